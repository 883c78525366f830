"""Pictures decoded on the training device or kept there, and augmentation there, a batch at a time.

What Pillow and timm do to one picture on the CPU is done here to many: a pixel may differ by a grey level or two where
fractions are rounded, and the noise of random erasing is another. Everything is plain PyTorch, on any device.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg

from ..progress import Track, silent
from .draws import number, seeded
from .images import MOST_PIXELS, Source
from .labelled import Sample, cores, stack
from .plans import Plan, Planner, Sketch, gather
from .stream import Key
from .transforms import statistics, to_tensor

MOST_BYTES = 32 * 2**30  # of pictures: more than any small set has, and less than large GPUs do


@dataclass
class Pixels:
    """Pictures, one after the other.

    Attributes:
        flat: uint8, (3, pixels of all).
        starts: where each begins.
        widths: of each.
    """

    flat: Tensor
    starts: Tensor
    widths: Tensor

    def to(self, device: torch.device) -> Pixels:
        """On the device."""
        return Pixels(*(x.to(device) for x in (self.flat, self.starts, self.widths)))

    @torch.no_grad()
    def show(self, plan: Plan, size: int) -> Tensor:
        """The images of a batch, uint8, (b, 3, size, size); the plan is on the same device."""
        head = plan.ints[: plan.size * Plan.HEAD].view(plan.size, Plan.HEAD)
        sample, crop, flips, cubic = head[:, 0], head[:, 1:5], head[:, 5:7], head[:, 7]
        images = self._cut(sample, crop, plan.window)
        wx = weights(crop[:, 3], plan.window[1], size, cubic, flips[:, 0])
        wy = weights(crop[:, 2], plan.window[0], size, cubic, flips[:, 1])
        # As torch's resize of bytes: along rows, rounded, then along columns.
        images = grey(images @ wx.mT[:, None])
        images = grey(wy[:, None] @ images)
        for name, first, count, begin, width in plan.steps:
            where = plan.ints[first : first + count]
            amounts = plan.floats[begin : begin + count * width].view(count, width)
            images[where] = OPERATIONS[name](images[where], amounts)
        if plan.erased:
            begin = plan.size * Plan.HEAD
            boxes = plan.ints[begin : begin + plan.erased * Plan.BOX].view(plan.erased, Plan.BOX)
            images = erase(images, boxes)
        return images.to(torch.uint8)

    def _cut(self, sample: Tensor, crop: Tensor, window: tuple[int, int]) -> Tensor:
        """Crops, float32 (b, 3, *window); what lies beyond a crop repeats its edge."""
        y, x, h, w = (part.view(-1, 1, 1) for part in crop.unbind(1))
        i = torch.arange(window[0], device=crop.device).view(1, -1, 1)
        j = torch.arange(window[1], device=crop.device).view(1, 1, -1)
        rows, columns = y + torch.minimum(i, h - 1), x + torch.minimum(j, w - 1)
        start, width = (part[sample].view(-1, 1, 1) for part in (self.starts, self.widths))
        return self.flat[:, start + rows * width + columns].transpose(0, 1).float()


def in_a_row(pictures: Sequence[Tensor]) -> Pixels:
    """Pictures of (3, h, w) one after the other; no waiting for the device."""
    device = pictures[0].device
    areas = [picture.shape[1] * picture.shape[2] for picture in pictures]
    starts = torch.tensor([0, *accumulate(areas[:-1])])
    widths = torch.tensor([picture.shape[2] for picture in pictures])
    flat = torch.cat([picture.flatten(1) for picture in pictures], 1)
    return Pixels(flat, *(x.to(device, non_blocking=True) for x in (starts, widths)))


class Pictures:
    """All pictures of a source, decoded.

    Args:
        source: the pictures.
        most: bytes that they may take.
        track: shows progress.
    """

    def __init__(self, source: Source, most: int = MOST_BYTES, track: Track = silent) -> None:
        def pixels(i: int) -> Tensor:
            return to_tensor(source.image(i))

        found: list[Tensor] = []
        total = 0
        with ThreadPoolExecutor(cores()) as pool:
            reading = pool.map(pixels, range(len(source)))
            for picture in track(reading, "reading pictures", len(source)):
                total += picture.nbytes
                if total > most:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise ValueError(
                        f"data.on_device=pictures keeps all of them in memory, at most {most / 2**30:.3g} GiB, and the "
                        f"first {len(found)} of {len(source)} are that much; take data.on_device=decoding, or shrink "
                        "the pictures"
                    )
                found.append(picture)
        self.sizes = np.array([picture.shape[1:] for picture in found])  # height, width
        self.pixels = in_a_row(found)

    def on(self, device: torch.device) -> Pixels:
        """On the device, where they stay."""
        self.pixels = self.pixels.to(device)
        return self.pixels


@dataclass
class Encoded:
    """The files of a batch, one after the other; those that a GPU cannot decode are pixels already.

    Attributes:
        buffer: uint8.
        pieces: of each picture the number of its bytes, and (3, h, w) where they are pixels.
    """

    buffer: Tensor
    pieces: list[tuple[int, tuple[int, ...] | None]]

    def decode(self, device: torch.device, again: Callable[[int], Tensor]) -> Pixels:
        """The pictures, on the device.

        Args:
            device: a GPU decodes by nvJPEG.
            again: reads picture number i of the batch anew, or says what is wrong with it.
        """
        parts = self.buffer.split([size for size, _ in self.pieces])
        files = [i for i, (_, shape) in enumerate(self.pieces) if shape is None]
        found = [
            part.view(shape) if shape else part
            for part, (_, shape) in zip(parts, self.pieces, strict=True)
        ]
        try:
            decoded = decode_all([found[i] for i in files], device) if files else []
        except RuntimeError:  # it does not say which one
            decoded = [again(i) for i in files]
        for i, picture in zip(files, decoded, strict=True):
            found[i] = picture
        return in_a_row([picture.to(device, non_blocking=True) for picture in found])


def decode_all(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """JPEG files as (3, h, w), RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision means to hand this over to TorchCodec
        pictures: list[Tensor] = decode_jpeg(files, ImageReadMode.RGB, device)
    return pictures


def grey(x: Tensor) -> Tensor:
    """Rounded to grey levels."""
    return (x + 0.5).floor_().clamp_(0, 255)


def weights(length: Tensor, window: int, size: int, cubic: Tensor, flip: Tensor) -> Tensor:
    """Of a resize with antialiasing, (b, size, window): from `length` (b,) pixels of a window to `size`.

    Pillow's and torch's: a cubic (or a triangle, where `cubic` is 0) as wide as a pixel of the result, at least as one
    of the picture, around the pixel's centre.
    """
    scale = (length.double() / size).view(-1, 1, 1)
    stretch = scale.clamp(min=1)
    support = stretch * (1 + cubic.view(-1, 1, 1))
    i = torch.arange(size, device=length.device).view(1, -1, 1)
    i = torch.where(flip.view(-1, 1, 1) > 0, size - 1 - i, i)
    j = torch.arange(window, device=length.device).view(1, 1, -1)
    centre = scale * (i + 0.5)
    first = (centre - support + 0.5).long().clamp(min=0)
    last = torch.minimum((centre + support + 0.5).long(), length.view(-1, 1, 1))
    d = ((j + 0.5 - centre) / stretch).abs()
    a = -0.5
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = (((d - 5) * d + 8) * d - 4) * a
    curve = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
    w = torch.where(cubic.view(-1, 1, 1) > 0, curve, (1 - d).clamp(min=0))
    w = torch.where((j >= first) & (j < last), w, 0.0)
    return (w / w.sum(2, keepdim=True)).float()


def blend(ground: Tensor | float, images: Tensor, factor: Tensor) -> Tensor:
    """Pillow's: at 0 the ground, at 1 the images; fractions are cut off."""
    f = factor.float().view(-1, 1, 1, 1)
    return (ground + f * (images - ground)).clamp_(0, 255).floor_()


def luminance(images: Tensor) -> Tensor:
    """Pillow's conversion to grey, (b, 1, h, w)."""
    r, g, b = images.int().unbind(1)
    return (((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).float()).unsqueeze(1)


def brightness(images: Tensor, amounts: Tensor) -> Tensor:
    """Towards black, or away from it."""
    return blend(0.0, images, amounts[:, 0])


def colour(images: Tensor, amounts: Tensor) -> Tensor:
    """Towards grey, or away from it."""
    return blend(luminance(images), images, amounts[:, 0])


def contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Towards the mean grey, or away from it."""
    mean = luminance(images).double().mean((1, 2, 3), keepdim=True)
    return blend((mean + 0.5).floor().float(), images, amounts[:, 0])


def sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    """Towards a smooth image, or away from it; pixels at the edge stay."""
    smooth = images.clone()
    around = F.avg_pool2d(images, 3, 1, divisor_override=1)
    smooth[:, :, 1:-1, 1:-1] = grey((around + 4 * images[:, :, 1:-1, 1:-1]) / 13)
    return blend(smooth, images, amounts[:, 0])


def invert(images: Tensor, amounts: Tensor) -> Tensor:
    """White becomes black."""
    return 255 - images


def posterize(images: Tensor, amounts: Tensor) -> Tensor:
    """Only the first bits stay."""
    step = 2.0 ** (8 - amounts[:, 0].clamp(max=8)).float().view(-1, 1, 1, 1)
    return (images / step).floor_() * step


def solarize(images: Tensor, amounts: Tensor) -> Tensor:
    """What is as bright as the amount, or brighter, is inverted."""
    return torch.where(images < amounts.float().view(-1, 1, 1, 1), images, 255 - images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """The dark half becomes brighter."""
    brighter = (images + amounts.float().view(-1, 1, 1, 1)).clamp_(max=255)
    return torch.where(images < 128, brighter, images)


def histogram(images: Tensor) -> Tensor:
    """How often each grey level occurs in each channel, (b, 3, 256)."""
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=flat.device)
    return counts.scatter_add_(2, flat, torch.ones_like(flat))


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Each grey level replaced, by tables of (b, 3, 256)."""
    flat = images.flatten(2).long()
    return tables.clamp(0, 255).float().gather(2, flat).view_as(images)


def auto_contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Each channel from 0 to 255."""
    low, high = (f(images.flatten(2), 2).double().unsqueeze(2) for f in (torch.amin, torch.amax))
    scale = 255.0 / (high - low).clamp(min=1)
    level = torch.arange(256, dtype=torch.float64, device=images.device)
    tables = (level * scale - low * scale).trunc()
    return look_up(images, torch.where(high > low, tables, level))


def equalize(images: Tensor, amounts: Tensor) -> Tensor:
    """Each channel's grey levels equally often, as Pillow counts."""
    counts = histogram(images)
    level = torch.arange(256, device=images.device)
    last = torch.where(counts > 0, level, 0).amax(2, keepdim=True)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, last)) // 255
    before = counts.cumsum(2) - counts + step // 2
    tables = torch.where(step > 0, before // step.clamp(min=1), level)
    return look_up(images, tables)


def affine(images: Tensor, amounts: Tensor) -> Tensor:
    """Rotation, shear or translation: where pixels come from (6 numbers), whether cubic, and the colour outside.

    Pillow's: cubic convolution with a = -1 or linear, edge pixels repeated, fractions cut off.
    """
    n, c, h, w = images.shape
    matrix, cubic, fill = amounts[:, :6].view(n, 2, 3), amounts[:, 6], amounts[:, 7:]
    y = (torch.arange(h, dtype=torch.float64, device=images.device) + 0.5).view(1, -1, 1)
    x = (torch.arange(w, dtype=torch.float64, device=images.device) + 0.5).view(1, 1, -1)
    m = matrix.view(n, 6, 1, 1).unbind(1)
    # The matrix is for coordinates from 0 to 1 across the whole.
    from_x = (m[0] * (x / w) + m[1] * (y / h) + m[2]) * w
    from_y = (m[3] * (x / w) + m[4] * (y / h) + m[5]) * h
    outside = (from_x < 0) | (from_x >= w) | (from_y < 0) | (from_y >= h)
    left, top = (from_x - 0.5).floor(), (from_y - 0.5).floor()
    wx = taps((from_x - 0.5 - left).float(), cubic)
    wy = taps((from_y - 0.5 - top).float(), cubic)
    left, top = left.long(), top.long()
    flat, moved = images.flatten(2), torch.zeros_like(images)
    for i in range(4):
        row = (top + (i - 1)).clamp_(0, h - 1) * w
        for j in range(4):
            index = row + (left + (j - 1)).clamp_(0, w - 1)
            pixels = flat.gather(2, index.flatten(1).unsqueeze(1).expand(-1, c, -1))
            moved += (wy[i] * wx[j]).unsqueeze(1) * pixels.view_as(images)
    ground = fill.float().view(n, c, 1, 1).expand_as(images)
    # A sum of weights is not quite one; what is 255 shall not become 254.
    return torch.where(outside.unsqueeze(1), ground, (moved + 1e-3).clamp_(0, 255).floor_())


def taps(d: Tensor, cubic: Tensor) -> list[Tensor]:
    """Weights of the four pixels around a place, `d` beyond the second; two of them are 0 where it is not cubic."""
    zero = torch.zeros_like(d)
    curve = [
        d * (-1 + d * (2 - d)),
        1 + d * d * (d - 2),
        d * (1 + d * (1 - d)),
        d * d * (d - 1),
    ]
    line = [zero, 1 - d, d, zero]
    where = cubic.view(-1, 1, 1) > 0
    return [torch.where(where, a, b) for a, b in zip(curve, line, strict=True)]


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        *(brightness, colour, contrast, sharpness, invert, posterize, solarize, solarize_add),
        *(auto_contrast, equalize, affine),
    )
}


def erase(images: Tensor, boxes: Tensor) -> Tensor:
    """Normal noise in the boxes: image, y, x, height, width, key; the noise depends on key and place alone."""
    h, w = images.shape[2:]
    where, y, x, height, width, keys = (part.view(-1, 1, 1, 1) for part in boxes.unbind(1))
    i = torch.arange(h, device=images.device).view(1, 1, -1, 1)
    j = torch.arange(w, device=images.device).view(1, 1, 1, -1)
    inside = (i >= y) & (i < y + height) & (j >= x) & (j < x + width)
    mean, std = statistics(images.device)
    noise = (normal(keys.view(-1), 3 * h * w).view(-1, 3, h, w) * std + mean).mul_(255).round_()
    chosen = images[where.view(-1)]
    images[where.view(-1)] = torch.where(inside, noise.clamp_(0, 255), chosen)
    return images


def normal(keys: Tensor, count: int) -> Tensor:
    """Normal numbers, (n, count), from keys (n,): the same on every device and in every batch."""
    z = keys.view(-1, 1) + torch.arange(1, count + 1, device=keys.device) * -7046029254386353131
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # splitmix64
    z = (z ^ _shift(z, 27)) * -7723592293110705685
    z = z ^ _shift(z, 31)
    u = ((z & 0xFFFFFF) + 1).float() / 2**24  # in (0, 1]
    angle = _shift(z, 32).float() * (2 * math.pi / 2**32)
    return (-2 * u.log()).sqrt_() * angle.cos()


def _shift(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class Planned(Dataset[Sample]):
    """Plans for pictures; the item (epoch, index) is drawn from (seed, epoch, index) alone.

    Args:
        source: the pictures.
        planner: draws the plans.
        seed: of every draw.
        sizes: height and width of each picture; without, every item has its file with it.
        token_labels: gives the probabilities and classes of a picture by its number.
    """

    def __init__(
        self,
        source: Source,
        planner: Planner,
        seed: int,
        sizes: NDArray[np.int64] | None = None,
        token_labels: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.source, self.planner, self.seed, self.sizes = source, planner, seed, sizes
        self.labels, self.token_labels = list(source.labels), token_labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        content = None
        if self.sizes is None:
            content, (height, width) = encoded(self.source, index)
        else:
            height, width = self.sizes[index].tolist()
        with seeded(self.seed, epoch, index):
            sketch = self.planner.plan(index, width, height, number(self.seed, epoch, index))
        sketch.content = content
        sample = sketch, self.labels[index], key
        if self.token_labels is None:
            return sample
        return *sample, *self.token_labels(index), torch.from_numpy(sketch.places)


def encoded(source: Source, index: int) -> tuple[Tensor, tuple[int, int]]:
    """A file as it is where a GPU can decode it, else its pixels; and height and width."""
    content = source.content(index)
    try:
        with Image.open(io.BytesIO(content)) as image:
            plain = image.format == "JPEG" and image.mode in ("RGB", "L")
            turned = plain and image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            if plain and not turned and image.width * image.height <= MOST_PIXELS:
                file = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                return file, (image.height, image.width)
    except (OSError, SyntaxError, ValueError):
        pass  # what is wrong is said below
    pixels = to_tensor(source.image(index)).contiguous()
    return pixels, (pixels.shape[1], pixels.shape[2])


def join(sketches: list[Sketch]) -> Encoded:
    """The contents of a batch in one; the plans then speak of the batch's pictures, not of the source's."""
    pieces: list[tuple[int, tuple[int, ...] | None]] = []
    for i, sketch in enumerate(sketches):
        assert sketch.content is not None
        shape = tuple(sketch.content.shape) if sketch.content.ndim == 3 else None
        pieces.append((sketch.content.numel(), shape))
        sketch.sample = i
    contents = [sketch.content.flatten() for sketch in sketches if sketch.content is not None]
    return Encoded(torch.cat(contents), pieces)


def collate(samples: list[Sample]) -> dict[str, Any]:
    """As `labelled.collate`, with a "plan" in place of images, and "files" where the pictures come with it."""
    sketches, *others = zip(*samples, strict=True)
    batch = stack(*others)
    if sketches[0].content is not None:
        batch["files"] = join(list(sketches))
    return batch | {"plan": gather(list(sketches))}
