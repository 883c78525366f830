"""Inference and training of pale_tiny on a CPU beside timm's Swin-T.

    python benchmarks/cpu.py                            # adds a run to benchmarks/results/cpu.json, rewrites cpu.md
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/cpu.py    # the same on a CPU without AVX-512

Inference is in fp32 unless the mode says otherwise: eager, compiled, and by onnxruntime and OpenVINO (if installed)
from the file that `pale export --fixed` writes for either model. A training step is a forward and backward pass without
an optimizer, eager, in fp32 and under bf16 autocast. Both models take turns. Speed on a shared host
changes within minutes, so the script is run several times and the page has the median of the runs and each run. Rounds
during which other processes use the machine are discarded; a row with fewer than six others is left out. A run also
measures the speed of the two libraries that compute linear layers, and an eager pass by operator.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pale
from pale.bench.models import BATCH, MODELS, create_model
from pale.bench.settings import BenchSettings
from pale.bench.timing import (
    WARMUP_CALLS,
    Step,
    describe_run,
    quartiles,
    time_call,
)
from pale.exporting import Format
from pale.ops.linear import native, onednn

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/cpu.json"
TOKENS, CHANNELS, HIDDEN = 1568, 256, 1024  # the MLP of stage 3 at batch 8
OPERATORS = 8
RUNTIMES = "onnxruntime", "openvino"
MODES = (
    *("eager", "compiled", "onnxruntime", "onnxruntime int8", "openvino", "openvino bf16"),
    *("training", "training bf16"),
)
BLOCK_SECONDS = 0.5
MAX_OTHERS = 0.1  # cores that other processes may use during a round that counts
MIN_KEPT = 6  # rounds of a row


def busy_seconds() -> float:
    """Return the CPU time of all processes since the machine started."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the CPU time of this process and of those that run exported models."""
    total = time.process_time()
    for child in active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def time_undisturbed(
    steps: Mapping[str, Step], settings: BenchSettings
) -> tuple[dict[str, list[float]], int]:
    """Return times in ms by name, and how many rounds were discarded because other processes used the machine.

    The load is measured for about half a second at a time, because the system counts hundredths of a second.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    discarded, end = 0, time.monotonic() + settings.seconds
    while len(times[MODELS[0]]) < settings.rounds and time.monotonic() < end:
        block: dict[str, list[float]] = {name: [] for name in steps}
        busy, own, began = busy_seconds(), own_seconds(), time.monotonic()
        while time.monotonic() < began + BLOCK_SECONDS:
            for name, step in steps.items():
                block[name].append(time_call(step, "cpu"))
        others = busy_seconds() - busy - (own_seconds() - own)
        if others > MAX_OTHERS * (time.monotonic() - began):
            discarded += len(block[MODELS[0]])
            continue
        for name, measured in block.items():
            times[name] += measured
    return times, discarded


def installed_runtimes() -> list[str]:
    """Return the runtimes of ONNX files that are installed."""
    return [name for name in RUNTIMES if importlib.util.find_spec(name) is not None]


def describe_processor() -> str:
    """Return name, family and model; the name alone does not identify a processor behind a hypervisor."""
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"


def linear_speeds() -> dict[str, float]:
    """Return the speed of a linear layer in FLOP/s: PyTorch's own, and oneDNN with the same weights."""
    x, weight, bias = torch.randn(TOKENS, CHANNELS), torch.randn(HIDDEN, CHANNELS), None
    ways: dict[str, Callable[[], object]] = {
        "pytorch": lambda: native(x, weight, bias),
        "onednn": lambda: onednn(x, weight, bias),
    }
    with torch.inference_mode():
        times = {name: [time_call(way, "cpu") for _ in range(30)] for name, way in ways.items()}
    work = 2 * TOKENS * CHANNELS * HIDDEN
    return {name: work / (1e-3 * min(ms)) for name, ms in times.items()}


def attention_speed() -> float:
    """Return the speed of PyTorch's attention in the groups of stage 3 at batch 8, in FLOP/s."""
    q, k, v = torch.randn(3, 16, 4, 98, 32)
    with torch.inference_mode():
        call = [
            time_call(lambda: F.scaled_dot_product_attention(q, k, v), "cpu") for _ in range(30)
        ]
    return 4 * 16 * 4 * 98**2 * 32 / (1e-3 * min(call))


def operators(batch: int, size: tuple[int, ...]) -> dict[str, float]:
    """Return the ms of the slowest operators in the fastest of some eager passes of pale_tiny."""
    model, x = create_model(MODELS[0], size).eval(), torch.randn(batch, 3, *size)
    passes = []
    with torch.inference_mode():
        model(x)
        for _ in range(6):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                model(x)
            events = [e for e in profiler.key_averages() if e.device_type == DeviceType.CPU]
            passes.append({event.key: event.self_cpu_time_total / 1e3 for event in events})
    found = min(passes, key=lambda times: sum(times.values()))
    slowest = sorted(found, key=lambda name: -found[name])[:OPERATORS]
    return {name: round(found[name], 2) for name in slowest} | {
        "all": round(sum(found.values()), 2)
    }


def compare(mode: str, batch: int, settings: BenchSettings) -> list[dict[str, Any]]:
    """Time both models in turns."""
    torch.compiler.reset()
    x = torch.randn(batch, 3, *settings.size)
    steps: dict[str, Step] = {}
    for name in MODELS:
        steps[name] = prepare(mode, name, x)
        for _ in range(WARMUP_CALLS):
            steps[name]()
    times, discarded = time_undisturbed(steps, settings)
    for child in active_children():
        child.kill()
    kept = len(times[MODELS[0]])
    print(f"{mode}, batch {batch}: {kept} rounds, {discarded} discarded", flush=True)
    if kept < MIN_KEPT:
        return []
    ours, rows = statistics.median(times[MODELS[0]]), []
    for name, measured in times.items():
        ms = statistics.median(measured)
        row = {"mode": mode, "batch": batch, "model": name, "ms": ms, "ratio": ms / ours}
        rows.append(
            row | {"quartiles": quartiles(measured), "rounds": kept, "discarded": discarded}
        )
        print(f"{name} {ms:.1f} ms, {ms / ours:.2f}", flush=True)
    return rows


def prepare(mode: str, name: str, x: torch.Tensor) -> Step:
    """Return a function that runs a model in a mode."""
    way, _, precision = mode.partition(" ")
    if way in RUNTIMES:
        return load_exported(name, x, way, precision)
    model = create_model(name, tuple(x.shape[2:]))
    if way == "training":
        return partial(train, model.train(), x, precision == "bf16")
    call = torch.compile(model, dynamic=False) if way == "compiled" else model
    return torch.inference_mode()(partial(call.eval(), x))


def load_exported(name: str, x: torch.Tensor, runtime: str, precision: str) -> Step:
    """Return a function that runs a model from an ONNX file of the size of `x`, in a process of its own.

    The process is stopped between calls: waiting threads of onnxruntime spin, which would slow down the other model.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    arguments = there, name, tuple(x[:, 0].shape), runtime, precision, torch.get_num_threads()
    process = context.Process(target=run_exported, args=arguments, daemon=True)
    process.start()
    pid = process.pid
    assert pid is not None

    def step() -> object:
        os.kill(pid, signal.SIGCONT)
        here.send(None)
        shape = here.recv()
        os.kill(pid, signal.SIGSTOP)
        return shape

    return step


def run_exported(
    pipe: Connection,
    name: str,
    size: tuple[int, int, int],
    runtime: str,
    precision: str,
    threads: int,
) -> None:
    """Run a model from an ONNX file for (batch, height, width) once for each message, which the shape answers."""
    torch.set_num_threads(threads)
    images = torch.randn(size[0], 3, *size[1:]).numpy()
    call: Callable[[], Any]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        kind: Format = "int8" if precision == "int8" else "onnx"
        pale.export(create_model(name, size[1:]), path, kind, fixed=True, sizes=[size])
        if runtime == "openvino":
            import openvino

            options = {
                "INFERENCE_PRECISION_HINT": precision or "f32",
                "INFERENCE_NUM_THREADS": threads,
            }
            call = partial(openvino.Core().compile_model(path, "CPU", options), images)
        else:
            import onnxruntime

            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = threads
            providers = ["CPUExecutionProvider"]
            session = onnxruntime.InferenceSession(path, settings, providers=providers)
            call = partial(session.run, None, {"images": images})
    while True:
        pipe.recv()
        pipe.send(call()[0].shape)


def train(model: nn.Module, x: torch.Tensor, low: bool) -> None:
    """Run a forward and a backward pass; `low`: under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(x).float().square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return one run."""
    settings = BenchSettings(tuple(args.size), "cpu", "fp32", args.rounds, args.seconds).resolved()
    return {
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "about": describe_run(settings) | {"processor": describe_processor()},
        "isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "runtimes": {name: version(name) for name in installed_runtimes()},
        "rows": [row for m in args.mode for b in args.batch for row in compare(m, b, settings)],
        "linear": linear_speeds(),
        "attention": attention_speed(),
        "operators": {batch: operators(batch, settings.size) for batch in args.batch},
    }


def page(runs: list[dict[str, Any]]) -> str:
    """Return the page for all runs."""
    lines = ["# Pale-T and Swin-T on a CPU", ""]
    lines += [
        "Random data, both models in turn, medians and quartiles. Inference is in fp32 unless the mode says otherwise.",
        "onnxruntime and OpenVINO run the files of `pale export --fixed`, in processes that are stopped between turns.",
    ]
    if any(row["mode"].startswith("training") for run in runs for row in run["rows"]):
        lines += ["Training is an eager forward and backward pass, in fp32 or under bf16 autocast."]
    lines += ["Written by `python benchmarks/cpu.py`, one execution for each run of a table.", ""]
    for key in dict.fromkeys(map(machine, runs)):
        lines += section(key, [run for run in runs if machine(run) == key])
    return "\n".join(lines)


def machine(run: dict[str, Any]) -> str:
    """Return hardware and versions of a run."""
    about = run["about"]
    packages = about["packages"]
    runtimes = "".join(f", {name} {found}" for name, found in run["runtimes"].items())
    isa = "" if run["isa"] == "all" else f", oneDNN limited to {run['isa']}"
    return (
        f"{about['processor']}, {about['threads']} threads{isa}, "
        f"{'x'.join(map(str, about['setting']['size']))}, torch {packages['torch']}, timm {packages['timm']}{runtimes}"
    )


def section(title: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return the tables of the runs on one machine."""
    lines = [f"## {title}", ""]
    lines += ["| mode | batch | model | images/s | speed of pale_tiny relative to it |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    kept = [(run, row) for run in runs for row in run["rows"]]
    for key in dict.fromkeys((row["mode"], row["batch"], row["model"]) for _, row in kept):
        found = [row for _, row in kept if (row["mode"], row["batch"], row["model"]) == key]
        ms, ratio = (statistics.median(row[name] for row in found) for name in ("ms", "ratio"))
        each = ", ".join(f"{row['ratio']:.2f}" for row in found)
        cell = "1" if key[2] == MODELS[0] else f"{ratio:.2f} (runs: {each})"
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {1e3 * key[1] / ms:.1f} | {cell} |")
    lines += [
        "",
        f"Each run. Rounds during which other processes used more than {MAX_OTHERS} cores are discarded:",
        "",
    ]
    lines += ["| run | commit | mode | batch | model | ms (quartiles) | rounds | discarded |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for run, row in kept:
        low, high = row["quartiles"]
        lines.append(
            f"| {run['time']} | {str(run['about']['commit'])[:8]} | {row['mode']} | {row['batch']} | {row['model']} "
            f"| {row['ms']:.1f} ({low:.1f} to {high:.1f}) | {row['rounds']} | {row['discarded']} |"
        )
    last = runs[-1]
    linear = {name: f"{speed / 1e9:.0f}" for name, speed in last["linear"].items()}
    lines += [
        "",
        f"GFLOP/s of {TOKENS} tokens, {CHANNELS} to {HIDDEN} channels (last run, best of 30 calls): ",
    ]
    lines[-1] += f"{linear['pytorch']} by `F.linear`, {linear['onednn']} by oneDNN; "
    lines[-1] += f"{last['attention'] / 1e9:.0f} in PyTorch's attention (stage 3, batch 8)."
    for batch, found in last["operators"].items():
        total = found["all"]
        shares = ", ".join(
            f"`{name.split('::')[-1]}` {ms:.1f} ({ms / total:.0%})"
            for name, ms in found.items()
            if name != "all"
        )
        lines += ["", f"Eager pale_tiny, batch {batch}, ms by operator of {total:.1f}: {shares}."]
    return [*lines, ""]


def main() -> None:
    """Measure a run and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    missing = set(RUNTIMES).difference(installed_runtimes())
    default = [mode for mode in MODES if mode.partition(" ")[0] not in missing]
    parser.add_argument("--mode", nargs="+", default=default, choices=MODES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, BATCH["cpu"]])
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=30, help="time limit of a row")
    parser.add_argument(
        "-o", "--output", type=Path, default=RESULT, help="JSON; the page lies beside it"
    )
    args = parser.parse_args()
    runs = json.loads(args.output.read_text()) if args.output.exists() else []
    run = measure(args)
    if not run["rows"]:
        raise SystemExit(
            "no row had enough undisturbed rounds; stop other processes, or give more --seconds"
        )
    runs = json.loads(json.dumps([*runs, run]))  # keys as in the file
    args.output.write_text(json.dumps(runs, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(page(runs))


if __name__ == "__main__":
    main()
