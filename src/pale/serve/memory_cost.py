"""Memory that a request needs, estimated in bytes before anything is allocated.

The constants here and in `tasks.memory` are peaks in bytes per pixel of the image, measured with each format, mode and
output (`tests/serve/test_memory.py` compares their sum with the memory of a real server). The memory of a prediction
depends on the task: `Pipeline.prediction_bytes`.
"""

from __future__ import annotations

from typing import Any

from PIL import Image

from ..tasks.memory import RGB, TWICE

WEBP = 16  # two canvases of the decoder, its frame as bytes, the image
COEFFICIENTS = 2  # for each component of a JPEG with several scans
# Modes with transparency or 16 bits become RGB in strips: pixels of a strip, and bytes of each.
STRIP_PIXELS, STRIP_BYTES = 2**22, 14
REQUEST_BYTES = 16_000_000  # per request: strips of drawn results, objects of Python
ALIGNED = 32  # pixels to which decoders round up sides
COPIES, TIFF_COPIES = 3, 10  # of a file: metadata, and lists of the positions of strips
TEXT = 4_000_000  # of a compressed text in a PNG: Pillow unpacks one megabyte, characters may take four bytes
MAX_TEXTS = 64  # that Pillow unpacks
MAX_JPEG_SIDE = 65_500  # pixels


def opening(content: bytes) -> int:
    """Return the bytes of the file itself, and of reading its header."""
    copies, texts = COPIES, 0
    if content[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        copies = TIFF_COPIES
    elif content[:4] == b"\x89PNG":
        texts = min(MAX_TEXTS, content.count(b"zTXt") + content.count(b"iTXt"))
    return REQUEST_BYTES + copies * len(content) + TEXT * texts


def decoding(image: Image.Image) -> int:
    """Return the bytes of decoding an opened file to an upright RGB image."""
    w, h = (side + -side % ALIGNED for side in image.size)
    per_pixel = TWICE
    if image.format in ("JPEG", "MPO"):
        per_pixel = max(per_pixel, RGB + COEFFICIENTS * len(image.getbands()))
    elif image.format == "WEBP":
        per_pixel = WEBP
    plain = image.mode in ("RGB", "L", "CMYK", "YCbCr", "1") and "transparency" not in image.info
    strips = 0 if plain else STRIP_BYTES * min(STRIP_PIXELS, w * h)
    return per_pixel * w * h + strips + _largest_tile(image)


def _largest_tile(image: Image.Image) -> int:
    """Return the bytes of the largest strip or tile of a TIFF, which is unpacked in one piece."""
    tags: Any = getattr(image, "tag_v2", None)
    if tags is None or image.format != "TIFF":
        return 0
    samples, bits = _largest(tags.get(277), 1), _largest(tags.get(258), 8)
    w, h = _largest(tags.get(322), 0), _largest(tags.get(323), 0)
    if not w or not h:
        w, h = image.width, min(image.height, _largest(tags.get(278), image.height))
    return int(w * h * max(RGB, samples * bits / 8))


def _largest(value: object, default: int) -> int:
    values = value if isinstance(value, tuple) else (value,)
    return max((v for v in values if isinstance(v, int)), default=default)


def tracing(size: tuple[int, int], trace_bytes: int) -> int:
    """Return the bytes of tracing the attention on an image.

    Args:
        size: width and height of the image.
        trace_bytes: bytes of queries and keys, of the image as the model sees it, and of both as JSON.
    """
    return TWICE * size[0] * size[1] + trace_bytes
