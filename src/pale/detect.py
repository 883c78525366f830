"""Detection after training: evaluation."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch

from . import weights as weight_files
from .recipes.schema import Detection
from .tasks.detection.metric import AveragePrecision
from .train.distributed import World
from .train.evaluate import Evaluation


def evaluate(
    recipe: Detection,
    weights: weight_files.Weights,
    source: Path,
    world: World,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, float], AveragePrecision]:
    """Evaluate weights; every process gets the same."""
    task = recipe.task(weights.about.get("classes") or recipe.data.val_source(recipe.seed).classes)
    model = task.model()
    weight_files.put(model, weights, source, new_head=False)
    model.to(world.device)
    figures, metric = Evaluation(task, world, 1, recipe.workers).run(model, dtype)
    assert isinstance(metric, AveragePrecision)
    return figures, metric


def write_evaluation(
    figures: dict[str, float], metric: AveragePrecision, recipe: Detection, folder: Path
) -> None:
    """evaluation.json, per_class.csv, and the results as COCO's servers take them, boxes and masks apart."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"figures": figures, "test": recipe.test.plain(), "details": metric.details()}
    (folder / "evaluation.json").write_text(json.dumps(about))
    rows = metric.per_class()
    with (folder / "per_class.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    boxes = [{k: v for k, v in d.items() if k != "segmentation"} for d in metric.detections]
    (folder / "detections_bbox.json").write_text(json.dumps(boxes))
    if metric.masks:
        masks = [{k: v for k, v in d.items() if k != "bbox"} for d in metric.detections]
        (folder / "detections_segm.json").write_text(json.dumps(masks))
