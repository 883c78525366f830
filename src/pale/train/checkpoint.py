"""Checkpoints: folders that appear whole or not at all, checked by their sums, pruned, found newest first.

checkpoints/step_00000120/ holds model.safetensors, ema.safetensors (where there is one), trainer.pt (what
else is needed to go on: tensors and numbers, read with weights_only) and manifest.json with size and
SHA-256 of each. A model in shards has a file shard-*.safetensors for each process in place of the first two
(`sharded.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import weights as weight_files
from .distributed import World

ALONE = World(torch.device("cpu"))
Tensors = Mapping[str, Tensor]


def save(
    folder: Path,
    step: int,
    models: Mapping[str, Tensors],
    trainer: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Path:
    """Write a checkpoint of whole models.

    Args:
        folder: of all checkpoints of the run.
        step: how many steps are done.
        models: weights by name, "model" and "ema".
        trainer: whatever else is needed to go on.
        about: goes into the header of the weights.
    """

    def write(path: Path) -> None:
        for name, tensors in models.items():
            weight_files.save(path / f"{name}.safetensors", tensors, about)
        torch.save(dict(trainer), path / "trainer.pt")

    return save_files(folder, step, write, ALONE)


def save_files(folder: Path, step: int, write: Callable[[Path], None], world: World) -> Path:
    """Write a checkpoint: files, sums, everything on disk, and only then its name.

    Args:
        folder: of all checkpoints of the run.
        step: how many steps are done.
        write: puts its files into a folder, on each process.
        world: the processes that write, all of which call this.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f".{target.name}.{os.getpid()}"
    temporary = world.share(None if world.main and is_good(target) else temporary)
    if temporary is None:
        return target

    def prepare() -> None:
        if world.main:
            _remove(temporary)
            temporary.mkdir(parents=True)

    def sums() -> dict[str, Any]:
        files = {}
        for file in sorted(temporary.iterdir())[world.rank :: world.size]:
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sum(file)}
            _sync(file)
        return files

    def finish(manifest: dict[str, Any]) -> None:
        if not world.main:
            return
        (temporary / "manifest.json").write_text(json.dumps({"step": step, "files": manifest}))
        _sync(temporary / "manifest.json")
        _sync(temporary)
        _remove(target)  # one that is not good
        temporary.rename(target)
        _sync(folder)

    try:
        _together(world, prepare)
        _together(world, lambda: write(temporary))
        parts = _together(world, sums)
        _together(world, lambda: finish({name: e for part in parts for name, e in part.items()}))
    except Exception as error:
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
        last = newest(folder)
        kept = f"{last} is the last good one" if last else "there is none yet"
        raise OSError(
            f"the checkpoint of step {step} could not be written to {folder} ({error}); {kept}; "
            f"make room and go on with: pale train --resume {folder.parent}"
        ) from error
    return target


def _together(world: World, action: Callable[[], Any]) -> list[Any]:
    """What each process gives; an error on one is an error on all, so that none waits for ever."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    told = world.gather((result, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, words) in enumerate(told):
        if words is not None:
            raise OSError(f"on process {rank}: {words}")
    return [result for result, _ in told]


def newest(folder: Path, warn: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest checkpoint whose files are all whole."""
    for path in _all(folder):
        if is_good(path):
            return path
        warn(f"{path} is damaged and passed over")
    return None


def load_models(path: Path) -> dict[str, dict[str, Tensor]]:
    """Whole weights by name, "model" and "ema"."""
    return {
        file.stem: weight_files.load(file).tensors for file in sorted(path.glob("*.safetensors"))
    }


def load_trainer(path: Path, device: torch.device) -> dict[str, Any]:
    """The rest."""
    return torch.load(path / "trainer.pt", map_location=device, weights_only=True)


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all but the newest `keep` good ones up to `step`, and what broken-off writes have left."""
    here = [path for path in _all(folder) if int(path.name.removeprefix("step_")) <= step]
    good = [path for path in here if is_good(path, sums=False)]
    for path in [p for p in _all(folder) if p not in good[:keep]]:
        _remove(path)
    for path in folder.glob(".step_*"):
        if not path.name.endswith(f".{os.getpid()}"):
            _remove(path)


def is_good(path: Path, sums: bool = True) -> bool:
    """Whether every file is there in full; `sums`: and unchanged."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        return all(
            (path / name).stat().st_size == entry["bytes"]
            and (not sums or _sum(path / name) == entry["sha256"])
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Make a file with `write` under another name, and give it its own when it is on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error})") from error


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*"), reverse=True)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    # Out of the way under a name that is no checkpoint's, then away: a kill leaves nothing half.
    if not path.exists():
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}.{os.getpid()}.old"))
    shutil.rmtree(path)
