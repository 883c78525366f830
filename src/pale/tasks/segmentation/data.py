"""Settings of images with masks: location, format and classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from ...core.settings import MAX_SIZE, Settings
from ...data.sources.class_list import IGNORED, ClassList, parse_entry, read_entries
from ...data.sources.holding import HoldOutBy, hold_out
from ...data.sources.masks import MaskFiles, MaskKind, MaskSource, SceneMasks, find_pairs
from ...data.sources.paths import require_root
from ...data.sources.scenes import Scenes
from ...data.sources.voc import VocMasks, mask_entries, mask_pairs
from ...data.sources.yolo import YoloDataset, YoloMasks, yolo_class_list
from ...errors import DataError, SettingsError
from ..base import VAL_SEED


class MaskData(Settings):
    """Settings of the dataset.

    Attributes:
        kind: folders of masks, YOLO's polygons, Pascal VOC's masks, or generated scenes.
        root: folder that the other paths are relative to; for YOLO, its data.yaml is also accepted.
        images: folder of images; {split} stands for `train` or `val`; without it the splits are folders inside.
        masks: folder of masks, in the same structure; a mask has the name of its image.
        train: name of the training split.
        val: name of the validation split.
        lists: a file of image names for each split, {split} in it; other images are left out. None: all images.
        hold_out: validate on this share of the training set, without folders of splits.
        hold_out_by: by the sorted list of files ("order") or by file name and seed ("name").
        classes: names, or a file with a line `value name r g b` for each; all but the name are optional.
        ignore: values in the masks that are not a label.
        reduce_zero: 0 is not a label, classes count from 1.
        mask_kind: whether classes are palette indices and grey values, or colours.
        unlisted: whether values or colours that are not in the list are an error or ignored.
        check: read every mask before training.
        unreadable: whether images or masks that cannot be read are an error, or are left out if `check` finds them.
        size: scenes: height and width.
        objects: scenes: minimum and maximum number of objects.
        samples: scenes: number generated for training.
        val_samples: scenes: number generated for validation.
        workers: processes that read images, for each training process.
    """

    kind: Literal["folder", "yolo", "voc", "scenes"] = "folder"
    root: Path | None = None
    images: str | None = None
    masks: str | None = None
    train: str = "train"
    val: str = "val"
    lists: str | None = None
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    hold_out_by: HoldOutBy = "order"
    classes: str | tuple[str, ...] | None = None
    ignore: tuple[int, ...] = (IGNORED,)
    reduce_zero: bool = False
    mask_kind: MaskKind = "auto"
    unlisted: Literal["error", "ignore"] = "error"
    check: bool = True
    unreadable: Literal["error", "skip"] = "error"
    size: int = Field(default=64, ge=16, le=MAX_SIZE)
    objects: tuple[int, int] = (1, 3)
    samples: int = Field(default=4096, ge=1)
    val_samples: int = Field(default=256, ge=1)
    workers: int = Field(default=4, ge=0)

    @field_validator("classes", mode="before")
    @classmethod
    def _words(cls, value: object) -> Any:
        if isinstance(value, list | tuple):
            for name in value:
                if not isinstance(name, str):
                    raise ValueError(
                        f"names must be strings, got {name!r}; quote them, after the value if there is one: "
                        '--data.classes \'["0 sky", "1 road"]\', or give a file'
                    )
        return value

    def class_list(self) -> ClassList:
        """Return the classes."""
        if self.kind == "yolo":
            return yolo_class_list(YoloDataset(require_root(self.root)))
        if self.kind == "voc" and self.classes is None:
            entries = mask_entries(require_root(self.root))
            return ClassList(entries, self.ignore, self.reduce_zero, self.unlisted)
        if self.classes is None:
            raise SettingsError(
                "data.classes is not set; give a file with a line `value name r g b` for each class, or "
                "the names: --data.classes '[sky, road, car]'"
            )
        if isinstance(self.classes, str):
            entries = read_entries(self._under(self.classes))
        else:
            entries = [parse_entry(line) for line in self.classes]
        return ClassList(entries, self.ignore, self.reduce_zero, self.unlisted)

    def train_source(self, seed: int, absent: list[str] | None = None) -> MaskSource:
        """Return the training images; `absent` as in `files`."""
        if self.kind == "scenes":
            return SceneMasks(Scenes(self.samples, self.size, seed, self.objects))
        return self._part(self.files(self.train, absent), 0, seed)

    def val_source(self, seed: int, absent: list[str] | None = None) -> MaskSource:
        """Return the validation images; `absent` as in `files`."""
        if self.kind == "scenes":
            return SceneMasks(Scenes(self.val_samples, self.size, VAL_SEED, self.objects))
        split = self.train if self.hold_out else self.val
        return self._part(self.files(split, absent), 1, seed)

    def files(self, split: str, absent: list[str] | None = None) -> MaskFiles:
        """Return all images of a split; those without a mask are an error, or are left out and added to `absent`."""
        if self.kind == "yolo":
            return YoloMasks(require_root(self.root), split, self.hold_out > 0)
        if self.kind == "voc":
            pairs = mask_pairs(require_root(self.root), split, self.hold_out > 0, absent)
            return VocMasks(pairs, self.class_list(), self.mask_kind)
        return MaskFiles(self._pairs(split, absent), self.class_list(), self.mask_kind)

    def _part(self, files: MaskFiles, part: int, seed: int) -> MaskFiles:
        if not self.hold_out:
            return files
        pairs = files.pairs
        parts = hold_out(
            len(pairs), lambda i: str(pairs[i][0]), self.hold_out, seed, self.hold_out_by
        )
        return files.with_pairs([pairs[i] for i in parts[part]])

    def _pairs(self, split: str, absent: list[str] | None) -> list[tuple[Path, Path]]:
        if self.images is None or self.masks is None:
            raise SettingsError(
                "data.images and data.masks are not set; give the folders of images and of masks: "
                "--data.images DIR --data.masks DIR"
            )
        if self.root is None and "{split}" in self.images and not Path(self.images).is_absolute():
            raise SettingsError(
                f"data.root is not set; give the folder that holds {self.images} and {self.masks}: "
                "--data.root DIR"
            )
        names = self._under(self.lists.replace("{split}", split)) if self.lists else None
        folders = self._folder(self.images, split), self._folder(self.masks, split)
        if not folders[0].is_dir() and (whole := self._under(self.images)).is_dir():
            raise DataError(
                f"there is no folder {folders[0]} in {whole}; name the splits (data.train, data.val), or validate on a "
                "share of all images: --data.hold_out 0.2 (pale data check: --splits, --hold-out)"
            )
        return find_pairs(*folders, names, absent)

    def _folder(self, pattern: str, split: str) -> Path:
        path = self._under(pattern.replace("{split}", split))
        whole = "{split}" in pattern or self.lists or self.hold_out
        return path if whole else path / split

    def _under(self, path: str) -> Path:
        return Path(path) if self.root is None else self.root / path
