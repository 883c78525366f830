"""Results of the dataset checks as lines and tables."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.console import Table
from .report import MAX_SHOWN, CheckReport, ImageReport, SplitReport

MAX_LISTED = 100  # classes of a table


def describe_folders(found: ImageReport) -> Iterator[str | Table]:
    """Yield the number of images of each class, and of images and classes of each split."""
    names = list(dict.fromkeys(name for labels in found.counts.values() for name in labels))
    table = Table("class", *(f"{_prefix(split)}images" for split in found.counts))
    for name in names[:MAX_LISTED]:
        table.add_row(name, *(str(labels.get(name, 0)) for labels in found.counts.values()))
    yield table
    if len(names) > MAX_LISTED:
        yield f"and {len(names) - MAX_LISTED} more classes; --json lists all"
    for split, labels in found.counts.items():
        yield f"{_prefix(split)}{sum(labels.values())} images in {len(labels)} class{'es' * (len(labels) != 1)}"


def _prefix(split: str) -> str:
    """Return the name of a split before its figures; a dataset without splits has none."""
    return "" if split == "." else f"{split}: "


def describe_masks(found: SplitReport) -> Iterator[str | Table]:
    """Yield the share of each class, and the unlabelled share of each split."""
    yield _classes(found, {"pixels, %": "share", "images": "images"})
    for name, split in found.splits.items():
        unlabelled = f"{split['unlabelled']:.1f} % of the pixels unlabelled"
        yield f"{name}: {split['images']} images, {unlabelled}"


def describe_objects(found: SplitReport) -> Iterator[str | Table]:
    """Yield the objects of each class, and the totals of each split."""
    yield _classes(found, {"objects": "objects", "images": "images"})
    for name, split in found.splits.items():
        sizes = ", ".join(f"{n} {size}" for size, n in split["sizes"].items())
        yield (
            f"{name}: {split['images']} images, {split['objects']} objects ({sizes}), "
            f"{split['crowds']} crowds, {split['empty']} images without objects"
        )


def _classes(found: SplitReport, columns: dict[str, str]) -> Table:
    table = Table("class", *(f"{split}: {title}" for split in found.splits for title in columns))
    for name in found.classes:
        entries = [split["classes"][name] for split in found.splits.values()]
        cells = [entry[key] for entry in entries for key in columns.values()]
        table.add_row(name, *(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells))
    return table


def describe_problems(found: CheckReport) -> Iterator[str]:
    """Yield the problems with the files that have them, and whether the dataset is ready."""
    for problem in found.problems:
        word = "problem" if problem.serious else "note"
        yield f"{word}: {problem.kind} ({len(problem.items)}); {problem.advice}"
        for item in problem.items[:MAX_SHOWN]:
            yield f"  {item}"
        if len(problem.items) > MAX_SHOWN:
            yield f"  and {len(problem.items) - MAX_SHOWN} more; --json lists all"
    yield "ready to train" if found.good else "not ready: see the problems above"
