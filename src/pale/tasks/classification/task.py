"""Classification: one class for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...core.progress import progress_bar
from ...data.gpu import decode as on_device
from ...data.gpu.augment import augment_batch
from ...data.gpu.plans import ImagePlan, Planner
from ...data.loader import ImageDataset, collate
from ...data.sources.images import ImageSource
from ...data.sources.scenes import SceneImages
from ...data.sources.token_labels import TokenLabelStore
from ...data.sources.words import name_classes
from ...data.transforms.images import Augment, eval_transform, normalise, to_tensor, train_transform
from ...data.transforms.mixing import Mix, Mixer, TokenMixer
from ...errors import DataError, SettingsError
from ...model.pale_transformer import VARIANTS
from ..base import Batch, Evaluated, Metric, Task, paper_note
from ..pipeline import Pipeline
from ..prediction import Json
from .data import Data
from .inference import ClassificationPipeline
from .loss import TokenLabels, blocks, classification_loss, dense_targets, token_loss
from .metric import TopK
from .model import Model


class ClassificationTask(Task):
    """The task of the recipes in `recipes.imagenet` and others."""

    kind: ClassVar[str] = "classification"
    best: ClassVar[str] = "top1"
    headline: ClassVar[Mapping[str, str]] = {"top1": "top-1"}
    scores: ClassVar[tuple[str, ...]] = ("top1", "top5")
    titles: ClassVar[Mapping[str, str]] = {
        "top1": "top-1, %",
        "top5": "top-5, %",
        "accuracy": "accuracy, %",
        "precision": "precision, %",
    }
    class_score: ClassVar[str] = "accuracy"
    pipeline: ClassVar[type[Pipeline]] = ClassificationPipeline

    train_source: ImageSource | None
    val_source: ImageSource

    def __init__(
        self,
        model: Model,
        data: Data,
        augment: Augment,
        mix: Mix,
        seed: int,
        classes: Sequence[str] | None = None,
        token_labels: TokenLabels | None = None,
    ) -> None:
        """Find the data.

        Args:
            model: the network.
            data: the dataset.
            augment: augmentation of training images.
            mix: mixing of training images.
            seed: seed of every random draw.
            classes: classes of the weights, for evaluation without a training set.
            token_labels: dense labels, and the weight of their loss.
        """
        self.settings, self.data, self.augment, self.mix = model, data, augment, mix
        self.seed = seed
        self.train_source = None
        if classes is None:
            data.read_words()  # an unreadable list is an error now, not in the report at the end
        self.classes: list[str] = []
        self.val_source = self._open_data(classes)
        sources = (self.train_source, self.val_source)
        found = [note for source in sources for note in getattr(source, "notes", ())]
        self.notes = list(dict.fromkeys([*self.notes, *found]))
        self.mixer = Mixer(mix, len(self.classes), seed)
        self.token_mixer = TokenMixer(mix, len(self.classes), seed)
        self.token_labels = token_labels or TokenLabels()
        self.store: TokenLabelStore | None = None
        self.tokens = False  # train with MixToken or token labels
        self.maps: list[tuple[int, int]] = []
        # All training images, if the device keeps them.
        self.decoded: on_device.DecodedImages | None = None
        if self.train_source is not None and (mix.tokens or self.token_labels.store is not None):
            self._begin_tokens(self.train_source)

    def _open_data(self, classes: Sequence[str] | None) -> ImageSource:
        """Set `train_source`, unless `classes` are given, and `classes`; return the validation images."""
        if classes is None:
            self.train_source = self.data.train_source(self.seed)
            classes = self.train_source.classes
            self._require_two(classes)
        self.classes = list(classes)
        return self.data.val_source(self.seed, self.classes)

    def _require_two(self, classes: Sequence[str]) -> None:
        """Raise `DataError` for a single class; name the likely cause, a folder above those of the classes."""
        if len(classes) > 1:
            return
        data, hint = self.data, ""
        if data.kind == "folder" and data.root is not None:
            folder = data.root / data.train / classes[0]
            if folder.is_dir() and any(each.is_dir() for each in folder.iterdir()):
                hint = f"; if the folders in {folder} are the classes, use --data.root {folder}"
        raise DataError(
            f"{data.root} holds images of one class, {classes[0]}, and a classifier needs at least two{hint}"
        )

    def _begin_tokens(self, source: ImageSource) -> None:
        """Open the token label store, and check the settings of MixToken and token labels."""
        self.tokens = True
        if self.data.sizes:
            raise SettingsError(
                "MixToken and token labels need one image size, got data.sizes; set mix.tokens to 0 and "
                "token_labels.store to null, or remove data.sizes"
            )
        if self.settings.name not in VARIANTS:
            raise SettingsError(
                f"MixToken and token labels need one of {', '.join(VARIANTS)}, got {self.settings.name}; "
                "set mix.tokens to 0 and token_labels.store to null for other models"
            )
        if self.token_labels.store is None:
            return
        if self.mix.on:
            raise SettingsError(
                f"token labels can be combined only with MixToken, got mix.mixup={self.mix.mixup:g} and "
                f"mix.cutmix={self.mix.cutmix:g}; set both to 0, and mix.tokens to 1 for MixToken"
            )
        if (self.augment.auto or "").startswith("augmix"):
            raise SettingsError(
                "token labels cannot follow AugMix, which blends several transformed copies of an image; "
                f"use RandAugment or AutoAugment, got augment.auto={self.augment.auto!r}"
            )
        self.store = TokenLabelStore(self.token_labels.store, source)

    def model(self) -> nn.Module:
        """Build the network."""
        size = self.data.size
        if not self.tokens:
            return self.settings.build(len(self.classes), size)
        model = self.settings.build_token_transformer(len(self.classes), size)
        self.maps = model.config.maps(size, size)
        return model

    def train_data(self, device: torch.device) -> ImageDataset | on_device.PlannedDataset:
        """Return augmented training images, with their token labels if there is a store."""
        assert self.train_source is not None
        source, labels = self.train_source, self.store.labels if self.store is not None else None
        if (planner := self._planner(device)) is not None:
            if self.data.on_device == "pictures":  # kept name
                self.decoded = on_device.DecodedImages(
                    source, self.data.workers, track=progress_bar
                )
            sizes = None if self.decoded is None else self.decoded.sizes
            return on_device.PlannedDataset(source, planner, self.seed, sizes, labels)
        return ImageDataset(
            source, train_transform(self.data.size, self.augment), self.seed, labels
        )

    def phases(self, steps: int) -> Sequence[int]:
        """Return the steps at which the image size changes."""
        return [first for first, _ in self.data.phases(steps)]

    def phase_data(self, data: Dataset[Any], step: int, steps: int) -> Dataset[Any]:
        """Return the training set with images of the size of a step."""
        if not self.data.sizes:
            return data
        size = [size for first, size in self.data.phases(steps) if first <= step][-1]
        changed = copy(data)
        if isinstance(changed, on_device.PlannedDataset):
            changed.planner = Planner(size, self.augment)
        elif isinstance(changed, ImageDataset):
            changed.transform = train_transform(size, self.augment)
        return changed

    def _planner(self, device: torch.device) -> Planner | None:
        """Return the planner for augmentation on the device; None if workers augment."""
        assert self.train_source is not None
        work = self.data.on_device
        if work == "nothing" or (
            work == "auto" and not on_device.can_decode(self.train_source, device)
        ):
            return None
        try:
            return Planner(self.data.size, self.augment)
        except ValueError:  # an augmentation that only workers can compute
            if work != "auto":
                raise
            return None

    def val_data(self) -> ImageDataset:
        """Return the centre crops of resized validation images."""
        transform = eval_transform(self.data.size, self.data.crop, self.augment.interpolation)
        return ImageDataset(self.val_source, transform, self.seed)

    def collate(self, samples: list[Any]) -> Batch:
        """Return images (or plans for them), labels and keys."""
        planned = isinstance(samples[0][0], ImagePlan)
        return on_device.collate(samples) if planned else collate(samples)

    def fetched(self, batch: Batch, device: torch.device) -> Batch:
        """Decode the files of a batch, so that a damaged file is found before a step begins."""
        if "files" not in batch:
            return batch
        source, samples = self.train_source, batch["keys"][:, 1].tolist()
        assert source is not None
        files: on_device.EncodedBatch = batch["files"]
        pixels = files.decode(device, lambda i: to_tensor(source.image(samples[i])))
        return {name: value for name, value in batch.items() if name != "files"} | {
            "pixels": pixels
        }

    def prepare(self, batch: Batch, step: int | None) -> Batch:
        """Normalise the images; in training mix them, with soft labels as "targets".

        MixToken leaves the images as they are: the model mixes tokens by "token_mask". The labels of the
        tokens are mixed in the same way, as "token_targets". The reference implementation moves the outputs back
        instead, which gives the same sum.
        """
        if (plan := batch.pop("plan", None)) is not None:
            pixels = batch.pop("pixels", None) or self._kept(plan.ints.device)
            batch["images"] = augment_batch(pixels, plan, plan.side)
        return batch | self._prepare_images(normalise(batch["images"]), batch, step)

    def _prepare_images(self, images: Tensor, batch: Batch, step: int | None) -> Batch:
        """Return normalised images, mixed in training, and their targets."""
        if step is None:
            return {"images": images}
        if self.tokens:
            return {"images": images} | self._prepare_tokens(batch, step)
        images, targets = self.mixer(images, batch["labels"], step)
        return {"images": images, "targets": targets}

    def _kept(self, device: torch.device) -> on_device.PackedImages:
        assert self.decoded is not None
        return self.decoded.to(device)

    def _prepare_tokens(self, batch: Batch, step: int) -> Batch:
        labels: Tensor = batch["labels"]
        first, last = self.maps[0], self.maps[-1]
        cells = self.token_mixer.cells(last, step)
        prepared = {"targets": self.token_mixer.targets(labels, cells)}
        cells = cells.to(labels.device)
        prepared["token_mask"] = blocks(cells, first, 2 ** (len(self.maps) - 1))
        if self.store is not None:
            n, smoothing = len(self.classes), self.mix.smoothing
            dense = dense_targets(
                batch["token_scores"], batch["token_classes"], batch["places"], last, n
            )
            dense = (1 - smoothing) * dense + smoothing / n
            prepared["token_targets"] = torch.where(cells[..., None], dense.flip(0), dense)
        return prepared

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy with the soft labels; with token labels plus `weight` times that of the tokens."""
        if not self.tokens:
            return classification_loss(model(batch["images"]), batch["targets"])
        logits, dense = model(batch["images"], batch["token_mask"])
        loss = classification_loss(logits, batch["targets"])
        if self.store is None:
            return loss
        return loss + self.token_labels.weight * token_loss(dense, batch["token_targets"])

    def metric(self, protocol: str = "") -> Metric:
        """Return a metric of top-1, top-5 and the loss."""
        return TopK(self.classes)

    def val_image(self, index: int) -> Image.Image:
        """Return the image before any transform."""
        return self.val_source.image(index)

    @classmethod
    def readable_names(cls, recipe: Any, classes: Sequence[str]) -> Sequence[str]:
        """Return the names of WordNet ids from the word list of the data; other names do not change."""
        return name_classes(classes, recipe.data.read_words())

    def class_counts(self) -> Mapping[str, int]:
        """Return the number of training images of each class."""
        generated = isinstance(self.train_source, SceneImages)
        if self.train_source is None or generated or self.data.is_mixture:
            return {}
        counts = np.bincount(np.asarray(self.train_source.labels), minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))

    def summary(self, found: Evaluated) -> str:
        """Return accuracies and loss."""
        figures = found.figures
        return (
            f"top-1 {figures['top1']:.2f} %{paper_note(found, 'top1')}, top-5 {figures['top5']:.2f} %, "
            f"loss {figures['loss']:.4f}, {figures['images']:.0f} images"
        )

    def as_json(self, found: Sequence[Evaluated]) -> Json:
        """Return the figures, and the paper's top-1."""
        return found[0].figures | {"paper_top1": found[0].paper.get("top1")}
