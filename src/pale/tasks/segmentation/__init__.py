"""One class a pixel: UperNet on a backbone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, field_validator
from torch import Tensor, nn

from ...data.labelled import cores
from ...data.mask_transforms import MaskAugment, Masked, WholeImages, collate, distort
from ...data.masks import (
    IGNORED,
    ClassList,
    Labels,
    MaskFiles,
    MaskKind,
    MaskSource,
    SceneMasks,
    find_pairs,
    hold_out,
    parse_entry,
    read_entries,
    require_good,
    survey,
)
from ...data.scenes import Scenes
from ...data.transforms import normalise
from ...pale_transformer import VARIANTS
from ...settings import Settings
from ..backbones import STRIDES, DenseModel, maps_of
from ..classification import VAL_SEED
from .inference import Inference
from .loss import Loss, balanced, keep_masks, pixel_loss
from .metric import MeanIoU, overlay, unpack
from .upernet import UperNet


class SegmentationModel(DenseModel):
    """UperNet on a backbone, and what both start from.

    Attributes:
        width: channels of the decode head.
        auxiliary: channels of the auxiliary head; 0 for none.
        dropout: of channels before the classifiers, as mmsegmentation's heads have it.
    """

    width: int = Field(default=512, ge=1)
    auxiliary: int = Field(default=256, ge=0)
    dropout: float = Field(default=0.1, ge=0, lt=1)

    def network(self, classes: int, size: int | tuple[int, int]) -> UperNet:
        """The model with random weights."""
        backbone, channels = maps_of(self, size, "UperNet")
        multiple = 1 if self.name in VARIANTS else STRIDES[-1]
        return UperNet(backbone, channels, classes, self.width, self.auxiliary, multiple)


class MaskData(Settings):
    """Which pictures and masks, and what the masks mean.

    Attributes:
        kind: files, or generated scenes.
        root: what the other paths are under.
        images: folder of pictures; {split} stands for `train` or `val`, without it they are folders inside.
        masks: folder of masks, likewise; a mask has its picture's name.
        train: name of the training split.
        val: name of the validation split.
        lists: a file of names for each split, {split} in it; others are left out. None: the folders say it.
        hold_out: validate on this share of the training set; the folders then have no splits.
        classes: names, or a file of them (`value name r g b` a line; only the name must be there).
        ignore: values in the masks that are no label.
        reduce_zero: 0 is no label, classes count from 1.
        mask_kind: what stands for a class: palette indices and grey values, or colours.
        unlisted: values or colours that are not in the list are an error, or ignored.
        check: look at every mask before training.
        size: scenes: height and width.
        objects: scenes: fewest and most objects.
        samples: scenes: how many to train on.
        val_samples: scenes: how many to validate on.
        workers: processes that read pictures, for each training process.
    """

    kind: Literal["folder", "scenes"] = "folder"
    root: Path | None = None
    images: str | None = None
    masks: str | None = None
    train: str = "train"
    val: str = "val"
    lists: str | None = None
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    classes: str | tuple[str, ...] | None = None
    ignore: tuple[int, ...] = (IGNORED,)
    reduce_zero: bool = False
    mask_kind: MaskKind = "auto"
    unlisted: Literal["error", "ignore"] = "error"
    check: bool = True
    size: int = Field(default=64, ge=16)
    objects: tuple[int, int] = (1, 3)
    samples: int = Field(default=4096, ge=1)
    val_samples: int = Field(default=256, ge=1)
    workers: int = Field(default=4, ge=0)

    @field_validator("classes", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            for name in value:
                if not isinstance(name, str):
                    raise ValueError(
                        f"names are words, got {name!r}; quote them, with the value in front where there is one: "
                        '--data.classes \'["0 sky", "1 road"]\', or give a file'
                    )
        return value

    def class_list(self) -> ClassList:
        """The classes."""
        if self.classes is None:
            raise ValueError(
                "data.classes is not set; give a file with a line `value name r g b` for each class, or "
                "the names: --data.classes '[sky, road, car]'"
            )
        if isinstance(self.classes, str):
            entries = read_entries(self._under(self.classes))
        else:
            entries = [parse_entry(line) for line in self.classes]
        return ClassList(entries, self.ignore, self.reduce_zero, self.unlisted)

    def train_source(self, seed: int, absent: list[str] | None = None) -> MaskSource:
        """Training pictures; `absent` as in `files`."""
        if self.kind == "scenes":
            return SceneMasks(Scenes(self.samples, self.size, seed, self.objects))
        return self._part(self.files(self.train, absent), 0, seed)

    def val_source(self, seed: int, absent: list[str] | None = None) -> MaskSource:
        """Validation pictures, likewise."""
        if self.kind == "scenes":
            return SceneMasks(Scenes(self.val_samples, self.size, VAL_SEED, self.objects))
        split = self.train if self.hold_out else self.val
        return self._part(self.files(split, absent), 1, seed)

    def files(self, split: str, absent: list[str] | None = None) -> MaskFiles:
        """All pictures of a split; those without a mask are an error, or named in `absent` and left out."""
        return MaskFiles(self._pairs(split, absent), self.class_list(), self.mask_kind)

    def _part(self, files: MaskFiles, part: int, seed: int) -> MaskFiles:
        if not self.hold_out:
            return files
        pairs = hold_out(files.pairs, self.hold_out, seed)[part]
        return MaskFiles(pairs, files.classes, files.kind)

    def _pairs(self, split: str, absent: list[str] | None) -> list[tuple[Path, Path]]:
        if self.images is None or self.masks is None:
            raise ValueError(
                "data.images and data.masks are not set; give the folders of pictures and of masks: "
                "--data.images DIR --data.masks DIR"
            )
        if self.root is None and "{split}" in self.images and not Path(self.images).is_absolute():
            raise ValueError(
                f"data.root is not set; give the folder that holds {self.images} and {self.masks}: "
                "--data.root DIR"
            )
        names = self._under(self.lists.replace("{split}", split)) if self.lists else None
        folders = self._folder(self.images, split), self._folder(self.masks, split)
        if not folders[0].is_dir() and (whole := self._under(self.images)).is_dir():
            raise ValueError(
                f"there is no folder {folders[0]} in {whole}; name the splits (data.train, data.val), or have none and "
                "validate on a share: --data.hold_out 0.2 (pale data check: --splits, --hold-out)"
            )
        return find_pairs(*folders, names, absent)

    def _folder(self, pattern: str, split: str) -> Path:
        path = self._under(pattern.replace("{split}", split))
        whole = "{split}" in pattern or self.lists or self.hold_out
        return path if whole else path / split

    def _under(self, path: str) -> Path:
        return Path(path) if self.root is None else self.root / path


class SegmentationTask:
    """The task of the recipes in `recipes.ade20k` and its like."""

    best = "miou"

    def __init__(
        self,
        model: SegmentationModel,
        data: MaskData,
        augment: MaskAugment,
        test: Inference,
        loss: Loss,
        seed: int,
        classes: Sequence[str] | None = None,
    ) -> None:
        """Find the data and, for training, look at every mask.

        Args:
            model: the network.
            data: pictures and masks.
            augment: what training does to them.
            test: how validation images are segmented.
            loss: what is minimised.
            seed: of every draw.
            classes: for evaluation alone: the classes that the weights know; no training set is read.
        """
        self.settings, self.data, self.augment = model, data, augment
        self.test, self.loss_settings, self.seed = test, loss, seed
        self.val_source = data.val_source(seed)
        self.class_list = self.val_source.classes
        self.classes = list(self.class_list.names)
        self.notes: list[str] = []
        self.train_source: MaskSource | None = None
        weights = loss.class_weights
        if isinstance(weights, tuple) and len(weights) != len(self.classes):
            raise ValueError(
                f"loss.class_weights needs one for each of {len(self.classes)} classes, got {len(weights)}"
            )
        if classes is not None:
            _require_same(classes, self.classes)
            return
        self.train_source = data.train_source(seed)
        if data.check and isinstance(self.val_source, MaskFiles):
            seen = survey(self.val_source, cores())
            require_good(seen)
            _require_labels(np.stack([entry.pixels for entry in seen]).sum(0)[:-1], "validation")
            _require_labels(self.pixels, "training")

    @cached_property
    def pixels(self) -> NDArray[np.int64]:
        """Training pixels of each class."""
        assert self.train_source is not None
        seen = survey(self.train_source, cores())
        require_good(seen)
        return np.stack([entry.pixels for entry in seen]).sum(0)[:-1]

    @cached_property
    def class_weights(self) -> Tensor | None:
        """Of the loss."""
        weights = self.loss_settings.class_weights
        if weights == "balanced":
            return torch.tensor(balanced(self.pixels))
        return None if weights is None else torch.tensor(weights)

    def model(self) -> nn.Module:
        """The network."""
        model, self.notes = self.settings.assemble(len(self.classes), self.augment.crop)
        return model

    def train_data(self, device: torch.device) -> Masked:
        """Training crops."""
        assert self.train_source is not None
        return Masked(self.train_source, self.augment, self.seed)

    def val_data(self) -> WholeImages:
        """Validation images as they are."""
        return WholeImages(self.val_source)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Images, masks, distortions, keys."""
        return collate(samples)

    def fetched(self, batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """As it is."""
        return batch

    def prepare(self, batch: dict[str, Any], step: int | None) -> dict[str, Any]:
        """In training: distorted, normalised images and the channels to keep."""
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

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The decode head's loss and a share of the auxiliary one's."""
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
        """The class weights there, copied once: a recorded step must not copy them."""
        weights = self.class_weights
        if weights is None or weights.device == device:
            return weights
        self.class_weights = weights.to(device)
        return self.class_weights

    def metric(self) -> MeanIoU:
        """MIoU, mAcc, aAcc."""
        return MeanIoU(self.classes, self.test)

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
        picture, labels = self.val_source.image(index), self.val_source.mask(index)
        return side_by_side(picture, labels, unpack(entry["prediction"]), self.class_list)


def _require_same(known: Sequence[str], found: Sequence[str]) -> None:
    if len(known) != len(found):
        raise ValueError(
            f"the weights know {len(known)} classes, the data has {len(found)}; is it the right data set?"
        )
    for i, (theirs, ours) in enumerate(zip(known, found, strict=True)):
        if theirs != ours:
            raise ValueError(
                f"class {i} is {theirs!r} for the weights, {ours!r} in the data's list; both must list the same names "
                "in the same order: is it the right class list?"
            )


def _require_labels(pixels: NDArray[np.int64], what: str) -> None:
    if not pixels.sum():
        raise ValueError(
            f"there is no labelled pixel in the {what} set; are data.ignore and the class list right?"
        )


def side_by_side(
    picture: Image.Image, labels: Labels, guesses: Labels, classes: ClassList
) -> Image.Image:
    """Picture, labels over it, prediction over it."""
    w, h = picture.size
    canvas = Image.new("RGB", (3 * w + 8, h), "white")
    canvas.paste(picture, (0, 0))
    canvas.paste(overlay(picture, labels, classes.colours), (w + 4, 0))
    canvas.paste(overlay(picture, guesses, classes.colours), (2 * w + 8, 0))
    return canvas
