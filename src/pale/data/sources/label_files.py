"""Datasets with one label file per image (YOLO, Pascal VOC), converted to the structure of COCO's JSON.

A reader returns images, objects and categories in memory, so that training, evaluation and checks share one path.
Unreadable labels are listed with file, line, rule and value: training stops at the first, `pale data check` prints
all. File names in label files cannot refer to files outside the root of the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ...core.lists import first_of
from ...core.plain_json import Json
from ...core.progress import map_in_threads
from ...errors import DataError
from ..reading import display_name, read_bytes

T = TypeVar("T")
MAX_LABEL_BYTES = 2**24  # maximum size of one label file
MAX_COORDINATE = 1e7  # pixels
MAX_OBJECTS = 20_000  # of one label file
MAX_DRAWN = 2**33  # objects of an image times its pixels, where each object is drawn by itself
THREADS = 8  # threads mostly wait for the disk


@dataclass
class LabelledImages:
    """Images of a split with their objects.

    Attributes:
        origin: file or folder that describes the dataset, for messages.
        folder: folder that file names are relative to.
        content: images, annotations and categories, as in COCO's JSON.
        problems: unreadable labels, with file and line, rule, value.
    """

    origin: Path
    folder: Path
    content: Json
    problems: list[str] = field(default_factory=list)

    def require_readable(self) -> LabelledImages:
        """Return the images, or raise the first problem with the number of the others."""
        if self.problems:
            raise DataError(
                f"{first_of(self.problems)}; correct the labels, `pale data check` lists all such problems"
            )
        return self


@dataclass(frozen=True)
class LabelledImage:
    """One image of a split: the values of its entry, its objects, and the problems of its labels."""

    entry: Json
    objects: Sequence[Json] = ()
    problems: Sequence[str] = ()


def collect_images(
    origin: Path,
    folder: Path,
    classes: Sequence[str],
    images: Sequence[T],
    read: Callable[[T], LabelledImage],
    threads: int,
) -> LabelledImages:
    """Read images with `read` in threads, and number images, objects and classes from 1."""
    categories = [{"id": i, "name": name} for i, name in enumerate(classes, start=1)]
    content: Json = {"images": [], "annotations": [], "categories": categories}
    problems: list[str] = []
    for number, found in enumerate(map_in_threads(read, images, threads), start=1):
        content["images"].append({"id": number} | found.entry)
        for entry in found.objects:
            identity = len(content["annotations"]) + 1
            content["annotations"].append({"id": identity, "image_id": number} | entry)
        problems += found.problems
    return LabelledImages(origin, folder, content, problems)


def inside(path: Path, root: Path) -> Path | None:
    """Return a path without `..`, or None if it is outside the root."""
    try:
        plain = Path(os.path.normpath(path))
        return plain if plain.is_relative_to(os.path.normpath(root)) else None
    except ValueError:
        return None


def read_label_bytes(path: Path) -> bytes:
    """Return the content of a label file."""
    try:
        return read_bytes(path, MAX_LABEL_BYTES)
    except FileNotFoundError:
        raise DataError(f"there is no file {display_name(path)}") from None
    except OSError as error:
        raise DataError(
            f"{display_name(path)} cannot be read ({error.strerror or error}); give a regular file of at most "
            f"{MAX_LABEL_BYTES:,} bytes"
        ) from None


def too_many_objects(path: Path, count: int) -> str | None:
    """Return the problem of a label file with more objects than can be read, or None."""
    if count <= MAX_OBJECTS:
        return None
    return f"{display_name(path)}: {count:,} objects, an image may have {MAX_OBJECTS:,}"


def require_drawable(path: Path, count: int, size: tuple[int, int]) -> None:
    """Raise if drawing so many objects at the size of the image would take minutes."""
    h, w = size
    if count * h * w > MAX_DRAWN:
        raise DataError(
            f"{display_name(path)}: {count:,} objects in an image of {w}x{h} are too many to draw, there may be "
            f"{MAX_DRAWN // (h * w):,}; shrink or cut the image"
        )


def read_label_text(path: Path) -> str:
    """Return the text of a label file; a byte order mark is removed."""
    return read_label_bytes(path).decode("utf-8-sig", "surrogateescape")
