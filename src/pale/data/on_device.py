"""Pictures decoded on the training device or kept there, and the plans of what will be done to them.

`augmenting.show` makes the images of a batch of both.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg

from ..ops.kernels import AVAILABLE
from ..progress import Track, silent
from .draws import number, seeded
from .images import MOST_PIXELS, Source
from .labelled import Sample, cores, stack
from .plans import Planner, Sketch, gather
from .stream import Key
from .transforms import to_tensor

SAMPLED = 50  # files that are looked at before a device decodes
# Pixels of a picture, in the mean: 6 MB while it is decoded, beside some 50 of a training step.
MODERATE = 2**20
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
            # By NumPy: each of these threads would have PyTorch's threads beside it.
            return torch.from_numpy(np.asarray(source.image(i)).transpose(2, 0, 1).copy())

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


def decodes(source: Source, device: torch.device) -> bool:
    """Whether such files are best decoded by the device.

    It must be a GPU with nvJPEG and our kernels, and of files from all over the source nearly all plain JPEGs, of a
    moderate size: a GPU decodes whole pictures, where a worker hands on a small crop.
    """
    if device.type != "cuda" or not AVAILABLE:
        return False
    looked = sorted({i * len(source) // SAMPLED for i in range(SAMPLED)})
    files, pixels = [], 0
    for i in looked:
        try:
            content, (height, width) = encoded(source, i)
        except (OSError, ValueError):  # what is wrong with it is said when it is read
            continue
        pixels += height * width
        files += [content] if content.ndim == 1 else []
    if len(files) < 0.9 * len(looked) or pixels > MODERATE * len(looked):
        return False
    try:
        return len(decode_all(files[:1], device)) == 1
    except RuntimeError:
        return False


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
