"""Settings of token labels. This module imports nothing heavy, for a fast `pale --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..core.options import option, settings_class
from ..errors import SettingsError


@settings_class
class TokenLabelSettings:
    """Options of `pale token-labels make`."""

    model: str = option("teacher: a run, or a classifier of timm")
    output: Path = option("output folder; resumes if incomplete", metavar="DIR")
    weights: Path | None = option(
        "weights of a timm classifier (default: timm's pretrained weights)",
        default=None,
        metavar="FILE",
    )
    size: int | None = option(
        "side of the images (default: the teacher's input size)", default=None
    )
    k: int | None = option(
        "classes per position (default: 5, or all if there are fewer)", default=None
    )
    shard: int = option("images per file", default=4096)
    batch_size: int = option("images per batch", default=64)
    part: str = option(
        "make every Nth shard, starting with I, to share the work among N machines",
        default="0/1",
        metavar="I/N",
    )
    seed: int = option("seed of the run, which chooses hold-out and scenes", default=0)
    device: Literal["cpu", "cuda"] | None = option(
        "device (default: cuda if available)", default=None
    )

    def __post_init__(self) -> None:
        """Check the values."""
        words = self.part.split("/")
        if len(words) != 2 or not all(word.isdigit() for word in words):
            raise SettingsError(f"--part must be I/N, such as 0/4, got {self.part!r}")
        for name in ("k", "shard", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option_name = name.replace("_", "-")
                raise SettingsError(f"--{option_name} must be at least 1, got {value}")
