"""Checks before a run resumes: a usable checkpoint that holds the state of a run and fits its settings and dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.sources.identity import DataIdentity
from ..errors import RunError, WeightsError
from . import checkpoint, log
from .distributed import World

# Content of trainer.pt in every version.
STATE = {
    "step": int,
    "evaluated": int,
    "best": float,
    "figures": dict,
    "scaler": dict,
    "optimizer": dict,
}
WEIGHTS = ("weights.safetensors", "best.safetensors")


def job() -> str | None:
    """Return the id that the user gave the job (torchrun's --rdzv-id), or None."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def is_restart(run: Path, world: World) -> bool:
    """Return whether torchrun repeats a command that has written to this folder before; the same on all processes.

    torchrun counts restarts per machine: a machine that was replaced starts at 0, and machines that join or leave do
    not count. A log that the same job has written is therefore a restart too.
    """
    starts = [entry for entry in log.read(run / "log.jsonl") if entry["event"] == "start"]
    same_job = job() is not None and bool(starts) and starts[-1].get("job") == job()
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    restarted, same_job, started = world.any(
        counted, world.main and same_job, world.main and (run / "recipe.yaml").is_file()
    )
    return (restarted or same_job) and started


def check_progress_kept(run: Path) -> None:
    """Raise if a run without a usable checkpoint shows progress, which a new start would overwrite.

    A run that was killed before its first checkpoint can start again: it will log the same events.
    """
    events = log.read(run / "log.jsonl")
    shown = [
        f"checkpoints/{path.name}, damaged"
        for path in checkpoint.list_checkpoints(run / "checkpoints")
    ]
    saved = [entry for entry in events if entry["event"] == "saved"]
    shown += [
        f"log.jsonl, which lists a checkpoint of step {entry.get('step')}" for entry in saved[-1:]
    ]
    # Logs of versions without "saved" events do not show whether there was a checkpoint.
    if not any("data_sha256" in entry for entry in events if entry["event"] == "start"):
        shown += [name for name in WEIGHTS if (run / name).exists()]
        steps = [entry for entry in events if entry["event"] == "step"]
        shown += [f"log.jsonl up to step {entry.get('step')}" for entry in steps[-1:]]
    if shown:
        raise RunError(
            f"{run} shows progress ({'; '.join(shown)}) but has no usable checkpoint, and a new start at step 0 would "
            "overwrite it. Restore its folder checkpoints; or start a new run with its weights: pale train --config "
            f"{run}/recipe.yaml --output DIR --model.weights {run} --model.new_head false; or start again in another "
            f"folder: pale train --config {run}/recipe.yaml --output DIR"
        )


def check_state(path: Path, state: object) -> None:
    """Raise if a checkpoint does not hold the state of a run."""
    for name, kind in STATE.items():
        value = state.get(name) if isinstance(state, dict) else None
        if not isinstance(value, kind):
            raise WeightsError(
                f"{path}/trainer.pt is not the state of a run: {name} must be a {kind.__name__}, got "
                f"{type(value).__name__}; delete this checkpoint to resume from the one before it"
            )


def check_same_order(path: Path, saved: Mapping[str, object], current: Mapping[str, int]) -> None:
    """Raise if batch size or seed, which decide the samples of each step, are not those of a checkpoint."""
    run = path.parent.parent
    for name, value in current.items():
        if saved.get(name, value) != value:
            raise RunError(
                f"{name} decides which samples a step uses and cannot change when a run resumes, got {value}, {path} "
                f"has {saved[name]}; keep it, or start a new run with the weights of this one: pale train --config "
                f"{run}/recipe.yaml --output DIR --model.weights {run} --model.new_head false --{name} {value}"
            )


def check_length(path: Path, saved: Mapping[str, Any], steps: int) -> None:
    """Raise if a checkpoint has more steps than the run."""
    if saved["step"] > steps:
        raise RunError(
            f"{path} has done {saved['step']} steps, the recipe has {steps}; give more epochs"
        )


def check_same_data(
    path: Path, saved: Mapping[str, Any] | None, current: DataIdentity, allowed: bool
) -> str | None:
    """Raise if the training set is not that of a checkpoint; if that is allowed, return a warning.

    Args:
        path: the checkpoint.
        saved: identity of its training set; None in old versions, which did not save it.
        current: identity of the current training set.
        allowed: whether samples may differ; classes never may.
    """
    if saved is None:
        return None
    run = path.parent.parent
    if list(saved["classes"]) != list(current.classes):
        raise RunError(
            f"the classes of the training set are not those of {path}: "
            f"{_difference(saved['classes'], current.classes)}; labels would change their meaning. Restore the "
            "classes; or start a new run with the backbone of this one: pale train --config "
            f"{run}/recipe.yaml --output DIR --model.weights {run} --model.new_head true"
        )
    if saved["samples"] == current.samples and saved["digest"] == current.digest:
        return None
    difference = (
        f"{saved['samples']} samples before, {current.samples} now"
        if saved["samples"] != current.samples
        else f"still {current.samples} samples, but others or in another order"
    )
    changed = f"the training set is not that of {path} ({difference})"
    if allowed:
        return f"{changed}: the following steps use the current samples, in another order"
    raise RunError(
        f"{changed}: steps would use other samples, and the length of an epoch may differ. Restore the training set; "
        f"or resume with the current samples: pale train --resume {run} --allow-changed-data"
    )


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    for i, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return f"class {i} was {old!r} and is {new!r}"
    return f"there were {len(before)} and are {len(now)}"
