"""Objects from COCO's json.

What a file holds in excess (crowds, boxes without area, annotations without an image) is settled here, once:
what cannot be used is counted and told, what is ambiguous is an error that names it.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import rle
from .images import UnreadableImageError, read_image
from .instances import Instances, InstanceSource, Subset, from_masks, size_of

LEAST_SIDE = 1.0  # pixels; a thinner box is none, as in mmdetection


def read_json(path: Path) -> dict[str, Any]:
    """The content of an annotation file; images, annotations and categories are there."""
    if not path.is_file():
        raise ValueError(
            f"there is no annotation file {path}; expected is COCO's json with images, annotations, categories"
        )
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    for part in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise ValueError(
                f"{path} has no list of {part!r}; COCO's json holds images, annotations and categories"
            )
        for place, entry in enumerate(content[part]):
            if (reason := _entry_problem(entry, part == "images")) is not None:
                raise ValueError(f"{path}: entry {place} of {part} {reason}; repair or remove it")
    return content


def _entry_problem(entry: Any, image: bool) -> str | None:
    """What no reader could make sense of; a size becomes a number, 0 where it is not known."""
    if not isinstance(entry, dict):
        return f"is {str(entry)[:40]!r}, not an object {{...}}"
    for key in ("id", "image_id", "category_id"):
        if isinstance(entry.get(key), list | dict):
            return f"has the {key} {str(entry[key])[:40]}, not a number"
    for key in ("width", "height") if image else ():
        try:
            pixels = int(entry.get(key) or 0)
        except (TypeError, ValueError, OverflowError):
            pixels = -1
        if not 0 <= pixels < 1e7:
            return f"has the {key} {str(entry[key])[:40]!r}, not a number of pixels"
        entry[key] = pixels
    return None


class CocoFiles:
    """Pictures in a folder, objects in COCO's json.

    Category ids may have gaps: sorted, they are the classes. What the annotations hold is packed into one
    array, so that reading processes share it.

    Args:
        path: the json.
        images: folder of the pictures.
        categories: names of the classes that must be there (the training set's, for validation).
        keep_empty: keep pictures without objects to learn from.
    """

    def __init__(
        self,
        path: Path,
        images: Path,
        categories: Sequence[str] | None = None,
        keep_empty: bool = True,
    ) -> None:
        self.path, self.folder = path, images
        content = read_json(path)
        self.classes, self.categories = _categories(path, content["categories"])
        if categories is not None and list(categories) != self.classes:
            raise ValueError(
                f"{path} has the classes {_few(self.classes)}, expected are {_few(categories)}; "
                "both annotation files must list the same categories"
            )
        self.left_out: Counter[str] = Counter()
        by_image = self._by_image(content)
        entries = [_image_entry(path, entry) for entry in content["images"]]
        self.shaped = True
        packed, self._files, self._ids, self._sizes = [], [], [], []
        for identity, file, size in entries:
            own = by_image.get(identity, ())
            if own and size is None:
                size = size_of(images / file)
            found = self._clean(own, size)
            if not keep_empty and (found is None or found.crowd.all()):
                self.left_out["pictures without objects"] += 1
                continue
            size = size or size_of(images / file)
            empty = from_masks(size, (), ())
            packed.append(pickle.dumps(found if found is not None else empty, protocol=5))
            self._files.append(file)
            self._ids.append(identity)
            self._sizes.append(size)
        if not packed:
            raise ValueError(
                f"{path} holds no pictures with objects; there is nothing to learn from"
            )
        self._ends = np.cumsum([len(p) for p in packed])
        self._packed = np.frombuffer(b"".join(packed), np.uint8)

    def _by_image(self, content: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
        known = {entry.get("id") for entry in content["images"]}
        ids = Counter(entry.get("id") for entry in content["images"])
        if twice := [i for i, n in ids.items() if n > 1]:
            raise ValueError(
                f"{self.path}: {len(twice)} image ids occur twice, such as {twice[0]}; each picture needs its own"
            )
        numbers = set(self.categories)
        out: dict[int, list[dict[str, Any]]] = {}
        for entry in content["annotations"]:
            if entry.get("category_id") not in numbers:
                raise ValueError(
                    f"{self.path}: annotation {entry.get('id')} has the category {entry.get('category_id')}, "
                    f"which is not listed; there are {_few([str(c) for c in self.categories])}"
                )
            if entry.get("image_id") not in known:
                self.left_out["annotations without a picture"] += 1
                continue
            out.setdefault(entry["image_id"], []).append(entry)
        return out

    def _clean(
        self, entries: Sequence[dict[str, Any]], size: tuple[int, int] | None
    ) -> Instances | None:
        kept = []
        for entry in entries:
            assert size is not None
            reason, box = usable(entry, size)
            if reason is not None:
                self.left_out[reason] += 1
                continue
            kept.append((entry, box))
        if not kept:
            return None
        assert size is not None
        shapes = tuple(entry.get("segmentation") or None for entry, _ in kept)
        crowd = np.array([bool(entry.get("iscrowd", 0)) for entry, _ in kept])
        self.shaped &= all(s is not None or c for s, c in zip(shapes, crowd, strict=True))
        number = {c: i for i, c in enumerate(self.categories)}
        return Instances(
            size,
            np.array([box for _, box in kept], np.float64),
            np.array([number[e["category_id"]] for e, _ in kept], np.int64),
            crowd,
            np.array([area_of(e, b, size) for e, b in kept], np.float64),
            shapes,
        )

    @property
    def notes(self) -> list[str]:
        """What was left out, counted."""
        return [f"{self.path.name}: {n} {what} left out" for what, n in self.left_out.items()]

    def __len__(self) -> int:
        return len(self._files)

    def image(self, index: int) -> Image.Image:
        """The picture."""
        image = read_image(self.folder / self._files[index])
        self._require_size(index, (image.height, image.width))
        return image

    def _require_size(self, index: int, found: tuple[int, int]) -> None:
        h, w = self._sizes[index]
        if found != (h, w):
            raise UnreadableImageError(
                f"{self.name(index)} is {found[1]}x{found[0]}, {self.path.name} says {w}x{h}; "
                "boxes would be off: repair one of them"
            )

    def instances(self, index: int) -> Instances:
        """Its objects."""
        start = int(self._ends[index - 1]) if index else 0
        found: Instances = pickle.loads(self._packed[start : int(self._ends[index])].tobytes())
        return found

    def size(self, index: int) -> tuple[int, int]:
        """Its height and width."""
        return self._sizes[index]

    def image_id(self, index: int) -> int:
        """Its id."""
        return self._ids[index]

    def name(self, index: int) -> str:
        """The file."""
        return str(self.folder / self._files[index])

    def problem(self, index: int) -> str | None:
        """Why a picture cannot be used, as far as the head of its file tells."""
        try:
            self._require_size(index, size_of(self.folder / self._files[index]))
        except UnreadableImageError as error:
            return str(error)
        return None


def require_pictures(source: InstanceSource, threads: int) -> None:
    """Raise what is wrong with the pictures of a json, from the heads of the files."""
    indices: Sequence[int] = range(len(source))
    while isinstance(source, Subset):
        indices, source = [source.indices[i] for i in indices], source.source
    if not isinstance(source, CocoFiles):
        return
    files = source
    present = {p.name for p in files.folder.iterdir()} if files.folder.is_dir() else set()
    missing = [
        files.name(i)
        for i in indices
        if files._files[i] not in present and not Path(files.name(i)).is_file()
    ]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(
            f"{files.path.name} lists {missing[0]}{more}, but there is no such picture; is data.images right?"
        )
    # A share each: threads overlap the waiting for a disk, tasks of one picture would only cost time.
    with ThreadPoolExecutor(threads) as pool:
        shares = pool.map(
            lambda first: [(i, files.problem(i)) for i in indices[first::threads]], range(threads)
        )
        bad = [reason for _, reason in sorted(chain(*shares)) if reason is not None]
    if bad:
        more = f" (and {len(bad) - 1} more such pictures)" if len(bad) > 1 else ""
        raise UnreadableImageError(bad[0] + more)


def usable(entry: dict[str, Any], size: tuple[int, int]) -> tuple[str | None, list[float]]:
    """Why an annotation is left out, or None, and its box inside the image (left, top, right, bottom).

    Args:
        entry: of the json.
        size: height and width of the image; (0, 0) where it is not known.
    """
    box = entry.get("bbox")
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(isinstance(v, int | float) and abs(v) < 1e7 for v in box)
    ):
        return "annotations with a box that is no box", []
    left, top, w, h = (float(v) for v in box)
    if w < LEAST_SIDE or h < LEAST_SIDE:
        return f"boxes thinner than {LEAST_SIDE:g} pixel", []
    right, bottom = left + w, top + h
    if size != (0, 0):
        left, right = (min(max(v, 0.0), float(size[1])) for v in (left, right))
        top, bottom = (min(max(v, 0.0), float(size[0])) for v in (top, bottom))
        if right - left < LEAST_SIDE or bottom - top < LEAST_SIDE:
            return "boxes outside their picture", []
    if rle.problem(entry.get("segmentation"), size if size != (0, 0) else None) is not None:
        return "annotations with a broken shape", []
    return None, [left, top, right, bottom]


def area_of(entry: dict[str, Any], box: Sequence[float], size: tuple[int, int]) -> float:
    """As the json says; where it does not, of the shape, or of the box where there is none."""
    said = entry.get("area")
    if isinstance(said, int | float) and 0 <= said < float("inf"):
        return float(said)
    if size != (0, 0) and not rle.is_empty(shape := entry.get("segmentation")):
        return rle.area(shape, size)
    return (box[2] - box[0]) * (box[3] - box[1])


def _categories(path: Path, entries: Sequence[Any]) -> tuple[list[str], list[int]]:
    try:
        pairs = sorted((int(entry["id"]), str(entry["name"])) for entry in entries)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: a category needs an id and a name") from None
    numbers = [number for number, _ in pairs]
    if not pairs:
        raise ValueError(f"{path} lists no categories; each class needs an id and a name")
    if len(set(numbers)) < len(numbers):
        twice = next(n for n in numbers if numbers.count(n) > 1)
        raise ValueError(f"{path}: the category id {twice} occurs twice; each class needs its own")
    return [name for _, name in pairs], numbers


def _image_entry(path: Path, entry: Any) -> tuple[int, str, tuple[int, int] | None]:
    if not isinstance(entry, dict) or "id" not in entry or "file_name" not in entry:
        raise ValueError(f"{path}: an image needs an id and a file_name, got {str(entry)[:80]}")
    size = None
    if entry.get("height") and entry.get("width"):
        size = (int(entry["height"]), int(entry["width"]))
    return entry["id"], str(entry["file_name"]), size


def _few(words: Sequence[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return ", ".join(words[:5]) + more
