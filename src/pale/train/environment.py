"""Environment of a run: versions, commit, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import timm
import torch

from .. import __version__
from .distributed import World

if sys.platform != "win32":
    import resource


def peak_memory_mb(device: torch.device) -> float | None:
    """Return the peak memory of the GPU, or of this process on a CPU; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def environment(world: World) -> dict[str, object]:
    """Return versions and hardware for the log and the report."""
    cuda = world.device.type == "cuda"
    return {
        "pale": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(world.device)
        if cuda
        else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "processes": world.size,
    }


def commit() -> str | None:
    """Return the commit of this package's checkout, with "-dirty" if it has changes; None if it is not a checkout.

    The environment variable PALE_COMMIT overrides it, for copies of a checkout.
    """
    if given := os.environ.get("PALE_COMMIT"):
        return given
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True
        )
        done = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
