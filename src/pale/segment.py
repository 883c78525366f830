"""Segmentation after training: evaluation at one and at several scales."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import weights as weight_files
from .recipes.schema import Segmentation
from .tasks.segmentation.inference import Inference
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
