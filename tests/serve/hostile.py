"""Requests that deserve no result, as bytes on the wire: damaged files, bombs, wrong types, forms and headers."""

import functools
import io
import itertools
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator

from PIL import Image
from serve.uploads import encoded, large, tiled_tiff
from support.weights import pixels

PATHS = [
    "/predict/classification",
    "/predict/classification?output=drawn",
    "/look",
    "/look?x=1&y=1",
]


def request(content: bytes, path: str = PATHS[0], head: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n{head}"
    return f"{lines}\r\n".encode() + content


def png(
    width: int, height: int, data: bytes = b"", more: list[tuple[bytes, bytes]] | None = None
) -> bytes:
    """A PNG that says to be this large, with further chunks before its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *(more or []), (b"IDAT", data or zlib.compress(bytes(1000)))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
        for t, d in [*parts, (b"IEND", b"")]
    )  # fmt: skip


def photo(side: int = 48, kind: str = "PNG", **options) -> bytes:
    return encoded(Image.fromarray(pixels(side, side)), kind, **options)


def directory(tags: list[tuple[int, int, int, int]]) -> bytes:
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)


def exif_bomb(size: int) -> bytes:
    """Many tags that all name the same bytes, in a JPEG's EXIF, which may go on over several segments."""
    tags = [(20_000 + i, 7, size - 30_000, 20_000) for i in range(1000)]
    content = (b"II*\0" + struct.pack("<I", 8) + directory(tags)).ljust(size, b"\0")
    whole = photo(8, "JPEG")
    segments = b""
    for start in range(0, size, 60_000):
        part = b"Exif\0\0" + content[start : start + 60_000]
        segments += b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part
    return whole[:2] + segments + whole[2:]


def strips_bomb(count: int) -> bytes:
    """A TIFF of eight pixels with millions of strips."""
    whole = bytearray(encoded(Image.new("RGB", (8, 8)), "TIFF"))
    at = struct.unpack("<I", whole[4:8])[0]
    number = struct.unpack("<H", whole[at : at + 2])[0]
    tags = [
        struct.unpack("<HHII", whole[at + 2 + 12 * i : at + 14 + 12 * i]) for i in range(number)
    ]
    end = len(whole)
    data = end + 2 + 12 * number + 4
    tags = [(tag, 3, count, data) if tag == 273 else (tag, *rest) for tag, *rest in tags]
    whole[4:8] = struct.pack("<I", end)
    return bytes(whole + directory(tags) + bytes(2 * count))


def scans_bomb(count: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again; each takes a pass over all pixels."""
    whole = encoded(Image.new("L", (4000, 4000), 77), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * count + whole[-2:]


def webp_canvas(width: int, height: int) -> bytes:
    """A WebP whose canvas is large, whatever its frame."""
    frame = encoded(Image.new("RGB", (8, 8)), "WEBP", lossless=True)[12:]
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sizes + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_frame(width: int, height: int) -> bytes:
    """A GIF of 8x8 whose first frame is larger."""
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6)
    return head + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00;"


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack(
        "<IIIIiiHHIIiiII", 99, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0
    )


def form(name: str, content: bytes, end: bytes = b"\r\n--b--\r\n", extra: bytes = b"") -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'.encode()
    body = head + extra + b"\r\n" + content + end
    return request(body, head="Content-Type: multipart/form-data; boundary=b\r\n")


def parts(count: int) -> bytes:
    body = b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n1\r\n" * count + b"--b--\r\n"
    return request(body, head="Content-Type: multipart/form-data; boundary=b\r\n")


@functools.cache
def other_types() -> list[bytes]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../x.png", photo())
    image = Image.fromarray(pixels(32, 32))
    eps = encoded(image, "EPS")
    others = [
        encoded(image, kind)
        for kind in ("ICO", "PPM", "TGA", "PCX", "PDF", "SGI", "ICNS", "JPEG2000")
    ]
    return [
        eps,
        b"\xff\xd8" + eps,
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"<!DOCTYPE x [<!ENTITY y SYSTEM 'file:///etc/passwd'>]><x>&y;</x>",
        b"push graphic-context\nfill 'url(https://localhost/|id)'\n",
        b"\0\0\0 ftypheic" + bytes(200),
        b"/etc/passwd",
        b"#!/bin/sh\nid\n",
        archive.getvalue(),
        *others,
    ]  # fmt: skip


EVERY_KIND = 27 * 9  # requests, after which there was one of every kind


def hostile(count: int) -> Iterator[bytes]:
    """So many requests, of all kinds in turn."""
    draw = random.Random(0)
    good = {kind: photo(48, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    # Nearly fifty million pixels of nothing in 4 kB, and text that unpacks to 64 MB.
    flat = zlib.compress(bytes(4_000_000), 9)
    text = (b"zTXt", b"k\x00\x00" + zlib.compress(bytes(64_000_000), 1))
    texts = [(b"zTXt", b"k%d\x00\x00" % i + zlib.compress(bytes(1_000_000), 9)) for i in range(70)]
    bombs = {
        "text": png(8, 8, more=[text]),
        "texts": png(8, 8, more=texts),
        "exif": exif_bomb(2_000_000),
        "strips": strips_bomb(3_000_000),
        "scans": scans_bomb(3000),
        "tile": tiled_tiff(64, 64, (16_000, 16_000)),
        "tiles": tiled_tiff(20_000, 20_000, (256, 256)),
        "rgba": large("png rgba", 9_000, 6_000),
        "frame": gif_frame(65_535, 65_535),
    }  # fmt: skip
    bomb = itertools.cycle(bombs.values())
    names = [
        "../../../etc/passwd",
        "..\\..\\boot.ini",
        "/dev/zero",
        "a\x00b",
        "%2e%2e%2f",
        ";id",
        "x" * 9999,
    ]
    cut = lambda kind: good[kind][: draw.randrange(1, max(2, len(good[kind]) // 2))]  # noqa: E731
    path = lambda: draw.choice(PATHS)  # noqa: E731

    def flipped() -> bytes:
        content = bytearray(good[draw.choice(list(good))])
        for _ in range(40):
            content[draw.randrange(len(content) // 4)] = draw.randrange(256)
        return bytes(content[: 3 * len(content) // 4])

    makers = [
        lambda: request(cut(draw.choice(list(good))), path()),
        lambda: request(flipped(), path()),
        lambda: request(png(draw.randrange(9_000, 60_000), 60_000), path()),
        lambda: request(png(7_000, 7_000, flat), path()),  # just within the bound, and cut short
        lambda: request(next(bomb), path()),
        lambda: request(webp_canvas(draw.randrange(8_000, 60_000), 60_000), path()),
        lambda: request(
            bmp(draw.choice([-5, 0, 30_000, 2**31 - 1]), draw.choice([0, 30_000, -(2**31)]))
        ),
        lambda: request(draw.randbytes(draw.randrange(1, 3000)), path()),
        lambda: request(draw.choice(other_types()), path()),
        lambda: request(photo(200, "PNG")[:60] + draw.randbytes(400)),
        lambda: request(b""),
        lambda: form(draw.choice(names), b"not an image"),
        lambda: form("x.png", cut("PNG"), b""),
        lambda: form("x.png", cut("PNG"), extra=b"X-Long: " + b"a" * 100_000 + b"\r\n"),
        lambda: form("x.png", cut("PNG"), extra=b"X: y\r\n" * 2000),
        lambda: parts(draw.choice([9, 1000, 20_000])),
        lambda: request(good["PNG"], head="Content-Type: multipart/form-data; boundary=\r\n"),
        lambda: request(
            good["PNG"], head=f"Content-Type: multipart/form-data; boundary={'b' * 5000}\r\n"
        ),
        lambda: request(
            good["PNG"], f"/predict/{draw.choice(['..%2f..', 'x' * 2000, '%00', '%ff'])}"
        ),
        lambda: request(good["PNG"], "/predict/classification?output=../../etc/passwd"),
        lambda: request(
            good["PNG"], f"/look?x={draw.choice(['1e309', 'nan', '-1', '1' * 500])}&y=0"
        ),
        lambda: request(good["PNG"], head="X-Long: " + "a" * 100_000 + "\r\n"),
        lambda: request(good["PNG"], head="Content-Length: 5\r\n"),
        lambda: request(good["PNG"], head="Transfer-Encoding: chunked\r\n"),
        lambda: b"POST /look HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        lambda: (
            b"POST /look HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n\r\n"
        ),
        lambda: draw.randbytes(200) + b"\r\n\r\n",
    ]
    for maker in itertools.islice(itertools.cycle(makers), count):
        yield maker()
