"""Detect the task of a dataset folder, and find its images, labels and splits."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..core.plain_json import parse_json
from ..data.decoding import read_stored_image
from ..data.reading import display_name, read_text
from ..data.remote import address_of
from ..data.sources.class_list import IGNORED, read_entries
from ..data.sources.label_formats import detect_format
from ..data.sources.masks import MASK_SUFFIXES
from ..data.sources.paths import folder_names, is_image_file, missing_folder, walk_files
from ..errors import DataError, SettingsError

HOLD_OUT: dict[str, object] = {"data.hold_out": 0.2, "data.hold_out_by": "name"}
MAX_CLASSES = 64  # that are read from the values of masks
CLASS_LISTS = ("classes.txt", "labels.txt")
PATTERNS = ("annotations/instances_{split}.json", "annotations/{split}.json", "{split}.json")
SPLITS = ("train", "val")
COCO_SPLITS = ("train2017", "val2017")


@dataclass
class Layout:
    """Detected layout of a folder.

    Attributes:
        kind: kind of the task.
        settings: settings of a recipe of this task, by dotted name.
        notes: what was detected, for the log.
    """

    kind: str
    settings: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def recognise(root: Path | None, given: Mapping[str, object]) -> Layout:
    """Return task and data settings of a dataset.

    Args:
        root: root of the dataset.
        given: settings by dotted name; they override detection and are not part of the result.
    """
    if root is None and not {"data.images", "data.annotations"} & given.keys():
        raise SettingsError(
            "data.root is not set; give the folder that holds a folder of images for each class (or images/ and "
            "masks/, or images and a COCO file): --data.root DIR"
        )
    found = _recognise(root, given)
    taken = {name for name in found.settings if name in given}
    if "data.hold_out" in taken and not given["data.hold_out"]:
        taken.add("data.hold_out_by")
    found.settings = {k: v for k, v in found.settings.items() if k not in taken}
    return found


def _recognise(root: Path | None, given: Mapping[str, object]) -> Layout:
    if "data.masks" in given:
        return _masks(root, given)
    if "data.annotations" in given or given.get("data.kind") in ("coco", "yolo", "voc"):
        whole = "{split}" not in str(given.get("data.annotations", "{split}"))
        return Layout("detection", dict(HOLD_OUT) if whole else {})
    if root is None or address_of(root) is not None:
        return Layout("classification")  # whose data settings raise the error
    if not root.is_dir():
        raise DataError(f"{missing_folder(root)}; give the folder of the dataset: --data.root DIR")
    if (root / "masks").is_dir() and (root / "images").is_dir():
        return _masks(root, given)
    if (found := _annotations(root)) is not None:
        return found
    if (form := detect_format(root)) is not None:
        settings: dict[str, object] = {"data.kind": form, "model.heads.masks": False}
        return Layout("detection", settings, [f"{root} holds labels in the format of {form}"])
    return _folders(root)


def _folders(root: Path) -> Layout:
    """Return the layout of class folders, with or without folders of splits above them."""
    if all((root / split).is_dir() for split in SPLITS):
        return Layout("classification")
    if (root / "train").is_dir() and any(each.is_dir() for each in (root / "train").iterdir()):
        return Layout("classification", dict(HOLD_OUT))
    loose = [path for path in root.iterdir() if is_image_file(path)]
    if loose and not any(path.is_dir() for path in root.iterdir()):
        raise DataError(
            f"{root} holds images, but no folder for each class; move the images of each class into a folder of its "
            f"name: {root}/<class>/{loose[0].name}"
        )
    return Layout("classification", {"data.train": "."} | HOLD_OUT, _same_folders(root))


def _same_folders(root: Path) -> list[str]:
    """Return a warning if all class folders hold folders of the same names, which are then likely the classes."""
    shared: set[str] | None = None
    folders = [each for each in sorted(root.iterdir()) if each.is_dir()]
    for folder in folders if len(folders) > 1 else []:
        names = {each.name for each in folder.iterdir() if each.is_dir()}
        shared = names if shared is None else shared & names
        if len(shared) < 2:
            return []
    if shared is None:
        return []
    listed = ", ".join(display_name(name) for name in sorted(shared)[:3])
    return [
        f"warning: the classes are {', '.join(display_name(each.name) for each in folders[:3])}, and each holds the "
        f"same folders ({listed}); if these are the classes, use --data.root {display_name(folders[0])}"
    ]


def _masks(root: Path | None, given: Mapping[str, object]) -> Layout:
    base = root or Path()
    folders = [str(given.get(f"data.{name}", name)) for name in ("images", "masks")]
    settings: dict[str, object] = {"data.images": folders[0], "data.masks": folders[1]}
    split = "{split}" in folders[0] or all((base / folders[0] / name).is_dir() for name in SPLITS)
    settings |= {} if split or "data.lists" in given else HOLD_OUT
    found = Layout("segmentation", settings)
    if "data.classes" in given:
        return found
    for name in CLASS_LISTS:
        if (base / name).is_file():
            settings["data.classes"] = name
            _make_255_a_class(found, {entry.value for entry in read_entries(base / name)}, given)
            return found
    folder = base / folders[1].replace("{split}", "train")
    values = _mask_values(folder)
    _make_255_a_class(found, values, given)
    ignored = given.get("data.ignore", settings.get("data.ignore", [IGNORED]))
    if isinstance(ignored, list | tuple):
        values -= set(ignored)
    settings["data.classes"] = classes = [f"{value} value {value}" for value in sorted(values)]
    found.notes.append(
        f"no class list: the masks hold {len(classes)} values, which are the classes; name them in a "
        f"file of lines `value name`: {base / CLASS_LISTS[0]}"
    )
    return found


def _make_255_a_class(
    found: Layout, values: Set[int] | Set[int | None], given: Mapping[str, object]
) -> None:
    """Make 255 a class if the masks have only one other value, as binary masks do."""
    if IGNORED not in values or len(values) != 2 or "data.ignore" in given:
        return
    found.settings["data.ignore"] = []
    found.notes.append(
        f"the masks have two values, so {IGNORED} is a class here; if it means unlabelled, give --data.ignore "
        f"'[{IGNORED}]'"
    )


def _mask_values(folder: Path) -> set[int]:
    """Return the values in the masks of a folder."""
    values: set[int] = set()
    paths = list(walk_files(folder, MASK_SUFFIXES)) if folder.is_dir() else []
    for path in paths:
        image = read_stored_image(folder / path)
        if len(image.getbands()) > 1:
            raise DataError(
                f"{folder / path} is a colour image, so its classes need names and colours; write a line `name r g b` "
                f"for each into {folder.parent / CLASS_LISTS[0]}"
            )
        values |= set(np.unique(np.asarray(image)).tolist())
        if len(values) > MAX_CLASSES or any(int(value) != value for value in values):
            raise DataError(
                f"{folder / path}: masks hold more than {MAX_CLASSES} values, so they may not be labels; list the "
                f"classes, a line `value name` for each, in {folder.parent / CLASS_LISTS[0]}"
            )
    if not values:
        raise DataError(f"there are no masks in {folder} ({', '.join(MASK_SUFFIXES)})")
    return {int(value) for value in values}


def _annotations(root: Path) -> Layout | None:
    """Return the layout of annotation files in COCO format: one for each split, or a single one."""
    for train, val in (SPLITS, COCO_SPLITS):
        for pattern in PATTERNS:
            if not all((root / pattern.replace("{split}", x)).is_file() for x in (train, val)):
                continue
            folders = [
                name
                for name in ("images/{split}", "{split}")
                if (root / name.replace("{split}", train)).is_dir()
            ]
            images = folders[0] if folders else "images" if (root / "images").is_dir() else "."
            path = root / pattern.replace("{split}", train)
            settings: dict[str, object] = {"data.train": train, "data.val": val}
            return _objects(path, settings | {"data.annotations": pattern, "data.images": images})
    return _single_annotation(root)


def _single_annotation(root: Path) -> Layout | None:
    """Return the layout of the only annotation file of a folder."""
    single = [*root.glob("*.json"), *root.glob("annotations/*.json")]
    single = [path for path in single if _looks_like_coco(path)]
    if not single:
        return None
    if len(single) > 1:
        names = ", ".join(path.name for path in sorted(single)[:4])
        raise DataError(
            f"{root} holds several annotation files ({names}); choose one: --data.annotations FILE --data.images DIR"
        )
    content = parse_json(read_text(single[0]))
    first = str(content["images"][0].get("file_name", ""))
    usual = (".", "images", "train", *folder_names(root))
    folders = [name for name in usual if (root / name / first).is_file()]
    settings: dict[str, object] = {"data.annotations": str(single[0].relative_to(root))} | HOLD_OUT
    return _objects(single[0], settings | {"data.images": folders[0] if folders else "images"})


def _looks_like_coco(path: Path) -> bool:
    try:
        content = parse_json(read_text(path))
    except ValueError:
        return False
    if not isinstance(content, dict) or not {"annotations", "categories"} <= content.keys():
        return False
    images = content.get("images")
    return isinstance(images, list) and bool(images) and isinstance(images[0], dict)


def _objects(path: Path, settings: dict[str, object]) -> Layout:
    """Return the layout of a detector; without a head for masks if an object has no shape."""
    try:
        entries = parse_json(read_text(path))["annotations"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{display_name(path)} holds no annotations in COCO format ({str(error)[:100]}); write it again"
        ) from None
    if not isinstance(entries, list):
        raise DataError(f"{display_name(path)}: annotations must be a list; write it again")
    found = Layout("detection", settings, [f"{path} holds annotations in COCO format"])
    if not all(isinstance(entry, dict) and entry.get("segmentation") for entry in entries):
        settings["model.heads.masks"] = False
        found.notes.append("some objects have no shape, so boxes alone are trained")
    return found
