"""What is wrong with a set of images and masks, and how uneven its classes are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..progress import Track, silent
from .check import LONG, SMALL, Problem, SplitReport
from .masks import MaskSource, Seen, survey

RARE = 0.001  # share of the pixels below which a class is hardly learned
EMPTY = 0.5  # share of unlabelled pixels above which an image is named


def check_masks(
    sources: dict[str, MaskSource],
    threads: int = 4,
    track: Track = silent,
    absent: Sequence[str] = (),
) -> SplitReport:
    """Read every picture and mask; the first source is the training set. `absent`: pictures without a mask."""
    first = next(iter(sources.values()))
    report = SplitReport(classes=list(first.classes.names))
    seen = {name: survey(source, threads, True, track) for name, source in sources.items()}
    advice = "training would not start: draw them, or remove the pictures"
    problems = [Problem("no mask", True, advice, list(absent))]
    for split, source in sources.items():
        good = [entry for entry in seen[split] if entry.error is None]
        pixels = (
            np.stack([e.pixels for e in good]) if good else np.zeros((0, len(first.classes) + 1))
        )
        report.splits[split] = _shares(report.classes, pixels)
        problems += _of_split(split, source, seen[split])
    bare = [
        f"{split}: no labelled pixel"
        for split, found in report.splits.items()
        if not any(c["images"] for c in found["classes"].values())
    ]
    problems.append(
        Problem(
            "nothing to learn from or to measure", True, "are --ignore and the list right?", bare
        )
    )
    problems += [_copies(sources, seen), *_of_classes(report)]
    report.problems = [problem for problem in problems if problem.items]
    return report


def _shares(names: Sequence[str], pixels: Any) -> dict[str, Any]:
    total = pixels[:, :-1].sum(0) if len(pixels) else np.zeros(len(names))
    labelled, everything = max(1, total.sum()), max(1, pixels.sum())
    return {
        "images": len(pixels),
        "unlabelled": float(100 * pixels[:, -1].sum() / everything) if len(pixels) else 0.0,
        "classes": {
            name: {
                "share": float(100 * total[i] / labelled),
                "images": int((pixels[:, i] > 0).sum()) if len(pixels) else 0,
            }
            for i, name in enumerate(names)
        },
    }


def _of_split(split: str, source: MaskSource, seen: Sequence[Seen]) -> list[Problem]:
    bad = [f"{split}: {entry.error}" for entry in seen if entry.error]
    rest = [(source.name(i), entry) for i, entry in enumerate(seen) if not entry.error]
    void = [
        f"{name}: {entry.pixels[-1] / entry.pixels.sum():.0%} without a label"
        for name, entry in rest
        if entry.pixels[-1] > EMPTY * entry.pixels.sum()
    ]
    odd = [
        f"{name}: {entry.size[0]}x{entry.size[1]}"
        for name, entry in rest
        if min(entry.size) < SMALL or max(entry.size) > LONG * min(entry.size)
    ]
    return [
        Problem("cannot be used", True, "training would not start: repair or remove them", bad),
        Problem(
            "mostly unlabelled", False, "little is learned from them; is the list complete?", void
        ),
        Problem(
            f"smaller than {SMALL} or longer than {LONG:g} to 1", False, "hardly a picture", odd
        ),
    ]


def _copies(sources: dict[str, MaskSource], seen: dict[str, list[Seen]]) -> Problem:
    """Pictures of equal pixels in two splits; only those of equal size and label counts are compared."""
    groups: dict[Any, list[tuple[str, int]]] = {}
    for split, entries in seen.items():
        for i, entry in enumerate(entries):
            if entry.error is None:
                groups.setdefault((entry.size, entry.pixels.tobytes()), []).append((split, i))
    items = []
    for members in groups.values():
        if len({split for split, _ in members}) < 2:
            continue
        by_sum: dict[str, list[tuple[str, int]]] = {}
        for split, i in members:
            pixels = np.asarray(sources[split].image(i)).tobytes()
            by_sum.setdefault(hashlib.sha256(pixels).hexdigest(), []).append((split, i))
        items += [
            " = ".join(sources[split].name(i) for split, i in same[:4])
            for same in by_sum.values()
            if len({split for split, _ in same}) > 1
        ]
    return Problem(
        "the same picture in two splits", True, "validation would flatter: remove one", items
    )


def _of_classes(report: SplitReport) -> list[Problem]:
    (first, train), *others = report.splits.items()
    never = [f"{first}: {name}" for name, c in train["classes"].items() if not c["images"]]
    unseen = [
        f"{split}: {name}"
        for split, found in others
        for name, c in found["classes"].items()
        if not c["images"] and train["classes"][name]["images"]
    ]
    rare = [
        f"{name}: {c['share']:.3f} % of the pixels, in {c['images']} of {train['images']} images"
        for name, c in train["classes"].items()
        if c["images"] and c["share"] < 100 * RARE
    ]
    return [
        Problem("class that never occurs in training", False, "it cannot be learned", never),
        Problem("class that never occurs in validation", False, "its IoU is not measured", unseen),
        Problem(
            "rare class",
            False,
            "hard to learn; loss.class_weights=balanced, loss.ohem or loss.dice may help",
            rare,
        ),
    ]
