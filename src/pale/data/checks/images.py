"""Check a classification dataset of folders, shards or list files before training."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from ...core.fonts import prepare_labels
from ...core.progress import Track, no_progress
from ..decoding import read_image
from ..reading import SUFFIXES, UNSUPPORTED_SUFFIXES, UnreadableImageError, display_name
from ..sources.class_list import row_strips
from ..sources.images import ImageSource, read_list
from ..sources.paths import folder_names, is_hidden, is_image_file, missing_folder
from ..sources.shards import ShardFiles
from .copies import SAME_IMAGE_ADVICE, pixel_digest
from .report import ImageReport, Problem

SMALL = 32  # pixels of the short side below which an image is reported
LONG = 4.0  # ratio of the sides above which a centre crop loses most of the image
FEW = 5  # images of a training class below which it is reported
UNEVEN = 10  # ratio of the largest to the smallest class above which it is reported
COLUMNS = 8  # images of a class on the contact sheet
TILE = 96  # pixels of an image on the contact sheet
TITLE = 14  # pixels of a class name on the contact sheet
TITLE_FONT = 10  # size of its font

Reader = Callable[[], Image.Image]


class DatasetFile(NamedTuple):
    """A file of the dataset: an image in a class, an image outside the class folders ("loose"), or another file."""

    split: str
    label: str
    path: str  # relative to the dataset
    kind: Literal["image", "other", "loose"] = "image"

    @property
    def name(self) -> str:
        """The path as valid Unicode."""
        return display_name(self.path)


@dataclass(frozen=True)
class ImageFacts:
    """Result of reading one image: an error, or its size, a hash of its pixels, and whether it has one colour."""

    error: str | None = None
    size: tuple[int, int] = (0, 0)
    digest: str = ""
    flat: bool = False


CheckedFile = tuple[DatasetFile, ImageFacts]


def examine(read: Reader) -> ImageFacts:
    """Decode one image and return its facts."""
    try:
        image = read()
    except UnreadableImageError as error:
        return ImageFacts(error=str(error))
    pixels = np.asarray(image)
    flat = all((pixels[rows] == pixels[0, 0]).all() for rows in row_strips(pixels))
    return ImageFacts(size=image.size, digest=pixel_digest(pixels), flat=flat)


_sources: dict[str, ImageSource] = {}  # in a worker process: the sources by split


def _start_worker(sources: dict[str, ImageSource]) -> None:
    _sources.update(sources)
    # Ctrl-C reaches the whole process group; only the main process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _examine_in_worker(image: str | tuple[str, int]) -> ImageFacts:
    """Examine a file, or an image of a source, given by split and index."""
    if isinstance(image, str):
        return examine(partial(read_image, image))
    split, index = image
    return examine(partial(_sources[split].image, index))


def find_splits(
    root: Path, splits: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, ImageSource]]:
    """Return the splits that exist, as folders, else shards, else list files; the latter two with their sources."""
    for exists, open_source in KINDS:
        if found := tuple(split for split in splits if exists(root / split)):
            sources: dict[str, ImageSource] = {}
            for split in found if open_source is not None else ():
                assert open_source is not None
                classes = next(iter(sources.values())).classes if sources else None
                sources[split] = open_source(root, split, classes)
            return found, sources
    if not (root / splits[0]).exists() and any(read_any(root)):
        return (".",), {}
    deeper = next((path for path in root.glob("*/*/*") if is_image_file(path)), None)
    hint = f"; there are images one folder deeper: give {deeper.parents[1]}" if deeper else ""
    raise ValueError(
        f"{root} holds no images in folders of classes, {root}/<class>/<image>, and no train and no val folder or "
        f"shards; name other splits, which may be list files: --splits A B{hint}"
    )


def read_any(root: Path) -> Iterator[Path]:
    """Yield images in folders below the root: classes of a dataset without splits."""
    return (path for path in root.glob("*/*") if is_image_file(path))


def _has_shards(path: Path) -> bool:
    return any(path.parent.glob(f"{path.name}-*.tar"))


def _open_list(root: Path, split: str, classes: Sequence[str] | None) -> ImageSource:
    return read_list(root / split, root, classes)


OpenSource = Callable[[Path, str, Sequence[str] | None], ImageSource]
# Forms of a split: how it is detected and opened. Folders are not opened as a source, but walked to find stray files.
KINDS: tuple[tuple[Callable[[Path], bool], OpenSource | None], ...] = (
    (Path.is_dir, None),
    (_has_shards, ShardFiles),
    (Path.is_file, _open_list),
)


def check_images(
    root: Path,
    splits: tuple[str, ...] = ("train", "val"),
    workers: int | None = None,
    track: Track = no_progress,
) -> ImageReport:
    """Decode every image of `root/<split>/<class>/`, of shards or of list files, and report problems."""
    if not root.is_dir():
        raise ValueError(
            f"{missing_folder(root)}; give a folder with <class>/<image> or train/<class>/<image>"
        )
    splits, sources = find_splits(root, splits)
    files = list(_source_files(root, sources) if sources else _walk_splits(root, splits))
    images = [file for file in files if file.kind == "image"]
    tasks = _source_tasks(sources) if sources else [str(root / file.path) for file in images]
    checked = list(zip(images, _examine_all(tasks, sources, workers, track), strict=True))
    readable = [(file, facts) for file, facts in checked if facts.error is None]
    report = ImageReport()
    for split in splits:
        classes = sources[split].classes if sources else _class_names(root / split)
        report.counts[split] = _count_images(images, split, classes)
    report.sizes = Counter(f"{w}x{h}" for w, h in (facts.size for _, facts in readable))
    problems = [
        _unreadable_images(checked),
        *_class_problems(report.counts),
        *_duplicates(readable),
        *_unusual_images(readable),
        *_stray_files(files),
    ]
    report.problems = [problem for problem in problems if problem.items]
    return report


def _source_files(root: Path, sources: dict[str, ImageSource]) -> Iterator[DatasetFile]:
    for split, source in sources.items():
        for i in range(len(source)):
            label = source.classes[source.labels[i]]
            yield DatasetFile(split, label, os.path.relpath(source.name(i), root))


def _source_tasks(sources: dict[str, ImageSource]) -> list[str | tuple[str, int]]:
    return [(split, i) for split, source in sources.items() for i in range(len(source))]


def _count_images(
    images: Sequence[DatasetFile], split: str, classes: Sequence[str]
) -> dict[str, int]:
    counts = Counter(file.label for file in images if file.split == split)
    return {label: counts[label] for label in classes}


def _walk_splits(root: Path, splits: tuple[str, ...]) -> Iterator[DatasetFile]:
    for split in splits:
        for folder, _, names in sorted(os.walk(root / split)):
            inside = Path(folder).relative_to(root / split)
            label = display_name(inside.parts[0]) if inside.parts else ""
            for name in sorted(names):
                if is_hidden(name):
                    continue
                kind: Literal["image", "other", "loose"] = "image" if label else "loose"
                if not name.lower().endswith(SUFFIXES):
                    kind = "other"
                yield DatasetFile(split, label, str(Path(split) / inside / name), kind)


def _class_names(root: Path) -> list[str]:
    return [display_name(name) for name in folder_names(root)]


def _examine_all(
    tasks: Sequence[str | tuple[str, int]],
    sources: dict[str, ImageSource],
    workers: int | None,
    track: Track,
) -> list[ImageFacts]:
    """Examine images in worker processes."""
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(sources,)) as pool:
        try:
            results = pool.map(_examine_in_worker, tasks, chunksize=4)
            return list(track(results, "reading", len(tasks)))
        except BrokenProcessPool:
            raise RuntimeError(
                "a process that reads images has died; if memory was short, start fewer: --workers 1"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _unreadable_images(checked: Sequence[CheckedFile]) -> Problem:
    items = [
        f"{file.name}: {facts.error.partition(': ')[2]}"
        for file, facts in checked
        if facts.error is not None
    ]
    return Problem(
        "unreadable",
        True,
        "training would stop at them: delete or replace them, or train with --data.unreadable skip",
        items,
    )


def _class_problems(counts: dict[str, dict[str, int]]) -> Iterator[Problem]:
    empty = [
        f"{split}/{label}"
        for split, labels in counts.items()
        for label, n in labels.items()
        if not n
    ]
    yield Problem("empty class", True, "add images or remove the folder", empty)
    train, *others = counts.values()
    single = list(train) if len(train) == 1 else []
    advice = "a classifier needs at least two; is this the folder above those of the classes?"
    yield Problem("only one class", True, advice, single)
    validation = list(zip(list(counts)[1:], others, strict=True))
    unknown = [
        f"{split}/{label}" for split, labels in validation for label in labels if label not in train
    ]
    yield Problem("class not in training", True, "misspelt, or images are missing", unknown)
    missing = [
        f"{split}/{label}" for split, labels in validation for label in train if label not in labels
    ]
    yield Problem("class not in validation", True, "its accuracy would not be measured", missing)
    present = {label: n for label, n in train.items() if n}
    uneven = []
    if present and max(present.values()) > UNEVEN * min(present.values()):
        few, many = min(present, key=present.__getitem__), max(present, key=present.__getitem__)
        uneven = [f"{many}: {present[many]} images, {few}: {present[few]}"]
    yield Problem("uneven classes", False, "rare classes are learned poorly", uneven)
    yield _small_classes(present)


def _small_classes(counts: dict[str, int]) -> Problem:
    items = [f"{label}: {n} images" for label, n in counts.items() if n < FEW]
    return Problem(f"fewer than {FEW} images", False, "such classes are learned poorly", items)


def _duplicates(readable: Sequence[CheckedFile]) -> Iterator[Problem]:
    groups: dict[str, list[DatasetFile]] = defaultdict(list)
    for file, facts in readable:
        if not facts.flat:  # images of one colour may be equal without being copies
            groups[facts.digest].append(file)
    across_splits, across_classes, within_class = [], [], []
    for group in groups.values():
        if len(group) < 2:
            continue
        names = " = ".join(file.name for file in group[:4])
        splits, labels = {file.split for file in group}, {file.label for file in group}
        if len(splits) > 1:
            across_splits.append(names)
        if len(labels) > 1:
            across_classes.append(names)
        if len(splits) == len(labels) == 1:
            within_class.append(names)
    yield Problem("the same image in train and val", True, SAME_IMAGE_ADVICE, across_splits)
    yield Problem("the same image in two classes", True, "one label is wrong", across_classes)
    yield Problem("the same image twice", False, "it counts twice", within_class)


def _unusual_images(readable: Sequence[CheckedFile]) -> Iterator[Problem]:
    sizes = [(file.name, *facts.size) for file, facts in readable]
    small = [f"{name}: {w}x{h}" for name, w, h in sizes if min(w, h) < SMALL]
    yield Problem(f"smaller than {SMALL} pixels", False, "too small to learn from", small)
    long = [f"{name}: {w}x{h}" for name, w, h in sizes if max(w, h) > LONG * min(w, h)]
    yield Problem(
        f"sides of more than {LONG:g} to 1", False, "the centre crop loses most of the image", long
    )
    flat = [file.name for file, facts in readable if facts.flat]
    yield Problem("one colour only", False, "nothing to learn from", flat)


def _stray_files(files: Sequence[DatasetFile]) -> Iterator[Problem]:
    loose = [file.name for file in files if file.kind == "loose"]
    yield Problem("outside a class folder", True, "they would not be used: move them", loose)
    others = [file.name for file in files if file.kind == "other"]
    unsupported = [name for name in others if name.lower().endswith(UNSUPPORTED_SUFFIXES)]
    advice = f"supported are {', '.join(SUFFIXES)}: convert or delete them, or train with --data.unreadable skip"
    yield Problem("format not supported", True, advice, unsupported)
    other = [name for name in others if name not in unsupported]
    yield Problem("not an image by its name", False, f"supported are {', '.join(SUFFIXES)}", other)


def _readers(root: Path, split: str) -> dict[str, list[Reader]]:
    """Return functions that read the images of each class."""
    if (source := find_splits(root, (split,))[1].get(split)) is not None:
        found: dict[str, list[Reader]] = {name: [] for name in source.classes}
        for i, label in enumerate(source.labels):
            found[source.classes[label]].append(partial(source.image, i))
        return found
    return {
        display_name(label): [
            partial(read_image, file)
            for file in sorted((root / split / label).rglob("*"))
            if is_image_file(file)
        ]
        for label in folder_names(root / split)
    }


def draw_contact_sheet(root: Path, split: str, path: Path, rows: int = 12) -> str:
    """Draw a row of images for each of the first classes, and return which classes these are."""
    readers = _readers(root, split)
    classes = list(readers)[:rows]
    canvas = Image.new("RGB", (COLUMNS * TILE, len(classes) * (TILE + TITLE)), "white")
    draw = ImageDraw.Draw(canvas)
    font, titles = prepare_labels(classes, TITLE_FONT)
    for row, label in enumerate(classes):
        top = row * (TILE + TITLE)
        draw.text((2, top), titles[row], fill="black", font=font)
        images = readers[label]
        # Spread over the class, because consecutive images are often similar.
        chosen = np.linspace(0, len(images) - 1, min(COLUMNS, len(images))).astype(int)
        for column, i in enumerate(chosen):
            try:
                image = images[i]()
            except UnreadableImageError:
                continue
            image.thumbnail((TILE - 2, TILE - 2))
            canvas.paste(image, (column * TILE, top + TITLE))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)
    return f"the first {rows} of {len(readers)} classes" if len(readers) > rows else "all classes"
