"""Shear and translation along one axis: timm's operations of RandAugment, about four times as fast.

Pillow computes them as general affine maps, with 16 input pixels per output pixel. Along one axis each row (or column)
is only shifted, so 4 input pixels with weights that are constant in a row give the same result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from timm.data import auto_augment

N = TypeVar("N", bound=np.generic)
Operation = Callable[..., Image.Image]  # arguments: image, strength, options


def shear_x(image: Image.Image, factor: float, **options: object) -> Image.Image:
    """Shift row y by `factor` (y + 1/2) pixels."""
    return _shifted(image, 0, factor, 0.0, options)


def shear_y(image: Image.Image, factor: float, **options: object) -> Image.Image:
    """Shift column x by `factor` (x + 1/2) pixels."""
    return _shifted(image, 1, factor, 0.0, options)


def translate_x_abs(image: Image.Image, pixels: float, **options: object) -> Image.Image:
    """Shift horizontally by `pixels`."""
    return _shifted(image, 0, 0.0, pixels, options)


def translate_y_abs(image: Image.Image, pixels: float, **options: object) -> Image.Image:
    """Shift vertically by `pixels`."""
    return _shifted(image, 1, 0.0, pixels, options)


def translate_x_rel(image: Image.Image, share: float, **options: object) -> Image.Image:
    """Shift horizontally by a share of the width."""
    return _shifted(image, 0, 0.0, share * image.width, options)


def translate_y_rel(image: Image.Image, share: float, **options: object) -> Image.Image:
    """Shift vertically by a share of the height."""
    return _shifted(image, 1, 0.0, share * image.height, options)


# From a function of timm to the faster one.
FASTER: dict[Operation, Operation] = {
    getattr(auto_augment, f.__name__): f
    for f in (shear_x, shear_y, translate_x_abs, translate_y_abs, translate_x_rel, translate_y_rel)
}


def source_matrix(function: Operation, amount: float, size: int) -> NDArray[np.float64]:
    """Return the matrix (3, 3) from output to input coordinates (0 to 1) of a geometric operation of timm."""
    if function is auto_augment.rotate:
        a = -math.radians(amount)
        matrix = np.array(
            [[math.cos(a), math.sin(a), 0], [-math.sin(a), math.cos(a), 0], [0, 0, 1]]
        )
        matrix[:2, 2] = 0.5 - matrix[:2, :2].sum(1) / 2  # around the centre
        return matrix
    row, column, unit = MATRIX_ENTRIES[function]
    matrix = np.eye(3)
    matrix[row, column] = amount / size if unit == "pixels" else amount
    return matrix


# Row, column and unit of the only entry that differs from the identity.
MATRIX_ENTRIES: dict[Operation, tuple[int, int, str]] = {
    auto_augment.shear_x: (0, 1, "shares"),
    auto_augment.shear_y: (1, 0, "shares"),
    auto_augment.translate_x_rel: (0, 2, "shares"),
    auto_augment.translate_y_rel: (1, 2, "shares"),
    auto_augment.translate_x_abs: (0, 2, "pixels"),
    auto_augment.translate_y_abs: (1, 2, "pixels"),
}
GEOMETRIC: frozenset[Operation] = frozenset({*MATRIX_ENTRIES, auto_augment.rotate})


def _shifted(
    image: Image.Image, axis: int, factor: float, offset: float, options: dict[str, Any]
) -> Image.Image:
    """Shift row i (axis 0) or column i (axis 1) by factor (i + 1/2) + offset pixels; Pillow unless RGB and bicubic."""
    resample = options.get("resample", Image.Resampling.BICUBIC)
    if isinstance(resample, list | tuple):
        resample = random.choice(resample)
    if resample != Image.Resampling.BICUBIC or image.mode != "RGB":
        row = (1, factor, offset, 0, 1, 0) if axis == 0 else (1, 0, 0, factor, 1, offset)
        options = options | {"resample": resample}
        return image.transform(image.size, Image.Transform.AFFINE, row, **options)
    if axis:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    rows = np.arange(image.height, dtype=np.float64)
    shift = factor * (rows + 0.5) + offset
    moved = slide(np.asarray(image), shift, options.get("fillcolor", (0, 0, 0)))
    image = Image.fromarray(moved)
    return image.transpose(Image.Transpose.TRANSPOSE) if axis else image


def slide(
    pixels: NDArray[np.uint8], shift: NDArray[np.floating], fill: Sequence[int]
) -> NDArray[np.uint8]:
    """Shift rows: output pixel (y, x) is interpolated at (y, x + shift[y]).

    As in Pillow's affine maps: cubic convolution with a = -1, edge pixels repeated, `fill` outside,
    rounded towards zero.

    Args:
        pixels: (h, w, 3).
        shift: in pixels, (h,).
        fill: colour outside the image.
    """
    h, w, c = pixels.shape
    shift = shift.clip(-w - 1, w + 1)
    whole = np.floor(shift).astype(np.int64)
    p = int(np.abs(whole).max()) + 3
    wide = np.empty((h, w + 2 * p, c), np.uint8)  # the rest is outside and filled below
    wide[:, p : p + w] = pixels
    wide[:, p - 2 : p] = pixels[:, :1]
    wide[:, p + w : p + w + 2] = pixels[:, -1:]
    taps = torch.from_numpy(
        _row_slices(wide.reshape(h, -1), c * (p + whole - 1), c * (w + 3))
    ).float()
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
    start = c * (p + np.floor(shift + 0.5).astype(np.int64))
    where = _row_slices(outside.repeat(h, 0), start, c * w)
    np.copyto(moved, np.tile(np.asarray(fill, np.uint8), w), where=where)
    return moved.reshape(h, w, c)


def _row_slices(rows: NDArray[N], start: NDArray[np.int64], length: int) -> NDArray[N]:
    """Return `length` entries of each row, beginning at the row's `start`."""
    return sliding_window_view(rows, length, axis=1)[np.arange(len(rows)), start]
