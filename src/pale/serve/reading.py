"""From a request's body to a picture, within bounds: bytes are counted as they come, pixels before they are decoded."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import PurePosixPath

from PIL import Image, ImageOps, UnidentifiedImageError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..data.images import to_rgb
from .limits import Limits, RefusedError, Share

# No format of Pillow's that calls other programs or that no browser or camera makes.
FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
)  # Pillow takes MPO, of some cameras, for JPEG
TOLD = "JPEG, PNG, WebP, GIF, BMP and TIFF"
LONGEST_NAME = 200
MOST_FIELDS = 8


class _InMemory(MultiPartParser):
    """Parses forms without files on the disk; the bound on the body is the bound on memory."""

    spool_max_size = 0  # as tempfile says it: never


async def read_body(
    stream: AsyncIterable[bytes], headers: Headers, limits: Limits, share: Share
) -> tuple[bytes, str]:
    """The picture's file and its name, from a form or as the body itself.

    Args:
        stream: the body.
        headers: of the request.
        limits: of its size.
        share: memory that the request holds.
    """
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.max_upload:
        raise _too_long(limits)
    bounded = _bounded(stream, limits, share)
    if headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return await _from_form(bounded, headers)
    content = bytearray()
    async for part in bounded:
        content += part
    return _some(bytes(content)), "picture"


async def _bounded(
    stream: AsyncIterable[bytes], limits: Limits, share: Share
) -> AsyncGenerator[bytes, None]:
    total = 0
    async for part in stream:
        total += len(part)
        if total > limits.max_upload:
            raise _too_long(limits)
        share.take(len(part))
        yield part


async def _from_form(stream: AsyncGenerator[bytes, None], headers: Headers) -> tuple[bytes, str]:
    try:
        form = await _InMemory(headers, stream, max_files=1, max_fields=MOST_FIELDS).parse()
    except (MultiPartException, FormParserError, KeyError, UnicodeError, ValueError) as error:
        told = getattr(error, "message", "") or "it is cut short or not well-formed"
        raise RefusedError(422, f"the form cannot be read: {told}") from None
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise RefusedError(422, "the form holds no file; send one: curl -F file=@photo.jpg")
        return _some(await files[0].read()), plain_name(files[0].filename)
    finally:
        await form.close()


def plain_name(name: str | None) -> str:
    """What a file is called, without folders and what cannot be printed: it is told again in answers, never opened."""
    last = PurePosixPath((name or "").replace("\\", "/")).name
    return "".join(c for c in last if c.isprintable())[:LONGEST_NAME] or "picture"


def _some(content: bytes) -> bytes:
    if not content:
        raise RefusedError(
            422, "there is no picture in the request; send one as body or as a form's file"
        )
    return content


def _too_long(limits: Limits) -> RefusedError:
    return RefusedError(
        413, f"a picture's file may have {limits.max_upload_mb:g} MB; this one has more"
    )


def opened(content: bytes, limits: Limits) -> Image.Image:
    """A picture of which only the header was read, and found to be within bounds."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("many times", limits) from None
    except UnidentifiedImageError:
        raise RefusedError(415, f"this is no picture that can be read; {TOLD} can") from None
    except Exception as error:
        raise _broken(error) from None
    if image.width * image.height > limits.max_pixels:
        raise _too_large(f"{image.width}x{image.height}", limits)
    return image


def decoded(image: Image.Image) -> Image.Image:
    """RGB, turned as EXIF says, transparency laid on white: as `pale.predict.as_picture` does it."""
    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)
    except Exception as error:
        image.close()  # its pixels go now, not when the traceback does
        raise _broken(error) from None


def _too_large(size: str, limits: Limits) -> RefusedError:
    return RefusedError(
        413,
        f"a picture may have {limits.max_pixels:,} pixels; this one has more ({size}); shrink it",
    )


def _broken(error: Exception) -> RefusedError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return RefusedError(422, f"the picture is damaged and cannot be read ({reason})")
