"""Compile kernels before their first launch, in several threads, into Triton's cache on disk.

The threads call Triton's own JIT with arguments of the recorded kinds, so that its cache keys are those of a launch.
Nothing is loaded or run. Nearly all of the time is spent in LLVM and in ptxas, without Python's global lock.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from ..core.progress import Track, no_progress
from .launching import AVAILABLE, INTERPRETED, Launch, compile_options

MAX_THREADS = 16  # the part that holds Python's global lock allows little more
# These kernels take longest; they come first, so that no thread is left alone with one at the end.
SLOW = ("attention_backward_kv", "conv_", "stem", "attention_backward", "linear_norm", "whole_mlp")


@dataclass(frozen=True)
class Compiled:
    """What `compile_kernels` did.

    Attributes:
        kernels: number of kernels.
        cached: those among them that were in the cache before.
        launchers: whether their launch code exists; otherwise the first launch builds it.
        threads: number of threads.
        seconds: elapsed time.
    """

    kernels: int
    cached: int
    launchers: bool
    threads: int
    seconds: float


def can_compile(device: torch.device) -> bool:
    """Return whether kernels can be compiled ahead for tensors of a device."""
    return AVAILABLE and not INTERPRETED and device.type == "cuda" and torch.version.hip is None


def thread_count(kernels: int, jobs: int | None = None) -> int:
    """Return the number of threads for so many kernels; `jobs` is the maximum, by default the number of cores."""
    if jobs is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # Other processes of a distributed run on this machine do the same.
        jobs = min(MAX_THREADS, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(jobs, kernels))


def is_cached(launch: Launch) -> bool:
    """Return whether Triton's cache has the kernel of a launch, for the GPU of the active driver."""
    found: bool = _prepare(launch, compat.kernel_in_cache)
    return found


def compile_kernels(
    launches: Sequence[Launch],
    device: torch.device | None = None,
    jobs: int | None = None,
    track: Track = no_progress,
) -> Compiled:
    """Compile the kernels of launches into Triton's cache; raise the first error.

    Args:
        launches: from `launching.recording`.
        device: the GPU; None for the target of `compat.compile_without_gpu`.
        jobs: maximum number of threads (default: the number of cores, at most 16).
        track: shows progress.
    """
    began = time.perf_counter()
    # Also creates what Triton keeps for each kernel, which threads would otherwise do at the same time.
    missing = [launch for launch in launches if not is_cached(launch)]
    missing.sort(key=_slow_first)
    threads = thread_count(len(missing), jobs)
    with ThreadPoolExecutor(threads, "compile kernels") as pool:
        futures = [pool.submit(_compile, launch, device) for launch in missing]
        try:
            done = track(as_completed(futures), "compiling kernels", len(futures))
            launchers = [future.result() for future in done]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Compiled(
        kernels=len(launches),
        cached=len(launches) - len(missing),
        launchers=all(launchers),
        threads=threads,
        seconds=time.perf_counter() - began,
    )


def example(kind: str) -> Any:
    """Return an argument of a kernel of this kind."""
    numbers = {"i32": 1, "i64": 1 << 40, "fp32": 0.5}
    if kind in numbers:
        return numbers[kind]
    name, _, unaligned = kind.partition(" ")
    dtype: torch.dtype = getattr(torch, name)
    if not unaligned:
        return torch.empty(0, dtype=dtype, device="meta")  # at address 0
    size = dtype.itemsize
    return torch.empty(64, dtype=torch.uint8)[size : 2 * size].view(dtype)


def _compile(launch: Launch, device: torch.device | None) -> bool:
    """Compile a kernel as its first launch would; return whether its launch code exists too."""
    # A new thread would use the first GPU.
    with nullcontext() if device is None else torch.cuda.device(device):
        compiled = _prepare(
            launch, lambda kernel, *args, **rest: kernel.warmup(*args, grid=(1,), **rest)
        )
        exists: bool = compat.build_launcher(compiled)
    return exists


def _prepare(launch: Launch, function: Callable[..., Any]) -> Any:
    """Call `function` with the kernel and the arguments of a launch."""
    kernel = getattr(importlib.import_module(launch.module), launch.name)
    options = compile_options(launch.name, dict(launch.options))
    return function(kernel, *map(example, launch.kinds), **options, **dict(launch.constants))


def _slow_first(launch: Launch) -> int:
    names = (i for i, start in enumerate(SLOW) if launch.name.startswith(start))
    return next(names, len(SLOW))
