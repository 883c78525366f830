"""Settings of `pale warm-up`. This module imports nothing heavy, so that its help is fast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from ..core.options import argument, option, settings_class
from ..errors import SettingsError

# From Volta, the first GPUs that Triton supports; its compiler aborts the process for a number that no GPU has.
CAPABILITIES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@settings_class
class KernelSettings:
    """Models, GPU and folder of compiled kernels."""

    weights: list[str] = argument(
        "run folders, .safetensors files, or model names such as pale_tiny", metavar="MODEL"
    )
    cache: Path | None = option(
        "folder of compiled kernels (default: $TRITON_CACHE_DIR, else ~/.triton/cache)",
        default=None,
        metavar="DIR",
    )
    target: str = option("GPU: sm_80 for A100, sm_90 for H100 and H200, ...", default="sm_90")
    dtype: list[Literal["bf16", "fp16", "fp32"]] = option(
        "dtypes to compute in; pale predict and pale serve use fp32", default=["bf16"]
    )
    training: bool = option("also the kernels of training", default=False)
    jobs: int | None = option(
        "threads that compile (default: the number of cores, at most 16)", default=None
    )

    def __post_init__(self) -> None:
        """Check the values."""
        if self.jobs is not None and self.jobs < 1:
            raise SettingsError(f"--jobs must be at least 1, got {self.jobs}")
        if not self.weights:
            raise SettingsError("name at least one model, such as pale_tiny or a run folder")
        self.capability()

    def capability(self) -> int:
        """Return the compute capability of the target, 90 for sm_90."""
        found = re.fullmatch(r"sm_(\d{2,3})", self.target)
        if found is None or int(found[1]) not in CAPABILITIES:
            raise SettingsError(
                "--target must be sm_ and the compute capability of an NVIDIA GPU, one of "
                f"{', '.join(map(str, CAPABILITIES))}, got {self.target!r}; "
                "nvidia-smi --query-gpu=compute_cap --format=csv prints 9.0 for sm_90"
            )
        return int(found[1])
