"""Semantic segmentation: a class for each pixel, by UperNet on a backbone."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ...core.console import Table
from ...core.escaping import csv_row
from ...core.files import fresh_path
from ...data.loader import usable_cores
from ...data.sources.holding import held_out_note
from ...data.sources.images import skipped_note
from ...data.sources.mask_survey import PairCheck, check_pairs, require_valid
from ...data.sources.masks import MaskFiles, MaskSource
from ...data.transforms.images import normalise
from ...data.transforms.masks import MaskAugment, MaskDataset, MaskEvalDataset, collate, distort
from ...errors import DataError, SettingsError, WeightsError
from ..base import Batch, Evaluated, Task, paper_note
from ..gallery import side_by_side
from ..pipeline import Pipeline
from ..prediction import Json
from .data import MaskData
from .draw import overlay
from .inference import SegmentationPipeline
from .loss import Loss, balanced, keep_masks, pixel_loss
from .metric import MeanIoU, unpack
from .model import SegmentationModel
from .segmenter import Inference

# Names of the figures that the paper reports for each protocol.
PAPER = {"single": "miou", "multi": "miou_multi"}


class SegmentationTask(Task):
    """The task of the recipes in `recipes.ade20k` and others."""

    kind: ClassVar[str] = "segmentation"
    best: ClassVar[str] = "miou"
    headline: ClassVar[Mapping[str, str]] = {"miou": "mIoU"}
    scores: ClassVar[tuple[str, ...]] = ("miou", "macc", "aacc")
    titles: ClassVar[Mapping[str, str]] = {
        "miou": "mIoU, %",
        "macc": "mAcc, %",
        "aacc": "aAcc, %",
        "iou": "IoU, %",
        "accuracy": "accuracy, %",
        "precision": "precision, %",
        "share": "share of pixels, %",
    }
    class_score: ClassVar[str] = "iou"
    confusion_unit: ClassVar[str] = "pixels"
    panel_about: ClassVar[str] = "Image, labels and prediction, each over the image."
    pipeline: ClassVar[type[Pipeline]] = SegmentationPipeline

    train_source: MaskSource | None
    val_source: MaskSource

    def __init__(
        self,
        model: SegmentationModel,
        data: MaskData,
        augment: MaskAugment,
        test: Inference,
        loss: Loss,
        seed: int,
        classes: Sequence[str] | None = None,
        multi: Inference | None = None,
    ) -> None:
        """Find the data and, for training, read every mask.

        Args:
            model: the network.
            data: images and masks.
            augment: augmentation of training images.
            test: inference on validation images.
            loss: settings of the loss.
            seed: seed of every random draw.
            classes: classes of the weights, for evaluation without a training set.
            multi: inference at several scales, an additional protocol of evaluation.
        """
        self.settings, self.data, self.augment = model, data, augment
        self.test, self.loss_settings, self.seed = test, loss, seed
        self.multi = multi
        self.val_source = data.val_source(seed)
        self.class_list = self.val_source.classes
        self.classes = list(self.class_list.names)
        self.notes: list[str] = []
        self.train_source = None
        weights = loss.class_weights
        if isinstance(weights, tuple) and len(weights) != len(self.classes):
            raise SettingsError(
                f"loss.class_weights needs a factor for each of {len(self.classes)} classes, got {len(weights)}"
            )
        if classes is not None:
            _require_same(classes, self.classes)
            return
        self.train_source = data.train_source(seed)
        if data.hold_out and data.hold_out_by == "name":
            self.notes.append(held_out_note(len(self.train_source), len(self.val_source), seed))
        if data.check and isinstance(self.val_source, MaskFiles):
            self.val_source, seen = self._checked(self.val_source)
            _require_labels(np.stack([entry.pixels for entry in seen]).sum(0)[:-1], "validation")
            assert isinstance(self.train_source, MaskFiles)
            self.train_source, seen = self._checked(self.train_source)
            self.pixels = np.stack([entry.pixels for entry in seen]).sum(0)[:-1]
            _require_labels(self.pixels, "training")

    def _checked(self, source: MaskFiles) -> tuple[MaskFiles, list[PairCheck]]:
        """Read every mask; leave out pairs that cannot be used if the settings allow it, else raise an error."""
        seen = check_pairs(source, usable_cores())
        bad = [entry.error for entry in seen if entry.error is not None]
        if self.data.unreadable == "error" or not bad or len(bad) == len(seen):
            require_valid(seen)
            return source, seen
        self.notes.append(skipped_note(bad))
        good = [i for i, entry in enumerate(seen) if entry.error is None]
        return source.with_pairs([source.pairs[i] for i in good]), [seen[i] for i in good]

    @cached_property
    def pixels(self) -> NDArray[np.int64]:
        """Number of training pixels of each class."""
        assert self.train_source is not None
        seen = check_pairs(self.train_source, usable_cores())
        require_valid(seen)
        return np.stack([entry.pixels for entry in seen]).sum(0)[:-1]

    @cached_property
    def class_weights(self) -> Tensor | None:
        """Factors of the classes in the loss."""
        weights = self.loss_settings.class_weights
        if weights == "balanced":
            return torch.tensor(balanced(self.pixels))
        return None if weights is None else torch.tensor(weights)

    def model(self) -> nn.Module:
        """Build the network."""
        model, notes = self.settings.assemble(len(self.classes), self.augment.crop)
        self.notes += notes
        return model

    def train_data(self, device: torch.device) -> MaskDataset:
        """Return augmented training crops."""
        assert self.train_source is not None
        return MaskDataset(self.train_source, self.augment, self.seed)

    def val_data(self) -> MaskEvalDataset:
        """Return whole validation images."""
        return MaskEvalDataset(self.val_source)

    def collate(self, samples: list[Any]) -> Batch:
        """Return images, masks, distortions and keys."""
        return collate(samples)

    def prepare(self, batch: Batch, step: int | None) -> Batch:
        """In training distort and normalise the images, and draw the channels to keep."""
        if step is None:
            return batch
        images = batch["images"]
        if self.augment.distort:
            images = distort(images, batch["draws"])
        batch = batch | {"images": normalise(images)}
        if rate := self.settings.dropout:
            channels = self.settings.width + self.settings.auxiliary
            batch["keep"] = keep_masks(batch["keys"], channels, rate, self.seed, images.device)
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of the decode head, plus that of the auxiliary head times its weight."""
        weights = self._weights_on(batch["masks"].device)
        output = model(batch["images"], batch.get("keep"))
        heads = output if isinstance(output, tuple) else (output,)
        factors = (1.0, self.loss_settings.auxiliary)
        total: Tensor = sum(  # type: ignore[assignment]
            factor * pixel_loss(logits, batch["masks"], self.loss_settings, weights)
            for factor, logits in zip(factors, heads, strict=False)
        )
        return total

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """Return the class weights on a device; they are copied once, because a recorded step must not copy."""
        weights = self.class_weights
        if weights is None or weights.device == device:
            return weights
        self.class_weights = weights.to(device)
        return self.class_weights

    def metric(self, protocol: str = "") -> MeanIoU:
        """Return a metric of mIoU, mAcc and aAcc."""
        return MeanIoU(self.classes, self.protocols()[protocol] if protocol else self.test)

    def protocols(self) -> Mapping[str, Inference]:
        """Return inference at one scale and, if there are settings for it, at several."""
        return {"single": self.test} | ({"multi": self.multi} if self.multi else {})

    @classmethod
    def evaluation_batch(cls, asked: int) -> int:
        """Return 1: images have different sizes."""
        return 1

    @classmethod
    def listed_classes(cls, recipe: Any) -> Sequence[str]:
        """Return the names in the class list of the data."""
        names: Sequence[str] = recipe.data.class_list().names
        return names

    def val_image(self, index: int) -> Image.Image:
        """Return the image."""
        return self.val_source.image(index)

    def described(self) -> Json:
        """Return the colours of the classes."""
        return {"colours": [[int(v) for v in colour] for colour in self.class_list.colours]}

    def panel(self, entry: Json) -> Image.Image:
        """Return image, labels and prediction next to each other."""
        index = entry["index"]
        image, labels = self.val_source.image(index), self.val_source.mask(index)
        shown = (labels, unpack(entry["prediction"]))
        colours = self.class_list.colours
        return side_by_side([image, *(overlay(image, each, colours) for each in shown)])

    def summary(self, found: Evaluated) -> str:
        """Return the figures of one protocol, and how images were segmented."""
        assert isinstance(found.how, Inference)
        figures, paper = found.figures, paper_note(found, PAPER[found.protocol])
        return (
            f"{found.protocol}-scale: mIoU {figures['miou']:.2f}{paper}, mAcc {figures['macc']:.2f}, "
            f"aAcc {figures['aacc']:.2f}, {figures['images']:.0f} images; {found.how.describe()}; "
            "at the size of the masks"
        )

    def as_json(self, found: Sequence[Evaluated]) -> Json:
        """Return the figures, the settings and the table of each protocol."""
        return {
            e.protocol: e.figures
            | {"paper_miou": e.paper.get(PAPER[e.protocol]), "inference": _plain(e)}
            | {"per_class": e.metric.details()["per_class"]}
            for e in found
        }

    def tables(self, found: Sequence[Evaluated]) -> list[Table]:
        """Return a table of the classes."""
        columns = [f"{e.protocol}: {c}" for e in found for c in ("IoU", "Acc")]
        table = Table("class", "pixels, %", *columns)
        for rows in zip(*(e.metric.details()["per_class"] for e in found), strict=True):
            numbers = [n for row in rows for n in (row["iou"], row["accuracy"])]
            cells = ["-" if n is None else f"{n:.2f}" for n in numbers]
            table.add_row(rows[0]["class"], f"{rows[0]['share']:.2f}", *cells)
        return [table]

    def write_evaluation(self, found: Sequence[Evaluated], folder: Path) -> str:
        """Write evaluation_single.json and so on, and per_class.csv with all protocols side by side."""
        folder.mkdir(parents=True, exist_ok=True)
        for each in found:
            about: Json = {
                "protocol": each.protocol,
                "inference": _plain(each),
                "figures": each.figures,
                "paper_miou": each.paper.get(PAPER[each.protocol]),
                "details": each.metric.details(),
            }
            path = fresh_path(folder / f"evaluation_{each.protocol}.json")
            path.write_text(json.dumps(about))
        with fresh_path(folder / "per_class.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = ("iou", "accuracy", "precision")
            titles = [f"{e.protocol}_{c}" for e in found for c in columns]
            writer.writerow(["class", "share", *titles])
            for rows in zip(*(e.metric.details()["per_class"] for e in found), strict=True):
                numbers = [rows[0]["share"]] + [row[c] for row in rows for c in columns]
                cells = ["" if n is None else f"{n:.3f}" for n in numbers]
                writer.writerow(csv_row([rows[0]["class"], *cells]))
        return "evaluation_*.json, per_class.csv"


def _plain(found: Evaluated) -> Json:
    return {} if found.how is None else found.how.plain()


def _require_same(known: Sequence[str], found: Sequence[str]) -> None:
    if len(known) != len(found):
        raise WeightsError(
            f"the weights have {len(known)} classes, the data has {len(found)}; is it the right dataset?"
        )
    for i, (theirs, ours) in enumerate(zip(known, found, strict=True)):
        if theirs != ours:
            raise WeightsError(
                f"class {i} is {theirs!r} in the weights, {ours!r} in the class list of the data; both must list the "
                "same names in the same order: is it the right class list?"
            )


def _require_labels(pixels: NDArray[np.int64], what: str) -> None:
    if not pixels.sum():
        raise DataError(
            f"there is no labelled pixel in the {what} set; are data.ignore and the class list right?"
        )
