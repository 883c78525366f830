"""Execute the augmentation plans of a batch of images.

The operations are those of Pillow and timm. A pixel may differ by a grey level or two because of rounding; the noise
of random erasing is drawn differently. This module has them in PyTorch for any device; on a GPU with Triton, the
kernels of `augment_kernels` compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.launching import AVAILABLE, INTERPRETED, launch
from ..seeding import hash_bits, shift_right
from ..transforms.images import imagenet_statistics
from .plans import AMOUNTS, BatchPlan

if TYPE_CHECKING:
    from .decode import PackedImages

KERNELS = __package__ + ".augment_kernels"


@torch.no_grad()
def augment_batch(pixels: PackedImages, plan: BatchPlan, size: int) -> Tensor:
    """Return the augmented images of a batch, uint8, (b, 3, size, size); images and plan are on one device."""
    fused = AVAILABLE and (pixels.flat.is_cuda or INTERPRETED)
    return (augment_fused if fused else augment_eager)(pixels, plan, size)


def augment_eager(pixels: PackedImages, plan: BatchPlan, size: int) -> Tensor:
    """Execute a plan in PyTorch."""
    head = plan.ints[: plan.boxes].view(plan.size, BatchPlan.HEAD)
    crop, flips, cubic = head[:, 1:5], head[:, 5:7], head[:, 7]
    images = gather_crops(pixels, head[:, 0], crop, plan.window)
    wx = resize_weights(crop[:, 3], plan.window[1], size, cubic, flips[:, 0])
    wy = resize_weights(crop[:, 2], plan.window[0], size, cubic, flips[:, 1])
    # As torch resizes uint8: along rows, rounded, then along columns.
    images = round_grey(images @ wx.mT[:, None])
    images = round_grey(wy[:, None] @ images)
    amounts = plan.floats.view(plan.turns, plan.size, AMOUNTS)
    for name, turn, first, count in plan.steps:
        where = plan.ints[first : first + count]
        images[where] = OPERATIONS[name](images[where], amounts[turn, where])
    if plan.erased:
        boxes = plan.ints[plan.boxes : plan.codes].view(plan.erased, BatchPlan.BOX)
        images = erase(images, boxes)
    return images.to(torch.uint8)


def augment_fused(pixels: PackedImages, plan: BatchPlan, size: int) -> Tensor:
    """Execute a plan with Triton kernels."""
    b, high, ints, floats = plan.size, plan.window[0], plan.ints, plan.floats
    rows, images = (pixels.flat.new_empty(b, 3, h, size) for h in (high, size))

    def run(name: str, grid: tuple[int, ...], *args: Tensor | int, **blocks: int) -> None:
        launch(KERNELS, name, grid, *args, options={"num_warps": 4}, **blocks)

    # Triton's interpreter is faster with few large programs.
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
        mean, std = imagenet_statistics(ints.device)
        grid = plan.erased, -(-3 * area // block)
        run("erase", grid, images, ints, mean, std, plan.boxes, size, BLOCK=block)
    return images


def gather_crops(
    pixels: PackedImages, sample: Tensor, crop: Tensor, window: tuple[int, int]
) -> Tensor:
    """Return the crops, float32 (b, 3, *window); smaller crops are padded by repeating their edge."""
    y, x, h, w = (part.view(-1, 1, 1) for part in crop.unbind(1))
    i = torch.arange(window[0], device=crop.device).view(1, -1, 1)
    j = torch.arange(window[1], device=crop.device).view(1, 1, -1)
    rows, columns = y + torch.minimum(i, h - 1), x + torch.minimum(j, w - 1)
    start, width = (part[sample].view(-1, 1, 1) for part in (pixels.starts, pixels.widths))
    return pixels.flat[:, start + rows * width + columns].transpose(0, 1).float()


def round_grey(x: Tensor) -> Tensor:
    """Round to the nearest grey level, 0 to 255."""
    return (x + 0.5).floor_().clamp_(0, 255)


def resize_weights(length: Tensor, window: int, size: int, cubic: Tensor, flip: Tensor) -> Tensor:
    """Return the weights (b, size, window) of an antialiased resize from `length` (b,) pixels of a window to `size`.

    As in Pillow and torch: a cubic (a triangle if `cubic` is 0) around the centre of each output pixel, as wide as an
    output pixel, but at least as wide as an input pixel.
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
    """Blend as Pillow does: `ground` at factor 0, the images at 1; fractions are truncated."""
    f = factor.float().view(-1, 1, 1, 1)
    return (ground + f * (images - ground)).clamp_(0, 255).floor_()


def luminance(images: Tensor) -> Tensor:
    """Convert to grey as Pillow does, (b, 1, h, w)."""
    r, g, b = images.int().unbind(1)
    return (((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).float()).unsqueeze(1)


def brightness(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend with black."""
    return blend(0.0, images, amounts[:, 0])


def colour(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend with the grey image."""
    return blend(luminance(images), images, amounts[:, 0])


def contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend with the mean grey level."""
    mean = luminance(images).double().mean((1, 2, 3), keepdim=True)
    return blend((mean + 0.5).floor().float(), images, amounts[:, 0])


def sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    """Blend with a smoothed image; edge pixels are not smoothed."""
    smooth = images.clone()
    around = F.avg_pool2d(images, 3, 1, divisor_override=1)
    smooth[:, :, 1:-1, 1:-1] = round_grey((around + 4 * images[:, :, 1:-1, 1:-1]) / 13)
    return blend(smooth, images, amounts[:, 0])


def invert(images: Tensor, amounts: Tensor) -> Tensor:
    """Invert all grey levels."""
    return 255 - images


def posterize(images: Tensor, amounts: Tensor) -> Tensor:
    """Keep only the highest bits."""
    step = 2.0 ** (8 - amounts[:, 0].clamp(max=8)).float().view(-1, 1, 1, 1)
    return (images / step).floor_() * step


def solarize(images: Tensor, amounts: Tensor) -> Tensor:
    """Invert grey levels of at least the given amount."""
    return torch.where(images < amounts[:, 0].float().view(-1, 1, 1, 1), images, 255 - images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """Add an amount to grey levels below 128."""
    brighter = (images + amounts[:, 0].float().view(-1, 1, 1, 1)).clamp_(max=255)
    return torch.where(images < 128, brighter, images)


def histogram(images: Tensor) -> Tensor:
    """Count the grey levels of each channel, (b, 3, 256)."""
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=flat.device)
    return counts.scatter_add_(2, flat, torch.ones_like(flat))


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace grey levels by the entries of tables (b, 3, 256)."""
    flat = images.flatten(2).long()
    return tables.clamp(0, 255).float().gather(2, flat).view_as(images)


def auto_contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Stretch each channel to 0 to 255."""
    low, high = (f(images.flatten(2), 2).double().unsqueeze(2) for f in (torch.amin, torch.amax))
    scale = 255.0 / (high - low).clamp(min=1)
    level = torch.arange(256, dtype=torch.float64, device=images.device)
    tables = (level * scale - low * scale).trunc()
    return look_up(images, torch.where(high > low, tables, level))


def equalize(images: Tensor, amounts: Tensor) -> Tensor:
    """Equalize the histogram of each channel as Pillow does."""
    counts = histogram(images)
    level = torch.arange(256, device=images.device)
    last = torch.where(counts > 0, level, 0).amax(2, keepdim=True)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, last)) // 255
    before = counts.cumsum(2) - counts + step // 2
    tables = torch.where(step > 0, before // step.clamp(min=1), level)
    return look_up(images, tables)


def affine(images: Tensor, amounts: Tensor) -> Tensor:
    """Rotate, shear or translate; amounts are the source matrix (6 numbers), whether cubic, and the fill colour.

    As in Pillow: cubic convolution with a = -1 or bilinear, edge pixels repeated, fractions truncated.
    """
    n, c, h, w = images.shape
    matrix, cubic, fill = amounts[:, :6].view(n, 2, 3), amounts[:, 6], amounts[:, 7:]
    y = (torch.arange(h, dtype=torch.float64, device=images.device) + 0.5).view(1, -1, 1)
    x = (torch.arange(w, dtype=torch.float64, device=images.device) + 0.5).view(1, 1, -1)
    m = matrix.view(n, 6, 1, 1).unbind(1)
    # The matrix is for coordinates from 0 to 1.
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
    # The weights sum to slightly less than one; the offset keeps 255 from becoming 254.
    return torch.where(outside.unsqueeze(1), ground, (moved + 1e-3).clamp_(0, 255).floor_())


def taps(d: Tensor, cubic: Tensor) -> list[Tensor]:
    """Return the weights of the four pixels around a point, `d` after the second; without `cubic` two of them are 0."""
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
    """Fill boxes (image, y, x, height, width, key) with normal noise that depends only on key and pixel."""
    h, w = images.shape[2:]
    where, y, x, height, width, keys = (part.view(-1, 1, 1, 1) for part in boxes.unbind(1))
    i = torch.arange(h, device=images.device).view(1, 1, -1, 1)
    j = torch.arange(w, device=images.device).view(1, 1, 1, -1)
    inside = (i >= y) & (i < y + height) & (j >= x) & (j < x + width)
    mean, std = imagenet_statistics(images.device)
    noise = (normal(keys.view(-1), 3 * h * w).view(-1, 3, h, w) * std + mean).mul_(255).round_()
    chosen = images[where.view(-1)]
    images[where.view(-1)] = torch.where(inside, noise.clamp_(0, 255), chosen)
    return images


def normal(keys: Tensor, count: int) -> Tensor:
    """Return normal random numbers, (n, count), for keys (n,): equal on all devices and in all batches."""
    z = hash_bits(keys.view(-1, 1), torch.arange(count, device=keys.device))
    u = ((z & 0xFFFFFF) + 1).float() / 2**24  # in (0, 1]
    angle = shift_right(z, 32).float() * (2 * math.pi / 2**32)
    return (-2 * u.log()).sqrt_() * angle.cos()
