"""Objects from annotation files in COCO's format.

Entries that cannot be used (boxes without area, annotations without an image, broken shapes) are left out, counted
and logged. Ambiguous entries (ids that occur twice, unknown categories) raise an error that names them.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
from PIL import Image

from ...core.lists import first_of
from ...core.plain_json import Json, parse_json
from ...core.progress import map_in_threads
from .. import rle
from ..decoding import read_image
from ..reading import (
    MAX_PIXELS,
    MAX_SIDE,
    UnreadableImageError,
    display_name,
    read_text,
    repeated_value,
    require_distinct_names,
    shorten_list,
)
from .instances import Instances, InstanceSource, InstanceSubset, from_masks, height_width

MIN_SIDE = 1.0  # pixels; thinner boxes are left out, as in mmdetection


def read_annotations(path: Path) -> Json:
    """Read an annotation file and check that images, annotations and categories are lists of objects."""
    if not path.is_file():
        raise ValueError(
            f"there is no annotation file {path}; expected is COCO's json with images, annotations, categories"
        )
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    for part in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise ValueError(
                f"{path} has no list of {part!r}; COCO's json holds images, annotations and categories"
            )
        for index, entry in enumerate(content[part]):
            if (reason := _entry_problem(entry)) is None and part == "images":
                reason = _normalise_size(entry)
            if reason is not None:
                raise ValueError(f"{path}: entry {index} of {part} {reason}; repair or remove it")
    return content


def _entry_problem(entry: object) -> str | None:
    """Return why an entry cannot be interpreted at all, or None."""
    if not isinstance(entry, dict):
        return f"is {str(entry)[:40]!r}, not an object {{...}}"
    for key in ("id", "image_id", "category_id"):
        if isinstance(entry.get(key), list | dict):
            return f"has the {key} {str(entry[key])[:40]}, which must be a number"
    return None


def _normalise_size(entry: Json) -> str | None:
    """Convert width and height of an image entry to integers, 0 if unknown; return why it is not possible, or None."""
    for key in ("width", "height"):
        try:
            pixels = int(entry.get(key) or 0)
        except (TypeError, ValueError, OverflowError):
            pixels = -1
        if not 0 <= pixels <= MAX_SIDE:
            return f"has the {key} {str(entry[key])[:40]!r}, expected are pixels up to {MAX_SIDE:,}"
        entry[key] = pixels
    if entry["width"] * entry["height"] > MAX_PIXELS:
        return f"has {entry['width']}x{entry['height']} pixels, more than {MAX_PIXELS:,}"
    return None


class CocoFiles:
    """Images in a folder, objects in an annotation file.

    Category ids may have gaps; in sorted order they are the classes. The annotations are packed into one
    array, so that data loader workers share its memory.

    Args:
        path: annotation file.
        images: folder of the images.
        categories: expected class names (those of the training set, for validation).
        keep_empty: keep images without objects to train on.
        content: content of the annotation file, if it was already read or converted.
    """

    def __init__(
        self,
        path: Path,
        images: Path,
        categories: Sequence[str] | None = None,
        keep_empty: bool = True,
        content: Json | None = None,
    ) -> None:
        self.path, self.folder = path, images
        content = read_annotations(path) if content is None else content
        self.classes, self.categories = _categories(path, content["categories"])
        _require_same_classes(path, self.classes, categories)
        self.left_out: Counter[str] = Counter()
        annotations = self._group_by_image(content)
        entries = [_image_entry(path, entry) for entry in content["images"]]
        self.shaped = True
        packed, self.file_names, self.ids, self._sizes = [], [], [], []
        for image_id, file, size in entries:
            own = annotations.get(image_id, ())
            if own and size is None:
                size = height_width(images / file)
            found = self._usable_instances(own, size) if size is not None else None
            if not keep_empty and (found is None or found.crowd.all()):
                self.left_out["images without objects"] += 1
                continue
            size = size or height_width(images / file)
            empty = from_masks(size, (), ())
            packed.append(pickle.dumps(found if found is not None else empty, protocol=5))
            self.file_names.append(file)
            self.ids.append(image_id)
            self._sizes.append(size)
        if not packed:
            raise ValueError(f"{path} has no images with objects; there is nothing to learn from")
        self._ends = np.cumsum([len(p) for p in packed])
        self._packed = np.frombuffer(b"".join(packed), np.uint8)

    def _group_by_image(self, content: Json) -> dict[int, list[Json]]:
        """Return the annotations by image id."""
        ids = Counter(entry.get("id") for entry in content["images"])
        if twice := [i for i, n in ids.items() if n > 1]:
            raise ValueError(
                f"{self.path}: {len(twice)} image ids occur twice, such as {twice[0]}; each image needs its own"
            )
        categories = set(self.categories)
        out: dict[int, list[Json]] = {}
        for entry in content["annotations"]:
            if entry.get("category_id") not in categories:
                raise ValueError(
                    f"{self.path}: annotation {entry.get('id')} has the category {entry.get('category_id')}, "
                    f"which is not listed; there are {shorten_list(self.categories)}"
                )
            if entry.get("image_id") not in ids:
                self.left_out["annotations without an image"] += 1
                continue
            out.setdefault(entry["image_id"], []).append(entry)
        return out

    def _usable_instances(self, entries: Sequence[Json], size: tuple[int, int]) -> Instances | None:
        """Return the objects of valid annotations, None if there are none; the others are counted in `left_out`."""
        kept = []
        for entry in entries:
            reason, box = check_annotation(entry, size)
            if reason is not None:
                self.left_out[reason] += 1
                continue
            kept.append((entry, box))
        if not kept:
            return None
        shapes = tuple(entry.get("segmentation") or None for entry, _ in kept)
        crowd = np.array([bool(entry.get("iscrowd", 0)) for entry, _ in kept])
        self.shaped &= all(s is not None or c for s, c in zip(shapes, crowd, strict=True))
        number = {c: i for i, c in enumerate(self.categories)}
        return Instances(
            size,
            np.array([box for _, box in kept], np.float64),
            np.array([number[e["category_id"]] for e, _ in kept], np.int64),
            crowd,
            np.array([annotation_area(e, b, size) for e, b in kept], np.float64),
            shapes,
        )

    @property
    def notes(self) -> list[str]:
        """Numbers of entries that were left out, for the log."""
        return [f"{self.path.name}: {n} {kind} left out" for kind, n in self.left_out.items()]

    def __len__(self) -> int:
        return len(self.file_names)

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB; raises if its size is not that in the annotation file."""
        image = read_image(self.folder / self.file_names[index])
        self._require_size(index, (image.height, image.width))
        return image

    def _require_size(self, index: int, found: tuple[int, int]) -> None:
        h, w = self._sizes[index]
        if found != (h, w):
            raise UnreadableImageError(
                f"{self.name(index)} is {found[1]}x{found[0]}, {self.path.name} has {w}x{h}; "
                "boxes would be misplaced: repair one of them"
            )

    def instances(self, index: int) -> Instances:
        """Return the objects of an image."""
        start = int(self._ends[index - 1]) if index else 0
        found: Instances = pickle.loads(self._packed[start : int(self._ends[index])].tobytes())
        return found

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of an image."""
        return self._sizes[index]

    def image_id(self, index: int) -> int:
        """Return the id of an image in the annotation file."""
        return self.ids[index]

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return display_name(self.folder / self.file_names[index])

    def missing(self, indices: Sequence[int]) -> list[str]:
        """Return the names of images whose files do not exist."""
        present = {p.name for p in self.folder.iterdir()} if self.folder.is_dir() else set()
        return [
            self.name(i)
            for i in indices
            if self.file_names[i] not in present
            and not path_exists(self.folder / self.file_names[i])
        ]

    def header_problem(self, index: int) -> str | None:
        """Return why an image cannot be used, judged by the header of its file, or None."""
        try:
            self._require_size(index, height_width(self.folder / self.file_names[index]))
        except UnreadableImageError as error:
            return str(error)
        return None


def require_images(source: InstanceSource, threads: int) -> None:
    """Raise if images of an annotation file are missing or have another size; reads only the headers of the files."""
    files, indices = _files_behind(source)
    if files is None:
        return
    if missing := files.missing(indices):
        raise ValueError(
            f"{files.path.name} lists {first_of(missing)}, but there is no such image; give the folder of "
            "the images: --data.images DIR"
        )
    problems = _header_problems(files, indices, threads)
    if bad := [reason for reason in problems if reason is not None]:
        raise UnreadableImageError(first_of(bad, "more such images"))


def without_unusable(source: InstanceSource, threads: int) -> tuple[InstanceSource, list[str]]:
    """Return the images whose files exist and have the stated size, and what is wrong with the others."""
    files, indices = _files_behind(source)
    if files is None:
        return source, []
    problems = _header_problems(files, indices, threads)
    good = [i for i, reason in enumerate(problems) if reason is None]
    bad = [reason for reason in problems if reason is not None]
    return (InstanceSubset(source, good) if bad else source), bad


def _files_behind(source: InstanceSource) -> tuple[CocoFiles | None, Sequence[int]]:
    """Return the files that a source selects from, and the selected indices; None if it has no annotation file."""
    indices: Sequence[int] = range(len(source))
    while isinstance(source, InstanceSubset):
        indices, source = [source.indices[i] for i in indices], source.source
    return (source if isinstance(source, CocoFiles) else None), indices


def _header_problems(files: CocoFiles, indices: Sequence[int], threads: int) -> list[str | None]:
    """Return why each image cannot be used, judged by the header of its file, or None."""

    def check(first: int) -> list[str | None]:
        return [files.header_problem(i) for i in indices[first::threads]]

    # One task per thread, which overlaps waiting for the disk; one per image would cost more than it saves.
    found: list[str | None] = [None] * len(indices)
    for first, part in enumerate(map_in_threads(check, range(threads), threads)):
        found[first::threads] = part
    return found


def path_exists(path: Path) -> bool:
    """Return whether a path exists; False for names that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_box(value: object) -> TypeGuard[list[float]]:
    """Return whether a value from a file is a list of four coordinates."""
    return isinstance(value, list) and len(value) == 4 and all(map(rle.is_coordinate, value))


def check_annotation(entry: Json, size: tuple[int, int]) -> tuple[str | None, list[float]]:
    """Return why an annotation is left out, or None, and its box inside the image (left, top, right, bottom).

    Args:
        entry: an annotation of the file.
        size: height and width of the image; (0, 0) if unknown.
    """
    box = entry.get("bbox")
    if not is_box(box):
        return "annotations with an invalid box", []
    left, top, w, h = (float(v) for v in box)
    if w < MIN_SIDE or h < MIN_SIDE:
        return f"boxes thinner than {MIN_SIDE:g} pixel", []
    corners = [left, top, left + w, top + h]
    if size != (0, 0):
        corners = _clip_box(corners, size)
        if corners[2] - corners[0] < MIN_SIDE or corners[3] - corners[1] < MIN_SIDE:
            return "boxes outside their image", []
    if rle.shape_problem(entry.get("segmentation"), size if size != (0, 0) else None) is not None:
        return "annotations with a broken shape", []
    return None, corners


def _clip_box(corners: Sequence[float], size: tuple[int, int]) -> list[float]:
    limits = (size[1], size[0], size[1], size[0])
    return [
        min(max(value, 0.0), float(limit)) for value, limit in zip(corners, limits, strict=True)
    ]


def annotation_area(entry: Json, box: Sequence[float], size: tuple[int, int]) -> float:
    """Return the area of the annotation file if valid, else of the shape, or of the box without a shape."""
    area = entry.get("area")
    if isinstance(area, int | float) and 0 <= area < float("inf"):
        return float(area)
    if size != (0, 0) and not rle.is_empty(shape := entry.get("segmentation")):
        return rle.area(shape, size)
    return (box[2] - box[0]) * (box[3] - box[1])


def _require_same_classes(
    path: Path, classes: Sequence[str], expected: Sequence[str] | None
) -> None:
    if expected is not None and list(expected) != list(classes):
        raise ValueError(
            f"{path} has the classes {shorten_list(classes)}, expected are {shorten_list(expected)}; both annotation "
            "files must list the same categories"
        )


def _categories(path: Path, entries: Sequence[Json]) -> tuple[list[str], list[int]]:
    """Return names and ids of the categories, sorted by id."""
    try:
        pairs = sorted((int(entry["id"]), str(entry["name"])) for entry in entries)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{path}: a category needs an id and a name") from None
    numbers = [number for number, _ in pairs]
    if not pairs:
        raise ValueError(f"{path} lists no categories; each class needs an id and a name")
    if len(set(numbers)) < len(numbers):
        twice = repeated_value(numbers)
        raise ValueError(f"{path}: the category id {twice} occurs twice; each class needs its own")
    names = [name.encode("utf-8", "backslashreplace").decode() for _, name in pairs]
    require_distinct_names(names, path)
    return names, numbers


def _image_entry(path: Path, entry: Json) -> tuple[int, str, tuple[int, int] | None]:
    """Return id, file name, and height and width if known."""
    if "id" not in entry or "file_name" not in entry:
        raise ValueError(f"{path}: an image needs an id and a file_name, got {str(entry)[:80]}")
    size = None
    if entry.get("height") and entry.get("width"):
        size = (int(entry["height"]), int(entry["width"]))
    return entry["id"], str(entry["file_name"]), size
