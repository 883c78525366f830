"""Token labels in files: the class probabilities that a teacher predicts at each position of each image.

A store is a folder. `manifest.json` describes teacher and data, `names.txt` lists the images, one per line, and
`labels-000000.npy` ... contain a record of fixed size per image: uint16 (images, 2, k, h, w), first the k largest
probabilities at each position as float16 bits, then their classes. Files are written atomically, so that an
interrupted run continues with the next shard.

The store has probabilities, whereas the reference implementation keeps logits and replaces all others by 0, which has
no meaning for logits. The remainder of the k probabilities to 1 is distributed over all classes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.plain_json import parse_json
from ..reading import (
    MAX_TEXT_BYTES,
    display_name,
    open_regular,
    read_bytes,
    read_text,
    repeated_value,
    shorten_list,
)
from .images import ImageFiles, ImageSource, ImageSubset
from .scenes import SceneImages
from .shards import ShardFiles

FORMAT = 1
MAX_CLASSES = 65536


@dataclass(frozen=True)
class TokenLabelManifest:
    """Description of a store; the attributes are the keys of manifest.json.

    Attributes:
        teacher: name of the model, or the run.
        weights: SHA-256 of the teacher's weights.
        size: the teacher's input is the whole image, resized to a square of this side.
        grid: rows and columns of the maps.
        k: number of classes per position.
        classes: names of the classes.
        pictures: number of images (kept name).
        names: SHA-256 of names.txt.
        shard: number of images per shard, except the last.
        agreement: per cent of images whose label has the largest sum over the map; None until the store is
            complete.
        format: version of the file format.
    """

    teacher: str
    weights: str
    size: int
    grid: tuple[int, int]
    k: int
    classes: tuple[str, ...]
    pictures: int  # kept name
    names: str
    shard: int
    agreement: float | None = None
    format: int = FORMAT

    def __len__(self) -> int:
        return self.pictures  # kept name

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-len(self) // self.shard)

    def rows(self, shard: int) -> range:
        """Return the indices of the images of a shard."""
        return range(shard * self.shard, min((shard + 1) * self.shard, len(self)))


def sample_names(source: ImageSource) -> list[str]:
    """Return names of the images of a source that do not change if the dataset is moved."""
    if isinstance(source, ImageSubset):
        names = sample_names(source.source)
        return [names[i] for i in source.indices]
    if isinstance(source, ImageFiles):
        return [display_name(Path(path).as_posix()) for path in source.paths]
    if isinstance(source, ShardFiles):
        index = source.index
        return [
            f"{index.tars[shard]}:{key.decode('utf-8', 'backslashreplace')}"
            for shard, key in zip(index.shard.tolist(), index.key.tolist(), strict=True)
        ]
    if isinstance(source, SceneImages):
        scenes = source.scenes
        return [f"scene {i} of {scenes.size} px, seed {scenes.seed}" for i in range(len(scenes))]
    raise TypeError(f"images of a {type(source).__name__} have no persistent names")


def pack_labels(probabilities: Tensor, k: int) -> NDArray[np.uint16]:
    """Convert probabilities (b, classes, h, w) to records (b, 2, k, h, w)."""
    top = probabilities.float().topk(k, dim=1)
    scores = top.values.half().cpu().numpy().view(np.uint16)
    return np.stack([scores, top.indices.cpu().numpy().astype(np.uint16)], axis=1)


def unpack_labels(records: NDArray[np.uint16]) -> tuple[Tensor, Tensor]:
    """Convert records (..., 2, k, h, w) to probabilities and classes, (..., k, h, w) each."""
    scores = np.array(records[..., 0, :, :, :]).view(np.float16)
    classes = records[..., 1, :, :, :].astype(np.int32)
    return torch.from_numpy(scores), torch.from_numpy(classes)


class TokenLabelWriter:
    """Write a store, or resume an incomplete one."""

    def __init__(self, folder: Path, manifest: TokenLabelManifest, names: Sequence[str]) -> None:
        self.folder, self.manifest = folder, manifest
        if len(manifest.classes) > MAX_CLASSES:
            raise ValueError(
                f"token labels take at most {MAX_CLASSES} classes, got {len(manifest.classes)}"
            )
        path = folder / "manifest.json"
        if path.is_file():
            old = asdict(read_manifest(folder))
            new = asdict(manifest) | {"agreement": old["agreement"]}
            if changed := [name for name in new if new[name] != old[name]]:
                listed = ", ".join(
                    f"{n} ({_shorten(old[n])}, now {_shorten(new[n])})" for n in changed
                )
                raise ValueError(
                    f"{folder} was started with another {listed}; resume with the same, or choose another folder"
                )
        elif folder.is_dir() and any(
            f.name != "names.txt" and f.suffix != ".part" for f in folder.iterdir()
        ):  # an interrupted run may leave these two
            raise ValueError(f"{folder} contains other files; choose another folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write_atomically(folder / "names.txt", _names_file(names))
            self._write_manifest(manifest)

    def missing(self) -> list[int]:
        """Return the shards that have not been written."""
        return [n for n in range(self.manifest.shards) if not shard_path(self.folder, n).is_file()]

    def write(self, shard: int, records: NDArray[np.uint16]) -> None:
        """Write a shard atomically."""
        expected = (len(self.manifest.rows(shard)), 2, self.manifest.k, *self.manifest.grid)
        assert records.shape == expected, (records.shape, expected)
        path = shard_path(self.folder, shard)
        _replace(path, lambda file: np.save(file, records, allow_pickle=False))

    def finish(self, labels: Sequence[int]) -> TokenLabelManifest:
        """Check all shards, compute the agreement with the labels and mark the store as complete."""
        correct = 0
        for shard in range(self.manifest.shards):
            rows = self.manifest.rows(shard)
            scores, classes = unpack_labels(_load_shard(self.folder, self.manifest, shard)[:])
            total = torch.zeros(len(rows), len(self.manifest.classes))
            total.scatter_add_(1, classes.flatten(1).long(), scores.flatten(1).float())
            correct += int((total.argmax(1) == torch.tensor(labels[rows.start : rows.stop])).sum())
        agreement = round(100 * correct / len(self.manifest), 2)
        complete = replace(self.manifest, agreement=agreement)
        self._write_manifest(complete)
        for remnant in self.folder.glob(".*.part"):  # of interrupted runs
            remnant.unlink(missing_ok=True)
        return complete

    def _write_manifest(self, manifest: TokenLabelManifest) -> None:
        content = json.dumps(asdict(manifest), indent=1)
        _write_atomically(self.folder / "manifest.json", (content + "\n").encode())


class TokenLabelStore:
    """The token labels of the images of a source, by index.

    Args:
        folder: the store.
        source: the images; all must be in the store, which may have more (those of a hold-out set).
    """

    def __init__(self, folder: Path, source: ImageSource) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        manifest = self.manifest
        if manifest.agreement is None:
            raise ValueError(
                f"{folder} is not complete; run the same pale token-labels make again to resume it"
            )
        if list(source.classes) != list(manifest.classes):
            raise ValueError(
                f"{folder} has labels of {len(manifest.classes)} classes ({shorten_list(manifest.classes)}), the data "
                f"has {len(source.classes)} ({shorten_list(source.classes)}); make labels of this data"
            )
        content = read_bytes(folder / "names.txt", MAX_TEXT_BYTES)
        if hashlib.sha256(content).hexdigest() != manifest.names:
            raise ValueError(f"{folder}/names.txt was changed; make the labels again")
        stored = content.decode().splitlines()
        number = {name: i for i, name in enumerate(stored)}
        names = sample_names(source)
        if absent := [name for name in names if name not in number]:
            raise ValueError(
                f"{folder} has no labels for {len(absent)} of the {len(names)} images ({shorten_list(absent)}); it "
                f"has {len(stored)} ({shorten_list(stored)}): make labels of this data"
            )
        self.rows = np.array([number[name] for name in names])
        for shard in range(manifest.shards):
            _load_shard(folder, manifest, shard)
        self._files: dict[int, NDArray[np.uint16]] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_files": {}}

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """Return probabilities and classes of an image, (k, h, w) each."""
        shard, row = divmod(int(self.rows[index]), self.manifest.shard)
        if shard not in self._files:
            self._files[shard] = _load_shard(self.folder, self.manifest, shard)
        return unpack_labels(self._files[shard][row])


def hash_names(names: Sequence[str]) -> str:
    """Return the SHA-256 of names.txt; raises if the names are not unique lines."""
    if bad := [name for name in names if len(name.splitlines()) != 1]:
        raise ValueError(f"the name of an image must be one line, got {bad[0]!r}; rename it")
    if len(set(names)) < len(names):
        twice = repeated_value(names)
        raise ValueError(
            f"two images have the name {twice!r}; labels are found by name: rename one"
        )
    return hashlib.sha256(_names_file(names)).hexdigest()


def _names_file(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def read_manifest(folder: Path) -> TokenLabelManifest:
    """Read and check the manifest of a store."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(
            f"there are no token labels in {folder}; make them: "
            f"pale token-labels make --model TEACHER --data.root DIR --output {folder}"
        )
    try:
        values = parse_json(read_text(path))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, expected {FORMAT}")
        lists = {"grid": tuple(values["grid"]), "classes": tuple(values["classes"])}
        manifest = TokenLabelManifest(**values | lists)
        count = manifest.pictures  # kept name
        numbers = (manifest.size, *manifest.grid, manifest.k, count, manifest.shard)
        if len(numbers) != 6 or not all(type(n) is int and 0 < n < 1 << 31 for n in numbers):
            rule = "size, grid, k, pictures and shard must be positive integers"  # kept name
            raise ValueError(rule)
        if not all(isinstance(name, str) for name in (*manifest.classes, manifest.names)):
            raise ValueError("names must be strings")
        return manifest
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); make the labels again") from None


def shard_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard."""
    return folder / f"labels-{shard:06d}.npy"


def _load_shard(folder: Path, manifest: TokenLabelManifest, shard: int) -> NDArray[np.uint16]:
    path = shard_path(folder, shard)
    expected = (len(manifest.rows(shard)), 2, manifest.k, *manifest.grid)
    try:
        open_regular(path).close()
        records: NDArray[np.uint16] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = "it is missing" if not path.is_file() else error
        raise ValueError(
            f"{path} cannot be read ({reason}); delete it and run pale token-labels make again"
        ) from None
    if records.shape != expected or records.dtype != np.uint16:
        raise ValueError(
            f"{path} has {records.dtype} {records.shape}, expected uint16 {expected}; "
            "delete it and run pale token-labels make again"
        )
    return records


def _write_atomically(path: Path, content: bytes) -> None:
    _replace(path, lambda file: file.write(content))


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    # With the process id, because several processes may write parts of a store.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _shorten(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return shorten_list(value)[:60]
    return str(value)[:60]
