"""Commands that run a trained model over a dataset: `pale features`, `pale probe`, `pale token-labels make`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from ..core.progress import select_progress
from ..tools.token_labels import TokenLabelSettings
from .console import print_line
from .options import Reporting, argument, option
from .weights import FOREIGN


class Features(Reporting, name="features"):
    """Write the embeddings of a folder of images."""

    weights: Path = argument("run folder or .safetensors file", metavar="RUN")
    root: Path = argument("folder that holds <class>/<image>", metavar="DIR")
    output: Path = option("file to write, such as out.safetensors", "-o", metavar="FILE")
    recipe: str | None = option(FOREIGN)
    device: Literal["cpu", "cuda"] = option("device", default="cpu")
    workers: int = option("processes that read images", default=0)

    def run(self) -> None:
        """Compute and write the embeddings."""
        from ..tools.features import extract_folder

        where = self.weights, self.recipe, self.root, self.output
        found = extract_folder(*where, self.workers, self.device, select_progress(self.json))
        count, width = found.vectors.shape
        words = f"{self.output}: {count} images, {width} features each"
        self.report({"pictures": count, "features": width}, words)


class Probe(Reporting, name="probe"):
    """Fit and score a linear classifier on features.

    Examples:
        pale probe train.safetensors val.safetensors --neighbours 20
        pale probe train.safetensors val.safetensors --weights runs/mine -o probe.safetensors
    """

    train: Path = argument("features to fit on")
    val: Path = argument("features to score on")
    output: Path | None = option(
        "write the model with this classifier, for pale predict, serve and export", "-o"
    )
    weights: Path | None = option(
        "with -o: run or .safetensors file that computed the features", metavar="RUN"
    )
    recipe: str | None = option(FOREIGN)
    neighbours: int | None = option(
        "also score a weighted vote of the K nearest images of TRAIN by cosine similarity",
        metavar="K",
    )

    def run(self) -> None:
        """Fit, score and print."""
        from ..tools.probe_files import probe_files

        given = (self.output, self.weights, self.recipe, self.neighbours)
        self.report(*probe_files(self.train, self.val, *given))


class MakeTokenLabels(Reporting, TokenLabelSettings, name="token-labels make", settings="data."):
    """Write the dense labels of a teacher, for training with token labels.

    Choose the images with --data.root DIR, --data.kind, --data.train, ... as in a recipe.

    Example:
        pale token-labels make --model runs/teacher --data.root DIR --output labels
    """

    def run(self) -> None:
        """Make the labels and print how to train with them."""
        from ..tools.tables import describe_token_labels
        from ..tools.teacher import make_token_labels

        report = (lambda line: None) if self.json else print_line
        made = make_token_labels(self, self.overrides, report, select_progress(self.json))
        plain = asdict(made) | {"classes": len(made.classes)}
        self.report(plain, describe_token_labels(made, self.output))
