"""Files that take much memory for their size: every format and mode that the server reads, flat and so small."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6
    return exif


def tiled_tiff(width: int, height: int, tile: tuple[int, int], samples: int = 4) -> bytes:
    """A TIFF of deflated tiles, all of them the same bytes of the file; Pillow itself writes strips alone."""
    data = zlib.compress(bytes(tile[0] * tile[1] * samples), 9)
    count = -(-width // tile[0]) * -(-height // tile[1])
    bits, offsets = 8, 8 + 2 * samples
    sizes = offsets + 4 * count
    at = sizes + 4 * count
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, samples, bits),
        (259, 3, 1, 8),
        (262, 3, 1, 2),
        (277, 3, 1, samples),
        (284, 3, 1, 1),
        (322, 4, 1, tile[0]),
        (323, 4, 1, tile[1]),
        (324, 4, count, offsets if count > 1 else at),
        (325, 4, count, sizes if count > 1 else len(data)),
        (338, 3, 1, 2),
    ]
    if samples == 3:
        tags.pop()
    head = struct.pack("<HHI", 0x4949, 42, at + len(data) + len(data) % 2)
    body = struct.pack(f"<{samples}H", *[8] * samples)
    body += struct.pack(f"<{count}I", *[at] * count) + struct.pack(
        f"<{count}I", *[len(data)] * count
    )
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (
        head + body + data + bytes(len(data) % 2)
        + struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    )  # fmt: skip


def large(name: str, width: int, height: int) -> bytes:
    """A file of so many pixels, by its kind."""
    flat = Image.new("RGB", (width, height), (90, 140, 40))
    clear = lambda: Image.new("RGBA", (width, height), (90, 140, 40, 100))  # noqa: E731
    deep = lambda: Image.fromarray(np.full((height, width), 40_000, np.uint16))  # noqa: E731
    one_strip = {"compression": "tiff_deflate", "strip_size": 4 * width * height}
    makers = {
        "png rgb": lambda: encoded(flat, "PNG"),
        "png rgba": lambda: encoded(clear(), "PNG"),
        "png rgba turned": lambda: encoded(clear(), "PNG", exif=turned()),
        "png 16 bits": lambda: encoded(deep(), "PNG"),
        "png palette": lambda: encoded(flat.convert("P"), "PNG", transparency=0),
        "jpeg": lambda: encoded(flat, "JPEG"),
        "jpeg progressive": lambda: encoded(flat, "JPEG", progressive=True, subsampling=0),
        "jpeg cmyk": lambda: encoded(
            flat.convert("CMYK"), "JPEG", progressive=True, exif=turned()
        ),
        "tiff lzw": lambda: encoded(clear(), "TIFF", compression="tiff_lzw"),
        "tiff one strip": lambda: encoded(clear(), "TIFF", **one_strip),
        "tiff 16 bits": lambda: encoded(deep(), "TIFF", **one_strip),
        "tiff tiles": lambda: tiled_tiff(width, height, (width // 64 * 32, height // 64 * 32)),
        "webp": lambda: encoded(flat, "WEBP", lossless=True, method=0),
        "webp rgba": lambda: encoded(clear(), "WEBP", lossless=True, method=0),
        "gif frames": lambda: encoded(
            flat.convert("P"), "GIF", save_all=True, append_images=[flat.convert("P")], transparency=0
        ),
    }  # fmt: skip
    return makers[name]()


KINDS = [
    "png rgb", "png rgba", "png rgba turned", "png 16 bits", "png palette", "jpeg", "jpeg progressive", "jpeg cmyk",
    "tiff lzw", "tiff one strip", "tiff 16 bits", "tiff tiles", "webp", "webp rgba", "gif frames",
]  # fmt: skip
