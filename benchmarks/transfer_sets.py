"""The labelled image sets for transfer: which photos, of which class, in which split. None is used in pre-training.

Classes and splits are the official ones where there are any. Caltech-101 is drawn: 30 images of each class for
training and at most 50 others for the test, without the background class, as is usual. `photos-200` stands for
somebody's own photos: ten classes of Caltech-101, chosen by name before any run, with 20 images to train and 30 to
test. Draws are by the hash of a file's path, so they are the same everywhere.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pretraining_sources import (
    SOURCES,
    Archive,
    Entry,
    Mirrors,
    Repository,
    read_file,
)

from pale.errors import DataError

FLOWER_LISTS = ("wallace-zhou/FloralVision", "c76755263ca3510931eb8d9a77994facd5745380")
FLOWER_SPLITS = {"trnid": "train", "valid": "val", "tstid": "test"}
CALTECH = r"101_ObjectCategories/(?P<label>[^/]+)/[^/]+\.jpg"
CALTECH_COUNTS = {"train": 30, "test": 50}
PHOTO_COUNTS = {"train": 20, "test": 30}
PHOTO_CLASSES = (
    *("butterfly", "chandelier", "crab", "elephant", "grand_piano"),
    *("helicopter", "ketch", "laptop", "sunflower", "umbrella"),
)
MAX_MATRIX_BYTES = 2**24
# Types of numbers in a MATLAB file, as struct's letters.
NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
MATRIX, COMPRESSED = 14, 15


class Photo(NamedTuple):
    """An image of a set: its file, its split ("train", "val" or "test") and its class."""

    entry: Entry
    split: str
    label: str


Finder = Callable[[Mirrors, Repository | Archive], list[Photo]]


@dataclass(frozen=True)
class PhotoSet:
    """A set of labelled photos.

    Attributes:
        name: of the set.
        source: name in `pretraining_sources.SOURCES`, which has repository and commit.
        photos: returns all photos.
        counts: photos of each split, where that is known.
    """

    name: str
    source: str
    photos: Finder
    counts: Mapping[str, int] | None = None

    def find(self, mirrors: Mirrors) -> tuple[Repository | Archive, list[Photo]] | None:
        """Return the repository and the photos in a fixed order; None if it is not there."""
        (source,) = (source for source in SOURCES if source.name == self.source)
        repository: Repository | Archive | None
        if source.repository.endswith(".tar"):
            tar = mirrors.shared / source.repository
            repository = Archive(tar) if tar.is_file() else None
        else:
            repository = mirrors.open(source.repository, source.commit)
        if repository is None:
            return None
        photos = sorted(self.photos(mirrors, repository))
        for photo in photos:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._ -]*", photo.label):
                raise DataError(f"{self.name}: {photo.label!r} is no usable class name")
        found = {split: sum(p.split == split for p in photos) for split in self.counts or ()}
        if self.counts and found != dict(self.counts):
            raise DataError(
                f"{self.name} must have {dict(self.counts)} photos, found {found}; fetch the repository again"
            )
        return repository, photos


def pets(mirrors: Mirrors, repository: Repository | Archive) -> list[Photo]:
    """Return the breeds of Oxford-IIIT Pet, by its lists."""
    files = {entry.path: entry for entry in repository.entries()}
    found = []
    for name, split in (("trainval", "train"), ("test", "test")):
        path = f"oxford-iiit-pet/annotations/{name}.txt"
        for line in read_file(repository, path).decode().splitlines():
            stem = line.split()[0]
            image = f"oxford-iiit-pet/images/{stem}.jpg"
            if image not in files:
                raise DataError(f"{repository.folder} has no {image}, which {path} lists")
            found.append(Photo(files[image], split, stem.rpartition("_")[0]))
    return found


def flowers(mirrors: Mirrors, repository: Repository | Archive) -> list[Photo]:
    """Return Flowers-102 with the official split, whose files are in another repository."""
    lists = mirrors.open(*FLOWER_LISTS)
    if lists is None:
        raise DataError(
            f"the official split of Flowers-102 is in {FLOWER_LISTS[0]}; fetch it beside the images"
        )
    labels = read_matrices(read_file(lists, "imagelabels.mat"))["labels"]
    splits = {
        int(number): split
        for key, numbers in read_matrices(read_file(lists, "setid.mat")).items()
        if (split := FLOWER_SPLITS.get(key)) is not None
        for number in numbers
    }
    found = []
    for entry in repository.entries():
        match = re.fullmatch(r"flowers/[^/]+/(\d+)/image_(\d{5})\.jpg", entry.path)
        if match is None:
            continue
        number = int(match[2])
        if number not in splits or not 1 <= number <= len(labels):
            raise DataError(f"{entry.path} is in no list of the official split")
        label = int(labels[number - 1])
        if label != int(match[1]):
            raise DataError(f"{entry.path} has the class {label} in the official list")
        found.append(Photo(entry, splits[number], f"{label:03d}"))
    return found


def cub(mirrors: Mirrors, repository: Repository | Archive) -> list[Photo]:
    """Return CUB-200-2011 with the official split, which is in the paths."""
    found = []
    for entry in repository.entries():
        if match := re.fullmatch(r"(train|test)/([^/]+)/[^/]+\.jpg", entry.path):
            found.append(Photo(entry, match[1], match[2]))
    return found


def caltech(mirrors: Mirrors, repository: Repository | Archive) -> list[Photo]:
    """Return Caltech-101 with 30 images of each class for training."""
    return draw(_caltech_classes(repository), CALTECH_COUNTS)


def photos_200(mirrors: Mirrors, repository: Repository | Archive) -> list[Photo]:
    """Return ten classes of Caltech-101 with 20 photos each for training and 30 for the test."""
    classes = _caltech_classes(repository)
    if missing := [name for name in PHOTO_CLASSES if name not in classes]:
        raise DataError(f"Caltech-101 lacks {', '.join(missing)}; fetch the repository again")
    return draw({name: classes[name] for name in PHOTO_CLASSES}, PHOTO_COUNTS)


def _caltech_classes(repository: Repository | Archive) -> dict[str, list[Entry]]:
    classes = defaultdict(list)
    for entry in repository.entries():
        match = re.fullmatch(CALTECH, entry.path)
        if match and not match["label"].startswith("BACKGROUND"):
            classes[match["label"]].append(entry)
    return classes


def draw(classes: Mapping[str, Sequence[Entry]], counts: Mapping[str, int]) -> list[Photo]:
    """Draw for each split the given number of images of each class, the last split as many as there are."""
    found = []
    for label, entries in classes.items():
        order = sorted(entries, key=lambda entry: hashlib.sha256(entry.path.encode()).digest())
        for split, count in counts.items():
            found += [Photo(entry, split, label) for entry in order[:count]]
            order = order[count:]
    return found


def read_matrices(content: bytes) -> dict[str, tuple[float, ...]]:
    """Return the real numeric matrices of a MATLAB file (level 5, little endian), flat, by name; others are ignored."""
    if len(content) < 128 or content[124:128] != b"\x00\x01IM":
        raise DataError("not a MATLAB file of level 5; fetch the repository again")
    found: dict[str, tuple[float, ...]] = {}
    try:
        for kind, data in _elements(content[128:]):
            if kind == COMPRESSED:
                machine = zlib.decompressobj()
                data = machine.decompress(data, MAX_MATRIX_BYTES)
                if machine.unconsumed_tail:
                    raise DataError(f"a matrix of a MATLAB file has over {MAX_MATRIX_BYTES} bytes")
                ((kind, data),) = _elements(data)
            if kind == MATRIX:
                _, _, (_, name), *values = _elements(data)
                if len(values) == 1 and values[0][0] in NUMBERS:
                    letter = NUMBERS[values[0][0]]
                    numbers = struct.iter_unpack(f"<{letter}", values[0][1])
                    found[name.decode("ascii")] = tuple(number for (number,) in numbers)
    except (struct.error, ValueError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"a damaged MATLAB file ({error}); fetch the repository again") from None
    return found


def _elements(content: bytes) -> list[tuple[int, bytes]]:
    """Return type and data of each element; short data is within the tag, other data is padded to 8 bytes."""
    found, place = [], 0
    while place + 8 <= len(content):
        kind, size = struct.unpack_from("<II", content, place)
        if kind >> 16:
            size, kind, start = kind >> 16, kind & 0xFFFF, place + 4
            end = place + 8
        else:
            start = place + 8
            end = start + size if kind == COMPRESSED else start + -(-size // 8) * 8
        if size > len(content) - start:
            raise DataError("a MATLAB file is cut short; fetch the repository again")
        found.append((kind, content[start : start + size]))
        place = end
    return found


SETS = (
    PhotoSet("oxford-pets", "oxford-pets", pets),
    PhotoSet("flowers-102", "flowers-102", flowers, {"train": 1020, "val": 1020, "test": 6149}),
    PhotoSet("cub-200", "cub-200", cub, {"train": 5994, "test": 5794}),
    PhotoSet("caltech-101", "caltech-101", caltech),
    PhotoSet("photos-200", "caltech-101", photos_200, {"train": 200, "test": 300}),
)
