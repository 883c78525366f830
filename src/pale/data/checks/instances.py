"""Check a detection dataset of images and annotations in COCO's format, and count its objects.

The checks read the annotation file itself, not a `CocoFiles` source, which would stop at the first error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...core.plain_json import Json
from ...core.progress import Track, map_in_threads, no_progress
from .. import rle
from ..decoding import read_image
from ..reading import UnreadableImageError, display_name, distinct_names
from ..sources.coco import (
    MIN_SIDE,
    annotation_area,
    check_annotation,
    is_box,
    path_exists,
    read_annotations,
)
from .copies import SAME_IMAGE, SAME_IMAGE_ADVICE, pixel_digest
from .report import Problem, SplitReport

OUTSIDE = 1.0  # pixels by which a box may exceed the image, because of rounding
FEW = 10  # number of objects below which a class is reported
SMALL, LARGE = 32**2, 96**2  # COCO's limits of small and large objects, in pixels
LEFT_OUT = "they are left out"


def check_instances(
    splits: dict[str, tuple[Path, Path]], threads: int = 4, track: Track = no_progress
) -> SplitReport:
    """Check annotation files and images.

    Args:
        splits: annotation file and image folder of each split; the first is the training set.
        threads: number of threads that read images.
        track: shows progress.
    """
    read = {name: (read_annotations(path), folder) for name, (path, folder) in splits.items()}
    return check_contents(read, threads, track)


def check_contents(
    splits: dict[str, tuple[Json, Path]],
    threads: int = 4,
    track: Track = no_progress,
    unreadable: Sequence[str] = (),
) -> SplitReport:
    """Check annotations in the structure of COCO's JSON, and images.

    Args:
        splits: content and image folder of each split; the first is the training set.
        threads: number of threads that read images.
        track: shows progress.
        unreadable: labels that could not be read and are missing in the content.
    """
    contents = {name: content for name, (content, _) in splits.items()}
    training = next(iter(contents))
    report = SplitReport(classes=_class_names(contents[training]["categories"]))
    advice = "training would not start: correct the label files"
    problems = [Problem("labels that cannot be read", True, advice, list(unreadable))]
    digests: dict[str, dict[str, str]] = {}
    for name, (content, folder) in splits.items():
        report.splits[name] = _count_objects(content, report.classes)
        problems += _repeated_entries(name, content)
        problems += _unusable_content(name, content, name == training)
        problems += _annotation_problems(name, content)
        examine = partial(_examine_image, name, folder)
        images = map_in_threads(examine, content["images"], threads, track, f"reading {name}")
        problems += _image_problems(images)
        digests[name] = {image.file: image.digest for image in images if image.digest}
    problems += _split_problems(contents, digests)
    problems += _class_problems(report)
    report.problems = sorted(_merge_kinds(problems), key=lambda problem: not problem.serious)
    return report


def _merge_kinds(problems: Sequence[Problem]) -> list[Problem]:
    """Merge the problems of all splits that have the same kind; those without items are dropped."""
    merged: dict[str, Problem] = {}
    for p in problems:
        if p.items:
            before = merged.get(p.kind)
            items = [*before.items, *p.items] if before else p.items
            merged[p.kind] = Problem(p.kind, p.serious, p.advice, items)
    return list(merged.values())


def _sorted_by_id(categories: Sequence[Json]) -> list[Json]:
    return sorted(categories, key=lambda c: c["id"] if isinstance(c.get("id"), int) else 0)


def _class_names(categories: Sequence[Json]) -> list[str]:
    return distinct_names([str(c.get("name")) for c in _sorted_by_id(categories)])


def _count_objects(content: Json, classes: Sequence[str]) -> Json:
    """Return the statistics of a split."""
    categories = _sorted_by_id(content["categories"])
    name = dict(zip([c.get("id") for c in categories], _class_names(categories), strict=True))
    objects: Counter[str] = Counter()
    images: dict[str, set[object]] = {}
    sizes = Counter({"small": 0, "medium": 0, "large": 0})
    crowds = 0
    with_objects = set()
    image_sizes = _image_sizes(content)
    for entry in content["annotations"]:
        if entry.get("iscrowd"):
            crowds += 1
            continue
        label = name.get(entry.get("category_id"), "?")
        objects[label] += 1
        images.setdefault(label, set()).add(entry.get("image_id"))
        with_objects.add(entry.get("image_id"))
        size = image_sizes.get(entry.get("image_id"), (0, 0))
        reason, box = check_annotation(entry, size)
        area = annotation_area(entry, box, size) if reason is None else 0
        sizes["small" if area < SMALL else "medium" if area < LARGE else "large"] += 1
    return {
        "images": len(content["images"]),
        "empty": sum(image.get("id") not in with_objects for image in content["images"]),
        "objects": sum(objects.values()),
        "crowds": crowds,
        "sizes": dict(sizes),
        "classes": {c: {"objects": objects[c], "images": len(images.get(c, ()))} for c in classes},
    }


def _image_sizes(content: Json) -> dict[object, tuple[int, int]]:
    """Return height and width by image id; (0, 0) if unknown."""
    sizes = {}
    for entry in content["images"]:
        h, w = entry.get("height"), entry.get("width")
        sizes[entry.get("id")] = (int(h), int(w)) if h and w else (0, 0)
    return sizes


def _repeated_entries(split: str, content: Json) -> list[Problem]:
    problems = []
    for part, serious in (("images", True), ("categories", True), ("annotations", False)):
        ids = Counter(entry.get("id") for entry in content[part])
        twice = [f"{split}: {part} {i}, {n} times" for i, n in ids.items() if n > 1]
        problems.append(
            Problem(f"ids of {part} that occur twice", serious, "each needs its own", twice)
        )
    advice = "results are listed by name: rename one"
    repeated = _repeated(split, content["categories"], "name")
    problems.append(Problem("names of categories that occur twice", True, advice, repeated))
    repeated = _repeated(split, content["images"], "file_name")
    problems.append(Problem("images listed twice", False, "they count twice: remove one", repeated))
    return problems


def _repeated(split: str, entries: Sequence[Json], key: str) -> list[str]:
    counts = Counter(str(entry.get(key)) for entry in entries)
    return [f"{split}: {display_name(name)}, {n} times" for name, n in counts.items() if n > 1]


def _unusable_content(split: str, content: Json, training: bool) -> list[Problem]:
    """Return problems because of which training or validation would not start."""
    sizes = _image_sizes(content)
    has_objects = any(
        entry.get("image_id") in sizes
        and not entry.get("iscrowd")
        and check_annotation(entry, sizes[entry["image_id"]])[0] is None
        for entry in content["annotations"]
    )
    missing = "no images" if not sizes else "" if has_objects else "no usable object"
    incomplete = [] if content["categories"] else [f"{split}: no categories"]
    incomplete += [
        f"{split}: {str(entry)[:80]}"
        for part, keys in (("images", {"id", "file_name"}), ("categories", {"id", "name"}))
        for entry in content[part]
        if not keys <= set(entry)
    ]
    return [
        Problem(
            "nothing to learn from" if training else "nothing to measure",
            True,
            "is it the right file?",
            [f"{split}: {missing}"] if missing else [],
        ),
        Problem(
            "incomplete entries",
            True,
            "an image needs an id and a file_name, a category an id and a name",
            incomplete,
        ),
    ]


def _annotation_problems(split: str, content: Json) -> list[Problem]:
    images = {entry.get("id"): entry for entry in content["images"]}
    sizes = _image_sizes(content)
    categories = {entry.get("id") for entry in content["categories"]}
    items: dict[str, list[str]] = {
        k: [] for k in ("category", "image", "box", "empty", "outside", "shape")
    }
    for entry in content["annotations"]:
        name = f"{split}: annotation {entry.get('id')}"
        if entry.get("category_id") not in categories:
            items["category"].append(f"{name}: category {entry.get('category_id')}")
        image = images.get(entry.get("image_id"))
        if image is None:
            items["image"].append(f"{name}: image {entry.get('image_id')}")
            continue
        kind, reason = _box_problem(entry.get("bbox"), image)
        if kind:
            items[kind].append(f"{name}: {reason}, in {_file_name(image)}")
        size = sizes[image.get("id")]
        if problem := rle.shape_problem(entry.get("segmentation"), size if all(size) else None):
            items["shape"].append(f"{name}: {problem}, in {_file_name(image)}")
    without_shape = _count_without_shape(split, content["annotations"])
    return [
        Problem(
            "unknown categories", True, "list them in categories, or remove them", items["category"]
        ),
        Problem("annotations without an image", False, LEFT_OUT, items["image"]),
        Problem("invalid boxes", False, f"a box is four numbers; {LEFT_OUT}", items["box"]),
        Problem("boxes without area", False, LEFT_OUT, items["empty"]),
        Problem("boxes outside their image", False, "clipped, or left out", items["outside"]),
        Problem("broken shapes", False, LEFT_OUT, items["shape"]),
        Problem(
            "objects without a shape",
            False,
            "train boxes only: --model.heads.masks false",
            without_shape,
        ),
    ]


def _count_without_shape(split: str, annotations: Sequence[Json]) -> list[str]:
    missing = Counter(
        rle.is_empty(entry.get("segmentation")) for entry in annotations if not entry.get("iscrowd")
    )
    return [f"{split}: {missing[True]} of {missing.total()} objects"] if missing[True] else []


def _file_name(image: Json) -> str:
    return display_name(str(image.get("file_name")))


def _box_problem(box: object, image: Json) -> tuple[str, str]:
    """Return the kind of problem and a description, both empty if there is none."""
    if not is_box(box):
        return "box", f"{box!r}"
    left, top, w, h = box
    if w < MIN_SIDE or h < MIN_SIDE:
        return "empty", f"{w:g}x{h:g}"
    width, height = image.get("width"), image.get("height")
    if width and height:
        excess = max(-left, -top, left + w - width, top + h - height)
        if excess > OUTSIDE:
            return "outside", f"by {excess:.1f} pixels"
    return "", ""


@dataclass(frozen=True)
class ImageCheck:
    """Result of reading one listed image: missing, unusable, or a hash of its pixels."""

    file: str
    missing: str | None = None
    unusable: str | None = None
    digest: str = ""


def _examine_image(split: str, folder: Path, entry: Json) -> ImageCheck:
    path, file = folder / str(entry.get("file_name")), _file_name(entry)
    if not path_exists(path):
        return ImageCheck(file, missing=f"{split}: {display_name(path)}")
    try:
        image = read_image(path)
    except UnreadableImageError as error:
        return ImageCheck(file, unusable=f"{split}: {error}")
    stated = (entry.get("width"), entry.get("height"))
    if all(stated) and stated != image.size:
        found = f"{image.width}x{image.height}"
        return ImageCheck(
            file,
            unusable=f"{split}: {display_name(path)} is {found}, the file states {stated[0]}x{stated[1]}",
        )
    return ImageCheck(file, digest=pixel_digest(np.asarray(image)))


def _image_problems(images: Sequence[ImageCheck]) -> list[Problem]:
    missing = [image.missing for image in images if image.missing is not None]
    unusable = [image.unusable for image in images if image.unusable is not None]
    return [
        Problem("missing images", True, "give the folder of the images: --images DIR", missing),
        Problem("unusable images", True, "repair or remove them", unusable),
    ]


def _split_problems(contents: dict[str, Json], digests: dict[str, dict[str, str]]) -> list[Problem]:
    """Compare the categories and images of the other splits with those of the first."""
    (first, *others) = contents
    expected = _id_and_name(contents[first]["categories"])
    different = [
        f"{first} and {name}"
        for name in others
        if _id_and_name(contents[name]["categories"]) != expected
    ]
    known = {digest: file for file, digest in digests[first].items()}
    copies = [
        f"{first}/{known[digest]} = {name}/{file}"
        for name in others
        for file, digest in digests[name].items()
        if digest in known
    ]
    return [
        Problem("categories that differ", True, "all files must list the same", different),
        Problem(SAME_IMAGE, True, SAME_IMAGE_ADVICE, copies),
    ]


def _id_and_name(categories: Sequence[Json]) -> list[tuple[object, object]]:
    return [(c.get("id"), c.get("name")) for c in _sorted_by_id(categories)]


def _class_problems(report: SplitReport) -> list[Problem]:
    (first, train), *_ = report.splits.items()
    never = [f"{first}: {name}" for name, c in train["classes"].items() if not c["objects"]]
    rare = [
        f"{name}: {c['objects']} objects in {c['images']} images"
        for name, c in train["classes"].items()
        if 0 < c["objects"] < FEW
    ]
    empty = [
        f"{name}: {split['empty']} of {split['images']}"
        for name, split in report.splits.items()
        if split["empty"]
    ]
    return [
        Problem("class that never occurs in training", False, "it cannot be learned", never),
        Problem(f"class with fewer than {FEW} objects", False, "hard to learn", rare),
        Problem(
            "images without objects",
            False,
            "not used for training unless --data.keep_empty true",
            empty,
        ),
    ]
