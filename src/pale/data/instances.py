"""Images with objects: a box, a class and, where there is one, a shape each. COCO's json, trimaps, scenes.

What a file holds in excess (crowds, boxes without area, annotations without an image) is settled here, once:
what cannot be used is counted and told, what is ambiguous is an error that names it.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from . import rle
from .images import UnreadableImageError, read_image
from .masks import MASK_SUFFIXES, image_size
from .rle import Mask, Shape
from .scenes import CLASSES as SHAPES
from .scenes import Scenes

LEAST_SIDE = 1.0  # pixels; a thinner box is none, as in mmdetection


@dataclass(frozen=True)
class Instances:
    """The objects of one image, in its own pixels.

    Attributes:
        size: height and width of the image.
        boxes: (n, 4): left, top, right, bottom.
        labels: (n,), from 0 on.
        crowd: (n,): regions of many objects; never learned, and no mistake when found.
        areas: (n,), of the shape, for the metric's small, medium and large.
        shapes: of each object.
    """

    size: tuple[int, int]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    areas: NDArray[np.float64]
    shapes: tuple[Shape, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, keep: NDArray[Any]) -> Instances:
        """Some of them: by a mask or by numbers."""
        where = np.arange(len(self))[keep]
        return Instances(
            self.size,
            self.boxes[where],
            self.labels[where],
            self.crowd[where],
            self.areas[where],
            tuple(self.shapes[i] for i in where),
        )

    def masks(self, to: tuple[int, int] | None = None) -> Mask:
        """(n, h, w) of 0 and 1, at the image's size or at another."""
        h, w = to or self.size
        out = np.zeros((len(self), h, w), np.uint8)
        for mask, shape in zip(out, self.shapes, strict=True):
            mask[:] = rle.draw(shape, self.size, (h, w))
        return out

    def annotations(self, image: int, categories: Sequence[int]) -> list[dict[str, Any]]:
        """As COCO's json has them, without ids."""
        out = []
        for i, (left, top, right, bottom) in enumerate(self.boxes.tolist()):
            entry: dict[str, Any] = {
                "image_id": image,
                "category_id": categories[int(self.labels[i])],
                "bbox": [left, top, right - left, bottom - top],
                "area": float(self.areas[i]),
                "iscrowd": int(self.crowd[i]),
            }
            if not rle.is_empty(self.shapes[i]):
                entry["segmentation"] = self.shapes[i]
            out.append(entry)
        return out


def from_masks(
    size: tuple[int, int], masks: Sequence[NDArray[Any]], labels: Sequence[int]
) -> Instances:
    """Objects of masks (h, w); empty ones are left out."""
    found = [(m, c, b) for m, c in zip(masks, labels, strict=True) if (b := rle.box_of(m))]
    return Instances(
        size,
        np.array([b for _, _, b in found], np.float64).reshape(-1, 4),
        np.array([c for _, c, _ in found], np.int64),
        np.zeros(len(found), np.bool_),
        np.array([int((m > 0).sum()) for m, _, _ in found], np.float64),
        tuple(rle.encode((m > 0).astype(np.uint8)) for m, _, _ in found),
    )


class InstanceSource(Protocol):
    """Pictures with their objects, by number."""

    classes: list[str]
    categories: list[int]  # the number of each class in COCO's json
    shaped: bool  # every object but crowds has a shape

    @property
    def notes(self) -> list[str]:
        """What was left out, counted."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Picture number `index`, RGB."""

    def instances(self, index: int) -> Instances:
        """Its objects."""

    def size(self, index: int) -> tuple[int, int]:
        """Its height and width, without reading it."""

    def image_id(self, index: int) -> int:
        """Its number in COCO's json."""

    def name(self, index: int) -> str:
        """Where it comes from, for messages."""


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
    return content


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
            found = self._clean(by_image.get(identity, ()), size)
            if not keep_empty and (found is None or found.crowd.all()):
                self.left_out["pictures without objects"] += 1
                continue
            size = size or _size_of(images / file)
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
        if entries and size is None:
            size = (0, 0)  # unknown: read with the picture
        for entry in entries:
            reason, box = usable(entry, size or (0, 0))
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
            np.array([e.get("area", (b[2] - b[0]) * (b[3] - b[1])) for e, b in kept], np.float64),
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
        h, w = self._sizes[index]
        if (image.height, image.width) != (h, w):
            raise UnreadableImageError(
                f"{self.name(index)} is {image.width}x{image.height}, {self.path.name} says {w}x{h}; "
                "boxes would be off: repair one of them"
            )
        return image

    def instances(self, index: int) -> Instances:
        """Its objects."""
        start = int(self._ends[index - 1]) if index else 0
        found: Instances = pickle.loads(self._packed[start : int(self._ends[index])].tobytes())
        if found.size == (0, 0):
            return Instances(self._sizes[index], *list(vars(found).values())[1:])
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

    def missing(self) -> list[str]:
        """Pictures that are not there."""
        present = {p.name for p in self.folder.iterdir()} if self.folder.is_dir() else set()
        return [
            str(self.folder / f)
            for f in self._files
            if f not in present and not (self.folder / f).is_file()
        ]


def usable(entry: dict[str, Any], size: tuple[int, int]) -> tuple[str | None, list[float]]:
    """Why an annotation is left out, or None, and its box inside the image (left, top, right, bottom)."""
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
    if rle.problem(entry.get("segmentation")) is not None:
        return "annotations with a broken shape", []
    return None, [left, top, right, bottom]


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


def _size_of(path: Path) -> tuple[int, int]:
    w, h = image_size(path)
    return h, w


def _few(words: Sequence[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return ", ".join(words[:5]) + more


class SceneInstances:
    """Scenes with their objects."""

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes
        self.classes = list(scenes.shapes)
        self.categories = list(range(1, len(self.classes) + 1))
        self.shaped, self.notes = True, list[str]()

    def __len__(self) -> int:
        return len(self.scenes)

    def image(self, index: int) -> Image.Image:
        """The picture."""
        return Image.fromarray(self.scenes[index].image)

    def instances(self, index: int) -> Instances:
        """Its objects."""
        return self.both(index)[1]

    def both(self, index: int) -> tuple[Image.Image, Instances]:
        """Picture and objects, drawn once."""
        scene = self.scenes[index]
        masks = [scene.instances == k + 1 for k in range(len(scene.labels))]
        labels = [self.classes.index(SHAPES[label]) for label in scene.labels]
        found = from_masks(scene.instances.shape, masks, labels)
        return Image.fromarray(scene.image), found

    def size(self, index: int) -> tuple[int, int]:
        """All are square."""
        return self.scenes.size, self.scenes.size

    def image_id(self, index: int) -> int:
        """Its number, from 1 on."""
        return index + 1

    def name(self, index: int) -> str:
        """For messages."""
        return f"scene {index} of seed {self.scenes.seed}"


class PetSilhouettes:
    """Oxford-IIIT Pet: one cat or dog a picture, its shape the trimap's pet pixels (1; the border, 3, is outside).

    Args:
        root: holds images/, annotations/trimaps/ and the lists.
        split: "trainval" or "test".
        keep_empty: keep pictures whose trimap has no pet pixel (14 of them).
    """

    def __init__(self, root: Path, split: str, keep_empty: bool = True) -> None:
        path = root / "annotations" / f"{split}.txt"
        if not path.is_file():
            raise ValueError(f"there is no list {path}; expected is the Oxford-IIIT Pet data set")
        rows = [line.split() for line in path.read_text().splitlines()]
        rows = [row for row in rows if row and not row[0].startswith("#")]
        self.root, self.classes, self.categories = root, ["cat", "dog"], [1, 2]
        self.shaped, self.notes = True, list[str]()
        self._rows = [(row[0], int(row[2]) - 1) for row in rows]
        if not keep_empty:
            before = len(self._rows)
            self._rows = [row for row in self._rows if (self._trimap(row[0]) == 1).any()]
            if before > len(self._rows):
                self.notes = [
                    f"{path.name}: {before - len(self._rows)} pictures without objects left out"
                ]

    def _trimap(self, stem: str) -> NDArray[np.uint8]:
        path = self.root / "annotations/trimaps" / f"{stem}.png"
        try:
            with Image.open(path) as image:
                return np.asarray(image)
        except FileNotFoundError:
            raise UnreadableImageError(f"{path}: there is no such mask") from None

    def __len__(self) -> int:
        return len(self._rows)

    def image(self, index: int) -> Image.Image:
        """The picture."""
        return read_image(self._path(index))

    def instances(self, index: int) -> Instances:
        """The pet, or nothing."""
        stem, label = self._rows[index]
        trimap = self._trimap(stem)
        return from_masks((trimap.shape[0], trimap.shape[1]), [trimap == 1], [label])

    def size(self, index: int) -> tuple[int, int]:
        """From the head of the file."""
        return _size_of(self._path(index))

    def image_id(self, index: int) -> int:
        """Its number, from 1 on."""
        return index + 1

    def name(self, index: int) -> str:
        """The file."""
        return str(self._path(index))

    def _path(self, index: int) -> Path:
        return self.root / "images" / f"{self._rows[index][0]}.jpg"


class Subset:
    """Some pictures of a source."""

    def __init__(self, source: InstanceSource, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices
        self.classes, self.categories = source.classes, source.categories
        self.shaped, self.notes = source.shaped, source.notes

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        """Picture number `index` of the subset."""
        return self.source.image(self.indices[index])

    def instances(self, index: int) -> Instances:
        """Its objects."""
        return self.source.instances(self.indices[index])

    def size(self, index: int) -> tuple[int, int]:
        """Its height and width."""
        return self.source.size(self.indices[index])

    def image_id(self, index: int) -> int:
        """Its number in the whole."""
        return self.source.image_id(self.indices[index])

    def name(self, index: int) -> str:
        """Where it comes from."""
        return self.source.name(self.indices[index])


def both(source: InstanceSource, index: int) -> tuple[Image.Image, Instances]:
    """Picture and objects, of one size."""
    if isinstance(source, SceneInstances):
        return source.both(index)
    image, found = source.image(index), source.instances(index)
    if (image.height, image.width) != found.size:
        raise UnreadableImageError(
            f"{source.name(index)} is {image.width}x{image.height}, its objects lie in "
            f"{found.size[1]}x{found.size[0]}; both must have one size"
        )
    return image, found


def convert(
    images: Path, masks: Path, classes: Sequence[str], divisor: int | None = None
) -> dict[str, Any]:
    """COCO's json from pictures and instance masks: each value above 0 of a mask is an object.

    Args:
        images: folder of pictures.
        masks: folder of masks with the same names, 8 or 16 bits, palette or grey.
        classes: names. With one, all objects are of it.
        divisor: a value's class is value // divisor, from 1 on, as in Cityscapes (26001: class 26, object 1).
    """
    from .masks import find_pairs

    if divisor is None and len(classes) != 1:
        raise ValueError(
            f"{len(classes)} classes need a divisor that tells them from a mask's values (value // divisor); "
            "with one class there is none"
        )
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(classes)]
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
    for number, (picture, mask_path) in enumerate(find_pairs(images, masks), start=1):
        values = _values(mask_path)
        w, h = image_size(picture)
        if (h, w) != values.shape:
            raise UnreadableImageError(
                f"{picture} is {w}x{h}, its mask {values.shape[1]}x{values.shape[0]}; both must have one size"
            )
        content["images"].append(
            {"id": number, "file_name": str(picture.relative_to(images)), "height": h, "width": w}
        )
        objects = [int(v) for v in np.unique(values) if v > 0]
        labels = [0 if divisor is None else v // divisor - 1 for v in objects]
        if wrong := [v for v, c in zip(objects, labels, strict=True) if not 0 <= c < len(classes)]:
            raise UnreadableImageError(
                f"{mask_path}: the value {wrong[0]} gives the class {wrong[0] // (divisor or 1)}, there are "
                f"{len(classes)}; check the divisor and the list"
            )
        found = from_masks((h, w), [values == v for v in objects], labels)
        for entry in found.annotations(number, range(1, len(classes) + 1)):
            content["annotations"].append({"id": len(content["annotations"]) + 1} | entry)
    return content


def _values(path: Path) -> NDArray[np.int64]:
    if path.suffix.lower() not in MASK_SUFFIXES:
        raise UnreadableImageError(f"{path}: masks are lossless files ({', '.join(MASK_SUFFIXES)})")
    with Image.open(path) as image:
        values = np.asarray(image)
    if values.ndim != 2:
        raise UnreadableImageError(f"{path}: an instance mask has one value a pixel, not colours")
    return values.astype(np.int64)
