"""Recognise copies of an image by its pixels, which also finds copies in another file format."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ..sources.class_list import row_strips

SAME_IMAGE = "the same image in two splits"
SAME_IMAGE_ADVICE = "validation results would be too good: remove one"


def pixel_digest(pixels: NDArray[np.uint8]) -> str:
    """Return a hash of the shape and the pixels of an image."""
    digest = hashlib.sha256(str(pixels.shape).encode())
    for rows in row_strips(pixels):
        digest.update(np.ascontiguousarray(pixels[rows]).data)
    return digest.hexdigest()
