"""What is wrong with a set of pictures and COCO's json, and how its objects are spread.

Works on the json itself, not on what the loader makes of it, so that all is named at once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..progress import Track, silent
from . import rle
from .check import Problem, SplitReport
from .coco import LEAST_SIDE, area_of, read_json, usable
from .images import UnreadableImageError, read_image

OUTSIDE = 1.0  # pixels that a box may stick out, from rounding
FEW = 10  # objects below which a class is hardly learned
SMALL, LARGE = 32**2, 96**2  # COCO's bounds, in pixels


def check_instances(
    splits: dict[str, tuple[Path, Path]], threads: int = 4, track: Track = silent
) -> SplitReport:
    """Look at each json with its folder of pictures; the first is the training set."""
    contents = {name: read_json(path) for name, (path, _) in splits.items()}
    first = next(iter(contents.values()))
    report = SplitReport(classes=[str(c.get("name")) for c in _by_id(first["categories"])])
    problems: list[Problem] = []
    sums: dict[str, dict[str, str]] = {}
    for name, (_, folder) in splits.items():
        content = contents[name]
        report.splits[name] = _counts(content, report.classes)
        problems += _of_ids(name, content)
        problems += _refused(name, content, name == next(iter(splits)))
        problems += _of_annotations(name, content)
        found, sums[name] = _of_pictures(name, content, folder, threads, track)
        problems += found
    problems += _between(contents, sums)
    problems += _of_classes(report)
    merged: dict[str, Problem] = {}
    for p in problems:  # one line a kind, whichever split
        if p.items:
            before = merged.get(p.kind)
            items = [*before.items, *p.items] if before else p.items
            merged[p.kind] = Problem(p.kind, p.serious, p.advice, items)
    report.problems = sorted(merged.values(), key=lambda p: not p.serious)
    return report


def _by_id(categories: Sequence[Any]) -> list[dict[str, Any]]:
    return sorted(categories, key=lambda c: c["id"] if isinstance(c.get("id"), int) else 0)


def _counts(content: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    name = {c.get("id"): str(c.get("name")) for c in content["categories"]}
    objects: Counter[str] = Counter()
    pictures: dict[str, set[Any]] = {}
    sizes = Counter({"small": 0, "medium": 0, "large": 0})
    crowds = 0
    with_objects = set()
    picture_size = _picture_sizes(content)
    for entry in content["annotations"]:
        if entry.get("iscrowd"):
            crowds += 1
            continue
        label = name.get(entry.get("category_id"), "?")
        objects[label] += 1
        pictures.setdefault(label, set()).add(entry.get("image_id"))
        with_objects.add(entry.get("image_id"))
        size = picture_size.get(entry.get("image_id"), (0, 0))
        reason, box = usable(entry, size)
        area = area_of(entry, box, size) if reason is None else 0
        sizes["small" if area < SMALL else "medium" if area < LARGE else "large"] += 1
    return {
        "images": len(content["images"]),
        "empty": sum(image.get("id") not in with_objects for image in content["images"]),
        "objects": sum(objects.values()),
        "crowds": crowds,
        "sizes": dict(sizes),
        "classes": {
            c: {"objects": objects[c], "images": len(pictures.get(c, ()))} for c in classes
        },
    }


def _picture_sizes(content: dict[str, Any]) -> dict[Any, tuple[int, int]]:
    """Height and width by id; (0, 0) where the json does not say."""
    sizes = {}
    for entry in content["images"]:
        h, w = entry.get("height"), entry.get("width")
        sizes[entry.get("id")] = (int(h), int(w)) if h and w else (0, 0)
    return sizes


def _of_ids(split: str, content: dict[str, Any]) -> list[Problem]:
    out = []
    for part, serious in (("images", True), ("categories", True), ("annotations", False)):
        ids = Counter(entry.get("id") for entry in content[part])
        twice = [f"{split}: {part} {i}, {n} times" for i, n in ids.items() if n > 1]
        out.append(Problem(f"ids of {part} that occur twice", serious, "each needs its own", twice))
    files = Counter(str(entry.get("file_name")) for entry in content["images"])
    same = [f"{split}: {name}, {n} times" for name, n in files.items() if n > 1]
    out.append(Problem("pictures listed twice", False, "they count twice: remove one", same))
    return out


def _refused(split: str, content: dict[str, Any], training: bool) -> list[Problem]:
    """What training does not begin with."""
    sizes = _picture_sizes(content)
    objects = any(
        entry.get("image_id") in sizes
        and not entry.get("iscrowd")
        and usable(entry, sizes[entry["image_id"]])[0] is None
        for entry in content["annotations"]
    )
    nothing = "no pictures" if not sizes else "" if objects else "no object that can be used"
    bare = [] if content["categories"] else [f"{split}: no categories"]
    bare += [
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
            [f"{split}: {nothing}"] if nothing else [],
        ),
        Problem(
            "entries that lack something",
            True,
            "an image needs an id and a file_name, a category an id and a name",
            bare,
        ),
    ]


def _of_annotations(split: str, content: dict[str, Any]) -> list[Problem]:
    images = {entry.get("id"): entry for entry in content["images"]}
    sizes = _picture_sizes(content)
    categories = {entry.get("id") for entry in content["categories"]}
    items: dict[str, list[str]] = {
        k: [] for k in ("category", "image", "box", "empty", "outside", "shape")
    }
    shaped = Counter(
        rle.is_empty(a.get("segmentation")) for a in content["annotations"] if not a.get("iscrowd")
    )
    for entry in content["annotations"]:
        told = f"{split}: annotation {entry.get('id')}"
        if entry.get("category_id") not in categories:
            items["category"].append(f"{told}: category {entry.get('category_id')}")
        image = images.get(entry.get("image_id"))
        if image is None:
            items["image"].append(f"{told}: image {entry.get('image_id')}")
            continue
        kind, what = _box_problem(entry.get("bbox"), image)
        if kind:
            items[kind].append(f"{told}: {what}, in {image.get('file_name')}")
        size = sizes[image.get("id")]
        if reason := rle.problem(entry.get("segmentation"), size if all(size) else None):
            items["shape"].append(f"{told}: {reason}, in {image.get('file_name')}")
    bare = [f"{split}: {shaped[True]} of {shaped.total()} objects"] if shaped[True] else []
    return [
        Problem(
            "unknown categories", True, "list them in categories, or remove them", items["category"]
        ),
        Problem("annotations without a picture", False, "they are left out", items["image"]),
        Problem("boxes that are none", False, "four numbers; they are left out", items["box"]),
        Problem("boxes without area", False, "they are left out", items["empty"]),
        Problem(
            "boxes outside their picture",
            False,
            "cut, or left out: off by how much?",
            items["outside"],
        ),
        Problem("broken shapes", False, "they are left out", items["shape"]),
        Problem("objects without a shape", False, "boxes alone: --model.heads.masks false", bare),
    ]


def _box_problem(box: Any, image: dict[str, Any]) -> tuple[str, str]:
    numbers = isinstance(box, list) and len(box) == 4
    if not numbers or not all(isinstance(v, int | float) and abs(v) < 1e7 for v in box):
        return "box", f"{box!r}"
    left, top, w, h = box
    if w < LEAST_SIDE or h < LEAST_SIDE:
        return "empty", f"{w:g}x{h:g}"
    width, height = image.get("width"), image.get("height")
    if width and height:
        beyond = max(-left, -top, left + w - width, top + h - height)
        if beyond > OUTSIDE:
            return "outside", f"by {beyond:.1f} pixels"
    return "", ""


def _of_pictures(
    split: str, content: dict[str, Any], folder: Path, threads: int, track: Track
) -> tuple[list[Problem], dict[str, str]]:
    """Problems of the files, and a sum of each picture's pixels by file name."""

    def look(entry: dict[str, Any]) -> tuple[str | None, str | None, str, str]:
        file = str(entry.get("file_name"))
        path = folder / file
        if not path.is_file():
            return f"{split}: {path}", None, "", file
        try:
            image = read_image(path)
        except UnreadableImageError as error:
            return None, f"{split}: {error}", "", file
        said = (entry.get("width"), entry.get("height"))
        if all(said) and said != image.size:
            return (
                None,
                f"{split}: {path} is {image.width}x{image.height}, the json says {said[0]}x{said[1]}",
                "",
                file,
            )
        return None, None, hashlib.sha256(image.tobytes()).hexdigest(), file

    with ThreadPoolExecutor(threads) as pool:
        try:
            looking = pool.map(look, content["images"])
            seen = list(track(looking, f"reading {split}", len(content["images"])))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [
        Problem("missing pictures", True, "is the folder right?", [m for m, _, _, _ in seen if m]),
        Problem(
            "pictures that cannot be used",
            True,
            "repair or remove them",
            [b for _, b, _, _ in seen if b],
        ),
    ], {file: digest for _, _, digest, file in seen if digest}


def _between(contents: dict[str, dict[str, Any]], sums: dict[str, dict[str, str]]) -> list[Problem]:
    (first, *others) = contents
    own = [(c.get("id"), c.get("name")) for c in _by_id(contents[first]["categories"])]
    odd = [
        f"{first} and {name}"
        for name in others
        if [(c.get("id"), c.get("name")) for c in _by_id(contents[name]["categories"])] != own
    ]
    known = {digest: file for file, digest in sums[first].items()}
    copies = [
        f"{first}/{known[digest]} = {name}/{file}"
        for name in others
        for file, digest in sums[name].items()
        if digest in known
    ]
    return [
        Problem("categories that differ", True, "all files must list the same", odd),
        Problem(
            "the same picture in two splits", True, "validation would flatter: remove one", copies
        ),
    ]


def _of_classes(report: SplitReport) -> list[Problem]:
    (first, train), *_ = report.splits.items()
    never = [f"{first}: {name}" for name, c in train["classes"].items() if not c["objects"]]
    rare = [
        f"{name}: {c['objects']} objects in {c['images']} pictures"
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
            "pictures without objects",
            False,
            "not learned from unless --data.keep_empty true",
            empty,
        ),
    ]
