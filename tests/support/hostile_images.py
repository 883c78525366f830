"""Files that a hostile dataset may hold, and the peak memory of reading them."""

import io
import multiprocessing
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 48 48\n%%EndComments\n"
    b"newpath 0 0 moveto 48 48 lineto stroke\n%%EOF\n"
)


def png(
    path: Path, width: int, height: int, bits: int = 8, colour: int = 2, pixels: bool = True
) -> Path:
    """Write a PNG of zeros in a few bytes; without `pixels` the header alone promises them.

    Colour types: 0 grey, 2 RGB, 3 palette, 6 RGBA.
    """
    channels = {0: 1, 2: 3, 3: 1, 6: 4}[colour]

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    packer, packed = zlib.compressobj(9), b""
    row = bytes(1 + -(-width * channels * bits // 8))
    for _ in range(height if pixels else 1):
        packed += packer.compress(row)
    packed += packer.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(6)) if colour == 3 else b""
    content = chunk(b"IHDR", header) + palette + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return path


def scans_bomb(path: Path, side: int = 4000, count: int = 3000) -> Path:
    """Write a progressive JPEG whose last scan comes again and again; each takes a pass over all pixels."""
    content = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 200)).save(content, "JPEG", progressive=True)
    whole = content.getvalue()
    last = whole.rindex(b"\xff\xda")
    path.write_bytes(whole[:last] + whole[last:-2] * count + whole[-2:])
    return path


def peak_mb(function: Callable[..., Any], *args: Any, limit_gb: float = 4) -> float:
    """Return the memory that a call takes beyond what was held before, at its peak, in MB.

    It runs in a process of its own, which cannot take more than `limit_gb`; what it raises is raised here.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(theirs, limit_gb, function, args))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = None
    process.join()
    assert found is not None, f"the process ended with {process.exitcode}"
    if isinstance(found, BaseException):
        raise found
    return found


def _measured(pipe: Any, limit_gb: float, function: Callable[..., Any], args: Any) -> None:
    try:
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        limit = virtual + int(limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function(*args)
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    except BaseException as error:
        pipe.send(error)
