"""Shared by evidence.py and transfer.py: planned runs, one result file per run, and tables over seeds.

A result file has the hardware, versions, commit and command of its run, so that folders of several machines can be
merged. What has a result file is not repeated, and an interrupted run is resumed.

A rehearsal makes a few steps of each run, in a folder of its own. Its result files are marked; tables of results refuse
them.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pale.recipes.schema import Recipe
from pale.tasks import TASKS
from pale.train.checkpoint import newest
from pale.train.distributed import World, join
from pale.train.environment import environment
from pale.train.log import read
from pale.train.loop import train

# 95 % two-sided quantiles of Student's t distribution by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

REHEARSAL = "rehearsal"  # folder of runs and results of a rehearsal
REHEARSAL_BATCH = 4  # largest batch of a rehearsal on a CPU
NO_RESULTS = "**A rehearsal of a few steps: the figures are no results.**\n\n"


@dataclass(frozen=True)
class Run:
    """One training run of a part."""

    part: str
    label: str
    seed: int
    recipe: Recipe = field(repr=False)
    init: str | None = None  # weights, or the name of the run, whose backbone this one starts from
    about: Mapping[str, Any] = field(default_factory=dict)  # further values of the result file

    @property
    def name(self) -> str:
        """Folder of the run and stem of its result file."""
        return f"{self.part}-{self.label}-{self.seed}"


def execute(run: Run, args: argparse.Namespace) -> None:
    """Train one run, or resume it, and write its result file."""
    folder, result = args.out / "runs" / run.name, args.out / "results" / f"{run.name}.json"
    if result.exists():
        return
    recipe = run.recipe.override(
        {"data.workers": args.workers, "compile": args.compile, "cuda_graph": args.graph}
    )
    if run.init is not None:
        recipe = recipe.started_from(args.out / "runs" / run.init)  # an absolute path stays one
    if args.rehearse:
        recipe = shorten(recipe, args.rehearse)
    began, resume = time.monotonic(), newest(folder / "checkpoints") is not None
    with join() as world:
        outcome = train(recipe, folder, world, resume=resume, quiet=True)
        facts = describe_machine(world)
    if outcome.signal is not None:
        raise SystemExit(f"{run.name}: stopped after step {outcome.step}; run the command again")
    events = read(folder / "log.jsonl")
    found = [e for e in events if e["event"] == "eval"]
    metric = TASKS[recipe.kind].best
    evals = [(e["epoch"], e[metric]) for e in found]
    steps = [e for e in events if e["event"] == "step"]
    row = {
        "part": run.part,
        "label": run.label,
        "seed": run.seed,
        "metric": metric,
        "last": evals[-1][1],
        "best": max(value for _, value in evals),
        "figures": {k: v for k, v in found[-1].items() if k not in ("event", "step", "epoch")},
        "evaluations": evals,
        "loss": [(e["step"], e["loss"]) for e in steps[:: max(1, len(steps) // 40)]],
        "images_per_s": statistics.median(e["images_per_s"] for e in steps),
        "seconds_of_last_start": time.monotonic() - began,
        "resumed": resume,
        "side_by_side": args.shard[1],
        **mark(args),
        **facts,
        "recipe": recipe.plain(),
        **run.about,
    }
    write_result(result, row)
    print(f"{run.name}: last {row['last']:.2f}, best {row['best']:.2f}", flush=True)
    if outcome.late_signal is not None:
        raise SystemExit(f"{run.name}: ended; stopped before the next run, run the command again")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares data in a folder, so that shards can start at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".preparing").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


def choose_folder(args: argparse.Namespace) -> Path:
    """Return the folder of runs and results, which is another one in a rehearsal."""
    if args.rehearse:
        args.out /= REHEARSAL
    return args.out


def show_rehearsal(args: argparse.Namespace, tables: Callable[[list[dict[str, Any]]], str]) -> None:
    """Print the tables of a rehearsal, if it is one."""
    if args.rehearse:
        show(NO_RESULTS + tables(load([args.out / "results"], rehearsal=True)), None)


def shorten(recipe: Recipe, steps: int) -> Recipe:
    """Return a recipe for a rehearsal: a few steps, on a CPU of a small batch; everything else as planned."""
    changes: dict[str, Any] = {"steps": steps, "warmup_steps": min(1, steps - 1), "log_every": 1}
    changes["min_steps"] = None
    if not torch.cuda.is_available():
        changes["batch"] = min(recipe.batch, REHEARSAL_BATCH)
    return recipe.override(changes)


def mark(args: argparse.Namespace) -> dict[str, int]:
    """Return the values of a result file that only a rehearsal has."""
    return {"rehearsal": args.rehearse} if args.rehearse else {}


def describe_machine(world: World) -> dict[str, Any]:
    """Return hardware, versions, commit and command, for a result file."""
    return {
        "environment": environment(world) | {"host": platform.machine()},
        "command": shlex.join(["python", *sys.argv]),
    }


def write_result(path: Path, row: Mapping[str, Any]) -> None:
    """Write a result file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".part")
    partial_file.write_text(json.dumps(row, indent=1, default=str) + "\n")
    partial_file.replace(path)


def execute_all(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Train the chosen runs of a part; in a rehearsal one of each label."""
    if args.labels:
        runs = [run for run in runs if run.label in args.labels]
    if args.rehearse:
        runs = list({run.label: run for run in reversed(runs)}.values())[::-1]
    index, count = args.shard
    for run in runs[index::count]:
        length = run.recipe.steps or run.recipe.epochs
        unit = "steps" if run.recipe.steps else "epochs"
        print(f"{run.name}: {length} {unit}", flush=True)
        execute(run, args)


def load(folders: Sequence[Path], rehearsal: bool = False) -> list[dict[str, Any]]:
    """Read all result files, either of runs or of a rehearsal; of the same run the one that was written last counts."""
    rows: dict[tuple, tuple[float, dict[str, Any]]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        row, written = json.loads(path.read_text()), path.stat().st_mtime
        if ("rehearsal" in row) != rehearsal:
            what = "was not written by a rehearsal" if rehearsal else "is of a rehearsal, no result"
            raise SystemExit(f"{path} {what}; name another folder")
        key = row["part"], row["label"], row["seed"]
        if key not in rows or rows[key][0] < written:
            rows[key] = written, row
    return [row for _, row in rows.values()]


def interval(values: Sequence[float]) -> str:
    """Return mean and 95 % interval (Student's t) of the seeds."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {half_width(values):.2f}"


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean (Student's t)."""
    return STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that train a list of runs."""
    parser.add_argument("--labels", nargs="+", help="only these runs")
    parser.add_argument("--shard", type=_shard, default=(0, 1), metavar="i/n", help="each n-th run")
    text = f"make only so many steps of each run, in OUT/{REHEARSAL}: to find errors and measure speeds"
    parser.add_argument("--rehearse", type=int, metavar="STEPS", help=text)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--graph", default="auto", choices=["auto", "true", "false"])


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that print tables."""
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path)


def show(text: str, output: Path | None) -> None:
    """Print a text, and write it where asked."""
    print(text)
    if output:
        output.write_text(text + "\n")


def _shard(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    return index, count
