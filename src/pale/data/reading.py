"""Safe reading of files and images, for the whole package.

The content of a file is hostile until checked. Three rules are enforced here: only regular files are read (a FIFO or a
device would block), only listed image formats are decoded (some of Pillow's others start programs such as Ghostscript),
and the size of an image is checked before memory is allocated for its pixels.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Sequence
from typing import IO, BinaryIO, TypeVar

from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from ..core.lists import list_first

# Formats of cameras, browsers and annotation tools. Pillow reads MPO, which some cameras write, as JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
FORMAT_NAMES = "JPEG, PNG, WebP, GIF, BMP and TIFF"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Formats of phones and cameras that are recognised by name, so that such files are reported, not skipped silently.
UNSUPPORTED_SUFFIXES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".cr2", ".nef", ".arw")
MAX_PIXELS = 178_956_970  # Pillow's limit against decompression bombs; 0.7 GB as RGB
MAX_SIDE = 65_535  # the limit of JPEG
# Scans of a JPEG: a progressive one has about ten. Each needs a pass over all pixels, and may have only 23 bytes.
MAX_SCANS = 200
MAX_IMAGE_BYTES = 2**31  # size of an encoded image
MAX_TEXT_BYTES = 2**33  # size of a list or an annotation file
TILE_WIDTH, TILE_LENGTH = 322, 323  # TIFF tags

BLOCK = 1 << 24  # bytes of a file that are searched at a time
START_OF_SCAN = b"\xff\xda"  # never inside the data of a scan

_FLAGS = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"):  # not all systems define all of them
    _FLAGS |= getattr(os, _name, 0)


T = TypeVar("T")


class UnreadableImageError(ValueError):
    """An image file cannot be used; the message starts with its name."""


class EmptyFileError(UnidentifiedImageError):
    """A file without content, such as that of an interrupted download."""


class TooLargeError(ValueError):
    """The header of an image states more pixels than may be decoded."""


def display_name(path: str | os.PathLike[str]) -> str:
    r"""Return a file name as valid Unicode: bytes that are not UTF-8 become `\xNN`."""
    text = os.fspath(path)
    try:
        content = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate from a JSON file
        content = text.encode("utf-8", "backslashreplace")
    return content.decode("utf-8", "backslashreplace")


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return class names as valid Unicode; equal names get the class number: "crane (class 517)"."""
    shown = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    counts = Counter(shown)
    out, taken = [], {name for name, count in counts.items() if count == 1}
    for number, name in enumerate(shown):
        if counts[name] > 1:
            name = f"{name} (class {number})"
            while name in taken:
                name += "'"
            taken.add(name)
        out.append(name)
    return out


def repeated_value(values: Sequence[T]) -> T:
    """Return the most frequent value; the first one if several are equally frequent."""
    counts = Counter(values)
    return max(counts, key=counts.__getitem__)


def shorten_list(items: Sequence[object]) -> str:
    """Return the first five items and the number of the others, for messages: "'a', 'b' and 7 more"."""
    return list_first([repr(item) for item in items], 5)


def require_distinct_names(names: Sequence[str], where: object) -> None:
    """Raise if two classes have the same name; `where` is the subject of the message."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"{where} has the name {repeated[0]!r} twice; results are listed by name, so each class "
            "needs its own"
        )


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; anything else raises `OSError` without blocking."""
    try:
        _require_regular(os.stat(path), path)
        # O_NONBLOCK: if the file was replaced by a FIFO since then, opening it does not wait for a writer.
        descriptor = os.open(path, _FLAGS)
    except ValueError as error:  # a null byte or a surrogate
        raise OSError(errno.EINVAL, f"invalid file name: {error}") from None
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
    raise OSError(errno.EINVAL, f"{kind}, not a regular file", display_name(path))


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_IMAGE_BYTES) -> bytes:
    """Return the content of a regular file; raises `OSError` if it has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, the limit is {limit:,}")
        return file.read(size)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a list or an annotation file; bytes that are not UTF-8 become surrogates, as in file names."""
    try:
        return read_bytes(path, MAX_TEXT_BYTES).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise ValueError(
            f"{display_name(path)} cannot be read ({error.strerror or error}); give a text file"
        ) from None


def open_image(file: IO[bytes], max_pixels: int | None = None) -> Image.Image:
    """Read the header of an image in one of `FORMATS` without decoding it; the caller closes the image.

    Args:
        file: open for reading.
        max_pixels: limit above which `TooLargeError` is raised, `MAX_PIXELS` by default.
    """
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        if not file.seek(0, os.SEEK_END):
            raise EmptyFileError("the file is empty") from None
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLargeError(f"more than {limit:,} pixels ({error})") from None
    sides = [image.size]
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        # A tile is decoded as a whole, even if the image is smaller.
        tags = image.tag_v2
        sides.append((_tag_value(tags.get(TILE_WIDTH)), _tag_value(tags.get(TILE_LENGTH))))
    for width, height in sides:
        if width * height > limit:
            raise TooLargeError(f"more than {limit:,} pixels ({width}x{height})")
        if max(width, height) > MAX_SIDE:
            raise TooLargeError(f"a side of more than {MAX_SIDE:,} pixels ({width}x{height})")
    return image


def require_few_scans(image: Image.Image) -> None:
    """Raise `TooLargeError` if an opened JPEG has more than `MAX_SCANS` scans; call it before decoding."""
    file: IO[bytes] | None = getattr(image, "fp", None)
    if image.format not in ("JPEG", "MPO") or file is None:
        return
    position = file.tell()
    file.seek(0)
    scans = 0
    while scans <= MAX_SCANS and (part := file.read(BLOCK)):
        scans += part.count(START_OF_SCAN)
    file.seek(position)
    if scans > MAX_SCANS:
        raise TooLargeError(f"more than {MAX_SCANS} scans, which take minutes to decode")


def _tag_value(value: object) -> int:
    """Return the (first) integer of a TIFF tag, 0 if it has none."""
    if isinstance(value, tuple) and value:
        value = value[0]
    return value if isinstance(value, int) else 0
