"""Classification on several datasets at once, and on datasets with tags (multi-label).

There is one classifier over the joint classes of all sources, so a trained model is a plain classifier for `Predictor`,
export and timm. The loss of an image is over the classes of its own source: softmax and cross-entropy for images with
one class, sigmoid and binary cross-entropy for images with tags. An image contributes no loss for classes of other
sources, because it may show them without being labelled.

A mixed image has the loss share * L(own labels, own source) + (1 - share) * L(labels and source of its partner). Both
losses are linear in the labels, so within one source this is Mixup and CutMix with mixed labels as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...core.console import Table
from ...core.settings import vary
from ...data.sources.images import ImageSource
from ...data.sources.mixture import Mixture
from ...data.stream import Part
from ...data.transforms.mixing import Mixer
from ...errors import SettingsError
from ..base import Batch, Evaluated
from ..prediction import Json
from .loss import SourceClasses, mixture_loss, smooth_targets
from .metric import SourceMetric
from .mixture_data import train_mixture, val_mixture
from .task import ClassificationTask


class LabelTables:
    """Classes and sources of the images of a mixture, as tables on a device.

    Args:
        source: the images.
    """

    def __init__(self, source: Mixture) -> None:
        self.count = len(source.classes)
        self.classes = torch.from_numpy(source.class_table())
        members = source.member_table()
        self.sources = torch.from_numpy(members)
        masks = torch.zeros(len(source.members), self.count, dtype=torch.bool)
        for mask, numbers in zip(masks, source.numbers, strict=True):
            mask[torch.from_numpy(numbers)] = True
        multi = torch.tensor([member.multi for member in source.members])
        labels = (self.classes < self.count).sum(1).numpy()
        mean = np.bincount(members, labels) / np.bincount(members)
        scale = torch.from_numpy(1 / np.maximum(mean, 1)).float()
        self.known = SourceClasses(masks, multi, scale)

    def to(self, device: torch.device) -> LabelTables:
        """Move the tables to a device, where they stay."""
        if self.classes.device != device:
            self.classes, self.sources = self.classes.to(device), self.sources.to(device)
            self.known = self.known.to(device)
        return self

    def targets(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels (b, classes), 0 or 1, and sources (b,) of the images with these indices."""
        targets = torch.zeros(len(rows), self.count + 1, device=rows.device)
        targets.scatter_(1, self.classes[rows].long(), 1.0)  # the last column is for padding
        return targets[:, :-1].contiguous(), self.sources[rows]


class MixtureTask(ClassificationTask):
    """The task of recipes with `data.mix` or `data.labels=multi`."""

    best: ClassVar[str] = "score"
    headline: ClassVar[Mapping[str, str]] = {"score": "mean score"}
    scores: ClassVar[tuple[str, ...]] = ("score",)
    titles: ClassVar[Mapping[str, str]] = {
        "class": "source",
        "score": "score, %",
        "top1": "top-1, %",
        "top5": "top-5, %",
        "map": "mAP, %",
    }
    class_score: ClassVar[str] = "score"

    train_source: Mixture | None
    val_source: Mixture

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Two classes, for an image and its partner: their mixed labels are the shares of the two.
        self.mixer = Mixer(vary(self.mix, smoothing=0.0), 2, self.seed)

    def _open_data(self, classes: Sequence[str] | None) -> ImageSource:
        train = None
        if classes is None:
            train = self.train_source = train_mixture(self.data, self.seed)
            classes = train.classes
            self.notes = [self._describe(train)]
        self.classes = list(classes)
        return val_mixture(self.data, self.seed, train, self.classes)

    def _describe(self, train: Mixture) -> str:
        total = sum(part.quota for part in train.parts)
        each = [
            f"{m.name} {part.samples} images, {len(m.source.classes)} {'tags' if m.multi else 'classes'}, "
            f"{100 * part.quota / total:.1f} %"
            for m, part in zip(train.members, train.parts, strict=True)
        ]
        return f"sources and their shares of an epoch of {total} samples: {'; '.join(each)}"

    def _begin_tokens(self, source: ImageSource) -> None:
        raise SettingsError(
            "MixToken and token labels need one dataset with one class for each image; set mix.tokens to 0 and "
            "token_labels.store to null, or remove data.mix and data.labels"
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources, with the number of images per epoch of each."""
        assert self.train_source is not None
        return self.train_source.parts

    @cached_property
    def train_tables(self) -> LabelTables:
        """Labels of the training images."""
        assert self.train_source is not None
        return LabelTables(self.train_source)

    @cached_property
    def val_tables(self) -> LabelTables:
        """Labels of the validation images."""
        return LabelTables(self.val_source)

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes only read and collate; tables on a GPU cannot be sent to them.
        left_out = ("train_tables", "val_tables", "decoded")
        return {name: v for name, v in self.__dict__.items() if name not in left_out}

    def _prepare_images(self, images: Tensor, batch: Batch, step: int | None) -> Batch:
        tables = (self.val_tables if step is None else self.train_tables).to(images.device)
        targets, sources = tables.targets(batch["labels"])
        found = {"images": images, "targets": targets, "sources": sources}
        if step is None:
            return found
        found["targets"] = smooth_targets(targets, sources, tables.known, self.mix.smoothing)
        if self.mix.on:
            half = len(images) // 2
            sides = torch.arange(len(images), device=images.device) >= half
            found["images"], shares = self.mixer(images, sides.long(), step)
            found["share"] = shares[0, 0]
        return found

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss; see the module."""
        logits, known = model(batch["images"]), self.train_tables.known
        targets, sources = batch["targets"], batch["sources"]
        own = mixture_loss(logits, targets, sources, known).mean()
        if "share" not in batch:
            return own
        other = mixture_loss(logits, targets.flip(0), sources.flip(0), known).mean()
        share: Tensor = batch["share"]
        return share * own + (1 - share) * other

    def metric(self, protocol: str = "") -> SourceMetric:
        """Return a metric of the accuracies of all sources."""
        return SourceMetric(self.val_source, self.val_tables.known)

    def described(self) -> Json:
        """Return the number of tags among the classes, and the sources."""
        assert self.train_source is not None
        names = [[m.name, len(m.source)] for m in self.train_source.members]
        return {"tags": self.train_source.tags, "sources": names}

    def summary(self, found: Evaluated) -> str:
        """Return the mean score and the loss."""
        figures = found.figures
        return (
            f"mean score {figures['score']:.2f} %, loss {figures['loss']:.4f}, {figures['images']:.0f} images of "
            f"{len(self.val_source.members)} sources"
        )

    def as_json(self, found: Sequence[Evaluated]) -> Json:
        """Return the figures."""
        return dict(found[0].figures)

    def tables(self, found: Sequence[Evaluated]) -> list[Table]:
        """Return a row for each source."""
        table = Table("source", "images", "loss", "top-1", "top-5", "mAP")
        for row in found[0].metric.details()["per_class"]:
            cells = ["" if row[n] is None else f"{row[n]:.2f}" for n in ("top1", "top5", "map")]
            table.add_row(row["class"], f"{row['images']:.0f}", f"{row['loss']:.4f}", *cells)
        return [table]
