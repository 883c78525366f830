"""Timing and hardware limits for all benchmarks.

All compared versions run in turns in one process, so that other load on the machine slows them equally. A result is
the median over the rounds; on a GPU, CUDA events measure the time. The limits are the speed of a large matrix
product and of a large copy, measured in the same process.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from ..tools.doctor import examine
from ..train.environment import commit
from .settings import MIN_ROUNDS, BenchSettings

Step = Callable[[], object]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATRIX_SIDE = {"cuda": 8192, "cpu": 2048}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
WARMUP_CALLS = 3
MAX_SPREAD = 0.2  # interquartile range over median, above which a warning is printed


def time_call(step: Step, device: str) -> float:
    """Return the time of one call in ms."""
    if device != "cuda":
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def time_in_turns(steps: Mapping[str, Step], settings: BenchSettings) -> dict[str, list[float]]:
    """Return times in ms by name; each round runs all steps, and at least two rounds run."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.monotonic() + settings.seconds * len(steps)
    for n in range(settings.rounds):
        if n >= MIN_ROUNDS and time.monotonic() > end:
            break
        for name, step in steps.items():
            times[name].append(time_call(step, settings.device))
    return times


def record_cuda_graph(step: Step) -> Step:
    """Return the step as one CUDA graph, without gaps between its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    """Replay the graph; `step` is an argument because only it keeps the weights and images of the graph alive."""
    graph.replay()


def measure_ceilings(settings: BenchSettings) -> dict[str, float]:
    """Return the speed of a square matrix product (FLOP/s) and of a copy (bytes read and written per second)."""
    device, n = settings.device, MATRIX_SIDE[settings.device]
    a, b = (torch.randn(n, n, device=device).to(DTYPES[settings.dtype]) for _ in range(2))
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Step] = {"matrix": lambda: a @ b, "copy": lambda: target.copy_(source)}
    for step in steps.values():
        step()
    work = {"matrix": 2 * n**3, "copy": 2 * source.nbytes}
    times = time_in_turns(steps, replace(settings, rounds=min(10, settings.rounds)))
    return {name: work[name] / (1e-3 * statistics.median(t)) for name, t in times.items()}


def quartiles(times: list[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def spread_warning(times: Mapping[str, tuple[float, tuple[float, float]]]) -> str | None:
    """Return a warning if quartiles lie far apart; `times` holds median and quartiles by name."""
    poor = [name for name, (ms, (low, high)) in times.items() if high - low > MAX_SPREAD * ms]
    if not poor:
        return None
    return (
        f"quartiles further apart than {MAX_SPREAD:.0%} of the median in {len(poor)} of {len(times)} times, "
        f"first {poor[0]}: is there other load on this machine?"
    )


def describe_run(settings: BenchSettings) -> dict[str, Any]:
    """Return hardware, versions, commit and settings for JSON."""
    facts = examine()
    return {
        "hardware": _hardware(settings.device),
        "threads": torch.get_num_threads(),
        "pale": facts["pale"],
        "commit": commit(),
        "python": facts["python"],
        "system": facts["system"],
        "packages": facts["packages"],
        "cuda": torch.version.cuda,
        "setting": settings.plain(),
    }


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    n = torch.get_num_threads()
    return f"{names[0] if names else platform.processor()}, {n} thread{'s' * (n > 1)}"


def error_line(error: Exception) -> str:
    """Return an error as one line."""
    return shorten(f"{type(error).__name__}: {error}", 200)
