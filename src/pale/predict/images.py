"""Convert paths, bytes, arrays and tensors to RGB images of Pillow."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from ..data.decoding import decode_image, decode_opened, open_header, read_image, to_rgb
from ..data.reading import (
    MAX_PIXELS,
    MAX_SIDE,
    UnreadableImageError,
    display_name,
    open_image,
    open_regular,
)


class LazyImage(Protocol):
    """An image that is read when it is needed, such as one of an archive or an object store."""

    @property
    def name(self) -> str:
        """Name in results."""

    def load(self) -> str | os.PathLike[str] | bytes:
        """Return its path or its content; thread-safe."""


def is_lazy(image: object) -> TypeGuard[LazyImage]:
    """Return whether an image must be loaded first."""
    # `isinstance` of a protocol does the same in 10 microseconds, a hundredth of a small image.
    return hasattr(image, "load") and hasattr(image, "name")


ImageLike = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | Tensor


def as_image(what: ImageLike, name: str = "image") -> Image.Image:
    """Return an RGB image, rotated by its EXIF orientation, with transparent pixels blended with white.

    Args:
        what: a path, a file's bytes, an image of Pillow, an array (h, w), (h, w, 1), (h, w, 3) or (h, w, 4), or a
            tensor (1, h, w), (3, h, w) or (4, h, w); values are uint8, or floats from 0 to 1.
        name: name for messages.
    """
    if isinstance(what, str | os.PathLike):
        return read_image(what)
    if isinstance(what, bytes | bytearray | memoryview):
        return decode_image(io.BytesIO(what), name)
    if isinstance(what, Image.Image):
        _require_size(what.size, name)
        return to_rgb(ImageOps.exif_transpose(what))
    if isinstance(what, Tensor):
        if what.dim() != 3 or what.shape[0] not in (1, 3, 4):
            raise UnreadableImageError(
                f"{name}: a tensor must be (1, h, w), (3, h, w) or (4, h, w), got {tuple(what.shape)}; "
                "give several images to Predictor.batch, as a list"
            )
        return _from_array(what.detach().cpu().permute(1, 2, 0).numpy(), name)
    if isinstance(what, np.ndarray):
        return _from_array(what, name)
    raise UnreadableImageError(
        f"{name}: an image must be a path, bytes, an image of Pillow, an array or a tensor, got {type(what).__name__}"
        + ("; give several images to Predictor.batch" if isinstance(what, list | tuple) else "")
    )


def _from_array(array: NDArray[Any], name: str) -> Image.Image:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise UnreadableImageError(
            f"{name}: an array must be (h, w), (h, w, 1), (h, w, 3) or (h, w, 4), got {array.shape}"
        )
    _require_size((array.shape[1], array.shape[0]), name)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise UnreadableImageError(
                f"{name}: floats must be from 0 to 1, got {array.min():g} to {array.max():g}; "
                "give uint8, or the values before normalisation, divided by the largest possible one"
            )
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise UnreadableImageError(
            f"{name}: values must be uint8, or floats from 0 to 1, got {array.dtype}"
        )
    pixels = np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array)
    return to_rgb(Image.fromarray(pixels))


def _require_size(size: tuple[int, int], name: str) -> None:
    w, h = size
    if w * h > MAX_PIXELS or max(size) > MAX_SIDE:
        raise UnreadableImageError(
            f"{name}: an image has at most {MAX_PIXELS:,} pixels and sides of at most {MAX_SIDE:,}, got {w}x{h}; "
            "shrink it or cut it"
        )


@dataclass(frozen=True)
class Opened:
    """An image of known size that can be decoded.

    Attributes:
        pixels: number of pixels; 0 if it cannot be read.
        decode: return the RGB image as `as_image` does, or raise the reason; thread-safe, to be called once.
    """

    pixels: int
    decode: Callable[[], Image.Image]


def open_any(what: ImageLike, name: str) -> Opened:
    """Read the header of an image; arguments as for `as_image`."""
    if isinstance(what, bytes | bytearray | memoryview):
        image = open_header(io.BytesIO(what), name)
        return Opened(image.width * image.height, partial(decode_opened, image, name))
    return Opened(_pixel_count(what), partial(as_image, what, name))


def _pixel_count(what: str | os.PathLike[str] | Image.Image | NDArray[Any] | Tensor) -> int:
    if isinstance(what, np.ndarray | Tensor):
        return int(np.prod(what.shape)) // 3
    if isinstance(what, Image.Image):
        return what.width * what.height
    try:
        with open_regular(what) as file, open_image(file) as image:
            return image.width * image.height
    except (
        OSError,
        ValueError,
        TypeError,
        SyntaxError,
        LookupError,
        ArithmeticError,
        struct.error,
    ):
        return 0  # `decode` raises the error


def name_of(image: ImageLike | LazyImage, number: int = 0) -> str:
    """Return the name of an image in results: its path as valid Unicode, or its number."""
    if isinstance(image, str | os.PathLike):
        return display_name(image)
    if is_lazy(image):
        return image.name
    return f"image {number}"
