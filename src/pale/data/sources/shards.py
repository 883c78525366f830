"""Tar shards in webdataset's layout: an image `<key>.jpg`, followed by its class number `<key>.cls`.

An index beside the shards (`train.npz`) has tar, offset and size of each image. Shards therefore offer random
access like a folder, with a few large files instead of millions of small ones, and behave like a folder in
training: each sample once per epoch, resuming at any step, any number of processes.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...core.progress import Track, no_progress
from ..decoding import decode_image
from ..reading import (
    MAX_IMAGE_BYTES,
    SUFFIXES,
    UnreadableImageError,
    display_name,
    open_regular,
    read_bytes,
    require_distinct_names,
)
from .images import ImageFiles, numbered_classes
from .tar_files import tar_members

T = TypeVar("T")
Place = tuple[int, int, int, bytes]  # shard, offset, size and key of an image
# Of a damaged archive; RuntimeError: of an encrypted one, or a header of nested brackets.
ARCHIVE_ERRORS = (MemoryError, BadZipFile, RuntimeError)
MAX_CLASS_BYTES = 32  # size of a .cls file, which contains a number


@dataclass(frozen=True)
class ShardIndex:
    """Position of each image of a split.

    Attributes:
        tars: names of the shards.
        bytes: size of each shard, by which a changed shard is detected.
        shard: index of the shard of each image.
        offset: offset of each image in its shard.
        size: bytes of each image.
        label: class of each image.
        key: key of each image.
        classes: names of the classes.
    """

    tars: tuple[str, ...]
    bytes: NDArray[np.int64]
    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int64]
    key: NDArray[np.bytes_]
    classes: tuple[str, ...]


def write_shards(
    source: ImageFiles,
    folder: Path,
    split: str,
    shard_bytes: int,
    track: Track = no_progress,
) -> list[Path]:
    """Write a source as shards `<split>-000000.tar` ... of about `shard_bytes`, and their index.

    Files are copied unchanged, in random order, so that classes are mixed for sequential readers. The same source gives
    the same bytes.
    """
    if list(folder.glob(f"{split}-*.tar")) or (folder / f"{split}.npz").exists():
        raise ValueError(f"{folder} contains shards of {split} already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    try:
        _write_tars(source, folder, split, shard_bytes, track, paths)
        save_index(folder, split, build_index(paths, source.classes))
    except (OSError, UnreadableImageError) as error:
        for path in paths:  # an incomplete set would look like a complete one
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}").unlink(missing_ok=True)
        (folder / f".{split}.npz").unlink(missing_ok=True)
        if isinstance(error, UnreadableImageError):
            raise
        raise OSError(
            f"{paths[-1]} could not be written ({error.strerror or error}); free disk space, or choose another folder; "
            f"the shards of {split} written so far were removed"
        ) from error
    return paths


def _write_tars(
    source: ImageFiles,
    folder: Path,
    split: str,
    shard_bytes: int,
    track: Track,
    paths: list[Path],
) -> None:
    """Write the shards; the path of each is added to `paths` before it is written."""
    order = np.random.default_rng(0).permutation(len(source))
    remaining = [int(i) for i in order[::-1]]
    steps = track(range(len(source)), f"packing {split}", len(source))
    while remaining:
        path = folder / f"{split}-{len(paths):06d}.tar"
        paths.append(path)
        temporary = path.with_name(f".{path.name}")
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            while remaining and (tar.offset < shard_bytes or not tar.offset):
                index = remaining.pop()
                next(steps)
                suffix = Path(source.paths[index]).suffix.lower()
                _add_file(tar, f"{index:08d}{suffix}", _read_content(source, index))
                _add_file(tar, f"{index:08d}.cls", str(source.labels[index]).encode())
        temporary.rename(path)


def _read_content(source: ImageFiles, index: int) -> bytes:
    try:
        return read_bytes(source.root / source.paths[index])
    except OSError as error:
        raise UnreadableImageError(
            f"{source.name(index)}: cannot be read ({error.strerror or error}); delete it or replace it"
        ) from None


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def build_index(paths: Sequence[Path], classes: Sequence[str] | None = None) -> ShardIndex:
    """Build the index of shards, also of other tools, from the headers in the tars; classes are numbers from 0."""
    places, labels = scan_shards(paths, "cls", int, MAX_CLASS_BYTES, "its class")
    known = tuple(classes if classes is not None else numbered_classes(labels, paths[0]))
    return index_of(paths, places, labels, known)


def scan_shards(
    paths: Sequence[Path], suffix: str, parse: Callable[[bytes], T], limit: int, content: str
) -> tuple[list[Place], list[T]]:
    """Return the position of each image in the tars, and the value in the file beside it.

    Args:
        paths: the shards.
        suffix: suffix of the file beside each image, without the dot.
        parse: returns the value of such a file; raises a ValueError for wrong content.
        limit: maximum size of such a file in bytes.
        content: description of such a file for messages.
    """
    places: list[Place] = []
    values: list[T] = []
    for number, path in enumerate(paths):
        try:
            images, found = _read_members(path, suffix, parse, limit, content)
        except (tarfile.TarError, ValueError, OSError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise ValueError(
                f"{path} cannot be read as a shard ({reason}); make it again"
            ) from None
        if images.keys() != found.keys():
            key = sorted(images.keys() ^ found.keys())[0]
            raise ValueError(
                f"{path}: {key} needs both an image and a .{suffix} file with {content}"
            )
        places += [(number, *images[k], k.encode("utf-8", "surrogateescape")) for k in images]
        values += [found[k] for k in images]
    if not places:
        raise ValueError(
            f"there are no images in {len(paths)} shards, {paths[0] if paths else 'none'} first"
        )
    return places, values


def index_of(
    paths: Sequence[Path], places: Sequence[Place], labels: Sequence[int], classes: Sequence[str]
) -> ShardIndex:
    """Return the index of images at the positions that `scan_shards` found."""
    shard, offset, size, keys = zip(*places, strict=True)
    return ShardIndex(
        tuple(path.name for path in paths),
        np.array([path.stat().st_size for path in paths]),
        np.array(shard, np.int32),
        np.array(offset),
        np.array(size),
        np.array(labels),
        np.array(keys),
        tuple(classes),
    )


def _read_members(
    path: Path, beside: str, parse: Callable[[bytes], T], limit: int, content: str
) -> tuple[dict[str, tuple[int, int]], dict[str, T]]:
    """Return offset and size of the images in a tar, and the values of the files beside them, by key."""
    images: dict[str, tuple[int, int]] = {}
    values: dict[str, T] = {}
    with open_regular(path) as file:
        for member in tar_members(file):
            key, dot, suffix = member.name.partition(".")
            if not member.isreg():
                continue
            if f"{dot}{suffix}".lower() in SUFFIXES:
                images[key] = member.offset_data, member.size
            elif suffix == beside:
                values[key] = parse(_read_small(file, member, limit, content))
    return images, values


def _read_small(file: BinaryIO, member: tarfile.TarInfo, limit: int, content: str) -> bytes:
    if member.size > limit:
        raise ValueError(
            f"{member.name!r} does not contain {content}: it has {member.size} bytes, at most {limit}"
        )
    return read_at(file.fileno(), member.size, member.offset_data)


def save_index(folder: Path, split: str, index: ShardIndex) -> None:
    """Write `<split>.npz`, which contains only arrays and no pickles."""
    temporary = folder / f".{split}.npz"
    arrays = {name: np.array(value) for name, value in vars(index).items()}
    assert not any(array.dtype.hasobject for array in arrays.values())
    # NumPy 1.26 would store an argument allow_pickle as an array.
    np.savez(temporary, **arrays)  # type: ignore[arg-type]
    temporary.replace(folder / f"{split}.npz")


def load_index(folder: Path, split: str) -> ShardIndex:
    """Load the index of a split and check it against the shards; without a file it is built from the tars."""
    paths = sorted(folder.glob(f"{split}-*.tar"))
    if not paths:
        raise ValueError(f"there are no shards {folder}/{split}-*.tar; pale data pack makes them")
    file = folder / f"{split}.npz"
    if not file.is_file():
        return build_index(paths)
    index = read_index(file)
    now = [path.stat().st_size for path in paths]
    if [path.name for path in paths] != list(index.tars) or now != index.bytes.tolist():
        raise ValueError(
            f"{file} does not fit the shards beside it: some are missing, truncated or were changed; "
            "copy them again, or delete the index to use the present shards"
        )
    return index


def read_index(file: Path) -> ShardIndex:
    """Load an index file and check its values."""
    try:
        index = _load_arrays(file)
        _require_valid_index(index)
    except (OSError, ValueError, TypeError, KeyError, EOFError, *ARCHIVE_ERRORS) as error:
        raise ValueError(
            f"{file} is damaged ({error}); delete it: the index is then built from the shards"
        ) from None
    return index


def _load_arrays(file: Path) -> ShardIndex:
    """Load a file of `save_index`; its values are not checked."""
    with open_regular(file) as content:
        with ZipFile(content) as archive:  # compressed, a few bytes could expand to any size
            if any(member.compress_type != ZIP_STORED for member in archive.infolist()):
                raise ValueError("its arrays are compressed")
        content.seek(0)
        with np.load(content, allow_pickle=False) as stored:
            values: dict[str, Any] = {name: stored[name] for name in stored.files}
    return ShardIndex(**values | {n: tuple(values[n].tolist()) for n in ("tars", "classes")})


def _require_valid_index(index: ShardIndex) -> None:
    """Raise if columns differ in length or values are out of range."""
    columns = (index.shard, index.offset, index.size, index.label, index.key)
    if any(c.ndim != 1 or len(c) != len(index.shard) for c in columns) or not len(index.shard):
        raise ValueError("its columns differ in length")
    for column, bound in (
        (index.shard, len(index.tars)),
        (index.label, len(index.classes)),
        (index.size, MAX_IMAGE_BYTES),
        (index.offset, None),
    ):
        if column.dtype.kind not in "iu" or column.min() < 0:
            raise ValueError("a number in it is out of range")
        if bound is not None and column.max() >= bound:
            raise ValueError("a number in it is out of range")
    if index.bytes.shape != (len(index.tars),) or index.key.dtype.kind != "S":
        raise ValueError("names of shards or images are missing")


class ShardFiles:
    """The images of a split in shards, by index.

    Args:
        folder: contains `<split>-*.tar`.
        split: name of the split.
        classes: classes of the training set, for validation.
        index: positions of the images; None: load them.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        classes: Sequence[str] | None = None,
        index: ShardIndex | None = None,
    ) -> None:
        self.folder, self.index = folder, index or load_index(folder, split)
        self.classes = list(classes if classes is not None else self.index.classes)
        require_distinct_names(self.classes, f"{folder}/{split}")
        if classes is not None and list(classes) != list(self.index.classes):
            raise ValueError(
                f"the classes of {folder}/{split} are not those of the training set; pack both with one command"
            )
        self.labels: list[int] = self.index.label.tolist()
        if empty := sorted(set(range(len(self.classes))) - set(self.labels)):
            raise ValueError(
                f"every class needs at least one image, but {folder}/{split} has none for "
                f"{self.classes[empty[0]]!r}"
            )
        self._files: dict[int, int] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_files": {}}

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""
        return decode_image(io.BytesIO(self.content(index)), self.name(index))

    def content(self, index: int) -> bytes:
        """Return the encoded file."""
        shard = int(self.index.shard[index])
        size, offset = int(self.index.size[index]), int(self.index.offset[index])
        size = max(0, min(size, int(self.index.bytes[shard]) - offset))
        try:
            if shard not in self._files:
                with open_regular(self.shard_path(shard)) as file:
                    self._files[shard] = os.dup(file.fileno())
            # Without a seek: processes share the position of an inherited file descriptor.
            return read_at(self._files[shard], size, offset)
        except OSError as error:
            raise UnreadableImageError(
                f"{self.name(index)}: cannot be read ({error.strerror or error}); copy the shards again"
            ) from None

    def shard_path(self, shard: int) -> Path:
        """Return the path of a tar."""
        return self.folder / self.index.tars[shard]

    def name(self, index: int) -> str:
        """Return shard and key of an image."""
        tar = self.index.tars[int(self.index.shard[index])]
        key = self.index.key[index].decode("utf-8", "backslashreplace")
        return f"{display_name(self.folder / tar)}:{key}"


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at an offset; Windows has no `pread`, but its processes do not share file positions."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    parts, left = [], size
    while left and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
