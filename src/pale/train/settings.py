"""Options of training and evaluation. This module imports nothing heavy, for a fast `pale --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..core.options import argument, option, settings_class


@settings_class
class RunSettings:
    """A new run, from a recipe or a file, or a run to resume."""

    recipe: str | None = argument("recipe name; `pale recipes` lists all", default=None)
    config: Path | None = option(
        "recipe file, such as the recipe.yaml of a run", default=None, metavar="FILE"
    )
    resume: Path | None = option("resume a run", default=None, metavar="RUN")
    # Not --run: torchrun would read it as an abbreviation of its own --run-path.
    output: Path | None = option("run folder (default runs/RECIPE)", default=None, metavar="DIR")
    init: Path | None = option(
        "initialise the backbone with the weights of a classifier", default=None, metavar="FILE"
    )
    allow_changed_data: bool = option(
        "with --resume: continue although training samples were added, removed or renamed",
        default=False,
    )
    device: Literal["cpu", "cuda"] | None = option(
        "device (default: cuda if available)", default=None
    )
    dist_timeout: float = option(
        "seconds that a process waits for the others before the run fails", default=600.0
    )


@settings_class
class EvalSettings:
    """Weights and options of their evaluation."""

    weights: Path = argument(
        "run folder, .safetensors file of a run, or name listed by pale weights", metavar="RUN"
    )
    recipe: str | None = option(
        "recipe of the model and the data, for weights that were not trained with pale",
        default=None,
    )
    device: Literal["cpu", "cuda"] | None = option(
        "device (default: cuda if available)", default=None
    )
    batch_size: int = option("classification: images per batch", default=64)
    protocol: Literal["single", "multi", "both"] = option(
        "segmentation: one scale, several scales with flipped images, or both", default="both"
    )
    output: Path | None = option(
        "segmentation, detection: folder for JSON and tables (default RUN/evaluation)",
        "-o",
        default=None,
        metavar="DIR",
    )


@settings_class
class ReportSettings:
    """Runs for a report."""

    runs: list[Path] = argument("run folder; several are compared", metavar="RUN")
    output: Path | None = option(
        "page that compares several runs (default comparison.html)",
        "-o",
        default=None,
        metavar="FILE",
    )
