"""Checkpoints: folders that are written atomically and verified by checksums.

checkpoints/step_00000120/ holds model.safetensors, ema.safetensors (if there is a moving average), trainer.pt (the
rest of the state: tensors and numbers, read with weights_only) and manifest.json with size and SHA-256 of each. A model
in shards has a file shard-*.safetensors per process instead of the first two (`sharded.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..core.files import fresh_path
from ..core.plain_json import Json, parse_json
from ..errors import PaleError, WeightsError
from ..weights.read import load_weights, require_uncompressed
from ..weights.write import save_weights
from .distributed import World

T = TypeVar("T")
ALONE = World(torch.device("cpu"))
Tensors = Mapping[str, Tensor]
NAME = re.compile(r"step_(\d{8,})")
INCOMPLETE = re.compile(r"\.step_\d{8,}\.\d+(\.old)?")  # remains of an interrupted write
# Exceptions of PyTorch and safetensors if a disk is full.
WRITE_FAILURES = (OSError, RuntimeError, SafetensorError)
MAX_MANIFEST = 2**24  # bytes; with a thousand processes it has about 100 kB


class WriteError(PaleError, OSError):
    """A file of a run could not be written."""


def save(
    folder: Path,
    step: int,
    models: Mapping[str, Tensors],
    trainer: Mapping[str, object],
    about: Mapping[str, object],
) -> Path:
    """Write a checkpoint of models that are not in shards.

    Args:
        folder: folder of all checkpoints of the run.
        step: steps done.
        models: weights by name, "model" and "ema".
        trainer: rest of the state.
        about: header of the weights.
    """

    def write(path: Path) -> None:
        for name, tensors in models.items():
            save_weights(path / f"{name}.safetensors", tensors, about)
        torch.save(dict(trainer), path / "trainer.pt")

    return save_files(folder, step, write, ALONE)


def save_files(folder: Path, step: int, write: Callable[[Path], None], world: World) -> Path:
    """Write a checkpoint under a temporary name: files, then checksums; rename it when everything is on disk.

    Args:
        folder: folder of all checkpoints of the run.
        step: steps done.
        write: writes the files of a process into a folder.
        world: the processes, all of which must call this.
    """
    target = folder / f"step_{step:08d}"
    exists = world.main and is_good(target)
    temporary = world.broadcast(None if exists else folder / f".{target.name}.{os.getpid()}")
    if temporary is None:
        return target

    def prepare() -> None:
        if world.main:
            folder.mkdir(
                exist_ok=True
            )  # the run folder exists, unless its file system is unavailable
            _remove(temporary)
            temporary.mkdir()

    def sums() -> dict[str, Json]:
        files = {}
        for file in sorted(temporary.iterdir())[world.rank :: world.size]:
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sum(file)}
            _sync(file)
        return files

    def finish(manifest: dict[str, Json]) -> None:
        if not world.main:
            return
        (temporary / "manifest.json").write_text(json.dumps({"step": step, "files": manifest}))
        _sync(temporary / "manifest.json")
        _sync(temporary)
        _remove(target)  # damaged, if it exists
        temporary.rename(target)
        _sync(folder)

    try:
        _on_all_processes(world, prepare)
        _on_all_processes(world, lambda: write(temporary))
        parts = _on_all_processes(world, sums)
        _on_all_processes(
            world, lambda: finish({name: e for part in parts for name, e in part.items()})
        )
    except Exception as error:
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, WRITE_FAILURES):
            raise
        last = newest(folder)
        kept = f"{last} is the last good one" if last else "there is no other yet"
        raise WriteError(
            f"the checkpoint of step {step} could not be written to {folder} ({error}); {kept}; "
            f"free disk space and resume with: pale train --resume {folder.parent}"
        ) from error
    return target


def _on_all_processes(world: World, action: Callable[[], T]) -> list[T]:
    """Return the results of all processes; an error of one is raised on all, so that none waits forever."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    results = world.gather((result, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(results):
        if text is not None:
            raise OSError(f"on process {rank}: {text}")
    return [cast("T", result) for result, _ in results]


def newest(folder: Path, warn: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the newest undamaged checkpoint, or None."""
    for path in list_checkpoints(folder):
        if is_good(path):
            return path
        warn(f"{path} is damaged and ignored")
    return None


def load_models(path: Path) -> dict[str, dict[str, Tensor]]:
    """Load weights that are not in shards, by name: "model" and "ema"."""
    return {file.stem: load_weights(file).tensors for file in sorted(path.glob("*.safetensors"))}


def load_trainer(path: Path, device: torch.device) -> dict[str, Any]:
    """Load the rest of the state; only tensors, numbers, strings and containers of them are unpickled."""
    require_uncompressed(path / "trainer.pt")
    try:
        state = torch.load(path / "trainer.pt", map_location=device, weights_only=True)
    except (
        pickle.UnpicklingError
    ):  # PyTorch's message recommends loading it without this protection
        reason = "it is damaged or holds other objects, which may run code when they are loaded"
    except (RuntimeError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    else:
        return cast("dict[str, Any]", state)
    raise WeightsError(
        f"{path / 'trainer.pt'} cannot be read as tensors and numbers alone ({reason}); delete this checkpoint to "
        "resume from the one before it"
    )


def prune(folder: Path, keep: int, step: int) -> None:
    """Keep the newest `keep` good checkpoints up to `step`; delete all others and the remains of interrupted writes."""
    all_ = list_checkpoints(folder)
    good = [path for path in all_ if _step(path) <= step and is_good(path, sums=False)]
    for path in [p for p in all_ if p not in good[:keep]]:
        _remove(path)
    for path in folder.iterdir():
        if INCOMPLETE.fullmatch(path.name) and not path.name.endswith(f".{os.getpid()}"):
            _remove(path)


def is_good(path: Path, sums: bool = True) -> bool:
    """Return whether every file of a checkpoint is complete; with `sums`, also whether its checksum is right."""
    try:
        files = _manifest(path)
        loaded = {name for name in os.listdir(path) if name.endswith((".safetensors", ".pt"))}
        return loaded <= files.keys() and all(
            _size(path, name) == entry["bytes"]
            and (not sums or _sum(path / name) == entry["sha256"])
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _manifest(path: Path) -> dict[str, Json]:
    """Return size and checksum of the files of a checkpoint by name; raise if the manifest is not valid."""
    if _size(path, "manifest.json") > MAX_MANIFEST:
        raise ValueError(f"{path}/manifest.json has more than {MAX_MANIFEST} bytes")
    content = parse_json((path / "manifest.json").read_bytes())
    if content["step"] != _step(path):
        raise ValueError(f"{path}/manifest.json is of step {content['step']}")
    files = content["files"]
    if not isinstance(files, dict) or "trainer.pt" not in files:
        raise ValueError(f"{path}/manifest.json lists no trainer.pt")
    return files


def _size(path: Path, name: str) -> int:
    """Return the size of a file of a checkpoint, which must be a regular file in its folder."""
    if name in (".", "..") or Path(name).name != name or "\\" in name:
        raise ValueError(f"a checkpoint can hold only files of its folder, got {name!r}")
    status = (path / name).lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path / name} is not a regular file")
    return status.st_size


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file with `write` under a temporary name and rename it when it is on disk."""
    temporary = fresh_path(path.with_name(f".{path.name}.{os.getpid()}"))
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, WRITE_FAILURES):
            raise
        raise WriteError(f"{path} could not be written ({error})") from error


def write_text(path: Path, content: str) -> None:
    """Write a text file with `write_file`."""

    def write(temporary: Path) -> None:
        temporary.write_text(content, encoding="utf-8")

    write_file(path, write)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, damaged ones too, newest first; copies under other names do not count."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted((p for p in named if p.is_dir() and not p.is_symlink()), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and writes their entries itself
    # On Windows fsync needs a file that is open for writing.
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    # Rename it first, so that a killed process never leaves an incomplete checkpoint under its name.
    if not os.path.lexists(path):
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}.{os.getpid()}.old"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
