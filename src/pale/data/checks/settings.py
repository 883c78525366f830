"""Which data to check, and how. This module imports nothing heavy, so that `pale --help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ...core.options import argument, option, settings_class
from ...errors import SettingsError

SPLITS = ["train", "val"]  # recognised by identity: a recipe's own splits apply if none are given
MASKS = (
    "images with masks",
    "DIR holds folders of images and of masks, each with a folder per split.",
)
LABELS = (
    "labels of YOLO or Pascal VOC",
    "DIR holds data.yaml, images and labels (YOLO), or JPEGImages, Annotations and ImageSets (Pascal VOC).",
)
OBJECTS = (
    "images with objects",
    "DIR holds annotation files in COCO format and folders of images (--images).",
)
MASK_SETTINGS = ("masks", "classes", "ignore", "mask_kind", "unlisted", "lists", "hold_out")


@settings_class
class CheckSettings:
    """A dataset: folders of classes, images with masks (`masks`), with objects (`annotations`), or labels (`kind`)."""

    root: Path = argument(
        "folder with train/<class>/<image> and val/..., or the root of --masks or --annotations",
        metavar="DIR",
    )
    splits: list[str] = option(
        "folders, shards or list files to check", default=SPLITS, metavar="NAME"
    )
    sheet: Path | None = option(
        "also draw some images of each class, to a file such as out.png",
        default=None,
        metavar="FILE",
    )
    workers: int | None = option("processes (default: one per core)", default=None)
    images: str | None = option(
        "folder of images under the root, for masks and objects", default=None, metavar="DIR"
    )
    recipe: str | None = option(
        "segmentation recipe whose data settings apply", default=None, group=MASKS
    )
    masks: str | None = option(
        "folder of masks, under the root", default=None, metavar="DIR", group=MASKS
    )
    classes: str | None = option(
        "class list, under the root", default=None, metavar="FILE", group=MASKS
    )
    ignore: list[int] | None = option("mask values without a label", default=None, group=MASKS)
    reduce_zero: bool = option(
        "classes are numbered from 1, and 0 is unlabelled", default=False, group=MASKS
    )
    mask_kind: Literal["auto", "index", "colour"] | None = option(
        "meaning of the pixels of a mask", default=None, group=MASKS
    )
    unlisted: Literal["error", "ignore"] | None = option(
        "how to treat values that are not in the class list", default=None, group=MASKS
    )
    lists: str | None = option(
        "file with the image names of a split; {split} in it is replaced",
        default=None,
        metavar="FILE",
        group=MASKS,
    )
    hold_out: float | None = option(
        "share of the images to validate on, for data without folders per split",
        default=None,
        metavar="SHARE",
        group=MASKS,
    )
    annotations: str | None = option(
        "annotation file in COCO format, under the root; {split} in it is replaced",
        default=None,
        metavar="FILE",
        group=OBJECTS,
    )

    kind: Literal["yolo", "voc"] | None = option("format of the labels", default=None, group=LABELS)
    task: Literal["detection", "segmentation"] | None = option(
        "what the labels are for (default: detection)", default=None, group=LABELS
    )

    def __post_init__(self) -> None:
        """Refuse options that do not apply to the data."""
        self._check_kind()
        of_masks = [*(["recipe"] if self.recipe else []), *self.mask_settings()]
        if self.annotations and (others := [*of_masks, *(["sheet"] if self.sheet else [])]):
            raise SettingsError(
                f"--{others[0].replace('_', '-')} does not apply to objects, which --annotations checks; "
                "leave out one of them"
            )
        if self.sheet and self.has_masks:
            raise SettingsError("--sheet draws folders of classes, not masks; leave it out")

    def _check_kind(self) -> None:
        if self.kind is None:
            if self.task:
                raise SettingsError("--task applies to labels; also give --kind yolo or --kind voc")
            return
        given = {
            name: getattr(self, name)
            for name in ("annotations", "images", "sheet", "masks", "lists")
        }
        if not self.has_masks:
            given |= {"recipe": self.recipe} | self.mask_settings() | {"hold_out": None}
        if others := [name for name, value in given.items() if value is not None]:
            raise SettingsError(
                f"--{others[0].replace('_', '-')} does not apply to --kind {self.kind}"
                + (", which has a fixed layout" if self.has_masks else " --task detection")
                + "; leave out one of them"
            )

    @property
    def has_masks(self) -> bool:
        """Whether the images have masks."""
        if self.kind:
            return self.task == "segmentation"
        return not self.annotations and bool(self.images or self.recipe or self.mask_settings())

    def mask_settings(self) -> dict[str, object]:
        """Return the data settings of a segmentation recipe that were given."""
        given = {name: getattr(self, name) for name in MASK_SETTINGS}
        given["reduce_zero"] = self.reduce_zero or None
        return {name: value for name, value in given.items() if value is not None}
