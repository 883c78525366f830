"""Check a dataset of images and masks, and measure the shares of its classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.plain_json import Json
from ...core.progress import Track, no_progress
from ..sources.mask_survey import PairCheck, check_pairs
from ..sources.masks import MaskSource
from .copies import SAME_IMAGE, SAME_IMAGE_ADVICE, pixel_digest
from .images import LONG, SMALL
from .report import Problem, SplitReport

RARE = 0.001  # share of the pixels below which a class is reported
MAX_UNLABELLED = 0.5  # share of unlabelled pixels above which an image is reported


def check_masks(
    sources: dict[str, MaskSource],
    threads: int = 4,
    track: Track = no_progress,
    absent: Sequence[str] = (),
) -> SplitReport:
    """Decode every image and mask and report problems.

    Args:
        sources: by split; the first is the training set.
        threads: number of threads that read files.
        track: shows progress.
        absent: images without a mask.
    """
    first = next(iter(sources.values()))
    report = SplitReport(classes=list(first.classes.names))
    checks = {name: check_pairs(source, threads, True, track) for name, source in sources.items()}
    advice = "training would not start: add masks, or remove the images"
    problems = [Problem("no mask", True, advice, list(absent))]
    for split, source in sources.items():
        valid = [entry.pixels for entry in checks[split] if entry.error is None]
        pixels = np.stack(valid) if valid else np.zeros((0, len(first.classes) + 1), np.int64)
        report.splits[split] = _class_shares(report.classes, pixels)
        problems += _pair_problems(split, source, checks[split])
    unlabelled = [
        f"{split}: no labelled pixel"
        for split, found in report.splits.items()
        if not any(c["images"] for c in found["classes"].values())
    ]
    problems.append(
        Problem(
            "no labels for training or validation",
            True,
            "are --ignore and the list right?",
            unlabelled,
        )
    )
    problems += [_copies_across_splits(sources, checks), *_class_problems(report)]
    report.problems = [problem for problem in problems if problem.items]
    return report


def _class_shares(names: Sequence[str], pixels: NDArray[np.int64]) -> Json:
    """Return the statistics of a split from the pixel counts of its images, (images, classes + 1)."""
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


def _pair_problems(split: str, source: MaskSource, checks: Sequence[PairCheck]) -> list[Problem]:
    bad = [f"{split}: {entry.error}" for entry in checks if entry.error]
    valid = [(source.name(i), entry) for i, entry in enumerate(checks) if not entry.error]
    unlabelled = [
        f"{name}: {entry.pixels[-1] / entry.pixels.sum():.0%} without a label"
        for name, entry in valid
        if entry.pixels[-1] > MAX_UNLABELLED * entry.pixels.sum()
    ]
    unusual = [
        f"{name}: {entry.size[0]}x{entry.size[1]}"
        for name, entry in valid
        if min(entry.size) < SMALL or max(entry.size) > LONG * min(entry.size)
    ]
    return [
        Problem("cannot be used", True, "training would not start: repair or remove them", bad),
        Problem("mostly unlabelled", False, "is the class list complete?", unlabelled),
        Problem(
            f"smaller than {SMALL} or longer than {LONG:g} to 1", False, "unusual sizes", unusual
        ),
    ]


def _copies_across_splits(
    sources: dict[str, MaskSource], checks: dict[str, list[PairCheck]]
) -> Problem:
    """Find images with equal pixels in two splits; only those of equal size and label counts are compared."""
    groups: dict[tuple[tuple[int, int], bytes], list[tuple[str, int]]] = {}
    for split, entries in checks.items():
        for i, entry in enumerate(entries):
            if entry.error is None:
                groups.setdefault((entry.size, entry.pixels.tobytes()), []).append((split, i))
    items = []
    for members in groups.values():
        if len({split for split, _ in members}) < 2:
            continue
        by_digest: dict[str, list[tuple[str, int]]] = {}
        for split, i in members:
            digest = pixel_digest(np.asarray(sources[split].image(i)))
            by_digest.setdefault(digest, []).append((split, i))
        items += [
            " = ".join(sources[split].name(i) for split, i in same[:4])
            for same in by_digest.values()
            if len({split for split, _ in same}) > 1
        ]
    return Problem(SAME_IMAGE, True, SAME_IMAGE_ADVICE, items)


def _class_problems(report: SplitReport) -> list[Problem]:
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
