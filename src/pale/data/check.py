"""What is wrong with a data set of folders, shards or list files, found before hours are spent on it."""

from __future__ import annotations

import hashlib
import os
import signal
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from ..progress import Track, silent
from .images import SUFFIXES, Source, UnreadableImageError, is_picture, list_file, read_image
from .shards import Shards

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


# Split, class, name, and what it is.
File = tuple[str, str, str, Literal["picture", "other", "loose"]]


@dataclass(frozen=True)
class Facts:
    """What one file tells: an error, or its size and the sum of its pixels."""

    error: str | None = None
    size: tuple[int, int] = (0, 0)
    digest: str = ""
    flat: bool = False


def examine(read: Callable[[], Image.Image]) -> Facts:
    """Read one picture in full."""
    try:
        image = read()
    except UnreadableImageError as error:
        return Facts(error=str(error))
    pixels = np.asarray(image)
    # Of the pixels, not the file: a copy that was saved again as PNG is a copy.
    digest = hashlib.sha256(pixels.tobytes() + str(image.size).encode()).hexdigest()
    return Facts(size=image.size, digest=digest, flat=bool((pixels == pixels[0, 0]).all()))


_reading: dict[str, Source] = {}  # in a process of the pool: the sources, by split


def _begin(sources: dict[str, Source]) -> None:
    _reading.update(sources)
    # It reaches the whole group of processes; the main one answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _examine(what: str | tuple[str, int]) -> Facts:
    """A file, or a picture of a source."""
    if isinstance(what, str):
        return examine(partial(read_image, what))
    split, index = what
    return examine(partial(_reading[split].image, index))


def present(root: Path, splits: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Source]]:
    """Those of the splits that are there as folders, else as shards, else as list files, and what reads the latter."""
    for kind, made in KINDS:
        if found := tuple(split for split in splits if kind(root / split)):
            sources: dict[str, Source] = {}
            for split in found if made else ():
                classes = next(iter(sources.values())).classes if sources else None
                sources[split] = made(root, split, classes)
            return found, sources
    raise ValueError(
        f"{root} holds no train and no val folder, and no shards of them; name the splits, which may be list files: "
        "--splits A B"
    )


def _is_packed(path: Path) -> bool:
    return any(path.parent.glob(f"{path.name}-*.tar"))


def _list(root: Path, split: str, classes: Sequence[str] | None) -> Source:
    return list_file(root / split, root, classes)


# What a split may be, and what reads it; folders are read file by file, whatever lies in them.
KINDS: tuple[tuple[Callable[[Path], bool], Any], ...] = (
    (Path.is_dir, None),
    (_is_packed, Shards),
    (Path.is_file, _list),
)


def _listed(root: Path, sources: dict[str, Source]) -> list[File]:
    return [
        (split, source.classes[source.labels[i]], os.path.relpath(source.name(i), root), "picture")
        for split, source in sources.items()
        for i in range(len(source))
    ]


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir())


def check(
    root: Path,
    splits: tuple[str, ...] = ("train", "val"),
    workers: int | None = None,
    track: Track = silent,
) -> Report:
    """Read every picture of `root/<split>/<class>/`, of shards or of list files, and report what is odd."""
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; expected are {root}/train/<class>/<picture>")
    splits, sources = present(root, splits)
    report = Report()
    files = _listed(root, sources) if sources else list(_files(root, splits))
    pictures = [file for file in files if file[3] == "picture"]
    reads: list[Any] = [(split, i) for split, s in sources.items() for i in range(len(s))]
    if not sources:
        reads = [str(root / name) for _, _, name, _ in pictures]
    with ProcessPoolExecutor(workers, initializer=_begin, initargs=(sources,)) as pool:
        try:
            reading = pool.map(_examine, reads, chunksize=4)
            facts = list(track(reading, "reading", len(reads)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for split in splits:
        classes = sources[split].classes if sources else _folders(root / split)
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


def _files(root: Path, splits: tuple[str, ...]) -> Iterator[File]:
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
                yield split, label, str(Path(split) / inside / name), kind


def _name(file: File) -> str:
    return file[2]


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


def _readers(root: Path, split: str) -> dict[str, list[Callable[[], Image.Image]]]:
    """What reads the pictures of each class."""
    if (source := present(root, (split,))[1].get(split)) is not None:
        found: dict[str, list[Callable[[], Image.Image]]] = {name: [] for name in source.classes}
        for i, label in enumerate(source.labels):
            found[source.classes[label]].append(partial(source.image, i))
        return found
    return {
        label: [
            partial(read_image, file)
            for file in sorted((root / split / label).rglob("*"))
            if is_picture(file)
        ]
        for label in _folders(root / split)
    }


def sheet(root: Path, split: str, path: Path, columns: int = 8, rows: int = 12) -> str:
    """Draw some pictures of each class in a line, so that eyes can see what numbers do not; says of which classes."""
    every = _readers(root, split)
    classes = list(every)[:rows]
    canvas = Image.new("RGB", (columns * TILE, len(classes) * (TILE + 14)), "white")
    draw = ImageDraw.Draw(canvas)
    for row, label in enumerate(classes):
        draw.text((2, row * (TILE + 14)), label, fill="black")
        files = every[label]
        # Spread over the class: neighbours are often alike.
        for column, i in enumerate(
            np.linspace(0, len(files) - 1, min(columns, len(files))).astype(int)
        ):
            try:
                picture = files[i]()
            except UnreadableImageError:
                continue
            picture.thumbnail((TILE - 2, TILE - 2))
            canvas.paste(picture, (column * TILE, row * (TILE + 14) + 14))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)
    return f"the first {rows} of {len(every)} classes" if len(every) > rows else "all classes"
