"""Time several models in turn in one process, for segmentation_speed.py and detection_speed.py.

Modes, the same for every model:

- `eager`: as a user runs it without further settings.
- `compiled`: through `torch.compile`.
- `graphs`: recorded and replayed as CUDA graphs, without `torch.compile`.
- `compiled-graphs`: through `torch.compile`, then recorded.

In inference, `graphs` and `compiled-graphs` run our backbone as `pale.optimize` prepares it: its kernels are written by
hand, and `torch.compile` gets what is around it. Peers get it whole. The last rows of the table compare each model in
its fastest mode. On a CPU nothing is recorded.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import print_line
from torch import Tensor, nn

from pale.bench import timing
from pale.bench.settings import BenchSettings
from pale.model.pale_transformer import PaleTransformer

MODES = ("eager", "compiled", "graphs", "compiled-graphs")
MEASURED = ("eager", "graphs", "compiled-graphs")  # by default
Step = Callable[[], None]


def is_compiled(mode: str) -> bool:
    """Whether a mode goes through `torch.compile`."""
    return mode.startswith("compiled")


def is_recorded(mode: str, device: str) -> bool:
    """Whether a mode is recorded as CUDA graphs."""
    return mode.endswith("graphs") and device == "cuda"


class Compiled(nn.Module):
    """Wraps a module with `torch.compile`, for one input size.

    A module of its own, since `torch.cuda.make_graphed_callables` replaces the `forward` of what it records.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = torch.compile(module, dynamic=False)

    def forward(self, x: Tensor) -> Any:
        """Return the output of the module."""
        return self.call(x)


def compiled_around(model: nn.Module) -> nn.Module:
    """Compile everything but our backbones, whose kernels `pale.optimize` has chosen."""
    for module in model.modules():
        if isinstance(module, PaleTransformer):
            module.forward_intermediates = torch.compiler.disable(module.forward_intermediates)
    return Compiled(model)


def speed_arguments(doc: str | None, batch: int, size: tuple[int, int]) -> argparse.ArgumentParser:
    """Return a parser with the options of the speed scripts."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=batch, help="of a training step")
    parser.add_argument("--size", type=int, nargs=2, default=size, help="height and width")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", nargs="+", default=list(MEASURED), choices=MODES)
    parser.add_argument(
        "--compile-peers-only", action="store_true", help="leave ours out of the compiled modes"
    )
    parser.add_argument("--json", type=Path, help="results; the table goes beside it, as .md")
    return parser


def compare_speeds(
    args: argparse.Namespace,
    labels: Sequence[str],
    make: Callable[[str, str, str], Step],
) -> list[dict]:
    """Time `make(label, task, mode)` of all labels in turn, training and inference, every mode.

    A model that fails in a mode gets a row with its error; the others go on.
    """
    setting = BenchSettings(tuple(args.size), args.device, "bf16", args.rounds)
    cuda, rows = args.device == "cuda", []
    if cuda:
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in the training loop
    for mode in args.mode:
        for task in ("training", "inference"):
            chosen = labels[1:] if args.compile_peers_only and is_compiled(mode) else labels
            rows += _measured(args, chosen, make, setting, task, mode)
            if args.json:
                _write(args.json, timing.describe_run(setting), rows)
            torch.compiler.reset()  # otherwise models of later modes count as recompilations
            if cuda:
                gc.collect()
                torch.cuda.empty_cache()
    print_line(table(rows))
    return rows


def _measured(
    args: argparse.Namespace,
    labels: Sequence[str],
    make: Callable[[str, str, str], Step],
    setting: BenchSettings,
    task: str,
    mode: str,
) -> list[dict]:
    steps, peaks, errors = {}, {}, {}
    for label in labels:
        try:
            steps[label], peaks[label] = _warm(make, label, task, mode, args.device == "cuda")
        except Exception as error:  # a compiler may fail in any way; the row shows the error
            errors[label] = timing.error_line(error)
    times = timing.time_in_turns(steps, setting)
    count = args.batch if task == "training" else 1
    rows = []
    for label in labels:
        row = {"task": task, "mode": mode, "model": label, "batch": count}
        if label in errors:
            rows.append(row | {"error": errors[label]})
            print_line(f"{mode:16}{task:10}{label:9} failed: {errors[label]}")
            continue
        ms = statistics.median(times[label])
        row |= {"ms": ms, "quartiles": timing.quartiles(times[label])}
        row |= {"images_per_s": 1e3 * count / ms, "peak_mb": peaks[label]}
        rows.append(row)
        print_line(f"{mode:16}{task:10}{label:9} batch {count}: {ms:.2f} ms")
    return rows


def _warm(
    make: Callable[[str, str, str], Step], label: str, task: str, mode: str, cuda: bool
) -> tuple[Step, float | None]:
    """Return a step after running it, and its memory in MB (CUDA only)."""
    if cuda:
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    step = make(label, task, mode)
    for _ in range(5 if cuda else 1):
        step()
    if not cuda:
        return step, None
    torch.cuda.synchronize()
    return step, (torch.cuda.max_memory_allocated() - held) / 2**20


def best(rows: list[dict], task: str, model: str) -> dict | None:
    """Return the fastest row of a model over all modes."""
    mine = [r for r in rows if r["task"] == task and r["model"] == model and "ms" in r]
    return min(mine, key=lambda row: row["ms"], default=None)


def table(rows: list[dict]) -> str:
    """Return a table of milliseconds by task and mode, a column per model, with the ratio to the first, ours."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [f"| | {' | '.join(models)} |", f"| --- |{' --- |' * len(models)}"]
    for task, mode in dict.fromkeys((row["task"], row["mode"]) for row in rows):
        here = {r["model"]: r for r in rows if (r["task"], r["mode"]) == (task, mode)}
        lines.append(_line(f"{task}, {mode}", here, models))
    for task in dict.fromkeys(row["task"] for row in rows):
        fastest = {m: row for m in models if (row := best(rows, task, m)) is not None}
        lines.append(_line(f"{task}, each in its fastest mode", fastest, models, with_mode=True))
    return "\n".join(lines) + "\n"


def _line(name: str, here: dict[str, dict], models: list[str], with_mode: bool = False) -> str:
    ours, cells = here.get(models[0], {}).get("ms"), []
    for model in models:
        ms = here.get(model, {}).get("ms")
        if ms is None:
            cells.append("failed" if model in here else "-")
            continue
        notes = [f"{ms / ours:.2f}"] if ours and model != models[0] else []
        notes += [here[model]["mode"]] if with_mode else []
        cells.append(f"{ms:.2f} ms" + (f" ({', '.join(notes)})" if notes else ""))
    return f"| {name} | {' | '.join(cells)} |"


def _write(path: Path, about: dict, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "about": about, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(rows))
