"""What plans say, carried out on a batch of pictures.

What Pillow and timm do to one picture on the CPU is done here to many: a pixel may differ by a grey level or two where
fractions are rounded, and the noise of random erasing is another. Here it is plain PyTorch, on any device; on a GPU
with Triton, the same by the kernels of `augment_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.kernels import AVAILABLE, INTERPRETED, launch
from .draws import hashed, shifted
from .plans import AMOUNTS, Plan
from .transforms import statistics

if TYPE_CHECKING:
    from .on_device import Pixels

KERNELS = __package__ + ".augment_kernels"


@torch.no_grad()
def show(pixels: Pixels, plan: Plan, size: int) -> Tensor:
    """The images of a batch, uint8, (b, 3, size, size); the plan is on the pictures' device."""
    fused = AVAILABLE and (pixels.flat.is_cuda or INTERPRETED)
    return (show_fused if fused else show_plain)(pixels, plan, size)


def show_plain(pixels: Pixels, plan: Plan, size: int) -> Tensor:
    """In plain PyTorch."""
    head = plan.ints[: plan.boxes].view(plan.size, Plan.HEAD)
    crop, flips, cubic = head[:, 1:5], head[:, 5:7], head[:, 7]
    images = cut(pixels, head[:, 0], crop, plan.window)
    wx = weights(crop[:, 3], plan.window[1], size, cubic, flips[:, 0])
    wy = weights(crop[:, 2], plan.window[0], size, cubic, flips[:, 1])
    # As torch's resize of bytes: along rows, rounded, then along columns.
    images = grey(images @ wx.mT[:, None])
    images = grey(wy[:, None] @ images)
    amounts = plan.floats.view(plan.turns, plan.size, AMOUNTS)
    for name, turn, first, count in plan.steps:
        where = plan.ints[first : first + count]
        images[where] = OPERATIONS[name](images[where], amounts[turn, where])
    if plan.erased:
        boxes = plan.ints[plan.boxes : plan.codes].view(plan.erased, Plan.BOX)
        images = erase(images, boxes)
    return images.to(torch.uint8)


def show_fused(pixels: Pixels, plan: Plan, size: int) -> Tensor:
    """By kernels."""
    b, high, ints, floats = plan.size, plan.window[0], plan.ints, plan.floats
    rows, images = (pixels.flat.new_empty(b, 3, h, size) for h in (high, size))

    def run(name: str, grid: tuple[int, ...], *args: Tensor | int, **blocks: int) -> None:
        launch(KERNELS, name, grid, *args, options={"num_warps": 4}, **blocks)

    # In the interpreter, few programs.
    y, block = (64, 4096) if INTERPRETED else (8, 1024)
    blocks, across = {"BLOCK_Y": y, "BLOCK_X": 128}, -(-size // 128)
    source = pixels.flat, pixels.starts, pixels.widths, ints
    total = pixels.flat.shape[1]
    run("crop_rows", (b, -(-high // y), across), *source, rows, total, high, size, **blocks)
    resized = rows, ints, images, high, size
    run("crop_columns", (3 * b, -(-size // y), across), *resized, **blocks)
    after, tables = torch.empty_like(images), images.new_empty(b, 3, 256)
    area = size * size
    for turn in range(plan.turns):
        places = plan.codes + turn * b, turn * b * AMOUNTS
        run("look_up_tables", (3 * b,), images, ints, floats, tables, *places, area, BLOCK=block)
        given = images, tables, ints, floats, after
        run("operate", (b, -(-area // block)), *given, *places, size, BLOCK=block)
        images, after = after, images
    if plan.erased:
        noise = *statistics(ints.device), plan.boxes
        run(
            *("erase", (plan.erased, -(-3 * area // block)), images, ints),
            *(*noise, size),
            BLOCK=block,
        )
    return images


def cut(pixels: Pixels, sample: Tensor, crop: Tensor, window: tuple[int, int]) -> Tensor:
    """Crops, float32 (b, 3, *window); what lies beyond a crop repeats its edge."""
    y, x, h, w = (part.view(-1, 1, 1) for part in crop.unbind(1))
    i = torch.arange(window[0], device=crop.device).view(1, -1, 1)
    j = torch.arange(window[1], device=crop.device).view(1, 1, -1)
    rows, columns = y + torch.minimum(i, h - 1), x + torch.minimum(j, w - 1)
    start, width = (part[sample].view(-1, 1, 1) for part in (pixels.starts, pixels.widths))
    return pixels.flat[:, start + rows * width + columns].transpose(0, 1).float()


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
    return torch.where(images < amounts[:, 0].float().view(-1, 1, 1, 1), images, 255 - images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """The dark half becomes brighter."""
    brighter = (images + amounts[:, 0].float().view(-1, 1, 1, 1)).clamp_(max=255)
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
    z = hashed(keys.view(-1, 1), torch.arange(count, device=keys.device))
    u = ((z & 0xFFFFFF) + 1).float() / 2**24  # in (0, 1]
    angle = shifted(z, 32).float() * (2 * math.pi / 2**32)
    return (-2 * u.log()).sqrt_() * angle.cos()
