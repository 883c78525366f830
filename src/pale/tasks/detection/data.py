"""Settings of images with objects: location and format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...core.settings import MAX_SIZE, Settings
from ...data.sources.coco import CocoFiles
from ...data.sources.holding import HoldOutBy, hold_out
from ...data.sources.instances import (
    InstanceSource,
    InstanceSubset,
    PetSilhouettes,
    SceneInstances,
    with_objects,
)
from ...data.sources.label_formats import detect_format, read_labels
from ...data.sources.paths import require_root
from ...data.sources.scenes import CLASSES as SHAPES
from ...data.sources.scenes import Scenes
from ...errors import DataError, SettingsError
from ..base import VAL_SEED


class InstanceData(Settings):
    """Settings of the dataset.

    Attributes:
        kind: COCO's JSON, YOLO's or Pascal VOC's labels, silhouettes of Oxford-IIIT Pet, or generated scenes.
        root: folder that the other paths are relative to; for YOLO, its data.yaml is also accepted.
        images: folder of images; {split} stands for `train` or `val`.
        annotations: the JSON file; {split} as in `images`.
        train: name of the training split.
        val: name of the validation split.
        hold_out: validate on this share of the training set, with a single JSON file.
        hold_out_by: by the order in the file ("order") or by file name and seed ("name").
        keep_empty: train on images without objects too; mmdetection leaves them out.
        limit: use only this many images of each split, the first ones.
        check: check before training that every image exists.
        unreadable: whether missing or unreadable images are an error, or are left out.
        size: scenes: height and width.
        objects: scenes: minimum and maximum number of objects.
        shapes: scenes: the shapes, which are the classes.
        samples: scenes: number generated for training.
        val_samples: scenes: number generated for validation.
        workers: processes that read images, for each training process.
    """

    kind: Literal["coco", "yolo", "voc", "pets", "scenes"] = "coco"
    root: Path | None = None
    images: str | None = "{split}"
    annotations: str | None = "annotations/instances_{split}.json"
    train: str = "train2017"
    val: str = "val2017"
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    hold_out_by: HoldOutBy = "order"
    keep_empty: bool = False
    limit: int | None = Field(default=None, ge=1)
    check: bool = True
    unreadable: Literal["error", "skip"] = "error"
    size: int = Field(default=96, ge=16, le=MAX_SIZE)
    objects: tuple[int, int] = (1, 3)
    shapes: tuple[str, ...] = SHAPES
    samples: int = Field(default=4096, ge=1)
    val_samples: int = Field(default=256, ge=1)
    workers: int = Field(default=4, ge=0)

    def train_source(self, seed: int) -> InstanceSource:
        """Return the training images."""
        if self.kind == "scenes":
            return SceneInstances(Scenes(self.samples, self.size, seed, self.objects, self.shapes))
        if not self.hold_out:
            return self._limited(self._source(self.train, None, self.keep_empty))
        source = self._source(self.train, None, True)
        source = InstanceSubset(source, self._parts(source, seed)[0])
        return self._limited(source if self.keep_empty else with_objects(source))

    def val_source(self, seed: int, classes: Sequence[str] | None = None) -> InstanceSource:
        """Return the validation images, including those without objects; `classes` must be theirs."""
        if self.kind == "scenes":
            scenes = Scenes(self.val_samples, self.size, VAL_SEED, self.objects, self.shapes)
            return SceneInstances(scenes)
        if self.hold_out:
            source = self._source(self.train, classes, True)
            return self._limited(InstanceSubset(source, self._parts(source, seed)[1]))
        return self._limited(self._source(self.val, classes, True))

    def _source(
        self, split: str, classes: Sequence[str] | None, keep_empty: bool
    ) -> InstanceSource:
        if self.kind == "pets":
            return PetSilhouettes(require_root(self.root), split, keep_empty)
        if self.kind in ("yolo", "voc"):
            found = read_labels(self.kind, require_root(self.root), split, self.hold_out > 0)
            found.require_readable()
            return CocoFiles(found.origin, found.folder, classes, keep_empty, found.content)
        if self.images is None or self.annotations is None:
            raise SettingsError(
                "data.images and data.annotations are not set; give the folder of images and COCO's JSON file: "
                "--data.images DIR --data.annotations FILE"
            )
        if "{split}" not in self.annotations and not self.hold_out:
            raise SettingsError(
                f"data.annotations is one file, {self.annotations}: mark the split with {{split}} in it, or "
                "validate on a share of it: --data.hold_out 0.2"
            )
        path = self._under(self.annotations.replace("{split}", split))
        if self.root and not path.exists() and (form := detect_format(self.root)):
            raise DataError(
                f"there is no annotation file {path} in COCO format; {self.root} looks like a dataset in the format of "
                f"{form}: set data.kind={form}"
            )
        folder = self._under(self.images.replace("{split}", split))
        return CocoFiles(path, folder, classes, keep_empty)

    def _limited(self, source: InstanceSource) -> InstanceSource:
        if self.limit is None or self.limit >= len(source):
            return source
        return InstanceSubset(source, range(self.limit))

    def _parts(self, source: InstanceSource, seed: int) -> tuple[list[int], list[int]]:
        return hold_out(len(source), source.name, self.hold_out, seed, self.hold_out_by)

    def _under(self, path: str) -> Path:
        return Path(path) if Path(path).is_absolute() else require_root(self.root) / path
