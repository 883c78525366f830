"""Checks of a dataset: folders of classes, images with masks, or images with objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import recipes
from ..core.console import Table
from ..core.progress import Track, no_progress
from ..data.checks.images import check_images
from ..data.checks.instances import check_contents, check_instances
from ..data.checks.masks import check_masks
from ..data.checks.report import CheckReport, SplitReport
from ..data.checks.settings import SPLITS, CheckSettings
from ..data.checks.tables import describe_folders, describe_masks, describe_objects
from ..data.loader import usable_cores
from ..data.sources.label_formats import LabelFormat, read_labels
from ..errors import SettingsError
from ..tasks.layouts import recognise
from ..tasks.segmentation.data import MaskData

MASK_RECIPE = "small_masks.upernet_pale_t"  # recipe whose data settings apply if none is named
NEEDED = {
    "images": "DIR, the folder of images",
    "masks": "DIR, the folder of masks (for annotations in COCO format: --annotations FILE)",
    "classes": "FILE, a line `value name r g b` for each class",
}


def check_data(
    settings: CheckSettings, track: Track = no_progress
) -> tuple[CheckReport, Iterable[str | Table]]:
    """Check a dataset; return the report, and its counts as lines and tables."""
    settings = recognised(settings)
    root, splits, workers = settings.root, settings.splits, settings.workers
    if settings.annotations:
        images = settings.images or "{split}"
        objects = check_object_data(root, settings.annotations, images, splits, workers, track)
        return objects, describe_objects(objects)
    if settings.kind and not settings.has_masks:
        whole = settings.hold_out is not None
        labels = check_labels(settings.kind, root, splits, workers, track, whole)
        return labels, describe_objects(labels)
    if settings.has_masks:
        changes = {"root": str(root)} | settings.mask_settings()
        if settings.kind:
            changes["kind"] = settings.kind
        if settings.images:
            changes["images"] = settings.images
        given = None if splits is SPLITS else splits
        masks = check_mask_data(settings.recipe, changes, given, workers, track)
        return masks, describe_masks(masks)
    folders = check_images(root, tuple(splits), workers, track)
    return folders, describe_folders(folders)


def recognised(settings: CheckSettings) -> CheckSettings:
    """Return the settings with those of masks or annotations that `pale train finetune` finds in the folder.

    What the user gave decides; without it, folders of images and masks would be taken for classes.
    """
    chosen = settings.annotations or settings.kind or settings.has_masks or settings.sheet
    if chosen or settings.splits is not SPLITS or not settings.root.is_dir():
        return settings
    found = recognise(settings.root, {}).settings
    given = {name.removeprefix("data."): value for name, value in found.items()}
    if not {"masks", "annotations", "kind"} & given.keys():  # folders of classes
        return settings
    names = ["images", "annotations", "kind"]
    if "masks" in given:
        names += ["masks", "classes", "hold_out", "ignore"]
    changes: dict[str, Any] = {name: given[name] for name in names if name in given}
    if {"train", "val"} <= given.keys():
        changes["splits"] = [given["train"], given["val"]]
    return replace(settings, **changes)


def check_mask_data(
    name: str | None,
    settings: Mapping[str, object],
    splits: Sequence[str] | None = None,
    workers: int | None = None,
    track: Track = no_progress,
) -> SplitReport:
    """Check images with masks.

    Args:
        name: segmentation recipe; None: one for any dataset.
        settings: changes of its data settings, by name.
        splits: splits to check, the training split first; None: those of the recipe.
        workers: processes; None: one per core.
        track: shows the progress.
    """
    recipe = recipes.get(name or MASK_RECIPE)
    if not isinstance(recipe.data, MaskData):
        raise SettingsError(
            f"{name} is not a segmentation recipe; leave out --recipe to check folders"
        )
    changes = dict(settings) | ({"train": splits[0]} if splits else {})
    data = recipe.override({f"data.{key}": value for key, value in changes.items()}).data
    for key, what in NEEDED.items():
        if data.kind == "folder" and getattr(data, key) is None:
            raise SettingsError(f"--{key} is not given; to check masks give --{key} {what}")
    absent: list[str] = []
    if data.hold_out:
        # Both sources list the same missing files: collect them once.
        parts = (data.train_source(recipe.seed, absent), data.val_source(recipe.seed, []))
        sources = dict(zip((data.train, "held out"), parts, strict=True))
    else:
        sources = {split: data.files(split, absent) for split in splits or (data.train, data.val)}
    return check_masks(sources, workers or usable_cores(), track, absent)


def check_object_data(
    root: Path,
    annotations: str,
    images: str = "{split}",
    splits: Sequence[str] = ("train", "val"),
    workers: int | None = None,
    track: Track = no_progress,
) -> SplitReport:
    """Check images with annotations in COCO format.

    Args:
        root: folder of the dataset.
        annotations: file under the root; "{split}" in it stands for a split, without it only the first is checked.
        images: folder under the root; "{split}" as in `annotations`.
        splits: splits to check, the training split first.
        workers: processes; None: one per core.
        track: shows the progress.
    """
    chosen = splits if "{split}" in annotations else splits[:1]
    files = {
        split: (
            root / annotations.replace("{split}", split),
            root / images.replace("{split}", split),
        )
        for split in chosen
    }
    return check_instances(files, workers or usable_cores(), track)


def check_labels(
    form: LabelFormat,
    root: Path,
    splits: Sequence[str] = ("train", "val"),
    workers: int | None = None,
    track: Track = no_progress,
    whole: bool = False,
) -> SplitReport:
    """Check images with labels of YOLO or Pascal VOC.

    Args:
        form: format of the labels.
        root: folder of the dataset.
        splits: splits to check, the training split first.
        workers: threads; None: one per core.
        track: shows the progress.
        whole: the dataset has no splits: check all images, as the first one.
    """
    chosen = splits[:1] if whole else splits
    found = {split: read_labels(form, root, split, whole) for split in chosen}
    contents = {split: (read.content, read.folder) for split, read in found.items()}
    unreadable = [f"{split}: {p}" for split, read in found.items() for p in read.problems]
    return check_contents(contents, workers or usable_cores(), track, unreadable)
