"""Images with any number of tags each (multi-label), from tar shards or from a folder with a table.

Shards have an image `<key>.jpg`, followed by `<key>.json` with {"labels": ["dog", "person"]}. A folder has
`labels.json`, {"a.jpg": ["dog", "person"]}, or `labels.csv` with the columns image and label and one row for each pair;
paths are relative to the folder. `classes.txt` beside the shards or folders lists the classes, one per line; without it
they are the sorted names of the training set. An image may have no tag.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ...core.plain_json import parse_json
from ...errors import DataError
from ..reading import display_name, read_text, require_distinct_names, shorten_list
from .images import ImageFiles
from .shards import ShardFiles, index_of, scan_shards

MAX_TAGS = 1000  # maximum number of tags of an image
MAX_NAME = 200  # characters of a tag
MAX_CLASSES = 1 << 16  # the maximum of a header of weights
MAX_JSON_BYTES = 1 << 18  # maximum size of the tags of one image
ONE_CLASS = ("image",)  # the base classes expect a class for each image


class TagShards(ShardFiles):
    """Tagged images of a split in shards.

    Args:
        folder: contains `<split>-*.tar`.
        split: name of the split.
        classes: classes of the training set, for validation.

    Attributes:
        tags: class numbers of each image, sorted.
    """

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None = None) -> None:
        paths = sorted(folder.glob(f"{split}-*.tar"))
        if not paths:
            raise DataError(
                f"there are no shards {folder}/{split}-*.tar; each image KEY.jpg in them needs a KEY.json with "
                '{"labels": ["dog", "person"]}'
            )
        places, names = scan_shards(paths, "json", parse_labels, MAX_JSON_BYTES, "its labels")
        index = index_of(paths, places, [0] * len(places), ONE_CLASS)
        super().__init__(folder, split, index=index)
        known = classes if classes is not None else read_classes(folder)
        self.classes, self.tags = number_tags(names, known, f"{folder}/{split}")


class TagFiles(ImageFiles):
    """Tagged images in a folder.

    Args:
        root: contains labels.json or labels.csv, and the images.
        classes: those of the training set, for validation.

    Attributes:
        tags: class numbers of each image, sorted.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None = None) -> None:
        table = root / "labels.json", root / "labels.csv"
        if table[0].is_file():
            found = _read_json(table[0])
        elif table[1].is_file():
            found = _read_csv(table[1])
        else:
            raise DataError(
                f"there is neither {table[0]} nor {table[1]}; an example of the first: "
                '{"a.jpg": ["dog", "person"], "b.jpg": []}'
            )
        if not found:
            raise DataError(f"{root} lists no images; add a line for each image")
        super().__init__(root, list(found), [0] * len(found), ONE_CLASS)
        known = classes if classes is not None else read_classes(root.parent)
        self.classes, self.tags = number_tags(list(found.values()), known, root)


def parse_labels(content: bytes) -> list[str]:
    """Return the names in {"labels": [...]}; raises a ValueError for anything else."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise ValueError(f"labels are not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict) or "labels" not in value:
        raise ValueError('labels must be {"labels": [names]}')
    return check_names(value["labels"])


def check_names(names: object) -> list[str]:
    """Return distinct tag names of one image in order; raises a ValueError if they are not names."""
    if not isinstance(names, list):
        raise ValueError(f"labels must be a list of names, got {type(names).__name__}")
    if len(names) > MAX_TAGS:
        raise ValueError(f"an image has at most {MAX_TAGS} labels, got {len(names)}")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ValueError(
                f"a label must be a name of 1 to {MAX_NAME} characters, got {repr(name)[:80]}"
            )
    return [display_name(name) for name in dict.fromkeys(names)]


def number_tags(
    names: Sequence[Sequence[str]], classes: Sequence[str] | None, where: object
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return the classes and the class numbers of each image.

    Args:
        names: tags of each image.
        classes: those of the training set or of classes.txt; None: all names that occur, sorted.
        where: the dataset, for messages.
    """
    present = {name for each in names for name in each}
    if classes is None:
        classes = sorted(present)
    elif unknown := sorted(present - set(classes)):
        raise DataError(
            f"{where} has labels that neither classes.txt nor the training set has: {shorten_list(unknown)}; add them "
            "there, or remove them"
        )
    if not 0 < len(classes) <= MAX_CLASSES:
        raise DataError(
            f"{where} must have 1 to {MAX_CLASSES} different labels, got {len(classes)}; check the files with labels"
        )
    number_of = {name: i for i, name in enumerate(classes)}
    return list(classes), [tuple(sorted(number_of[name] for name in each)) for each in names]


def read_classes(folder: Path) -> list[str] | None:
    """Return the names in `classes.txt`, one per line; None if there is no such file."""
    path = folder / "classes.txt"
    if not path.is_file():
        return None
    names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if any(len(name) > MAX_NAME for name in names):
        raise DataError(f"{path}: a name has at most {MAX_NAME} characters; shorten it")
    names = [display_name(name) for name in names]
    require_distinct_names(names, path)
    return names


def _read_json(path: Path) -> dict[str, list[str]]:
    try:
        value = parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {str(error)[:100]}; write it again") from None
    if not isinstance(value, dict):
        raise DataError(f'{path} must be an object such as {{"a.jpg": ["dog"]}}; write it again')
    return {image: _names_of(path, image, names) for image, names in value.items()}


def _read_csv(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        for row in csv.DictReader(read_text(path).splitlines(), strict=True):
            image, label = row.get("image"), row.get("label")
            if not image or label is None:
                raise ValueError(f"row {len(found) + 2} needs an image and a label")
            # An empty label lists an image without tags.
            found.setdefault(image, []).extend([label] * bool(label))
    except (csv.Error, ValueError) as error:
        raise DataError(f"{path}: {error}; expected are the columns image and label") from None
    return {image: _names_of(path, image, names) for image, names in found.items()}


def _names_of(path: Path, image: str, names: object) -> list[str]:
    try:
        return check_names(names)
    except ValueError as error:
        raise DataError(f"{path}: {display_name(image)!r}: {error}; correct it") from None
