"""Tar shards, in webdataset's layout: a picture `<key>.jpg` and its class `<key>.cls`, a number, after it.

An index beside the shards (`train.npz`) says where in which tar each picture lies. So they are read at
random like a folder, a few large files in place of millions of small ones, and everything that holds for
folders holds for shards: each sample once an epoch, resume in the middle, any number of processes.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..progress import Track, silent
from .images import SUFFIXES, Files, UnreadableImageError, decode


@dataclass(frozen=True)
class Index:
    """Where each picture of a split lies."""

    tars: tuple[str, ...]
    bytes: NDArray[np.int64]  # of each tar: a tar that was changed is noticed
    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int64]
    key: NDArray[np.bytes_]
    classes: tuple[str, ...]


def pack(
    source: Files,
    folder: Path,
    split: str,
    shard_bytes: int,
    seed: int = 0,
    track: Track = silent,
) -> list[Path]:
    """Write a source as shards `<split>-000000.tar` ... of about `shard_bytes`, and their index.

    Files go in as they are, in an order drawn from `seed`, so that who reads shards in a row sees all
    classes mixed. The same source gives the same bytes.
    """
    if list(folder.glob(f"{split}-*.tar")) or (folder / f"{split}.npz").exists():
        raise ValueError(f"{folder} holds shards of {split} already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    try:
        _write(source, folder, split, shard_bytes, seed, track, paths)
        save_index(folder, split, index_of(paths, source.classes))
    except (OSError, UnreadableImageError) as error:
        for path in paths:  # half a set would be taken for a whole one
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}").unlink(missing_ok=True)
        (folder / f".{split}.npz").unlink(missing_ok=True)
        if isinstance(error, UnreadableImageError):
            raise
        raise OSError(
            f"{paths[-1]} could not be written ({error.strerror or error}); make room, or choose another folder; "
            f"what was written of {split} is removed"
        ) from error
    return paths


def _write(
    source: Files,
    folder: Path,
    split: str,
    shard_bytes: int,
    seed: int,
    track: Track,
    paths: list[Path],
) -> None:
    """The shards, whose paths are added to `paths` when they are begun."""
    order = np.random.default_rng(seed).permutation(len(source))
    waiting = [int(i) for i in order[::-1]]
    steps = track(range(len(source)), f"packing {split}", len(source))
    while waiting:
        path = folder / f"{split}-{len(paths):06d}.tar"
        paths.append(path)
        temporary = path.with_name(f".{path.name}")
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            while waiting and (tar.offset < shard_bytes or not tar.offset):
                index = waiting.pop()
                next(steps)
                suffix = Path(source.paths[index]).suffix.lower()
                _add(tar, f"{index:08d}{suffix}", _content(source, index))
                _add(tar, f"{index:08d}.cls", str(source.labels[index]).encode())
        temporary.rename(path)


def _content(source: Files, index: int) -> bytes:
    try:
        return Path(source.name(index)).read_bytes()
    except OSError as error:
        raise UnreadableImageError(
            f"{source.name(index)}: cannot be read ({error.strerror or error}); delete it or replace it"
        ) from None


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def index_of(paths: Sequence[Path], classes: Sequence[str] | None = None) -> Index:
    """Read the headers of shards, ours or others, whose classes are numbers from 0."""
    rows: list[tuple[int, int, int, int, bytes]] = []
    for number, path in enumerate(paths):
        pictures: dict[str, tuple[int, int]] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    key, dot, suffix = member.name.partition(".")
                    if f"{dot}{suffix}".lower() in SUFFIXES:
                        pictures[key] = member.offset_data, member.size
                    elif suffix == "cls":
                        file = tar.extractfile(member)
                        labels[key] = int(file.read()) if file else -1
        except (tarfile.TarError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a shard ({error}); make it again") from None
        if pictures.keys() != labels.keys():
            key = sorted(pictures.keys() ^ labels.keys())[0]
            raise ValueError(f"{path}: {key} needs both a picture and a .cls file with its class")
        rows += [(number, *pictures[k], labels[k], k.encode()) for k in pictures]
    if not rows:
        raise ValueError(
            f"no pictures in {len(paths)} shards, {paths[0] if paths else 'none'} first"
        )
    shard, offset, size, label, keys = zip(*rows, strict=True)
    known = tuple(classes) if classes is not None else tuple(map(str, range(max(label) + 1)))
    return Index(
        tuple(path.name for path in paths),
        np.array([path.stat().st_size for path in paths]),
        np.array(shard, np.int32),
        np.array(offset),
        np.array(size),
        np.array(label),
        np.array(keys),
        known,
    )


def save_index(folder: Path, split: str, index: Index) -> None:
    """Write `<split>.npz`; arrays alone, nothing pickled."""
    temporary = folder / f".{split}.npz"
    np.savez(temporary, allow_pickle=False, **{k: np.array(v) for k, v in vars(index).items()})
    temporary.replace(folder / f"{split}.npz")


def load_index(folder: Path, split: str) -> Index:
    """The index of a split, made from the headers where there is none; checked against the shards."""
    paths = sorted(folder.glob(f"{split}-*.tar"))
    if not paths:
        raise ValueError(f"there are no shards {folder}/{split}-*.tar; pale data pack makes them")
    file = folder / f"{split}.npz"
    if not file.is_file():
        return index_of(paths)
    with np.load(file, allow_pickle=False) as stored:
        values: dict[str, Any] = {name: stored[name] for name in stored.files}
    index = Index(**values | {n: tuple(values[n].tolist()) for n in ("tars", "classes")})
    now = [path.stat().st_size for path in paths]
    if [path.name for path in paths] != list(index.tars) or now != index.bytes.tolist():
        raise ValueError(
            f"{file} does not fit the shards beside it: some are missing, cut short or were changed; "
            "copy them again, or delete the index to read what is there"
        )
    return index


class Shards:
    """The pictures of a split, by number."""

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None = None) -> None:
        self.folder, self.index = folder, load_index(folder, split)
        self.classes = list(classes if classes is not None else self.index.classes)
        if classes is not None and list(classes) != list(self.index.classes):
            raise ValueError(
                f"the classes of {folder}/{split} are not those of training; pack both in one go"
            )
        self.labels: list[int] = self.index.label.tolist()
        if empty := sorted(set(range(len(self.classes))) - set(self.labels)):
            raise ValueError(
                f"every class needs at least one image, but {folder}/{split} has none for "
                f"{self.classes[empty[0]]!r}"
            )
        self._files: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Picture number `index`, RGB."""
        return decode(io.BytesIO(self.content(index)), self.name(index))

    def content(self, index: int) -> bytes:
        """Its file, as it is."""
        shard = int(self.index.shard[index])
        size, offset = int(self.index.size[index]), int(self.index.offset[index])
        try:
            if shard not in self._files:
                self._files[shard] = os.open(self.folder / self.index.tars[shard], os.O_RDONLY)
            # A read at a place, not a seek: processes that share the file do not disturb each other.
            return os.pread(self._files[shard], size, offset)
        except OSError as error:
            raise UnreadableImageError(
                f"{self.name(index)}: cannot be read ({error.strerror or error}); copy the shards again"
            ) from None

    def name(self, index: int) -> str:
        """Shard and key."""
        tar = self.index.tars[int(self.index.shard[index])]
        return f"{self.folder / tar}:{self.index.key[index].decode()}"
