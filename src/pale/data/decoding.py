"""Decode images to RGB with 8 bits per channel, rotated by EXIF; masks are not converted.

Every failure is an `UnreadableImageError` that names the file and the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .reading import (
    FORMAT_NAMES,
    EmptyFileError,
    TooLargeError,
    UnreadableImageError,
    display_name,
    open_image,
    open_regular,
    require_few_scans,
)

EXIF_ORIENTATION = 0x0112
STRIP_PIXELS = 2**22  # pixels converted at a time


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read an image as RGB: rotated by its EXIF orientation, transparency on white, 16 bits reduced to 8."""
    with _opened(path, "an image") as image:
        return load_upright(image)


def read_stored_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read a mask without conversion or rotation; `format` of the result is the file format."""
    with _opened(path, "a mask") as image:
        require_few_scans(image)
        image.load()
        return image


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of the upright image; reads only the header of the file."""
    (w, h), rotated = read_header(path)
    return (h, w) if rotated else (w, h)


def read_header(path: Path) -> tuple[tuple[int, int], bool]:
    """Return width and height as stored, and whether the EXIF orientation swaps them."""
    with _opened(path, "an image") as image:
        return image.size, image.getexif().get(EXIF_ORIENTATION, 1) >= 5


@contextmanager
def _opened(path: str | os.PathLike[str], kind: str) -> Iterator[Image.Image]:
    """Open an image file; every error, also of the body, becomes an `UnreadableImageError`."""
    name = display_name(path)
    try:
        with open_regular(path) as file:
            try:
                with open_image(file) as image:
                    yield image
            except Exception as error:
                raise undecodable_content(name, error, kind) from None
    except OSError as error:
        raise unreadable_file(name, error, kind) from None


def unreadable_file(name: str, error: OSError, kind: str = "an image") -> UnreadableImageError:
    """Describe why a file cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        noun = "mask" if kind == "a mask" else "file"
        return UnreadableImageError(f"{name}: there is no such {noun}")
    return UnreadableImageError(
        f"{name}: cannot be read ({error.strerror or error}); repair the disk or the permissions, or replace the file"
    )


def decode_image(file: IO[bytes], name: str) -> Image.Image:
    """Decode an open file as `read_image` does; `name` is used in messages."""
    return decode_opened(open_header(file, name), name)


def open_header(file: IO[bytes], name: str) -> Image.Image:
    """Read the header of an open file for `decode_opened`; `name` is used in messages."""
    try:
        return open_image(file)
    except Exception as error:
        raise undecodable_content(name, error) from None


def decode_opened(image: Image.Image, name: str) -> Image.Image:
    """Decode and close the result of `open_header`."""
    try:
        with image:
            return load_upright(image)
    except Exception as error:
        raise undecodable_content(name, error) from None


def undecodable_content(
    name: str, error: Exception, kind: str = "an image"
) -> UnreadableImageError:
    """Describe why the content of a file cannot be decoded."""
    if isinstance(error, TooLargeError):
        return UnreadableImageError(f"{name}: {error}; shrink or crop it")
    reason: object = error
    if isinstance(error, UnidentifiedImageError) and not isinstance(error, EmptyFileError):
        reason = f"unknown format; supported are {FORMAT_NAMES}"
    elif isinstance(error, MemoryError):
        reason = "not enough memory"
    return UnreadableImageError(
        f"{name}: cannot be read as {kind} ({reason}); delete it or replace it"
    )


def load_upright(image: Image.Image) -> Image.Image:
    """Decode an opened image to RGB and rotate it by its EXIF orientation."""
    require_few_scans(image)
    image.load()
    ImageOps.exif_transpose(image, in_place=True)  # in place: no copy without a rotation
    rgb = to_rgb(image)
    # Pillow's WebP decoder holds two canvases for as long as the image object exists.
    return image.copy() if rgb is image and image.format == "WEBP" else rgb


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any Pillow mode to RGB; an RGB image is returned itself."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range; save it with 8 or 16 bits")
    deep = image.mode.startswith("I")
    transparent = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    if not deep and not transparent:
        return image.convert("RGB")
    convert = _reduce_to_8_bits if deep else _blend_on_white
    rows = max(1, STRIP_PIXELS // image.width)
    if rows >= image.height:
        return convert(image)
    # In strips, because the intermediate results would take several times the memory of a large image.
    out = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        out.paste(convert(image.crop(box)), box)
    return out


def _reduce_to_8_bits(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips at 255.
    pixels = (np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)
    return Image.fromarray(pixels).convert("RGB")


def _blend_on_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
