"""Check all pairs of images and masks of a source, and count the pixels of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.lists import first_of
from ...core.progress import Track, map_in_threads, no_progress
from ..decoding import image_size, read_header
from ..reading import UnreadableImageError
from .class_list import IGNORED, row_strips
from .masks import MaskFiles, MaskSource


@dataclass(frozen=True)
class PairCheck:
    """Result of checking one pair.

    Attributes:
        error: why the pair cannot be used, or None.
        pixels: number of pixels of each class, and of unlabelled ones at the end, (n + 1,).
        size: width and height of the image.
    """

    error: str | None
    pixels: NDArray[np.int64]
    size: tuple[int, int] = (0, 0)


def check_pair(source: MaskSource, index: int, decode: bool = False) -> PairCheck:
    """Check one pair: decodes the mask, but of the image only the header unless `decode`."""
    pixels = np.zeros(len(source.classes) + 1, np.int64)
    try:
        if isinstance(source, MaskFiles):
            size = source.image(index).size if decode else image_size(source.pairs[index][0])
        else:
            size = source.image(index).size
        mask = source.mask(index)
    except UnreadableImageError as error:
        return PairCheck(str(error), pixels)
    if size != (mask.shape[1], mask.shape[0]):
        error_text = (
            f"{source.name(index)} is {size[0]}x{size[1]}, its mask {mask.shape[1]}x{mask.shape[0]}; "
            "both sizes must be equal"
        )
        if (
            isinstance(source, MaskFiles)
            and size == mask.shape
            and read_header(source.pairs[index][0])[1]
        ):
            error_text += " (its EXIF orientation rotates the image; the mask must be rotated, too)"
        return PairCheck(error_text, pixels, size)
    counts = np.zeros(256, np.int64)
    for rows in row_strips(mask):
        counts += np.bincount(mask[rows].ravel(), minlength=256)
    pixels[:-1], pixels[-1] = counts[: len(pixels) - 1], counts[IGNORED]
    return PairCheck(None, pixels, size)


def check_pairs(
    source: MaskSource, threads: int = 8, decode: bool = False, track: Track = no_progress
) -> list[PairCheck]:
    """Run `check_pair` on all pairs, in threads: decoding releases the GIL."""
    return map_in_threads(
        lambda i: check_pair(source, i, decode), range(len(source)), threads, track
    )


def require_valid(results: Sequence[PairCheck]) -> None:
    """Raise the first error, with the number of the others."""
    errors = [result.error for result in results if result.error is not None]
    if errors:
        raise UnreadableImageError(first_of(errors, "more such pairs"))
