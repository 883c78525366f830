"""Object detection: boxes, classes and shapes of objects, by Mask R-CNN on a backbone."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from ...core.console import Table
from ...core.escaping import csv_row
from ...core.files import fresh_path
from ...data import rle
from ...data.loader import usable_cores
from ...data.seeding import derive_seed
from ...data.sources.coco import require_images, without_unusable
from ...data.sources.holding import held_out_note
from ...data.sources.images import skipped_note, unreadable_images
from ...data.sources.instances import InstanceSource, has_objects
from ...data.transforms.images import normalise
from ...data.transforms.instances import (
    InstanceAugment,
    InstanceDataset,
    InstanceEvalDataset,
    collate,
)
from ...data.transforms.masks import distort
from ...errors import DataError
from ..base import Batch, Evaluated, Task
from ..gallery import side_by_side
from ..pipeline import Pipeline
from ..prediction import Json
from .data import InstanceData
from .draw import overlay, require_drawable
from .inference import DetectionPipeline, Testing
from .metric import FIGURES, MIN_SCORE, PREFIX, AveragePrecision
from .model import DetectionModel


class DetectionTask(Task):
    """The task of the recipes in `recipes.coco` and others."""

    kind: ClassVar[str] = "detection"
    best: ClassVar[str] = "box_ap"
    headline: ClassVar[Mapping[str, str]] = {"box_ap": "box AP", "mask_ap": "mask AP"}
    scores: ClassVar[tuple[str, ...]] = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")
    titles: ClassVar[Mapping[str, str]] = {
        f"{part}_{name}": f"{part} {name.replace('_', ' ').replace('ap', 'AP')}, %"
        for part in PREFIX.values()
        for name in FIGURES
    } | {"f1": "F1, %"}
    class_score: ClassVar[str] = "box_ap"
    panel_about: ClassVar[str] = (
        f"Image, labels and detections with a score of at least {MIN_SCORE:g}; F1 counts them at IoU 0.5, of any class."
    )
    pipeline: ClassVar[type[Pipeline]] = DetectionPipeline

    train_source: InstanceSource | None
    val_source: InstanceSource

    def __init__(
        self,
        model: DetectionModel,
        data: InstanceData,
        augment: InstanceAugment,
        test: Testing,
        seed: int,
        classes: Sequence[str] | None = None,
    ) -> None:
        """Find the data and check that the images exist.

        Args:
            model: the network.
            data: images and objects.
            augment: augmentation of training images.
            test: settings of inference.
            seed: seed of every random draw.
            classes: classes of the weights, for evaluation without a training set.
        """
        rle.codec()  # raises an error if a package is missing
        self.settings, self.data, self.augment = model, data, augment
        self.test, self.seed = test, seed
        self.masks = model.heads.masks
        self.notes: list[str] = []
        self.data_notes: list[str] = []
        self.train_source = None
        if classes is None:
            self.train_source = data.train_source(seed)
            classes = self.train_source.classes
        self.classes = list(classes)
        self.val_source = data.val_source(seed)
        if data.unreadable == "skip":
            self._leave_out_unusable()
        found = self.val_source.classes
        if found != self.classes:
            raise DataError(
                f"the validation set has {len(found)} classes ({', '.join(found[:4])}, ...), expected "
                f"{len(self.classes)} ({', '.join(self.classes[:4])}, ...); is it the right dataset?"
            )
        if data.hold_out and data.hold_out_by == "name" and self.train_source is not None:
            note = held_out_note(len(self.train_source), len(self.val_source), seed)
            self.data_notes.append(note)
        sources = [s for s in (self.train_source, self.val_source) if s is not None]
        for source in sources:
            if self.masks and not source.shaped:
                raise DataError(
                    "some objects have no shape (segmentation), so masks cannot be trained or evaluated; "
                    "for boxes alone set model.heads.masks=false"
                )
            if data.check:
                require_images(source, usable_cores())
        if not any(has_objects(self.val_source, i) for i in range(len(self.val_source))):
            raise DataError(
                f"there is no object in the {len(self.val_source)} images of the validation set, so nothing can "
                "be measured; are its annotations right?"
            )

    def _leave_out_unusable(self) -> None:
        """Remove images that are missing or cannot be read from both sets."""
        threads = usable_cores()
        self.val_source, bad = without_unusable(self.val_source, threads)
        if self.train_source is not None:
            self.train_source, others = without_unusable(self.train_source, threads)
            bad = others + bad
        if not len(self.val_source) or (
            self.train_source is not None and not len(self.train_source)
        ):
            raise unreadable_images(bad)
        self.data_notes = [skipped_note(bad)] if bad else []

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """0 for portrait, 1 for landscape training images: batches of one kind need less padding."""
        assert self.train_source is not None
        sizes = [self.train_source.size(i) for i in range(len(self.train_source))]
        return np.array([w >= h for h, w in sizes], np.int64)

    def model(self) -> nn.Module:
        """Build the network."""
        size = self.augment.crop or self.augment.short or self.data.size
        model, notes = self.settings.assemble(len(self.classes), size)
        model.set_thresholds(self.test.score, self.test.nms, self.test.most)
        read = [*(self.train_source.notes if self.train_source else ()), *self.val_source.notes]
        self.notes = [*self.data_notes, *notes]
        self.notes += dict.fromkeys(read)  # with hold_out both are from one file
        return model

    def train_data(self, device: torch.device) -> InstanceDataset:
        """Return augmented training images."""
        assert self.train_source is not None
        return InstanceDataset(self.train_source, self.augment, self.seed, self.masks)

    def val_data(self) -> InstanceEvalDataset:
        """Return validation images, resized as for inference."""
        return InstanceEvalDataset(self.val_source, self.test.short, self.test.long)

    def collate(self, samples: list[Any]) -> Batch:
        """Return padded images, objects and keys."""
        return collate(samples)

    def prepare(self, batch: Batch, step: int | None) -> Batch:
        """Normalise the images, with zeros as padding; in training add the targets of each."""
        images = batch["images"]
        if step is not None and self.augment.distort:
            images = distort(images, batch["draws"])
        images = clear_padding(normalise(images), batch["sizes"])
        if step is None:
            return batch | {"images": images}
        if frame := self.augment.crop_size:  # all batches have one size
            h, w = images.shape[-2:]
            images = F.pad(images, (0, frame[1] - w, 0, frame[0] - h))
        parts = [batch[k].split(batch["counts"]) for k in ("boxes", "labels")]
        masks = batch["masks"].split(batch["counts"]) if self.masks else None
        targets: list[Json] = []
        for i, key in enumerate(batch["keys"].tolist()):
            target = {
                "boxes": parts[0][i],
                "labels": parts[1][i] + 1,
                "seed": derive_seed(self.seed, *key),
            }
            targets.append(target if masks is None else target | {"masks": masks[i]})
        return batch | {"images": images, "targets": targets}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the losses of proposals, classes, boxes and masks."""
        losses = model(ImageList(batch["images"], batch["sizes"]), batch["targets"])
        total: Tensor = sum(losses.values())
        return total

    def metric(self, protocol: str = "") -> AveragePrecision:
        """Return a metric of COCO's average precision."""
        source = self.val_source
        return AveragePrecision(self.classes, source.categories, self.masks, source.image_id)

    def val_image(self, index: int) -> Image.Image:
        """Return the image."""
        return self.val_source.image(index)

    def described(self) -> Json:
        """Return the ids of the classes in COCO's JSON."""
        return {"categories": [int(v) for v in self.val_source.categories]}

    def panel(self, entry: Json) -> Image.Image:
        """Return image, labels and prediction next to each other."""
        index = entry["index"]
        source = self.val_source
        own = source.instances(index).annotations(0, source.categories)
        image, found = source.image(index), entry["detections"]
        require_drawable(found, (image.height, image.width))
        drawn = [overlay(image, each, self.classes, source.categories) for each in (own, found)]
        return side_by_side([image, *drawn])

    def protocols(self) -> Mapping[str, Testing]:
        """Return the settings of inference."""
        return {"": self.test}

    @classmethod
    def evaluation_batch(cls, asked: int) -> int:
        """Return 1: images have different sizes."""
        return 1

    @classmethod
    def listed_classes(cls, recipe: Any) -> Sequence[str]:
        """Return the classes in the annotations of the validation set."""
        names: Sequence[str] = recipe.data.val_source(recipe.seed).classes
        return names

    def summary(self, found: Evaluated) -> str:
        """Return the number of images and the settings of inference; `tables` have the figures."""
        return f"{found.figures['images']:.0f} images, {self.test.describe()}"

    def as_json(self, found: Sequence[Evaluated]) -> Json:
        """Return the figures, those of the paper, the settings, and the table of classes."""
        paper = {name: value for name, value in found[0].paper.items() if "_ap" in name}
        plain = found[0].figures | {"paper": paper, "test": self.test.plain()}
        return plain | {"per_class": _metric(found).per_class()}

    def tables(self, found: Sequence[Evaluated]) -> list[Table]:
        """Return a table of the average precision, and one of the classes."""
        figures, paper, metric = found[0].figures, found[0].paper, _metric(found)
        total = Table("", "AP", "AP50", "AP75", "small", "medium", "large", "AP in the paper")
        for part in ("box", "mask") if metric.masks else ("box",):
            keys = [f"{part}_{name}" for name in FIGURES]
            cells = [f"{figures[k]:.2f}" if k in figures else "-" for k in keys]
            theirs = paper.get(f"{part}_ap")
            total.add_row(part, *cells, "-" if theirs is None else f"{theirs:g}")
        rows = metric.per_class()
        columns = [c for c in rows[0] if c not in ("class", "objects")]
        classes = Table("class", "objects", *(c.replace("_", " ") for c in columns))
        for row in rows:
            cells = ["-" if row[c] is None else f"{row[c]:.2f}" for c in columns]
            classes.add_row(row["class"], str(row["objects"]), *cells)
        return [total, classes]

    def write_evaluation(self, found: Sequence[Evaluated], folder: Path) -> str:
        """Write evaluation.json, per_class.csv, and the results in COCO's format, boxes and masks separately."""
        metric = _metric(found)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"figures": found[0].figures, "test": self.test.plain()}
        about |= {"details": metric.details()}
        fresh_path(folder / "evaluation.json").write_text(json.dumps(about))
        rows = metric.per_class()
        with fresh_path(folder / "per_class.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(csv_row(rows[0]))
            writer.writerows(csv_row(row.values()) for row in rows)
        boxes = [{k: v for k, v in d.items() if k != "segmentation"} for d in metric.detections]
        fresh_path(folder / "detections_bbox.json").write_text(json.dumps(boxes))
        if metric.masks:
            masks = [{k: v for k, v in d.items() if k != "bbox"} for d in metric.detections]
            fresh_path(folder / "detections_segm.json").write_text(json.dumps(masks))
        return "evaluation.json, per_class.csv, detections_*.json (COCO's results)"


def _metric(found: Sequence[Evaluated]) -> AveragePrecision:
    metric = found[0].metric
    assert isinstance(metric, AveragePrecision)
    return metric


def clear_padding(images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Set the padding of images (b, 3, h, w) to zero."""
    ends = torch.tensor(sizes).to(images.device, non_blocking=True)
    rows, columns = (
        torch.arange(images.shape[axis], device=images.device) < ends[:, axis - 2, None]
        for axis in (2, 3)
    )
    return images * (rows[:, None, :, None] & columns[:, None, None])
