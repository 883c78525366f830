"""Detection after training: evaluation, and predictions for pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from . import weights as weight_files
from .data import rle
from .data.images import read_image
from .data.instance_transforms import resized
from .recipes.schema import Detection, of_weights
from .settings import vary
from .tasks.detection import MaskRCNN, Testing, overlay
from .tasks.detection.metric import AveragePrecision, as_results
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


@dataclass(frozen=True)
class Prediction:
    """The objects of one picture.

    Attributes:
        path: the picture.
        results: as COCO has them, the surest first; "image_id" is the picture's number.
        counts: objects by class name, the most first.
    """

    path: Path
    results: list[dict[str, Any]]
    counts: dict[str, int]


class Predictor:
    """A trained detector for pictures of any size.

    Args:
        model: with its weights.
        classes: names.
        categories: ids of the classes in COCO's json; by default from 1 on.
        test: how objects are looked for.
    """

    def __init__(
        self,
        model: MaskRCNN,
        classes: Sequence[str],
        test: Testing,
        categories: Sequence[int] | None = None,
    ) -> None:
        self.model, self.classes, self.test = model.eval(), list(classes), test
        self.categories = list(categories or range(1, len(self.classes) + 1))
        self.device = next(model.parameters()).device
        model.limits(test.score, test.nms, test.most)

    @classmethod
    def load(
        cls, path: Path, device: str = "cpu", recipe: Detection | None = None, **test: Any
    ) -> Predictor:
        """From a run or a .safetensors file of one; `test` changes fields of `Testing`."""
        rle.codec()
        weights = weight_files.load(path)
        if recipe is None:
            recipe = of_weights(weights, path, Detection, "detector")
        classes = weights.about.get("classes")
        if classes is None:
            classes = recipe.data.val_source(recipe.seed).classes
        settings = vary(recipe.model, weights=None, init=None, new_head=False)
        size = recipe.augment.crop or recipe.augment.short or recipe.data.size
        model = settings.build(len(classes), size)
        weight_files.put(model, weights, path, new_head=False)
        return cls(
            model.to(device), classes, vary(recipe.test, **test), categories(recipe, classes)
        )

    @torch.no_grad()
    def __call__(self, path: Path, number: int = 1) -> Prediction:
        """Look for the objects of one picture."""
        image = read_image(path)
        pixels = resized(image, self.test.short, self.test.long)
        seen = torch.from_numpy(pixels).permute(2, 0, 1).to(self.device)
        found = self.model([seen])[0]
        own = (image.height, image.width)
        results = as_results(found, seen.shape[1:], own, number, self.categories)  # type: ignore[arg-type]
        name = dict(zip(self.categories, self.classes, strict=True))
        counts: dict[str, int] = {}
        for entry in results:
            counts[name[entry["category_id"]]] = counts.get(name[entry["category_id"]], 0) + 1
        ordered = sorted(counts.items(), key=lambda item: -item[1])
        return Prediction(path, results, dict(ordered))

    def draw(self, prediction: Prediction) -> Image.Image:
        """The picture under what was found."""
        return overlay(
            read_image(prediction.path), prediction.results, self.classes, self.categories
        )

    def write(self, predictions: Sequence[tuple[Prediction, str]], folder: Path) -> None:
        """objects.json: what was found in all pictures, in COCO's format, with its images and categories."""
        images, found = [], []
        for number, (prediction, _) in enumerate(predictions, start=1):
            images.append({"id": number, "file_name": str(prediction.path)})
            found += prediction.results
        named = [{"id": c, "name": n} for c, n in zip(self.categories, self.classes, strict=True)]
        content = {"images": images, "categories": named, "annotations": found}
        (folder / "objects.json").write_text(json.dumps(content) + "\n")


def categories(recipe: Detection, classes: Sequence[str]) -> list[int] | None:
    """Ids of the recipe's data where it can still be read."""
    try:
        source = recipe.data.val_source(recipe.seed)
    except ValueError:
        return None
    return source.categories if source.classes == list(classes) else None
