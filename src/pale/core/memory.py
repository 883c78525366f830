"""Recognise out-of-memory errors of a GPU or the host, and advise what to change."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ..errors import PaleError

# PyTorch raises a plain RuntimeError for these; only its text identifies the cause.
HOST_TEXTS = ("DefaultCPUAllocator", "unable to mmap", "std::bad_alloc")
GPU_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
MAX_REASON = 200  # characters
# Options of commands that decide how much is computed at once.
SIZE_OPTIONS = {"batch": "--batch", "batch_size": "--batch-size", "size": "--size"}

Memory = Literal["GPU", "host"]


def exhausted_memory(error: BaseException) -> Memory | None:
    """Return which memory ran out if an error comes from an allocator, None for any other error."""
    if isinstance(error, MemoryError):
        return "host"
    torch = sys.modules.get("torch")  # do not import torch only for this: it takes seconds
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    if isinstance(error, RuntimeError) and not isinstance(error, PaleError):
        text = str(error)
        if any(words in text for words in HOST_TEXTS):
            return "host"
        if any(words in text for words in GPU_TEXTS):
            return "GPU"
    return None


def available_memory() -> int | None:
    """Return the bytes of host memory that this process can still take, or None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    group = Path(
        "/sys/fs/cgroup"
    )  # the limit of a container; reclaimable caches count as used there
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = (group / "memory.stat").read_text().split("\ninactive_file ")[1].split()[0]
    except (OSError, ValueError, IndexError):  # no limit, or another system
        return left
    return min(left, max(limit - used + int(cached), 0))


def short_reason(error: BaseException) -> str:
    """Return the line of an allocator's error that states the cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # An error of a data loading process contains its traceback, whose last line states the cause.
    text = lines[-1] if lines[0].startswith("Caught ") else lines[0]
    return text[:MAX_REASON].rstrip(". ")


def command_shortage(memory: Memory, error: BaseException, options: Mapping[str, object]) -> str:
    """Return the message about a command that ran out of memory: which of its options to change."""
    ways = [
        f"a smaller {option}" + (f" (now {options[name]})" if options[name] is not None else "")
        for name, option in SIZE_OPTIONS.items()
        if name in options
    ]
    if memory == "host" and options.get("workers"):
        ways.append(f"fewer --workers (now {options['workers']})")
    if memory == "GPU" and "device" in options:
        ways.append("--device cpu")
    ways.append("smaller images or a smaller model")
    return f"out of {memory} memory ({short_reason(error)}); each of these needs less: {'; '.join(ways)}"
