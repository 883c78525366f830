"""Segmentation after training: evaluation at one and at several scales, and predictions for pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from . import weights as weight_files
from .data.images import read_image
from .data.mask_transforms import to_tensor
from .data.masks import Colour, Labels, palette
from .recipes.schema import Segmentation, of_weights
from .settings import vary
from .tasks.segmentation.inference import Inference, Segmenter
from .tasks.segmentation.metric import indexed, overlay, pixel_counts
from .train.distributed import World
from .train.evaluate import Evaluation


@dataclass(frozen=True)
class Evaluated:
    """One protocol's result.

    Attributes:
        protocol: "single" or "multi".
        how: what was done.
        figures: mIoU, mAcc, aAcc, images.
        details: per class, confusion, the images at both ends.
        paper: the paper's mIoU under it, where the recipe has one.
    """

    protocol: str
    how: Inference
    figures: dict[str, float]
    details: dict[str, Any]
    paper: float | None


def protocols(recipe: Segmentation, which: str) -> dict[str, tuple[Inference, float | None]]:
    """By name: how, and what the paper reports."""
    paper = recipe.reported
    both = {
        "single": (recipe.test, paper.miou if paper else None),
        "multi": (recipe.multi, paper.miou_multi if paper else None),
    }
    return both if which == "both" else {which: both[which]}


def evaluate(
    recipe: Segmentation,
    weights: weight_files.Weights,
    source: Path,
    world: World,
    which: str = "both",
    dtype: torch.dtype | None = None,
) -> Iterator[Evaluated]:
    """Evaluate weights under each protocol; every process gets the same."""
    names = weights.about.get("classes")
    task = recipe.task(names if names is not None else recipe.data.class_list().names)
    model = task.model()
    weight_files.put(model, weights, source, new_head=False)
    model.to(world.device)
    for name, (how, paper) in protocols(recipe, which).items():
        task.test = how
        figures, metric = Evaluation(task, world, 1, recipe.workers).run(model, dtype)
        yield Evaluated(name, how, figures, metric.details(), paper)


def write_evaluation(found: Sequence[Evaluated], folder: Path) -> None:
    """evaluation_single.json and so on, and per_class.csv with all protocols side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in found:
        about: dict[str, Any] = {
            "protocol": each.protocol,
            "inference": each.how.plain(),
            "figures": each.figures,
        }
        about |= {"paper_miou": each.paper, "details": each.details}
        (folder / f"evaluation_{each.protocol}.json").write_text(json.dumps(about))
    with (folder / "per_class.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ("iou", "accuracy", "precision")
        writer.writerow(["class", "share"] + [f"{e.protocol}_{c}" for e in found for c in columns])
        for rows in zip(*(each.details["per_class"] for each in found), strict=True):
            numbers = [rows[0]["share"]] + [row[c] for row in rows for c in columns]
            cells = ["" if n is None else f"{n:.3f}" for n in numbers]
            writer.writerow([rows[0]["class"], *cells])


@dataclass(frozen=True)
class Prediction:
    """The classes of one picture.

    Attributes:
        path: the picture.
        labels: (h, w).
        shares: by class name, per cent of the pixels, largest first; absent ones are left out.
    """

    path: Path
    labels: Labels
    shares: dict[str, float]


class Predictor:
    """A trained segmenter for pictures of any size.

    Args:
        model: with its weights.
        recipe: what it was trained by.
        classes: their names.
        how: how pictures are looked at; by default as the recipe evaluates.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Segmentation,
        classes: Sequence[str],
        how: Inference | None = None,
    ) -> None:
        self.classes, self.colours = list(classes), colours(recipe, classes)
        self.segment = Segmenter(model.eval(), how or recipe.test, len(self.classes))

    @classmethod
    def load(
        cls, path: Path, device: str = "cpu", recipe: Segmentation | None = None, **how: Any
    ) -> Predictor:
        """From a run or a .safetensors file of one; `how` changes fields of `Inference`."""
        weights = weight_files.load(path)
        if recipe is None:
            recipe = of_weights(weights, path, Segmentation, "segmenter")
        classes = weights.about.get("classes") or recipe.data.class_list().names
        settings = vary(recipe.model, weights=None, init=None, new_head=False)
        model = settings.build(len(classes), recipe.augment.crop)
        weight_files.put(model, weights, path, new_head=False)
        return cls(model.to(device), recipe, classes, vary(recipe.test, **how))

    def __call__(self, path: Path) -> Prediction:
        """Segment one picture."""
        labels = self.segment(to_tensor(read_image(path))).numpy()
        counts = pixel_counts(labels, len(self.classes))
        order = np.argsort(-counts, kind="stable")
        shares = {self.classes[i]: 100 * counts[i] / labels.size for i in order if counts[i]}
        return Prediction(path, labels, {name: float(share) for name, share in shares.items()})

    def write(self, prediction: Prediction, folder: Path, stem: str) -> list[Path]:
        """STEM.png, indexed in the classes' colours, and STEM_overlay.jpg."""
        mask, over = folder / f"{stem}.png", folder / f"{stem}_overlay.jpg"
        mask.parent.mkdir(parents=True, exist_ok=True)
        indexed(prediction.labels, self.colours).save(mask)
        overlay(read_image(prediction.path), prediction.labels, self.colours).save(over, quality=90)
        return [mask, over]


def colours(recipe: Segmentation, classes: Sequence[str]) -> list[Colour]:
    """Those of the recipe's class list where it can still be read, else plain ones."""
    try:
        listed = recipe.data.class_list()
    except ValueError:
        return palette(len(classes))
    return listed.colours if list(listed.names) == list(classes) else palette(len(classes))
