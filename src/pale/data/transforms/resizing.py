"""Sizes and resampling that images, masks and objects share."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ...core.settings import MAX_LONG
from ..sources.class_list import Labels

MAX_ENLARGED = 16_384  # long side of an enlarged image
MIN_CROP = 16


def require_valid_scale(scale: tuple[float, float]) -> None:
    """Raise unless a range of scale factors is positive and in order."""
    if not 0 < scale[0] <= scale[1]:
        raise ValueError(f"scale needs two factors above 0, the smaller first, got {scale}")


def require_valid_crop(size: tuple[int, int]) -> None:
    """Raise unless height and width of a crop are in range."""
    if min(size) < MIN_CROP or max(size) > MAX_LONG:
        raise ValueError(f"crop must be at least {MIN_CROP} and at most {MAX_LONG}, got {size}")


def fit_size(
    h: int, w: int, short: int | None, long: int | None, factor: float = 1.0
) -> tuple[int, int]:
    """Return height and width after scaling: the ratio is kept, neither side exceeds its bound times `factor`.

    An image is enlarged to a long side of at most `MAX_ENLARGED`; 12000x1 pixels would become enormous otherwise.
    """
    ratio = factor
    if short is not None:
        ratio = factor * short / min(h, w)
    if long is not None and ratio * max(h, w) > factor * long:
        ratio = factor * long / max(h, w)
    if ratio > 1:
        ratio = min(ratio, max(1.0, MAX_ENLARGED / max(h, w)))
    return max(1, int(h * ratio + 0.5)), max(1, int(w * ratio + 0.5))


def draw_crop(
    size: tuple[int, int], crop: tuple[int, int], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw a box (left, top, right, bottom) of at most `crop` (h, w) in an image of `size` (h, w)."""
    (h, w), (crop_h, crop_w) = size, crop
    top = int(rng.integers(max(h - crop_h, 0), endpoint=True))
    left = int(rng.integers(max(w - crop_w, 0), endpoint=True))
    return left, top, min(left + crop_w, w), min(top + crop_h, h)


def scaled_crop(
    image: Image.Image, size: tuple[int, int], box: tuple[int, int, int, int]
) -> Image.Image:
    """Scale the image to `size` (h, w), but compute only the part `box` (left, top, right, bottom)."""
    left, top, right, bottom = box
    if (image.height, image.width) == size:
        return image.crop(box)
    fx, fy = image.width / size[1], image.height / size[0]
    return image.resize(
        (right - left, bottom - top),
        Image.Resampling.BILINEAR,
        box=(left * fx, top * fy, right * fx, bottom * fy),
    )


def scaled_mask(mask: Labels, size: tuple[int, int]) -> Labels:
    """Scale a mask to `size` (h, w); each pixel gets the label at its centre."""
    h, w = mask.shape
    rows = (2 * np.arange(size[0]) + 1) * h // (2 * size[0])
    columns = (2 * np.arange(size[1]) + 1) * w // (2 * size[1])
    return mask[rows[:, None], columns[None, :]]
