"""YOLO labels: the objects of `images/a.jpg` are in `labels/a.txt`, one per line.

A line is `class x y w h`, a box with its centre, or `class x y x y x y ...`, a polygon. Classes count from 0;
coordinates are relative to width and height of the image after EXIF rotation. `data.yaml` names classes and folders
of splits, as Ultralytics and Roboflow write it; `classes.txt`, as Label Studio writes it, names only the classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.plain_json import Json
from ...core.plain_yaml import load_yaml
from ...errors import DataError
from .. import rle
from ..decoding import image_size
from ..reading import SUFFIXES, UnreadableImageError, display_name, require_distinct_names
from .class_list import MAX_CLASSES, ClassEntry, ClassList, Labels
from .label_files import (
    LabelledImage,
    LabelledImages,
    collect_images,
    inside,
    read_label_bytes,
    read_label_text,
    require_drawable,
    too_many_objects,
)
from .masks import MaskFiles
from .paths import list_files

NAMES = ("data.yaml", "data.yml", "dataset.yaml")
CLASS_FILE = "classes.txt"
BOUNDS = (-0.5, 1.5)  # maximum of a coordinate; an object may be partly outside its image
MAX_NAMES = 100_000
BACKGROUND = "background"


def looks_like_yolo(root: Path) -> bool:
    """Return whether a folder has a data.yaml, or a classes.txt beside a folder of labels."""
    named = any((root / name).is_file() for name in NAMES)
    return named or ((root / CLASS_FILE).is_file() and (root / "labels").is_dir())


class YoloDataset:
    """Classes and splits of a dataset.

    Args:
        root: folder of the dataset, or its data.yaml.

    Attributes:
        file: data.yaml or classes.txt.
        classes: names.
    """

    def __init__(self, root: Path) -> None:
        self.file = _description(root)
        self.root = self.base = Path(os.path.abspath(self.file.parent))
        self._splits: Json = {}
        if self.file.name == CLASS_FILE:
            lines = [line.strip() for line in read_label_text(self.file).splitlines()]
            self.classes = [line for line in lines if line]
        else:
            self._read_yaml()
        if not 1 <= len(self.classes) <= MAX_NAMES:
            raise DataError(
                f"{self.file} names {len(self.classes)} classes; 1 to {MAX_NAMES:,} can be read"
            )
        require_distinct_names(self.classes, self.file)

    def _read_yaml(self) -> None:
        try:
            values = load_yaml(read_label_bytes(self.file))
        except ValueError as error:
            raise DataError(f"{self.file} is not YAML: {error}") from None
        if not isinstance(values, dict):
            raise DataError(f"{self.file} has no keys; expected are names, train, val")
        if "kpt_shape" in values:
            raise DataError(
                f"{self.file} has kpt_shape: keypoint labels are not supported; export boxes or polygons"
            )
        self.classes = _class_names(values.get("names"), self.file)
        count = values.get("nc", len(self.classes))
        if count != len(self.classes):
            raise DataError(
                f"{self.file} has nc: {str(count)[:40]} but {len(self.classes)} class names; correct one of them"
            )
        self._splits = values
        # An absolute path belongs to another machine: the dataset is in the folder of its data.yaml.
        base = inside(self.root / str(values.get("path") or "."), self.root)
        self.base = base if base is not None and base.is_dir() else self.root

    def images(self, split: str, whole: bool = False) -> list[Path]:
        """Return the images of a split; `whole`: all images if there is no such split."""
        if split not in ("names", "nc", "path") and self._splits.get(split):
            entries = self._splits[split]
            found = [
                path
                for entry in (entries if isinstance(entries, list) else [entries])
                for path in self._images_of(split, entry)
            ]
        else:
            found = list_files(self._split_folder(split, whole), SUFFIXES)
        if not found:
            raise DataError(
                f"the split {split} of {self.file} has no images ({', '.join(SUFFIXES)}); is it the right folder?"
            )
        return found

    def _split_folder(self, split: str, whole: bool) -> Path:
        folders = [self.base / "images" / split, self.base / split / "images"]
        if whole:
            folders += [self.base / "images", self.base]
        for folder in folders:
            if folder.is_dir():
                return folder
        raise DataError(
            f"{self.file} names no split {split!r}, and there is no folder images/{split} or {split}/images; name the "
            "splits (data.train, data.val), or validate on a share of all images: data.hold_out=0.2"
        )

    def _images_of(self, split: str, entry: object) -> list[Path]:
        """Return the images in a folder or in a list of files, as data.yaml names it."""
        where = self._locate(split, entry)
        if where.is_dir():
            return list_files(where, SUFFIXES)
        found = []
        for number, line in enumerate(read_label_text(where).splitlines(), start=1):
            if not line.strip():
                continue
            # Ultralytics: "./" is the folder of the list, all else is relative to `path`.
            folder = where.parent if line.startswith("./") else self.base
            path = inside(folder / line.strip(), self.root)
            if path is None:
                raise DataError(
                    f"{display_name(where)}, line {number}: {display_name(line.strip())[:200]} is outside the "
                    f"dataset {self.root}; move the image there, or set data.root to a folder that holds both"
                )
            found.append(path)
        return found

    def _locate(self, split: str, entry: object) -> Path:
        if not isinstance(entry, str):
            raise DataError(
                f"{self.file}: {split} is {str(entry)[:40]!r}, not the path of a folder or of a list of images"
            )
        short = entry
        while short.startswith("../"):  # Roboflow writes ../train/images for train/images
            short = short[3:]
        for path in (self.base / entry, self.root / entry, self.base / short, self.root / short):
            found = inside(path, self.root)
            if found is not None and found.exists():
                return found
        raise DataError(
            f"{self.file}: {split} is {display_name(entry)[:200]}, but there is no such file or folder in {self.base}; "
            "only files inside the dataset are read: correct it, or set data.root to the folder that holds it"
        )

    def label_path(self, image: Path) -> Path:
        """Return the label file: in `labels` instead of the last folder `images`, or else beside the image."""
        parts = list(image.relative_to(self.root).with_suffix(".txt").parts)
        for i in reversed(range(len(parts) - 1)):
            if parts[i] == "images":
                parts[i] = "labels"
                break
        return self.root.joinpath(*parts)


def _description(root: Path) -> Path:
    """Return the file that names the classes."""
    if root.is_file():
        return root
    named = [root / name for name in (*NAMES, CLASS_FILE) if (root / name).is_file()]
    others = sorted(root.glob("*.yaml")) if root.is_dir() else []
    if not named and len(others) != 1:
        raise DataError(
            f"there is no data.yaml or {CLASS_FILE} in {display_name(root)}, which names the classes of YOLO's labels"
            + (f", but {len(others)} .yaml files: give one as the root" if others else "")
        )
    return (named or others)[0]


def _class_names(names: object, file: Path) -> list[str]:
    """Return the names, given as a list or by number."""
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DataError(
                f"{file}: names must be numbered from 0 without gaps, got {str(list(names))[:80]}; number them again"
            )
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(n, str | int | float) for n in names):
        raise DataError(
            f"{file}: names is {str(names)[:40]!r}, not a list of class names; give names: [cat, dog]"
        )
    return [str(name) for name in names]


def read_yolo(root: Path, split: str, whole: bool, threads: int) -> LabelledImages:
    """Read a split; an image without a label file, or with an empty one, has no objects."""
    dataset = YoloDataset(root)
    images = dataset.images(split, whole)

    def read(image: Path) -> LabelledImage:
        entry: Json = {"file_name": str(image.relative_to(dataset.root))}
        try:
            w, h = image_size(image)
        except UnreadableImageError:  # reported when the image is read
            return LabelledImage(entry)
        labels = dataset.label_path(image)
        if not labels.exists():
            return LabelledImage(entry | {"width": w, "height": h})
        objects, problems = parse_labels(labels, len(dataset.classes), (h, w))
        return LabelledImage(entry | {"width": w, "height": h}, objects, problems)

    if not any(dataset.label_path(image).exists() for image in images):
        raise DataError(
            f"none of the {len(images)} images of the split {split} has a label file; expected is "
            f"{display_name(dataset.label_path(images[0]))} for {display_name(images[0])}"
        )
    return collect_images(dataset.file, dataset.root, dataset.classes, images, read, threads)


def parse_labels(path: Path, classes: int, size: tuple[int, int]) -> tuple[list[Json], list[str]]:
    """Return the objects of a label file in COCO's structure, and the lines that cannot be read.

    Args:
        path: label file.
        classes: number of classes.
        size: height and width of the image.
    """
    try:
        lines = read_label_text(path).splitlines()
    except DataError as error:
        return [], [str(error)]
    if (problem := too_many_objects(path, len(lines))) is not None:
        return [], [problem]
    objects, problems, seen = [], [], set()
    for number, line in enumerate(lines, start=1):
        words = tuple(line.split())
        if not words or words in seen:  # duplicate lines are one object
            continue
        seen.add(words)
        values, reason = _line_values(words, classes)
        if reason is not None:
            problems.append(f"{display_name(path)}, line {number}: {reason}")
            continue
        objects.append(_as_object(values, size))
    return objects, problems


def _line_values(words: Sequence[str], classes: int) -> tuple[list[float], str | None]:
    """Return the numbers of a line, and why they are not a label."""
    if len(words) != 5 and (len(words) < 7 or len(words) % 2 == 0):
        return [], (
            f"{len(words)} values; a box has 5 (class x y w h), a polygon 7 or more (class and three points or more), "
            "without a score"
        )
    try:
        values = [float(word) for word in words]
    except ValueError:
        return [], f"{' '.join(words)[:80]!r} are not numbers"
    if not (values[0].is_integer() and 0 <= values[0] < classes):
        return [], f"the class {words[0][:20]} is out of range; there are 0 to {classes - 1}"
    low, high = BOUNDS
    if wrong := [v for v in values[1:] if not (math.isfinite(v) and low <= v <= high)]:
        return [], (
            f"the coordinate {wrong[0]:g} is out of range; coordinates are relative to the image's width and height, "
            "0 to 1, not pixels"
        )
    return values, None


def _as_object(values: Sequence[float], size: tuple[int, int]) -> Json:
    h, w = size
    found: Json = {"category_id": int(values[0]) + 1, "iscrowd": 0}
    if len(values) == 5:
        x, y, width, height = (v * side for v, side in zip(values[1:], (w, h, w, h), strict=True))
        return found | {"bbox": [x - width / 2, y - height / 2, width, height]}
    xs, ys = [v * w for v in values[1::2]], [v * h for v in values[2::2]]
    polygon = [v for point in zip(xs, ys, strict=True) for v in point]
    left, top = min(xs), min(ys)
    box = [left, top, max(xs) - left, max(ys) - top]
    return found | {"bbox": box, "segmentation": [polygon]}


class YoloMasks(MaskFiles):
    """Images with the pixels of their polygons as masks.

    Pixels outside all polygons are background: the class of that name, or an additional first class. If polygons
    overlap, the smaller one is on top, as in Ultralytics.
    """

    def __init__(self, root: Path, split: str, whole: bool = False) -> None:
        dataset = YoloDataset(root)
        rle.codec()  # raises an error if a package is missing
        pairs = [(image, dataset.label_path(image)) for image in dataset.images(split, whole)]
        super().__init__(pairs, yolo_class_list(dataset))
        self._first = len(self.classes) - len(dataset.classes)  # label of the first class
        self._background = self.classes.names.index(BACKGROUND)
        self._named = len(dataset.classes)

    def mask(self, index: int) -> Labels:
        """Draw the polygons of an image."""
        image, path = self.pairs[index]
        w, h = image_size(image)
        labels = np.full((h, w), self._background, np.uint8)
        if not path.exists():
            return labels
        objects, problems = parse_labels(path, self._named, (h, w))
        if boxes := [o for o in objects if o.get("segmentation") is None]:
            problems.append(
                f"{display_name(path)} has {len(boxes)} boxes; masks need polygons (class x y x y x y ...)"
            )
        if not problems:
            problems = [
                f"{display_name(path)}: {reason}"
                for o in objects
                if (reason := rle.shape_problem(o["segmentation"], (h, w))) is not None
            ]
        if problems:
            raise UnreadableImageError(f"{problems[0]}; correct the label file")
        try:
            require_drawable(path, len(objects), (h, w))
        except DataError as error:
            raise UnreadableImageError(str(error)) from None
        for one in sorted(objects, key=lambda o: -rle.area(o["segmentation"], (h, w))):
            drawn = rle.draw(one["segmentation"], (h, w))
            labels[drawn > 0] = one["category_id"] - 1 + self._first
        return labels


def yolo_class_list(dataset: YoloDataset) -> ClassList:
    """Return the classes of masks, with the background."""
    names = dataset.classes if BACKGROUND in dataset.classes else [BACKGROUND, *dataset.classes]
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{dataset.file} names {len(dataset.classes)} classes; masks have at most {MAX_CLASSES} with the background"
        )
    return ClassList([ClassEntry(None, name) for name in names])
