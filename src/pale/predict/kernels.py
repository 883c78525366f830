"""Compile the kernels of models into a folder, also without a GPU: `pale warm-up`.

The launches are recorded in a process with TRITON_INTERPRET=1, in which the operators accept tensors of a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import compat
from ..core.progress import Track, no_progress
from ..errors import RunError, SettingsError, UnavailableError
from ..ops.compiling import Compiled, compile_kernels
from ..ops.launching import AVAILABLE, Launch, Target, compile_for
from ..tools.kernel_settings import KernelSettings


@dataclass(frozen=True)
class WarmUp:
    """Result of `compile_models`.

    Attributes:
        folder: cache with the kernels.
        target: the GPU, such as sm_90.
        launches: number of kernels that each model needs.
        compiled: see `Compiled`.
        size: bytes of the folder.
    """

    folder: Path
    target: str
    launches: dict[str, int]
    compiled: Compiled
    size: int

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        about = {"folder": str(self.folder), "target": self.target, "models": self.launches}
        return about | asdict(self.compiled) | {"bytes": self.size}

    def words(self) -> list[str]:
        """Return lines for a terminal."""
        done = self.compiled
        lines = [f"{name}: {count} kernels" for name, count in self.launches.items()]
        lines.append(
            f"{done.kernels} kernels for {self.target}: {done.cached} were compiled earlier, "
            f"{done.kernels - done.cached} in {done.seconds:.1f} s by {done.threads} threads"
        )
        lines.append(
            f"{self.folder}: {self.size / 1e6:.1f} MB; where the models run, set TRITON_CACHE_DIR={self.folder}"
        )
        if not done.launchers:
            lines.append(
                "each first launch will still build a small C file, because this machine has no libcuda.so.1"
            )
        return lines


def compile_models(
    settings: KernelSettings,
    say: Callable[[str], None] = lambda line: None,
    track: Track = no_progress,
) -> WarmUp:
    """Compile all kernels that models can need, for images of every size.

    Triton's driver and cache folder are replaced for the rest of this process, which must not have used kernels before.
    """
    if not AVAILABLE:
        raise UnavailableError(
            "compiling kernels needs Triton, which is not installed; pip install triton, on Linux"
        )
    folder = prepare_folder(settings.cache)
    capability = settings.capability()
    say(f"recording the kernels of {', '.join(settings.weights)}")
    found = {name: record_launches(name, settings) for name in settings.weights}
    every = list(dict.fromkeys(launch for launches in found.values() for launch in launches))
    say(f"compiling {len(every)} kernels for {settings.target}")
    # As `launching.dependent_launch` decides on a machine whose GPUs are all like the target.
    compile_for(Target(capability, capability >= 90))
    done = _compile(every, capability, folder, settings.jobs, track)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    counts = {name: len(launches) for name, launches in found.items()}
    return WarmUp(folder, settings.target, counts, done, size)


def _compile(
    launches: list[Launch], capability: int, folder: Path, jobs: int | None, track: Track
) -> Compiled:
    from triton import knobs
    from triton.errors import TritonError

    knobs.cache.dir = str(folder)
    compat.compile_without_gpu(capability)
    try:
        return compile_kernels(launches, None, jobs, track)
    except (TritonError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"a kernel could not be compiled for sm_{capability}: {reason}; the installed Triton may not support this "
            f"GPU, or {folder} may be full"
        ) from error


def prepare_folder(cache: Path | None) -> Path:
    """Return the absolute path of the cache, which exists then: its files contain their paths."""
    usual = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    folder = Path(cache or usual).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"--cache must be a folder that can be written, got {folder}: {error.strerror}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"--cache must be a folder that can be written, got {folder}")
    return folder


def record_launches(source: str, settings: KernelSettings) -> list[Launch]:
    """Return the launches that a model needs on the target, recorded in another process."""
    about = [source, settings.capability(), list(settings.dtype), settings.training]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches.json"
        done = subprocess.run(
            [sys.executable, "-m", "pale.predict.recorder", json.dumps(about), str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | own,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RunError(f"the kernels of {source} could not be recorded: {lines[-1]}")
        answer = json.loads(file.read_text())
    if "error" in answer:
        raise SettingsError(answer["error"])
    return [Launch.from_plain(values) for values in answer["launches"]]
