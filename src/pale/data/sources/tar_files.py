"""Headers of tar archives. An archive may come from anyone: headers are bounded, and reading only moves forward."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 1 << 20  # of a long name, or of the extended values of a member


class _BoundedReader:
    """An open file for `tarfile`, which would read as many bytes as a header states."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def read(self, size: int) -> bytes:
        """Read at most `MAX_HEADER_BYTES`."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(
                f"a header of {size:,} bytes, the limit is {MAX_HEADER_BYTES:,}"
            )
        return self._file.read(size)


def tar_members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an open, uncompressed archive; a damaged or hostile one raises `tarfile.TarError`.

    A negative size would lead back to an earlier member, and so on without end, in some versions of Python.
    """
    reader: Any = _BoundedReader(file)
    place = -1
    try:
        with tarfile.open(fileobj=reader, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header
                if member.size < 0 or tar.offset <= place:
                    raise tarfile.ReadError(f"a member of {member.size:,} bytes")
                place = tar.offset
                yield member
    except RecursionError:  # each header about the next member is one call deeper
        raise tarfile.ReadError("too many headers for one member") from None
