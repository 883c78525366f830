"""Shear and translation along one axis: timm's operations of RandAugment, some four times as fast.

Pillow computes them as general affine maps, 16 pixels for each. Along an axis every row (or column) is merely
moved by a fraction of a pixel, so 4 pixels with weights that are the same in the whole row give the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from timm.data import auto_augment


def shear_x(image: Image.Image, factor: float, **how: Any) -> Image.Image:
    """Row y moves by `factor` (y + 1/2) pixels."""
    return _moved(image, 0, factor, 0.0, how)


def shear_y(image: Image.Image, factor: float, **how: Any) -> Image.Image:
    """Column x moves by `factor` (x + 1/2) pixels."""
    return _moved(image, 1, factor, 0.0, how)


def translate_x_abs(image: Image.Image, pixels: float, **how: Any) -> Image.Image:
    """All rows move by `pixels`."""
    return _moved(image, 0, 0.0, pixels, how)


def translate_y_abs(image: Image.Image, pixels: float, **how: Any) -> Image.Image:
    """All columns move by `pixels`."""
    return _moved(image, 1, 0.0, pixels, how)


def translate_x_rel(image: Image.Image, share: float, **how: Any) -> Image.Image:
    """All rows move by a share of the width."""
    return _moved(image, 0, 0.0, share * image.width, how)


def translate_y_rel(image: Image.Image, share: float, **how: Any) -> Image.Image:
    """All columns move by a share of the height."""
    return _moved(image, 1, 0.0, share * image.height, how)


# timm's function: ours
FASTER = {
    getattr(auto_augment, f.__name__): f
    for f in (shear_x, shear_y, translate_x_abs, translate_y_abs, translate_x_rel, translate_y_rel)
}


def place(function: Any, amount: float, size: int) -> NDArray[np.float64]:
    """Where an operation of timm's takes its pixels from: (3, 3), on coordinates from 0 to 1."""
    if function is auto_augment.rotate:
        a = -math.radians(amount)
        turn = np.array([[math.cos(a), math.sin(a), 0], [-math.sin(a), math.cos(a), 0], [0, 0, 1]])
        turn[:2, 2] = 0.5 - turn[:2, :2].sum(1) / 2  # the centre stays
        return turn
    row, column, unit = PLACES[function]
    matrix = np.eye(3)
    matrix[row, column] = amount / size if unit == "pixels" else amount
    return matrix


PLACES = {
    auto_augment.shear_x: (0, 1, "shares"),
    auto_augment.shear_y: (1, 0, "shares"),
    auto_augment.translate_x_rel: (0, 2, "shares"),
    auto_augment.translate_y_rel: (1, 2, "shares"),
    auto_augment.translate_x_abs: (0, 2, "pixels"),
    auto_augment.translate_y_abs: (1, 2, "pixels"),
}
GEOMETRIC = frozenset({*PLACES, auto_augment.rotate})


def _moved(
    image: Image.Image, axis: int, factor: float, offset: float, how: dict[str, Any]
) -> Image.Image:
    resample = how.get("resample", Image.Resampling.BICUBIC)
    if isinstance(resample, list | tuple):
        resample = random.choice(resample)
    if resample != Image.Resampling.BICUBIC or image.mode != "RGB":
        row = (1, factor, offset, 0, 1, 0) if axis == 0 else (1, 0, 0, factor, 1, offset)
        how = how | {"resample": resample}
        return image.transform(image.size, Image.Transform.AFFINE, row, **how)
    if axis:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    rows = np.arange(image.height, dtype=np.float64)
    shift = factor * (rows + 0.5) + offset
    moved = slide(np.asarray(image), shift, how.get("fillcolor", (0, 0, 0)))
    image = Image.fromarray(moved)
    return image.transpose(Image.Transpose.TRANSPOSE) if axis else image


def slide(
    pixels: NDArray[np.uint8], shift: NDArray[np.floating[Any]], fill: Sequence[int]
) -> NDArray[np.uint8]:
    """Pixel (y, x) from (y, x + shift[y]).

    The kernel is the one of Pillow's affine maps: cubic convolution with a = -1, edge pixels repeated,
    `fill` where the place is outside, fractions cut off.

    Args:
        pixels: (h, w, 3).
        shift: in pixels, (h,).
        fill: a colour.
    """
    h, w, c = pixels.shape
    shift = shift.clip(-w - 1, w + 1)
    whole = np.floor(shift).astype(np.int64)
    p = int(np.abs(whole).max()) + 3
    wide = np.empty((h, w + 2 * p, c), np.uint8)  # what is not set is outside and filled below
    wide[:, p : p + w] = pixels
    wide[:, p - 2 : p] = pixels[:, :1]
    wide[:, p + w : p + w + 2] = pixels[:, -1:]
    taps = torch.from_numpy(_pieces(wide.reshape(h, -1), c * (p + whole - 1), c * (w + 3))).float()
    d = torch.from_numpy(shift - whole).float().view(h, 1)
    weights = (
        d * (-1 + d * (2 - d)),
        1 + d * d * (d - 2),
        d * (1 + d * (1 - d)),
        d * d * (d - 1),
    )
    out = weights[0] * taps[:, : w * c]
    for i in (1, 2, 3):
        out.addcmul_(weights[i], taps[:, i * c : (i + w) * c])
    moved = out.clamp_(0, 255).numpy().astype(np.uint8)
    outside = np.ones((1, c * (w + 2 * p)), bool)  # x + 1/2 + shift < 0 or >= w
    outside[:, c * p : c * (p + w)] = False
    where = _pieces(outside.repeat(h, 0), c * (p + np.floor(shift + 0.5).astype(np.int64)), c * w)
    np.copyto(moved, np.tile(np.asarray(fill, np.uint8), w), where=where)
    return moved.reshape(h, w, c)


def _pieces(rows: NDArray[Any], start: NDArray[np.int64], length: int) -> NDArray[Any]:
    """From each row `length` entries from its `start` on."""
    return sliding_window_view(rows, length, axis=1)[np.arange(len(rows)), start]
