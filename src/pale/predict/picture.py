"""Whatever a user has as a picture, as an RGB image of Pillow."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from ..data.images import UnreadableImageError, decode, read_image, to_rgb

Picture = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | Tensor


def as_picture(what: Picture, name: str = "picture") -> Image.Image:
    """RGB, turned as EXIF says, transparency laid on white.

    Args:
        what: a path, a file's bytes, an image of Pillow, an array (h, w), (h, w, 1), (h, w, 3) or (h, w, 4), or a
            tensor (1, h, w), (3, h, w) or (4, h, w); numbers are uint8, or floats from 0 to 1.
        name: for messages.
    """
    if isinstance(what, str | os.PathLike):
        return read_image(what)
    if isinstance(what, bytes | bytearray | memoryview):
        return decode(io.BytesIO(what), name)
    if isinstance(what, Image.Image):
        return to_rgb(ImageOps.exif_transpose(what))
    if isinstance(what, Tensor):
        if what.dim() != 3 or what.shape[0] not in (1, 3, 4):
            raise UnreadableImageError(
                f"{name}: a tensor must be (1, h, w), (3, h, w) or (4, h, w), got {tuple(what.shape)}; "
                "give several pictures as a list"
            )
        return _from_array(what.detach().cpu().permute(1, 2, 0).numpy(), name)
    if isinstance(what, np.ndarray):
        return _from_array(what, name)
    raise UnreadableImageError(
        f"{name}: a picture must be a path, bytes, an image of Pillow, an array or a tensor, got {type(what).__name__}"
    )


def _from_array(array: NDArray[Any], name: str) -> Image.Image:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise UnreadableImageError(
            f"{name}: an array must be (h, w), (h, w, 1), (h, w, 3) or (h, w, 4), got {array.shape}"
        )
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise UnreadableImageError(
                f"{name}: floats must be from 0 to 1, got {array.min():g} to {array.max():g}; "
                "give uint8, or divide by the largest value"
            )
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise UnreadableImageError(
            f"{name}: numbers must be uint8, or floats from 0 to 1, got {array.dtype}"
        )
    pixels = np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array)
    return to_rgb(Image.fromarray(pixels))
