"""Boxes, classes and shapes of objects: Mask R-CNN on a backbone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from ... import weights as weight_files
from ...data import rle
from ...data.coco import CocoFiles, require_pictures
from ...data.draws import number
from ...data.instance_transforms import InstanceAugment, Objects, WholeImages, collate
from ...data.instances import (
    InstanceSource,
    PetSilhouettes,
    SceneInstances,
    Subset,
    has_objects,
    with_objects,
)
from ...data.labelled import cores
from ...data.mask_transforms import distort
from ...data.scenes import CLASSES as SHAPES
from ...data.scenes import Scenes
from ...data.transforms import normalise
from ...settings import Settings
from ..backbones import DenseModel
from ..classification import VAL_SEED
from .drawing import overlay, side_by_side
from .mask_rcnn import Heads, MaskRCNN
from .metric import AveragePrecision
from .pyramid import FeaturePyramid, feature_pyramid, pyramid_of

__all__ = [
    "DetectionModel",
    "DetectionTask",
    "FeaturePyramid",
    "Heads",
    "InstanceData",
    "MaskRCNN",
    "Testing",
    "feature_pyramid",
    "overlay",
    "weight_files",
]


class DetectionModel(DenseModel):
    """Mask R-CNN on a backbone, and what both start from.

    Attributes:
        heads: sizes of the heads.
    """

    heads: Heads = Heads()

    def network(self, classes: int, size: int | tuple[int, int]) -> MaskRCNN:
        """The model with random weights."""
        return MaskRCNN(pyramid_of(self, size, self.heads.width), classes, self.heads)


class Testing(Settings):
    """How objects are looked for; the defaults are the paper's, mmdetection's.

    Attributes:
        short: the short side is brought to this; none: it stays.
        long: unless the long side would exceed this.
        score: least score of a detection.
        nms: greatest overlap (IoU) of two detections of a class.
        most: detections of an image.
    """

    short: int | None = Field(default=800, ge=16)
    long: int | None = Field(default=1333, ge=16)
    score: float = Field(default=0.05, ge=0, le=1)
    nms: float = Field(default=0.5, gt=0, le=1)
    most: int = Field(default=100, ge=1)


class InstanceData(Settings):
    """Which pictures and objects.

    Attributes:
        kind: COCO's json, silhouettes of Oxford-IIIT Pet, or generated scenes.
        root: what the other paths are under.
        images: folder of pictures; {split} stands for `train` or `val`.
        annotations: the json, likewise.
        train: name of the training split.
        val: name of the validation split.
        hold_out: validate on this share of the training set; there is one json then.
        keep_empty: learn from pictures without objects too; mmdetection leaves them out.
        limit: use the first so many pictures of each split.
        check: look for every picture before training.
        size: scenes: height and width.
        objects: scenes: fewest and most objects.
        shapes: scenes: which shapes, which are the classes.
        samples: scenes: how many to train on.
        val_samples: scenes: how many to validate on.
        workers: processes that read pictures, for each training process.
    """

    kind: Literal["coco", "pets", "scenes"] = "coco"
    root: Path | None = None
    images: str | None = "{split}"
    annotations: str | None = "annotations/instances_{split}.json"
    train: str = "train2017"
    val: str = "val2017"
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    keep_empty: bool = False
    limit: int | None = Field(default=None, ge=1)
    check: bool = True
    size: int = Field(default=96, ge=16)
    objects: tuple[int, int] = (1, 3)
    shapes: tuple[str, ...] = SHAPES
    samples: int = Field(default=4096, ge=1)
    val_samples: int = Field(default=256, ge=1)
    workers: int = Field(default=4, ge=0)

    def train_source(self, seed: int) -> InstanceSource:
        """Training pictures."""
        if self.kind == "scenes":
            return SceneInstances(Scenes(self.samples, self.size, seed, self.objects, self.shapes))
        if not self.hold_out:
            return self._limited(self._source(self.train, None, self.keep_empty))
        source = self._source(self.train, None, True)
        source = Subset(source, self._parts(len(source), seed)[0])
        return self._limited(source if self.keep_empty else with_objects(source))

    def val_source(self, seed: int, classes: Sequence[str] | None = None) -> InstanceSource:
        """Validation pictures, those without objects among them; `classes` must be theirs."""
        if self.kind == "scenes":
            scenes = Scenes(self.val_samples, self.size, VAL_SEED, self.objects, self.shapes)
            return SceneInstances(scenes)
        if self.hold_out:
            source = self._source(self.train, classes, True)
            return self._limited(Subset(source, self._parts(len(source), seed)[1]))
        return self._limited(self._source(self.val, classes, True))

    def _source(
        self, split: str, classes: Sequence[str] | None, keep_empty: bool
    ) -> InstanceSource:
        if self.kind == "pets":
            return PetSilhouettes(self._root(), split, keep_empty)
        if self.images is None or self.annotations is None:
            raise ValueError(
                "data.images and data.annotations are not set; give the folder of pictures and COCO's json: "
                "--data.images DIR --data.annotations FILE"
            )
        if "{split}" not in self.annotations and not self.hold_out:
            raise ValueError(
                f"data.annotations is one file, {self.annotations}: say where the splits are with {{split}} in "
                "it, or validate on a share of it: --data.hold_out 0.2"
            )
        path = self._under(self.annotations.replace("{split}", split))
        folder = self._under(self.images.replace("{split}", split))
        return CocoFiles(path, folder, classes, keep_empty)

    def _limited(self, source: InstanceSource) -> InstanceSource:
        if self.limit is None or self.limit >= len(source):
            return source
        return Subset(source, range(self.limit))

    def _parts(self, count: int, seed: int) -> tuple[list[int], list[int]]:
        held = round(self.hold_out * count)
        if not 0 < held < count:
            raise ValueError(
                f"a hold-out share of {self.hold_out} of {count} images leaves one side empty; choose another"
            )
        order = np.random.default_rng(seed).permutation(count).tolist()
        return sorted(order[held:]), sorted(order[:held])

    def _root(self) -> Path:
        if self.root is None:
            raise ValueError("data.root is not set; give the folder of the data: --data.root DIR")
        return self.root

    def _under(self, path: str) -> Path:
        return Path(path) if Path(path).is_absolute() else self._root() / path


class DetectionTask:
    """The task of the recipes in `recipes.coco` and its like."""

    best = "box_ap"

    def __init__(
        self,
        model: DetectionModel,
        data: InstanceData,
        augment: InstanceAugment,
        test: Testing,
        seed: int,
        classes: Sequence[str] | None = None,
    ) -> None:
        """Find the data and, for training, every picture.

        Args:
            model: the network.
            data: pictures and objects.
            augment: what training does to them.
            test: how objects are looked for.
            seed: of every draw.
            classes: for evaluation alone: the classes that the weights know; no training set is read.
        """
        rle.codec()  # says what to install
        self.settings, self.data, self.augment = model, data, augment
        self.test, self.seed = test, seed
        self.masks = model.heads.masks
        self.notes: list[str] = []
        self.train_source: InstanceSource | None = None
        if classes is None:
            self.train_source = data.train_source(seed)
            classes = self.train_source.classes
        self.classes = list(classes)
        self.val_source = data.val_source(seed)
        found = self.val_source.classes
        if found != self.classes:
            raise ValueError(
                f"the validation set has {len(found)} classes ({', '.join(found[:4])}, ...), expected are "
                f"{len(self.classes)} ({', '.join(self.classes[:4])}, ...); is it the right data set?"
            )
        sources = [s for s in (self.train_source, self.val_source) if s is not None]
        for source in sources:
            if self.masks and not source.shaped:
                raise ValueError(
                    "some objects have no shape (segmentation), so masks cannot be learned or measured; "
                    "for boxes alone set model.heads.masks=false"
                )
            if data.check:
                require_pictures(source, cores())
        if not any(has_objects(self.val_source, i) for i in range(len(self.val_source))):
            raise ValueError(
                f"there is no object in the {len(self.val_source)} pictures of the validation set, so nothing can "
                "be measured; are its annotations right?"
            )

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """0 for upright training pictures, 1 for wide ones: batches of one kind are padded less."""
        assert self.train_source is not None
        sizes = [self.train_source.size(i) for i in range(len(self.train_source))]
        return np.array([w >= h for h, w in sizes], np.int64)

    def model(self) -> nn.Module:
        """The network."""
        size = self.augment.crop or self.augment.short or self.data.size
        model, notes = self.settings.assemble(len(self.classes), size)
        model.limits(self.test.score, self.test.nms, self.test.most)
        read = [*(self.train_source.notes if self.train_source else ()), *self.val_source.notes]
        self.notes = [*notes, *dict.fromkeys(read)]  # with hold_out both are of one file
        return model

    def train_data(self, device: torch.device) -> Objects:
        """Training pictures, augmented."""
        assert self.train_source is not None
        return Objects(self.train_source, self.augment, self.seed, self.masks)

    def val_data(self) -> WholeImages:
        """Validation pictures at the size of testing."""
        return WholeImages(self.val_source, self.test.short, self.test.long)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Padded images, objects, keys."""
        return collate(samples)

    def fetched(self, batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """As it is."""
        return batch

    def prepare(self, batch: dict[str, Any], step: int | None) -> dict[str, Any]:
        """Normalised images, zero where they are padded; in training the targets of each."""
        images = batch["images"]
        if step is not None and self.augment.distort:
            images = distort(images, batch["draws"])
        images = framed(normalise(images), batch["sizes"])
        if step is None:
            return batch | {"images": images}
        if frame := self.augment.crop_size:  # all batches of one size
            h, w = images.shape[-2:]
            images = F.pad(images, (0, frame[1] - w, 0, frame[0] - h))
        parts = [batch[k].split(batch["counts"]) for k in ("boxes", "labels")]
        masks = batch["masks"].split(batch["counts"]) if self.masks else None
        targets: list[dict[str, Any]] = []
        for i, key in enumerate(batch["keys"].tolist()):
            target = {
                "boxes": parts[0][i],
                "labels": parts[1][i] + 1,
                "seed": number(self.seed, *key),
            }
            targets.append(target if masks is None else target | {"masks": masks[i]})
        return batch | {"images": images, "targets": targets}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The sum of the losses of proposals, classes, boxes and masks."""
        losses = model(ImageList(batch["images"], batch["sizes"]), batch["targets"])
        total: Tensor = sum(losses.values())
        return total

    def metric(self) -> AveragePrecision:
        """COCO's average precision."""
        source = self.val_source
        return AveragePrecision(self.classes, source.categories, self.masks, source.image_id)

    def val_picture(self, index: int) -> Image.Image:
        """The picture."""
        return self.val_source.image(index)

    def sample_name(self, index: int) -> str:
        """The file."""
        assert self.train_source is not None
        return self.train_source.name(index)

    def val_name(self, index: int) -> str:
        """The file of a validation picture."""
        return self.val_source.name(index)

    def panel(self, entry: dict[str, Any]) -> Image.Image:
        """For the report: picture, labels and prediction side by side."""
        index = entry["index"]
        source = self.val_source
        own = source.instances(index).annotations(0, source.categories)
        return side_by_side(
            source.image(index), own, entry["detections"], self.classes, source.categories
        )


def framed(images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Images (b, 3, h, w), zero where they are padding."""
    ends = torch.tensor(sizes).to(images.device, non_blocking=True)
    rows, columns = (
        torch.arange(images.shape[axis], device=images.device) < ends[:, axis - 2, None]
        for axis in (2, 3)
    )
    return images * (rows[:, None, :, None] & columns[:, None, None])
