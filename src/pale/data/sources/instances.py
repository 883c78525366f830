"""Images with objects, which have a box, a class and mostly a shape: generated scenes and Oxford-IIIT Pet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...core.plain_json import Json
from .. import rle
from ..decoding import image_size, read_image, read_stored_image
from ..reading import UnreadableImageError, display_name
from ..rle import Mask, Shape
from .images import pet_rows
from .scenes import CLASSES as SHAPES
from .scenes import Scenes, SceneSource

MAX_MASK_BYTES = 2**31  # maximum size of the masks of all objects in an image, one byte per pixel


@dataclass(frozen=True)
class Instances:
    """The objects of one image, in pixels of that image.

    Attributes:
        size: height and width of the image.
        boxes: (n, 4): left, top, right, bottom.
        labels: (n,), starting at 0.
        crowd: (n,): whether it is a region of many objects; not used for training, ignored by the metric.
        areas: (n,), of the shapes, for the metric's small, medium and large objects.
        shapes: shape of each object.
    """

    size: tuple[int, int]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    areas: NDArray[np.float64]
    shapes: tuple[Shape, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, keep: NDArray[np.bool_] | NDArray[np.integer]) -> Instances:
        """Return some of the objects, selected by a boolean mask or by indices."""
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
        """Draw the masks (n, h, w) of 0 and 1, at the size of the image or at another."""
        h, w = to or self.size
        if len(self) * h * w > MAX_MASK_BYTES:
            raise UnreadableImageError(
                f"an image of {w}x{h} with {len(self)} objects: the masks of one image may take "
                f"{MAX_MASK_BYTES / 2**30:g} GiB; cut it into parts, or train boxes only: --model.heads.masks false"
            )
        out = np.zeros((len(self), h, w), np.uint8)
        for mask, shape in zip(out, self.shapes, strict=True):
            mask[:] = rle.draw(shape, self.size, (h, w))
        return out

    def annotations(self, image: int, categories: Sequence[int]) -> list[Json]:
        """Return the objects as annotations in COCO's format, without ids."""
        out = []
        for i, (left, top, right, bottom) in enumerate(self.boxes.tolist()):
            entry: Json = {
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
    size: tuple[int, int],
    masks: Iterable[NDArray[np.bool_] | NDArray[np.integer]],
    labels: Sequence[int],
) -> Instances:
    """Return the objects of masks (h, w), which are read one at a time; empty masks are left out."""
    found: list[tuple[tuple[int, int, int, int], int, int, Shape]] = []
    for mask, label in zip(masks, labels, strict=True):
        if (box := rle.box_of(mask)) is not None:
            shape = rle.encode((mask > 0).astype(np.uint8))
            found.append((box, label, int(np.count_nonzero(mask > 0)), shape))
    return Instances(
        size,
        np.array([box for box, _, _, _ in found], np.float64).reshape(-1, 4),
        np.array([label for _, label, _, _ in found], np.int64),
        np.zeros(len(found), np.bool_),
        np.array([area for _, _, area, _ in found], np.float64),
        tuple(shape for _, _, _, shape in found),
    )


class InstanceSource(Protocol):
    """Images with their objects, by index."""

    classes: list[str]
    categories: list[int]  # category id of each class in COCO's format
    shaped: bool  # all objects except crowds have a shape

    @property
    def notes(self) -> list[str]:
        """Numbers of entries that were left out, for the log."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""

    def instances(self, index: int) -> Instances:
        """Return the objects of an image."""

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of an image without decoding it."""

    def image_id(self, index: int) -> int:
        """Return the id of an image in COCO's format."""

    def name(self, index: int) -> str:
        """Return the origin of an image, for messages."""


def height_width(path: Path) -> tuple[int, int]:
    """Return height and width of an image from the header of its file."""
    w, h = image_size(path)
    return h, w


class SceneInstances(SceneSource):
    """Generated scenes with their objects."""

    def __init__(self, scenes: Scenes) -> None:
        super().__init__(scenes)
        self.classes = list(scenes.shapes)
        self.categories = list(range(1, len(self.classes) + 1))
        self.shaped, self.notes = True, list[str]()

    def instances(self, index: int) -> Instances:
        """Draw a scene and return its objects."""
        return self.image_and_instances(index)[1]

    def image_and_instances(self, index: int) -> tuple[Image.Image, Instances]:
        """Draw a scene once and return image and objects."""
        scene = self.scenes[index]
        masks = [scene.instances == k + 1 for k in range(len(scene.labels))]
        labels = [self.classes.index(SHAPES[label]) for label in scene.labels]
        found = from_masks(scene.instances.shape, masks, labels)
        return Image.fromarray(scene.image), found

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width; all scenes are square."""
        return self.scenes.size, self.scenes.size

    def image_id(self, index: int) -> int:
        """Return the index plus 1."""
        return index + 1


class PetSilhouettes:
    """Oxford-IIIT Pet: one cat or dog per image; its shape is value 1 of the trimap (3, the border, is outside).

    Args:
        root: contains images/, annotations/trimaps/ and the lists.
        split: "trainval" or "test".
        keep_empty: keep the 14 images whose trimap has no pet pixel.
    """

    def __init__(self, root: Path, split: str, keep_empty: bool = True) -> None:
        path = root / "annotations" / f"{split}.txt"
        if not path.is_file():
            raise ValueError(f"there is no list {path}; expected is the Oxford-IIIT Pet dataset")
        self.root, self.classes, self.categories = root, ["cat", "dog"], [1, 2]
        self.shaped, self.notes = True, list[str]()
        # File name without suffix, and class.
        self.rows = [(row[0], int(row[2]) - 1) for row in pet_rows(path)]
        if not keep_empty:
            before = len(self.rows)
            self.rows = [row for row in self.rows if (self._trimap(row[0]) == 1).any()]
            if before > len(self.rows):
                self.notes = [
                    f"{path.name}: {before - len(self.rows)} images without objects left out"
                ]

    def _trimap(self, stem: str) -> NDArray[np.uint8]:
        path = self.root / "annotations/trimaps" / f"{stem}.png"
        trimap = np.asarray(read_stored_image(path))
        if trimap.ndim != 2:
            raise UnreadableImageError(f"{path}: a trimap has one value per pixel, not colours")
        return trimap

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""
        return read_image(self._path(index))

    def instances(self, index: int) -> Instances:
        """Return the pet, or no object."""
        stem, label = self.rows[index]
        trimap = self._trimap(stem)
        return from_masks((trimap.shape[0], trimap.shape[1]), [trimap == 1], [label])

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width from the header of the file."""
        return height_width(self._path(index))

    def image_id(self, index: int) -> int:
        """Return the index plus 1."""
        return index + 1

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return display_name(self._path(index))

    def _path(self, index: int) -> Path:
        return self.root / "images" / f"{self.rows[index][0]}.jpg"


class InstanceSubset:
    """Some images of a source."""

    def __init__(self, source: InstanceSource, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices
        self.classes, self.categories = source.classes, source.categories
        self.shaped, self.notes = source.shaped, source.notes

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        """Return an image of the subset."""
        return self.source.image(self.indices[index])

    def instances(self, index: int) -> Instances:
        """Return the objects of an image."""
        return self.source.instances(self.indices[index])

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of an image."""
        return self.source.size(self.indices[index])

    def image_id(self, index: int) -> int:
        """Return the id of an image in the whole source."""
        return self.source.image_id(self.indices[index])

    def name(self, index: int) -> str:
        """Return the origin of an image."""
        return self.source.name(self.indices[index])


def has_objects(source: InstanceSource, index: int) -> bool:
    """Return whether an image has an object that is not a crowd."""
    return not source.instances(index).crowd.all()


def with_objects(source: InstanceSource) -> InstanceSubset:
    """Return the images with objects to train on; the number of the others is added to the notes."""
    kept = [i for i in range(len(source)) if has_objects(source, i)]
    if not kept:
        raise ValueError(
            f"none of the {len(source)} training images has an object; there is nothing to learn from"
        )
    out = InstanceSubset(source, kept)
    if empty := len(source) - len(kept):
        out.notes = [*source.notes, f"training set: {empty} images without objects left out"]
    return out


def read_instances(source: InstanceSource, index: int) -> tuple[Image.Image, Instances]:
    """Return image and objects; raises if their sizes differ."""
    if isinstance(source, SceneInstances):
        return source.image_and_instances(index)
    image, found = source.image(index), source.instances(index)
    if (image.height, image.width) != found.size:
        raise UnreadableImageError(
            f"{source.name(index)} is {image.width}x{image.height}, its objects are given for "
            f"{found.size[1]}x{found.size[0]}; both sizes must be equal"
        )
    return image, found
