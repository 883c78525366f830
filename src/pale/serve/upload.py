"""Read an image from the body of a request within limits: bytes are counted on arrival, pixels before decoding."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import PurePosixPath

from PIL import Image, UnidentifiedImageError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..data.decoding import load_upright
from ..data.reading import FORMAT_NAMES, MAX_SCANS, START_OF_SCAN, TooLargeError, open_image
from .limits import Limits, RefusedError

MAX_NAME = 200  # characters
MAX_FIELDS = 8
UNNAMED = "image"


class _InMemoryParser(MultiPartParser):
    """Parses forms without temporary files; the limit on the body also limits the memory."""

    spool_max_size = 0  # in the sense of tempfile: never write to disk


async def read_body(
    stream: AsyncIterable[bytes], headers: Headers, limits: Limits
) -> tuple[bytes, str]:
    """Return the image file and its name, from a form or from the body itself.

    Args:
        stream: the body.
        headers: headers of the request.
        limits: limits of the server.
    """
    if headers.get("content-type", "").lower().startswith("multipart/form-data"):
        require_length(headers, limits)
        return await _read_form(_limited(stream, limits), headers)
    return _require_content(await read_content(stream, headers, limits)), UNNAMED


async def read_content(stream: AsyncIterable[bytes], headers: Headers, limits: Limits) -> bytes:
    """Return the body unchanged; arguments as in `read_body`."""
    require_length(headers, limits)
    content = bytearray()
    async for part in _limited(stream, limits):
        content += part
    return bytes(content)


def require_length(headers: Headers, limits: Limits) -> None:
    """Raise RefusedError if the headers announce too many bytes."""
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.max_upload:
        raise _too_large(limits)


async def _limited(stream: AsyncIterable[bytes], limits: Limits) -> AsyncGenerator[bytes, None]:
    total = 0
    async for part in stream:
        total += len(part)
        if total > limits.max_upload:
            raise _too_large(limits)
        yield part


async def _read_form(stream: AsyncGenerator[bytes, None], headers: Headers) -> tuple[bytes, str]:
    try:
        form = await _InMemoryParser(headers, stream, max_files=1, max_fields=MAX_FIELDS).parse()
    except (MultiPartException, FormParserError, KeyError, UnicodeError, ValueError) as error:
        reason = getattr(error, "message", "") or "it is incomplete or malformed"
        raise RefusedError(422, f"the form cannot be read: {reason}") from None
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise RefusedError(422, "the form holds no file; send one: curl -F file=@photo.jpg")
        return _require_content(await files[0].read()), plain_name(files[0].filename)
    finally:
        await form.close()


def plain_name(name: str | None) -> str:
    """Return the name of a file without folders and unprintable characters; it is only repeated in responses."""
    last = PurePosixPath((name or "").replace("\\", "/")).name
    return "".join(c for c in last if c.isprintable())[:MAX_NAME] or UNNAMED


def _require_content(content: bytes) -> bytes:
    if not content:
        raise RefusedError(
            422, "the request holds no image; send one as the body or as a file of a form"
        )
    return content


def _too_large(limits: Limits) -> RefusedError:
    return RefusedError(
        413, f"the file is larger than {limits.max_upload_mb:g} MB, the maximum of this server"
    )


def open_upload(content: bytes, limits: Limits) -> Image.Image:
    """Return an image of which only the header has been read and checked."""
    if content[:2] == b"\xff\xd8" and content.count(START_OF_SCAN) > MAX_SCANS:
        raise RefusedError(
            422, f"the JPEG has more than {MAX_SCANS} scans, the maximum; save it again"
        )
    try:
        return open_image(io.BytesIO(content), limits.pixels)
    except TooLargeError as error:
        raise RefusedError(
            413, f"the image is too large: {error}; make the image smaller"
        ) from None
    except UnidentifiedImageError:
        raise RefusedError(
            415, f"the file is not an image in a supported format ({FORMAT_NAMES})"
        ) from None
    except Exception as error:
        raise _damaged(error) from None


def decode_upload(image: Image.Image) -> Image.Image:
    """Return the image in RGB, rotated by EXIF, transparency on white, like `pale.Predictor`."""
    try:
        decoded = load_upright(image)
        # WebP's decoder keeps two canvases as long as its image lives.
        return image.copy() if decoded is image and image.format == "WEBP" else decoded
    except Exception as error:
        image.close()  # free the pixels now, not together with the traceback
        raise _damaged(error) from None


def _damaged(error: Exception) -> RefusedError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return RefusedError(422, f"the image is damaged and cannot be read ({reason})")
