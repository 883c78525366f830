"""Convert folders of images and instance masks to annotations in COCO's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.plain_json import Json
from ...core.progress import Track, no_progress
from ..decoding import read_stored_image
from ..reading import UnreadableImageError, display_name, require_distinct_names
from .instances import from_masks, height_width
from .masks import MASK_SUFFIXES, find_pairs


def convert_masks(
    images: Path,
    masks: Path,
    classes: Sequence[str],
    divisor: int | None = None,
    track: Track = no_progress,
    skipped: Counter[int] | None = None,
) -> Json:
    """Build annotations in COCO's format from images and instance masks; each value above 0 of a mask is an object.

    Args:
        images: folder of images.
        masks: folder of masks with the same names, 8 or 16 bits, palette or grey.
        classes: names of the classes. With a single one, all objects are of this class.
        divisor: the class of a value is value // divisor, counted from 1, as in Cityscapes (26001: class 26, object 1).
            Values below it are regions without objects (7: road) and are left out.
        track: shows progress.
        skipped: counts the masks in which each of these values occurs.
    """
    _require_valid_divisor(divisor, len(classes))
    require_distinct_names(classes, "the list of classes")
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(classes)]
    content: Json = {"images": [], "annotations": [], "categories": categories}
    pairs = find_pairs(images, masks)
    for number, (image, mask) in enumerate(track(pairs, "reading", len(pairs)), start=1):
        values = _read_values(mask)
        h, w = height_width(image)
        if (h, w) != values.shape:
            raise UnreadableImageError(
                f"{image} is {w}x{h}, its mask {values.shape[1]}x{values.shape[0]}; both sizes must be equal"
            )
        name = _json_name(image.relative_to(images))
        content["images"].append({"id": number, "file_name": name, "height": h, "width": w})
        present = [int(v) for v in np.unique(values) if v > 0]
        objects = [v for v in present if v >= (divisor or 0)]
        if skipped is not None:
            skipped.update(v for v in present if v < (divisor or 0))
        labels = _object_classes(objects, divisor, len(classes), mask)
        found = from_masks((h, w), (values == v for v in objects), labels)
        for entry in found.annotations(number, range(1, len(classes) + 1)):
            content["annotations"].append({"id": len(content["annotations"]) + 1} | entry)
    return content


def _require_valid_divisor(divisor: int | None, classes: int) -> None:
    if divisor is None and classes != 1:
        raise ValueError(
            f"{classes} classes need a divisor, which gives the class of a value in a mask (value // divisor); "
            "it can be omitted for one class"
        )
    if divisor is not None and divisor < 1:
        raise ValueError(f"the divisor must be 1 or more, got {divisor}; in Cityscapes it is 1000")


def _object_classes(
    values: Sequence[int], divisor: int | None, classes: int, path: Path
) -> list[int]:
    """Return the class, counted from 0, of each value of a mask."""
    labels = [0 if divisor is None else value // divisor - 1 for value in values]
    if wrong := [v for v, label in zip(values, labels, strict=True) if not 0 <= label < classes]:
        raise UnreadableImageError(
            f"{path}: the value {wrong[0]} gives the class {wrong[0] // (divisor or 1)}, there are {classes}; check "
            "the divisor and the list"
        )
    return labels


def _json_name(path: Path) -> str:
    """Return a file name that JSON can represent, or raise."""
    if (name := display_name(path)) != str(path):
        raise UnreadableImageError(
            f"{name}: a name that is not UTF-8 cannot be written to JSON; rename the file"
        )
    return name


def _read_values(path: Path) -> NDArray[np.int32]:
    if path.suffix.lower() not in MASK_SUFFIXES:
        raise UnreadableImageError(
            f"{path}: masks must be lossless files ({', '.join(MASK_SUFFIXES)})"
        )
    values = np.asarray(read_stored_image(path))
    if values.ndim != 2:
        raise UnreadableImageError(f"{path}: an instance mask has one value per pixel, not colours")
    if values.dtype.kind == "f":
        raise UnreadableImageError(f"{path}: an instance mask contains integers, not floats")
    return values.astype(np.int32)
