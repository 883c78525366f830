"""What is wrong with a data set of folders, found before hours are spent on it."""

from __future__ import annotations

import hashlib
import os
import signal
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from ..progress import Track, silent
from .images import SUFFIXES, UnreadableImageError, is_picture, read_image

SMALL = 32  # a shorter side is hardly a picture
LONG = 4.0  # ratio of the sides from which a centre crop loses most
UNEVEN = 10  # how many times the largest class may outnumber the smallest
SHOWN = 20  # files named for each problem
TILE = 96  # pixels of a picture on the sheet


@dataclass(frozen=True)
class Problem:
    """One kind of problem and the files or classes that have it.

    Attributes:
        kind: what it is, in a word or two.
        serious: training would stop, or its figures would be wrong.
        advice: what to do.
        items: which.
    """

    kind: str
    serious: bool
    advice: str
    items: list[str]


@dataclass
class Findings(ABC):
    """What a check has found, whatever the data."""

    problems: list[Problem] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing serious was found."""
        return not any(problem.serious for problem in self.problems)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        problems = [vars(problem) for problem in self.problems]
        return {"good": self.good, **self.counted(), "problems": problems}

    @abstractmethod
    def counted(self) -> dict[str, Any]:
        """The figures."""


@dataclass
class Report(Findings):
    """What a check of folders has found."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # split, class: pictures
    sizes: Counter[str] = field(default_factory=Counter)

    def counted(self) -> dict[str, Any]:
        """Pictures of each class, and the most frequent sizes."""
        return {"counts": self.counts, "sizes": dict(self.sizes.most_common(SHOWN))}


@dataclass
class SplitReport(Findings):
    """What a check of masks or objects has found.

    Attributes:
        classes: names of the training set's.
        splits: for each split its figures, and under "classes" those of each class.
    """

    classes: list[str] = field(default_factory=list)
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def counted(self) -> dict[str, Any]:
        """Of each split."""
        return {"classes": self.classes, "splits": self.splits}


@dataclass(frozen=True)
class Facts:
    """What one file tells: an error, or its size and the sum of its pixels."""

    error: str | None = None
    size: tuple[int, int] = (0, 0)
    digest: str = ""
    flat: bool = False


def examine(path: str) -> Facts:
    """Read one picture in full."""
    try:
        image = read_image(path)
    except UnreadableImageError as error:
        return Facts(error=str(error))
    pixels = np.asarray(image)
    # Of the pixels, not the file: a copy that was saved again as PNG is a copy.
    digest = hashlib.sha256(pixels.tobytes() + str(image.size).encode()).hexdigest()
    return Facts(size=image.size, digest=digest, flat=bool((pixels == pixels[0, 0]).all()))


def _ignore_ctrl_c() -> None:
    # It reaches the whole group of processes; the main one answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def check(
    root: Path,
    splits: tuple[str, ...] = ("train", "val"),
    workers: int | None = None,
    track: Track = silent,
) -> Report:
    """Read every picture of `root/<split>/<class>/` and report what is odd."""
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; expected are {root}/train/<class>/<picture>")
    splits = tuple(split for split in splits if (root / split).is_dir())
    if not splits:
        raise ValueError(f"{root} holds no train and no val folder; name the splits: --splits A B")
    report, files = Report(), list(_files(root, splits))
    pictures = [file for file in files if file[3] == "picture"]
    paths = [str(root / split / name) for split, _, name, _ in pictures]
    with ProcessPoolExecutor(workers, initializer=_ignore_ctrl_c) as pool:
        try:
            reading = pool.map(examine, paths, chunksize=4)
            facts = list(track(reading, "reading", len(paths)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for split in splits:
        classes = sorted(e.name for e in os.scandir(root / split) if e.is_dir())
        found = Counter(label for s, label, _, _ in pictures if s == split)
        report.counts[split] = {label: found[label] for label in classes}
    known = list(zip(pictures, facts, strict=True))
    readable = [(file, fact) for file, fact in known if fact.error is None]
    report.sizes = Counter(f"{w}x{h}" for _, fact in readable for w, h in [fact.size])
    problems = [
        _unreadable(known),
        *_labels(report.counts),
        *_duplicates(readable),
        *_odd(readable, files),
    ]
    report.problems = [problem for problem in problems if problem.items]
    return report


def _files(
    root: Path, splits: tuple[str, ...]
) -> Iterator[tuple[str, str, str, Literal["picture", "other", "loose"]]]:
    # Split, class, path under the split, and what it is.
    for split in splits:
        for where, _, names in sorted(os.walk(root / split)):
            inside = Path(where).relative_to(root / split)
            for name in sorted(names):
                if name.startswith("."):
                    continue
                label = inside.parts[0] if inside.parts else ""
                kind: Literal["picture", "other", "loose"] = "picture"
                if not name.lower().endswith(SUFFIXES):
                    kind = "other"
                elif not label:
                    kind = "loose"
                yield split, label, str(inside / name), kind


def _name(file: tuple[str, str, str, str]) -> str:
    return f"{file[0]}/{file[2]}"


def _unreadable(known: list[Any]) -> Problem:
    items = [f"{_name(file)}: {f.error.partition(': ')[2]}" for file, f in known if f.error]
    return Problem("unreadable", True, "training would stop at them: delete or replace", items)


def _labels(counts: dict[str, dict[str, int]]) -> Iterator[Problem]:
    empty = [
        f"{split}/{label}"
        for split, labels in counts.items()
        for label, n in labels.items()
        if not n
    ]
    yield Problem("empty class", True, "add pictures or remove the folder", empty)
    train, *others = counts.values()
    names = list(counts)[1:]
    unknown = [
        f"{split}/{label}"
        for split, labels in zip(names, others, strict=True)
        for label in labels
        if label not in train
    ]
    yield Problem("class not in training", True, "misspelt, or pictures are missing", unknown)
    missing = [
        f"{split}/{label}"
        for split, labels in zip(names, others, strict=True)
        for label in train
        if label not in labels
    ]
    yield Problem("class not in validation", True, "its accuracy would never be seen", missing)
    present = {label: n for label, n in train.items() if n}
    uneven = []
    if present and max(present.values()) > UNEVEN * min(present.values()):
        few, many = min(present, key=present.__getitem__), max(present, key=present.__getitem__)
        uneven = [f"{many}: {present[many]} pictures, {few}: {present[few]}"]
    yield Problem("uneven classes", False, "rare classes will be learned badly", uneven)


def _duplicates(readable: list[Any]) -> Iterator[Problem]:
    groups: dict[str, list[Any]] = defaultdict(list)
    for file, fact in readable:
        if not fact.flat:  # plain colours are alike without being copies
            groups[fact.digest].append(file)
    copies = [group for group in groups.values() if len(group) > 1]

    def told(group: list[Any]) -> str:
        return " = ".join(_name(file) for file in group[:4])

    across = [told(group) for group in copies if len({file[0] for file in group}) > 1]
    yield Problem(
        "the same picture in train and val", True, "validation would flatter: remove one", across
    )
    labels = [told(group) for group in copies if len({file[1] for file in group}) > 1]
    yield Problem("the same picture in two classes", True, "one label is wrong", labels)
    plain = [told(g) for g in copies if len({f[0] for f in g}) == 1 and len({f[1] for f in g}) == 1]
    yield Problem("the same picture twice", False, "it only counts double", plain)


def _odd(readable: list[Any], files: list[Any]) -> Iterator[Problem]:
    sizes = [(_name(file), *fact.size) for file, fact in readable]
    small = [f"{name}: {w}x{h}" for name, w, h in sizes if min(w, h) < SMALL]
    yield Problem(f"smaller than {SMALL} pixels", False, "hardly a picture", small)
    long = [f"{name}: {w}x{h}" for name, w, h in sizes if max(w, h) > LONG * min(w, h)]
    yield Problem(f"sides of more than {LONG:g} to 1", False, "the centre crop loses most", long)
    flat = [_name(file) for file, fact in readable if fact.flat]
    yield Problem("one colour only", False, "nothing to learn from", flat)
    loose = [_name(file) for file in files if file[3] == "loose"]
    yield Problem("outside a class folder", True, "they would not be used: move them", loose)
    other = [_name(file) for file in files if file[3] == "other"]
    yield Problem("not a picture by its name", False, f"read are {', '.join(SUFFIXES)}", other)


def sheet(root: Path, split: str, path: Path, columns: int = 8, rows: int = 12) -> None:
    """Draw some pictures of each class in a line, so that eyes can see what numbers do not."""
    classes = sorted(e.name for e in os.scandir(root / split) if e.is_dir())[:rows]
    canvas = Image.new("RGB", (columns * TILE, len(classes) * (TILE + 14)), "white")
    draw = ImageDraw.Draw(canvas)
    for row, label in enumerate(classes):
        draw.text((2, row * (TILE + 14)), label, fill="black")
        files = [f for f in sorted((root / split / label).rglob("*")) if is_picture(f)]
        # Spread over the class: neighbours are often alike.
        for column, i in enumerate(
            np.linspace(0, len(files) - 1, min(columns, len(files))).astype(int)
        ):
            try:
                picture = read_image(files[i])
            except UnreadableImageError:
                continue
            picture.thumbnail((TILE - 2, TILE - 2))
            canvas.paste(picture, (column * TILE, row * (TILE + 14) + 14))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)
