"""Images with objects: a box, a class and, where there is one, a shape each. Scenes, trimaps, instance masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..progress import Track, silent
from . import rle
from .images import UnreadableImageError, read_image
from .masks import MASK_SUFFIXES, image_size
from .rle import Mask, Shape
from .scenes import CLASSES as SHAPES
from .scenes import Scenes


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


def size_of(path: Path) -> tuple[int, int]:
    """Height and width of a picture, from the head of its file."""
    w, h = image_size(path)
    return h, w


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
        return size_of(self._path(index))

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


def has_objects(source: InstanceSource, index: int) -> bool:
    """Whether a picture has an object to learn from; crowds are none."""
    return not source.instances(index).crowd.all()


def with_objects(source: InstanceSource) -> Subset:
    """The pictures that have objects to learn from; how many have none is noted."""
    kept = [i for i in range(len(source)) if has_objects(source, i)]
    if not kept:
        raise ValueError(
            f"none of the {len(source)} training pictures has an object; there is nothing to learn from"
        )
    out = Subset(source, kept)
    if empty := len(source) - len(kept):
        out.notes = [*source.notes, f"training set: {empty} pictures without objects left out"]
    return out


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
    images: Path,
    masks: Path,
    classes: Sequence[str],
    divisor: int | None = None,
    track: Track = silent,
    skipped: Counter[int] | None = None,
) -> dict[str, Any]:
    """COCO's json from pictures and instance masks: each value above 0 of a mask is an object.

    Args:
        images: folder of pictures.
        masks: folder of masks with the same names, 8 or 16 bits, palette or grey.
        classes: names. With one, all objects are of it.
        divisor: a value's class is value // divisor, from 1 on, as in Cityscapes (26001: class 26, object 1).
            Values below it are regions without objects (7: road) and left out.
        track: shows how far it is.
        skipped: counts in how many masks each such value occurs.
    """
    from .masks import find_pairs

    if divisor is None and len(classes) != 1:
        raise ValueError(
            f"{len(classes)} classes need a divisor that tells them from a mask's values (value // divisor); "
            "with one class there is none"
        )
    if divisor is not None and divisor < 1:
        raise ValueError(f"the divisor must be 1 or more, got {divisor}; in Cityscapes it is 1000")
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(classes)]
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
    pairs = find_pairs(images, masks)
    for number, (picture, mask_path) in enumerate(track(pairs, "reading", len(pairs)), start=1):
        values = _values(mask_path)
        w, h = image_size(picture)
        if (h, w) != values.shape:
            raise UnreadableImageError(
                f"{picture} is {w}x{h}, its mask {values.shape[1]}x{values.shape[0]}; both must have one size"
            )
        content["images"].append(
            {"id": number, "file_name": str(picture.relative_to(images)), "height": h, "width": w}
        )
        found_values = [int(v) for v in np.unique(values) if v > 0]
        objects = [v for v in found_values if v >= (divisor or 0)]
        if skipped is not None:
            skipped.update(v for v in found_values if v < (divisor or 0))
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
    try:
        with Image.open(path) as image:
            values = np.asarray(image)
    except Exception as error:
        raise UnreadableImageError(
            f"{path}: cannot be read as a mask ({error}); replace it"
        ) from None
    if values.ndim != 2:
        raise UnreadableImageError(f"{path}: an instance mask has one value a pixel, not colours")
    if values.dtype.kind == "f":
        raise UnreadableImageError(f"{path}: an instance mask holds whole numbers, not floats")
    return values.astype(np.int64)
