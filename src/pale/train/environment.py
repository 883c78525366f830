"""On what a run ran: versions, commit, hardware."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import timm
import torch

from .. import __version__
from .distributed import World


def environment(world: World) -> dict[str, Any]:
    """Facts for the log and the report."""
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
    """The commit of the checkout that this package lies in, "-dirty" with changes; None when installed otherwise."""
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
