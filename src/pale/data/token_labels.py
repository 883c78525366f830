"""Dense labels in files: what a teacher sees at each place of each whole picture.

A store is a folder. `manifest.json` says of whom and of what the labels are, `names.txt` which pictures they
are for, one a line, and `labels-000000.npy` ... hold a record of fixed size for each: uint16
(pictures, 2, k, h, w), first the k greatest probabilities at each place as the bits of half precision, then
their classes. Files appear whole or not at all, so a run that was killed goes on with the next shard.

Probabilities, where the reference keeps logits and takes all others for 0: a teacher's logits have no zero.
What the k leave of 1 is shared out over all classes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .images import Files, Part, Source
from .labelled import SceneImages
from .shards import Shards

FORMAT = 1
MOST_CLASSES = 65536


@dataclass(frozen=True)
class Manifest:
    """What a store says about itself.

    Attributes:
        teacher: name of the model, or the run.
        weights: SHA-256 of the teacher's weights.
        size: side of the square to which the teacher saw each whole picture resized.
        grid: rows and columns of the maps.
        k: classes kept at each place.
        classes: names of the classes.
        pictures: how many.
        names: SHA-256 of names.txt.
        shard: pictures in each shard but the last.
        agreement: share of pictures, per cent, whose own class has the greatest sum over the map; None until
            the store is complete.
        format: of the files.
    """

    teacher: str
    weights: str
    size: int
    grid: tuple[int, int]
    k: int
    classes: tuple[str, ...]
    pictures: int
    names: str
    shard: int
    agreement: float | None = None
    format: int = FORMAT

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.pictures // self.shard)

    def rows(self, shard: int) -> range:
        """The pictures of a shard."""
        return range(shard * self.shard, min((shard + 1) * self.shard, self.pictures))


def names_of(source: Source) -> list[str]:
    """What the pictures of a source are called, wherever the data set lies."""
    if isinstance(source, Part):
        names = names_of(source.source)
        return [names[i] for i in source.indices]
    if isinstance(source, Files):
        return [Path(path).as_posix() for path in source.paths]
    if isinstance(source, Shards):
        index = source.index
        return [
            f"{index.tars[shard]}:{key.decode()}"
            for shard, key in zip(index.shard.tolist(), index.key.tolist(), strict=True)
        ]
    if isinstance(source, SceneImages):
        scenes = source.scenes
        return [f"scene {i} of {scenes.size} px, seed {scenes.seed}" for i in range(len(scenes))]
    raise TypeError(f"pictures of a {type(source).__name__} have no lasting names")


def pack(probabilities: Tensor, k: int) -> NDArray[np.uint16]:
    """(b, classes, h, w) -> records (b, 2, k, h, w)."""
    top = probabilities.float().topk(k, dim=1)
    scores = top.values.half().cpu().numpy().view(np.uint16)
    return np.stack([scores, top.indices.cpu().numpy().astype(np.uint16)], axis=1)


def unpack(records: NDArray[np.uint16]) -> tuple[Tensor, Tensor]:
    """Records (..., 2, k, h, w) -> probabilities and classes, (..., k, h, w)."""
    scores = np.array(records[..., 0, :, :, :]).view(np.float16)
    classes = records[..., 1, :, :, :].astype(np.int32)
    return torch.from_numpy(scores), torch.from_numpy(classes)


class Writer:
    """Writes a store, or goes on with one that was begun."""

    def __init__(self, folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
        self.folder, self.manifest = folder, manifest
        if len(manifest.classes) > MOST_CLASSES:
            raise ValueError(
                f"token labels take at most {MOST_CLASSES} classes, got {len(manifest.classes)}"
            )
        path = folder / "manifest.json"
        if path.is_file():
            old = asdict(read_manifest(folder))
            new = asdict(manifest) | {"agreement": old["agreement"]}
            if other := [name for name in new if new[name] != old[name]]:
                said = ", ".join(f"{n} ({_short(old[n])}, now {_short(new[n])})" for n in other)
                raise ValueError(
                    f"{folder} was begun with another {said}; go on with the same, or choose another folder"
                )
        elif folder.is_dir() and any(
            f.name != "names.txt" and f.suffix != ".part" for f in folder.iterdir()
        ):  # these two are what an early kill leaves
            raise ValueError(f"{folder} holds other files; choose another folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / "names.txt", "".join(f"{name}\n" for name in names).encode())
            self._write_manifest(manifest)

    def missing(self) -> list[int]:
        """Shards that are still to be written."""
        return [n for n in range(self.manifest.shards) if not shard_path(self.folder, n).is_file()]

    def write(self, shard: int, records: NDArray[np.uint16]) -> None:
        """Write a shard, whole or not at all."""
        expected = (len(self.manifest.rows(shard)), 2, self.manifest.k, *self.manifest.grid)
        assert records.shape == expected, (records.shape, expected)
        path = shard_path(self.folder, shard)
        _replace(path, lambda file: np.save(file, records, allow_pickle=False))

    def finish(self, labels: Sequence[int]) -> Manifest:
        """Look all over and say in the manifest that it is complete."""
        right = 0
        for shard in range(self.manifest.shards):
            rows = self.manifest.rows(shard)
            scores, classes = unpack(_load(self.folder, self.manifest, shard)[:])
            total = torch.zeros(len(rows), len(self.manifest.classes))
            total.scatter_add_(1, classes.flatten(1).long(), scores.flatten(1).float())
            right += int((total.argmax(1) == torch.tensor(labels[rows.start : rows.stop])).sum())
        agreement = round(100 * right / self.manifest.pictures, 2)
        done = Manifest(**asdict(self.manifest) | {"agreement": agreement})
        self._write_manifest(done)
        for left in self.folder.glob(".*.part"):  # of a kill
            left.unlink(missing_ok=True)
        return done

    def _write_manifest(self, manifest: Manifest) -> None:
        content = json.dumps(asdict(manifest), indent=1)
        _write(self.folder / "manifest.json", (content + "\n").encode())


class TokenLabelStore:
    """The labels of a source's pictures, by number.

    Args:
        folder: the store.
        source: the pictures; all must be in the store, which may hold more (a hold-out leaves some out).
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        manifest = self.manifest
        if manifest.agreement is None:
            raise ValueError(
                f"{folder} is not complete; run the same pale token-labels make again to go on with it"
            )
        if list(source.classes) != list(manifest.classes):
            raise ValueError(
                f"{folder} holds labels of {len(manifest.classes)} classes ({_few(manifest.classes)}), the data "
                f"has {len(source.classes)} ({_few(source.classes)}); make labels of this data"
            )
        content = (folder / "names.txt").read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest.names:
            raise ValueError(f"{folder}/names.txt was changed; make the labels again")
        stored = content.decode().splitlines()
        number = {name: i for i, name in enumerate(stored)}
        names = names_of(source)
        if absent := [name for name in names if name not in number]:
            raise ValueError(
                f"{folder} has no labels for {len(absent)} of the {len(names)} pictures ({_few(absent)}); it "
                f"holds {len(stored)} ({_few(stored)}): make labels of this data"
            )
        self.rows = np.array([number[name] for name in names])
        for shard in range(manifest.shards):
            _load(folder, manifest, shard)
        self._files: dict[int, NDArray[np.uint16]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """Probabilities and classes for picture number `index`, (k, h, w) each."""
        shard, row = divmod(int(self.rows[index]), self.manifest.shard)
        if shard not in self._files:
            self._files[shard] = _load(self.folder, self.manifest, shard)
        return unpack(self._files[shard][row])


def fingerprint(names: Sequence[str]) -> str:
    """SHA-256 of names.txt."""
    if bad := [name for name in names if len(name.splitlines()) != 1]:
        raise ValueError(f"a picture's name must be one line, got {bad[0]!r}; rename it")
    return hashlib.sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """What a store says about itself."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(
            f"there are no token labels in {folder}; make them: "
            f"pale token-labels make --model TEACHER --data.root DIR --output {folder}"
        )
    try:
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, expected {FORMAT}")
        lists = {"grid": tuple(values["grid"]), "classes": tuple(values["classes"])}
        return Manifest(**values | lists)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); make the labels again") from None


def shard_path(folder: Path, shard: int) -> Path:
    """The file of a shard."""
    return folder / f"labels-{shard:06d}.npy"


def _load(folder: Path, manifest: Manifest, shard: int) -> NDArray[np.uint16]:
    path = shard_path(folder, shard)
    expected = (len(manifest.rows(shard)), 2, manifest.k, *manifest.grid)
    try:
        records: NDArray[np.uint16] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = "it is missing" if not path.is_file() else error
        raise ValueError(
            f"{path} cannot be read ({reason}); delete it and run pale token-labels make again"
        ) from None
    if records.shape != expected or records.dtype != np.uint16:
        raise ValueError(
            f"{path} holds {records.dtype} {records.shape}, expected uint16 {expected}; "
            "delete it and run pale token-labels make again"
        )
    return records


def _write(path: Path, content: bytes) -> None:
    _replace(path, lambda file: file.write(content))


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # parts may be made side by side
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _few(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:3])) + (", ..." if len(words) > 3 else "")


def _short(value: Any) -> str:
    text = (
        _few(value) if isinstance(value, tuple) and value and isinstance(value[0], str) else value
    )
    return str(text)[:60]
