"""Images of folders, list files and tar archives as one sequence, or one shard of it.

A shard is a part of the images. It depends only on their names relative to the source, not on the order of the files,
the machine or the mount point. The hash of its name decides the shard of an image, so an added image does not change
the shards of others. Tar archives are read from start to end, so each archive belongs to one shard; the archives are
assigned in turn, sorted by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Protocol, TypeVar

from ...errors import DataError, SettingsError
from ..reading import (
    SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    UnreadableImageError,
    display_name,
    open_regular,
)
from .paths import is_hidden
from .shards import read_at
from .tar_files import tar_members

MAX_SHARDS = 1_000_000
MAX_PACKED_BYTES = 2**28  # of an image in an archive, because several are held in memory
MAX_LINE = 65_536  # maximum bytes of a line of a list
ARCHIVE = ".tar"
LIST = ".txt"


class ImageItem(Protocol):
    """An image that is read when it is needed."""

    @property
    def name(self) -> str:
        """Name relative to its source, as valid Unicode."""

    def load(self) -> str | os.PathLike[str] | bytes:
        """Return its path or its content; raise an UnreadableImageError or an OSError if that fails."""


Item = TypeVar("Item", bound=ImageItem)


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of the images; `index` counts from 0."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.count <= MAX_SHARDS):
            raise SettingsError(
                f"a shard is i/n with i from 0 to n - 1 and n up to {MAX_SHARDS:,}, got {self.index}/{self.count}"
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "3/16"."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        if found is None:
            raise SettingsError(
                f"a shard is i/n with i from 0 to n - 1, such as 0/16, got {display_name(text)!r}"
            )
        return cls(int(found[1]), int(found[2]))

    def owns(self, name: str) -> bool:
        """Return whether the image of this name belongs to the shard."""
        if self.count == 1:
            return True
        content = name.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.index


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class FileItem:
    """An image file; `path` is the path for the operating system."""

    name: str
    path: str

    def load(self) -> str:
        """Return the path."""
        return self.path


@dataclass(frozen=True, slots=True)
class BadItem:
    """An entry that is not a readable image or archive."""

    name: str
    reason: str

    def load(self) -> bytes:
        """Raise an error with the reason."""
        raise UnreadableImageError(f"{self.name}: {self.reason}")


class OpenArchive:
    """File descriptor of an archive, open as long as one of its items is needed."""

    def __init__(self, path: str) -> None:
        with open_regular(path) as file:
            self.descriptor = os.dup(file.fileno())
        # Without pread, threads would change each other's position in the file.
        self._lock = nullcontext() if hasattr(os, "pread") else Lock()

    def read(self, size: int, offset: int) -> bytes:
        """Return the bytes at an offset, fewer at the end of the file; thread-safe."""
        left = max(0, os.fstat(self.descriptor).st_size - offset)
        with self._lock:
            return read_at(self.descriptor, min(size, left), offset)

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class TarItem:
    """An image in an uncompressed tar archive."""

    name: str
    archive: OpenArchive
    offset: int
    size: int

    def load(self) -> bytes:
        """Return the content."""
        if self.size > MAX_PACKED_BYTES:
            raise UnreadableImageError(
                f"{self.name}: an image in an archive has at most {MAX_PACKED_BYTES:,} bytes, got {self.size:,}; "
                "shrink it, or unpack it"
            )
        content = self.archive.read(self.size, self.offset)
        if len(content) < self.size:
            raise UnreadableImageError(
                f"{self.name}: the archive ends after {len(content):,} of its {self.size:,} bytes; copy it again"
            )
        return content


def is_archive(name: str) -> bool:
    """Return whether it is a tar archive, by its name."""
    return name.lower().endswith(ARCHIVE)


def is_image_name(name: str) -> bool:
    """Return whether it is an image, by its name; one in a format that cannot be read is reported later."""
    return name.lower().endswith(SUFFIXES + UNSUPPORTED_SUFFIXES)


def local_items(sources: Sequence[Path], shard: Shard = WHOLE) -> Iterator[ImageItem]:
    """Yield the images of a shard: first files, sorted by name, then those of the archives.

    Args:
        sources: images, folders, list files (.txt: one path per line, relative to the folder of the list) and tar
            archives; those in folders are found too.
        shard: shard to return.
    """
    files: list[FileItem] = []
    archives: list[FileItem] = []
    for source, prefix in zip(sources, source_prefixes([s.name for s in sources]), strict=True):
        if not source.exists():
            raise DataError(
                f"there is no image, folder, list or archive {display_name(source)}; check the path"
            )
        for name, path in _entries(source):
            name = display_name(prefix + name)
            if is_archive(name):
                archives.append(FileItem(name, path))
            elif shard.owns(name):
                files.append(FileItem(name, path))
    yield from distinct(files)
    for archive in own_archives(archives, shard):
        yield from tar_items(archive.path, archive.name)


def distinct(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items sorted by name, each name once."""
    last = None
    for item in sorted(items, key=lambda item: item.name):
        if item.name != last:
            yield item
        last = item.name


def own_archives(archives: Iterable[Item], shard: Shard) -> list[Item]:
    """Return every n-th archive in the order of their names."""
    return list(distinct(archives))[shard.index :: shard.count]


def source_prefixes(names: Sequence[str]) -> list[str]:
    """Return the prefix of the image names of each source: empty for a single source, else its name."""
    if len(names) == 1:
        return [""]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"images are named after their source, and two sources have the name {display_name(repeated[0])!r}; "
            "give their common folder, or run one command per source"
        )
    # The name of a file is the whole name of its image.
    return [f"{name}/" if not is_file_name(name) else "" for name in names]


def is_file_name(name: str) -> bool:
    """Return whether a source of this name is an image or an archive, by its name."""
    return is_image_name(name) or is_archive(name)


def _entries(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative name and the path of each file of a source."""
    if source.is_dir():
        root = os.fspath(source)
        for where, _, names in os.walk(root, onerror=_unreadable_folder):
            inside = (
                "" if where == root else os.path.relpath(where, root).replace(os.sep, "/") + "/"
            )
            for name in names:
                if is_file_name(name) and not is_hidden(name):
                    yield inside + name, os.path.join(where, name)
    elif source.suffix.lower() == LIST:
        with open_regular(source) as file:
            for name in list_names(file, display_name(source)):
                yield name, os.path.join(source.parent, name)
    else:  # one that is not an image is listed as unreadable
        yield source.name, os.fspath(source)


def _unreadable_folder(error: OSError) -> None:
    raise DataError(
        f"the folder {display_name(error.filename)} cannot be read ({error.strerror}); its images would be missing: "
        "change its permissions, or leave it out"
    )


def list_names(file: BinaryIO, source: str) -> Iterator[str]:
    """Yield the lines of a list file that name an image; addresses are refused.

    A list names files in its own folder. If addresses were allowed, a list could make this program contact any host.
    """
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise DataError(f"{source}, line {number}: a line has at most {MAX_LINE:,} bytes")
        name = line.decode("utf-8", "surrogateescape").strip()
        if not name or name.startswith("#"):
            continue
        if "://" in name:
            raise DataError(
                f"{source}, line {number}: a list names files relative to itself, not addresses, got "
                f"{display_name(name)!r}; put the list beside the images and give its own address"
            )
        yield name


def tar_items(path: str, name: str) -> Iterator[ImageItem]:
    """Yield the images of an uncompressed tar archive in order; if it is damaged, the last item is a `BadItem`.

    Args:
        path: path of the archive.
        name: name of the archive, the prefix of the names of its images.
    """
    try:
        with open_regular(path) as file:
            archive = OpenArchive(path)
            for member in tar_members(file):
                name_fits = is_image_name(member.name) and not is_hidden(member.name)
                if member.isreg() and name_fits:
                    inside = display_name(f"{name}/{member.name}")
                    yield TarItem(inside, archive, member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OSError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        yield BadItem(
            name,
            f"cannot be read as an uncompressed tar archive ({reason}); the images after this one are missing: "
            "copy it again, or unpack it",
        )
