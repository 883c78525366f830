"""Images with a class each, from folders, list files or the Oxford-IIIT Pet dataset."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from ...core.progress import map_in_threads
from ..decoding import read_image
from ..reading import (
    SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    UnreadableImageError,
    display_name,
    read_bytes,
    read_text,
    require_distinct_names,
    shorten_list,
)
from . import holding
from .holding import HoldOutBy
from .paths import folder_names, is_hidden, missing_folder, walk_files

MAX_REPEATS = 20  # maximum number of repetitions of an image in an epoch with balanced sampling


class ImageSource(Protocol):
    """Images with a class each, by index."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""

    @property
    def labels(self) -> Sequence[int]:
        """The class of each image."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""

    def content(self, index: int) -> bytes:
        """Return the encoded file."""

    def name(self, index: int) -> str:
        """Return the origin of an image, for messages."""


class ImageFiles:
    """Images in files.

    Args:
        root: folder that contains all files.
        paths: paths below `root`.
        labels: class of each image.
        classes: names of the classes.
        unsupported: images beside them in formats that cannot be read.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int],
        classes: Sequence[str],
        unsupported: Sequence[str] = (),
    ) -> None:
        self.root, self.paths, self.labels, self.classes = root, paths, labels, classes
        self.unsupported = unsupported
        counts = Counter(labels)
        if empty := [name for i, name in enumerate(classes) if not counts[i]]:
            raise ValueError(
                f"every class needs at least one image, but in {root} there is none for "
                f"{shorten_list(empty)}; remove the class or add images ({', '.join(SUFFIXES)})"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""
        return read_image(self.root / self.paths[index])

    def content(self, index: int) -> bytes:
        """Return the encoded file, or no bytes if it cannot be read."""
        try:
            return read_bytes(self.root / self.paths[index])
        except OSError:
            return b""

    def name(self, index: int) -> str:
        """Return the path of the file."""
        return display_name(self.root / self.paths[index])


def read_folder(root: Path, classes: Sequence[str] | None = None) -> ImageFiles:
    """Read images `root/<class>/**/<image>`; the sorted folder names are the classes.

    Args:
        root: folder that contains the class folders.
        classes: expected classes (those of the training set, for validation).
    """
    layout = f"expected are {root}/<class>/<image>, one folder per class"
    if not root.is_dir():
        raise ValueError(f"{missing_folder(root)}; {layout}")
    folders = [name for name in folder_names(root) if not is_hidden(name)]
    if not folders:
        raise ValueError(f"{root} contains no folders; {layout}")
    names = [display_name(name) for name in folders]
    require_distinct_names(names, root)
    if classes is None:
        classes = names
    elif unknown := sorted(set(names) - set(classes)):
        raise ValueError(
            f"{root} has classes that the training set does not have: {shorten_list(unknown)}; remove them"
        )
    folder_of = dict(zip(names, folders, strict=True))
    paths, labels, unsupported = [], [], []
    for label, name in enumerate(classes):
        folder = folder_of.get(name, name)
        for path in walk_files(root / folder, SUFFIXES + UNSUPPORTED_SUFFIXES):
            path = os.path.join(folder, path)
            if path.lower().endswith(SUFFIXES):
                paths.append(path)
                labels.append(label)
            else:
                unsupported.append(display_name(root / path))
    return ImageFiles(root, paths, labels, classes, unsupported)


def numbered_classes(labels: Sequence[int], where: object) -> list[str]:
    """Return the names "0", "1", ... of numbered classes; every class needs an image, which bounds their number."""
    present = set(labels)
    if min(labels) < 0:
        raise ValueError(f"{where}: class {min(labels)} is out of range; numbers count from 0")
    if max(labels) >= len(labels):
        missing = next(i for i in range(len(labels)) if i not in present)
        raise ValueError(
            f"{where}: the classes are numbers up to {max(labels)}, and every class needs at least one image, but "
            f"there is none for '{missing}'; count from 0 without gaps"
        )
    return [str(i) for i in range(max(labels) + 1)]


def read_list(path: Path, root: Path, classes: Sequence[str] | None = None) -> ImageFiles:
    """Read a text file with lines `image class`: a path below `root`, and a class name or number.

    Numbers count from 0. The sorted names are the classes unless `classes` is given. Empty lines and
    lines that start with # are skipped.
    """
    if not path.is_file():
        raise ValueError(f"there is no list file {path}; an example of a line: cats/1.jpg cat")
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}, which the paths in {path} are relative to")
    paths, words = _parse_list(path)
    if all(word.isdecimal() for word in words):
        labels = [int(word) for word in words]
        known = list(classes) if classes is not None else numbered_classes(labels, path)
        if max(labels) >= len(known):
            raise ValueError(
                f"{path}: class {max(labels)} is out of range, there are {len(known)}; numbers count from 0"
            )
        return ImageFiles(root, paths, labels, known)
    known = list(classes) if classes is not None else sorted(set(words))
    return ImageFiles(root, paths, _class_numbers(words, known, path), known)


def _parse_list(path: Path) -> tuple[list[str], list[str]]:
    """Return the paths and the classes in a list file."""
    paths, words = [], []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.rsplit(maxsplit=1)
        if len(fields) != 2:
            raise ValueError(
                f"{path}, line {number}: expected an image and its class, got {line!r}"
            )
        paths.append(fields[0].strip())
        words.append(display_name(fields[1]))
    if not words:
        raise ValueError(f"{path} lists no images; an example of a line: cats/1.jpg cat")
    return paths, words


def _class_numbers(names: Sequence[str], classes: Sequence[str], path: Path) -> list[int]:
    """Return the index of each name in `classes`."""
    if unknown := sorted(set(names) - set(classes)):
        raise ValueError(
            f"{path} has classes that the training set does not have: {shorten_list(unknown)}"
        )
    number_of = {name: i for i, name in enumerate(classes)}
    return [number_of[name] for name in names]


def pet_rows(path: Path) -> list[list[str]]:
    """Return the fields of a list of Oxford-IIIT Pet: name, breed from 1, species (1 cat, 2 dog), number."""
    rows = [line.split() for line in read_text(path).splitlines()]
    rows = [row for row in rows if row and not row[0].startswith("#")]
    for row in rows:
        if len(row) < 3 or not row[1].isdecimal() or row[2] not in ("1", "2"):
            raise ValueError(
                f"{path}: expected lines such as `Abyssinian_100 1 1 1`, got {display_name(' '.join(row))!r}"
            )
    if not rows:
        raise ValueError(f"{path} lists no images; expected is the Oxford-IIIT Pet dataset")
    return rows


def read_pets(root: Path, split: str, classes: Sequence[str] | None = None) -> ImageFiles:
    """Read Oxford-IIIT Pet with its breeds as classes, named and ordered as in torchvision ("American Bulldog").

    Args:
        root: contains images/ and annotations/.
        split: "trainval" or "test".
        classes: expected classes.
    """
    path = root / "annotations" / f"{split}.txt"
    if not path.is_file():
        raise ValueError(f"there is no list {path}; expected is the Oxford-IIIT Pet dataset")
    rows = pet_rows(path)
    names = {int(row[1]): row[0].rpartition("_")[0].replace("_", " ").title() for row in rows}
    known = list(classes) if classes is not None else [names[i] for i in sorted(names)]
    labels = _class_numbers([names[int(row[1])] for row in rows], known, path)
    return ImageFiles(root, [f"images/{row[0]}.jpg" for row in rows], labels, known)


class ImageSubset:
    """Some images of a source, possibly repeated; `notes` state the reason.

    Args:
        source: the images.
        indices: the chosen ones; one may occur several times.
        notes: lines for the log of a run.
    """

    def __init__(
        self, source: ImageSource, indices: Sequence[int], notes: Sequence[str] = ()
    ) -> None:
        self.source, self.indices = source, indices
        self.notes = [*getattr(source, "notes", ()), *notes]
        self.classes = source.classes
        self.labels = [source.labels[i] for i in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        """Return an image of the subset."""
        return self.source.image(self.indices[index])

    def content(self, index: int) -> bytes:
        """Return the encoded file."""
        return self.source.content(self.indices[index])

    def name(self, index: int) -> str:
        """Return the origin of an image."""
        return self.source.name(self.indices[index])


def hold_out(
    source: ImageSource, share: float, seed: int, by: HoldOutBy = "order"
) -> tuple[ImageSubset, ImageSubset]:
    """Split off `share` of each class; return the rest and the split-off part.

    Args:
        source: the images.
        share: share of each class; at least one image with by="name".
        seed: seed of the choice.
        by: "order" draws positions in the sorted list of files, "name" chooses by file name (see `holding`).
    """
    kept, held = holding.hold_out(
        len(source), source.name, share, seed, by, source.labels, source.classes
    )
    notes = []
    if by == "name":
        notes.append(
            f"no split given: {len(held)} of {len(source)} images are held out for validation, {share:.0%} of each "
            f"class and at least one, chosen by file name and seed {seed}"
        )
    return ImageSubset(source, kept, notes), ImageSubset(source, held)


def without_unreadable(
    source: ImageSource, threads: int, skip: bool, training: bool = True
) -> ImageSource:
    """Decode every image; return the readable ones, with a note about the others, or raise an error that names these.

    Args:
        source: the images.
        threads: number of threads that decode.
        skip: leave unreadable images out.
        training: every class must keep an image.
    """

    def problem(index: int) -> str | None:
        try:
            source.image(index)
        except UnreadableImageError as error:
            return str(error)
        return None

    problems = map_in_threads(problem, range(len(source)), threads)
    bad = [reason for reason in problems if reason is not None]
    if not bad:
        return source
    if not skip:
        raise unreadable_images(bad)
    good = [index for index, reason in enumerate(problems) if reason is None]
    if training and (lost := set(source.labels) - {source.labels[index] for index in good}):
        names = [source.classes[label] for label in sorted(lost)]
        raise UnreadableImageError(
            f"{bad[0]}; no readable image is left of {shorten_list(names)}: add images or remove the class"
        )
    return ImageSubset(source, good, [skipped_note(bad)])


def require_supported(source: ImageSource, skip: bool) -> list[str]:
    """Return notes about images in unsupported formats beside a source; raise an error unless they are skipped."""
    found: Sequence[str] = getattr(source, "unsupported", ())
    if not found:
        return []
    reasons = [f"{name}: this format is not supported" for name in found]
    if not skip:
        raise unreadable_images(reasons)
    return [skipped_note(reasons)]


def unreadable_images(reasons: Sequence[str]) -> UnreadableImageError:
    """Return an error about images of a dataset that cannot be read."""
    return UnreadableImageError(
        f"{reasons[0]}{_others(reasons)}; convert or delete such files (supported are {', '.join(SUFFIXES)}), or leave "
        "them out: --data.unreadable skip"
    )


def skipped_note(reasons: Sequence[str]) -> str:
    """Return the line of the log about images that are left out."""
    number = (
        "1 unreadable image is" if len(reasons) == 1 else f"{len(reasons)} unreadable images are"
    )
    return f"{number} left out: {reasons[0]}{_others(reasons)}"


def _others(reasons: Sequence[str]) -> str:
    if len(reasons) < 2:
        return ""
    names = [reason.partition(": ")[0] for reason in reasons[1:]]
    return f" (and {len(names)} more: {shorten_list(names)})"


def balance_classes(source: ImageSource) -> ImageSubset:
    """Repeat the images of rare classes in turn until all classes have as many as the largest, 20 times at most."""
    labels = np.asarray(source.labels)
    members = [np.flatnonzero(labels == c) for c in range(len(source.classes))]
    largest = max(len(found) for found in members)
    chosen = [
        np.resize(found, min(largest, MAX_REPEATS * len(found))) for found in members if len(found)
    ]
    note = (
        f"balanced sampling: an epoch has {sum(map(len, chosen))} samples of {len(labels)} images"
    )
    return ImageSubset(source, np.sort(np.concatenate(chosen)).tolist(), [note])
