"""Commands that measure speed: `pale bench models`, `pale bench op`, `pale bench data`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ..bench.settings import BenchSettings
from ..bench.tables import describe_data, describe_models, describe_op, list_errors
from ..core.console import Console, Table
from ..errors import PaleError
from .console import print_error, print_parts
from .options import Reporting, Threaded, argument, option


class Measuring(Threaded, BenchSettings):
    """Base of the benchmarks of models and of operations."""

    json: Path | None = option("write all results to a JSON file too", metavar="FILE")
    plot: Path | None = option("draw the results as bars in a .png file", metavar="FILE")

    def prepare(self) -> None:
        """Check the output options first, because measuring takes minutes, and limit the threads."""
        from ..view.drawing import check_image_suffix

        if self.plot:
            check_image_suffix(self.plot)
        self.set_threads()

    def publish(self, report: dict[str, Any], parts: Iterable[str | Table]) -> None:
        """Print the report, write the requested files, and list failures."""
        from ..bench.plot import save_json, save_plot

        print_parts(parts)
        report["about"]["command"] = self.typed
        if self.json:
            save_json(report, self.json)
        if self.plot:
            save_plot(report, self.plot)
        for line in list_errors(report):
            print_error(line)


def print_progress(what: str) -> None:
    """Print the current measurement, on a terminal."""
    if sys.stderr.isatty():
        print_error(f"measuring: {what}")


class BenchModels(Measuring, name="bench models"):
    """Measure whole models, and compare them with timm models.

    `models` may be left out.

    Examples:
        pale bench
        pale bench pale_tiny convnext_tiny --batch 1 8 --mode eager compiled
        pale bench --task training --device cuda --json speed.json --plot speed.png
    """

    models: list[str] = argument(
        "models, a Pale model first (default pale_tiny swin_tiny_patch4_window7_224)",
        default=[],
        metavar="MODEL",
    )
    task: list[Literal["inference", "training", "latency"]] = option(
        "what to measure; latency is batch size 1, with CUDA graphs on a GPU", default=["inference"]
    )
    mode: list[Literal["eager", "compiled", "graphs"]] = option(
        "eager, with torch.compile, or with CUDA graphs", default=["eager"]
    )
    batch: list[int] = option("batch sizes (default 256 on CUDA, 8 on a CPU)", default=[])
    autocast: bool = option("inference under autocast, with fp32 weights")
    features: bool = option("leave out the classifier")
    optimized: bool = option("apply pale.optimize to Pale models")

    def run(self) -> None:
        """Measure and print."""
        from ..bench.models import MODELS, bench

        self.prepare()
        models = self.models or list(MODELS)
        report = bench(
            models,
            self,
            tasks=self.task,
            modes=self.mode,
            batches=self.batch,
            report=print_progress,
        )
        self.publish(report, describe_models(report, models[0]))
        if any(row["error"] for row in report["rows"] if row["model"] == models[0]):
            raise PaleError(f"{models[0]}, with which the others are compared, failed; see above")


class BenchOp(Measuring, name="bench op"):
    """Measure the attention and each fused part of a block, and compare them with plain PyTorch."""

    model: str = argument(
        "model whose stages are measured (default pale_tiny)", default="pale_tiny"
    )
    batch: int | None = option("batch size (default 256 on CUDA, 2 on a CPU)")
    stages: list[int] = option("stages, 1 to 4 (default all)", default=[])
    pieces: list[str] = option(
        "parts of a block: attention, mlp, ... (default all)", default=[], metavar="PIECE"
    )
    kernels: list[str] = option(
        "kernels of plain attention: flash, efficient, cudnn (default all)", default=[], metavar="K"
    )

    def run(self) -> None:
        """Measure and print."""
        from ..bench.op import bench_op

        self.prepare()
        report = bench_op(
            self.model,
            self,
            batch=self.batch,
            stages=self.stages,
            pieces=self.pieces,
            kernels=self.kernels,
            report=print_progress,
        )
        self.publish(report, describe_op(report))


class BenchData(Reporting, name="bench data", settings=""):
    """Measure how fast the images of a recipe are read.

    Settings of the recipe are options too: --data.root DIR --data.workers 16.
    """

    recipe: str = argument("recipe name; `pale recipes` lists all")
    seconds: float = option("how long to measure, in seconds", default=20.0)

    def run(self) -> None:
        """Measure and print."""
        from ..bench.data import measure
        from ..recipes import get

        recipe = get(self.recipe).override(self.overrides)
        with Console(stderr=True).status(f"reading images for {self.seconds:g} s"):
            found = measure(recipe, self.seconds)
        self.report(found, describe_data(found))


COMMANDS = (BenchModels, BenchOp, BenchData)
