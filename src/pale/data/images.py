"""Pictures with a class each: reading them safely, from folders or from list files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from PIL import Image, ImageOps

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MOST_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs


class UnreadableImageError(ValueError):
    """A file that is no picture we can use; the message names it."""


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """A picture as RGB, turned as its EXIF entry says, transparency laid on white, 16 bits brought to 8."""
    try:
        with open(path, "rb") as file:
            return decode(file, str(path))
    except FileNotFoundError:
        raise UnreadableImageError(
            f"{path}: there is no such file; was it moved after the list was made?"
        ) from None
    except OSError as error:
        raise UnreadableImageError(
            f"{path}: cannot be read ({error.strerror or error}); repair the disk or its rights, or replace it"
        ) from None


def decode(file: IO[bytes], name: str) -> Image.Image:
    """`read_image` for an open file; `name` is for messages."""
    try:
        with Image.open(file) as image:
            w, h = image.size
            if w * h > MOST_PIXELS:
                raise UnreadableImageError(_too_large(name, f"{w}x{h}"))
            image.load()
            ImageOps.exif_transpose(
                image, in_place=True
            )  # in place: no copy where nothing is turned
            return to_rgb(image)
    except UnreadableImageError:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableImageError(_too_large(name, str(error))) from None
    except Exception as error:
        reason = "no picture format is known for it" if "cannot identify" in str(error) else error
        raise UnreadableImageError(
            f"{name}: cannot be read as an image ({reason}); delete it or replace it"
        ) from None


def _too_large(name: str, size: str) -> str:
    return f"{name}: more than {MOST_PIXELS:,} pixels ({size}); shrink it before training"


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode of Pillow as RGB; one that is RGB already stays what it is."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion cuts off at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert(
            "RGB"
        )
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


class Source(Protocol):
    """Pictures with a class each, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""

    @property
    def labels(self) -> Sequence[int]:
        """The class of each picture."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Picture number `index`."""

    def content(self, index: int) -> bytes:
        """Its file, as it is."""

    def name(self, index: int) -> str:
        """Where it comes from, for messages."""


class Files:
    """Pictures in files."""

    def __init__(
        self, root: Path, paths: Sequence[str], labels: Sequence[int], classes: Sequence[str]
    ) -> None:
        self.root, self.paths, self.labels, self.classes = root, paths, labels, classes
        counts = Counter(labels)
        if empty := [name for i, name in enumerate(classes) if not counts[i]]:
            raise ValueError(
                f"every class needs at least one image, but in {root} there is none for "
                f"{_some(empty)}; remove the class or add images ({', '.join(SUFFIXES)})"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Image.Image:
        """Picture number `index`, RGB."""
        return read_image(self.root / self.paths[index])

    def content(self, index: int) -> bytes:
        """The file, as it is; empty where there is none."""
        try:
            return (self.root / self.paths[index]).read_bytes()
        except OSError:
            return b""

    def name(self, index: int) -> str:
        """Path of the file."""
        return str(self.root / self.paths[index])


def is_picture(path: Path) -> bool:
    """Whether it is one by its name, and no folder."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return ", ".join(repr(word) for word in words[:5]) + more


def folder(root: Path, classes: Sequence[str] | None = None) -> Files:
    """Read `root/<class>/**/<picture>`: the folders, sorted, are the classes.

    Args:
        root: the folder of the class folders.
        classes: the classes that a matching set has (the training set's, for validation).
    """
    if not root.is_dir():
        raise ValueError(
            f"there is no folder {root}; expected are {root}/<class>/<picture>, one folder a class"
        )
    found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    found = [name for name in found if not name.startswith(".")]
    if not found:
        raise ValueError(
            f"{root} holds no folders; expected are {root}/<class>/<picture>, one folder a class"
        )
    if classes is None:
        classes = found
    elif unknown := sorted(set(found) - set(classes)):
        raise ValueError(
            f"{root} holds classes that the training set does not: {_some(unknown)}; remove them"
        )
    paths, labels = [], []
    for label, name in enumerate(classes):
        for where, _, files in sorted(os.walk(root / name)):
            inside = os.path.relpath(where, root)
            for file in sorted(files):
                if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                    paths.append(os.path.join(inside, file))
                    labels.append(label)
    return Files(root, paths, labels, classes)


def list_file(path: Path, root: Path, classes: Sequence[str] | None = None) -> Files:
    """Read a text file of lines `picture class`: a path under `root`, then the class, a name or a number.

    Numbers count from 0. Names, sorted, are the classes, unless `classes` gives them. Empty lines and
    lines that begin with # are passed over.
    """
    if not path.is_file():
        raise ValueError(f"there is no list file {path}; a line of one is: cats/1.jpg cat")
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}, under which the paths of {path} should lie")
    paths, words = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.rsplit(maxsplit=1)
        if len(fields) != 2:
            raise ValueError(
                f"{path}, line {number}: expected a picture and its class, got {line!r}"
            )
        paths.append(fields[0].strip())
        words.append(fields[1])
    if not words:
        raise ValueError(f"{path} lists no pictures; a line is: cats/1.jpg cat")
    if all(word.isdigit() for word in words):
        labels = [int(word) for word in words]
        known = list(classes) if classes is not None else [str(i) for i in range(max(labels) + 1)]
        if max(labels) >= len(known):
            raise ValueError(
                f"{path}: class {max(labels)} is out of range, there are {len(known)}; numbers count from 0"
            )
        return Files(root, paths, labels, known)
    known = list(classes) if classes is not None else sorted(set(words))
    if unknown := sorted(set(words) - set(known)):
        raise ValueError(f"{path} names classes that the training set does not: {_some(unknown)}")
    number_of = {name: i for i, name in enumerate(known)}
    return Files(root, paths, [number_of[word] for word in words], known)


def pets(root: Path, split: str, classes: Sequence[str] | None = None) -> Files:
    """Oxford-IIIT Pet: the breeds of a split's list, named and ordered as torchvision does ("American Bulldog").

    Args:
        root: holds images/ and annotations/.
        split: "trainval" or "test".
        classes: the classes that a matching set has.
    """
    path = root / "annotations" / f"{split}.txt"
    if not path.is_file():
        raise ValueError(f"there is no list {path}; expected is the Oxford-IIIT Pet data set")
    rows = [line.split() for line in path.read_text().splitlines()]
    rows = [row for row in rows if row and not row[0].startswith("#")]
    names = {int(row[1]): row[0].rpartition("_")[0].replace("_", " ").title() for row in rows}
    known = list(classes) if classes is not None else [names[i] for i in sorted(names)]
    if unknown := sorted(set(names.values()) - set(known)):
        raise ValueError(f"{path} names classes that the training set does not: {_some(unknown)}")
    number_of = {name: i for i, name in enumerate(known)}
    labels = [number_of[names[int(row[1])]] for row in rows]
    return Files(root, [f"images/{row[0]}.jpg" for row in rows], labels, known)


class Part:
    """Some pictures of a source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices
        self.classes = source.classes
        self.labels = [source.labels[i] for i in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        """Picture number `index` of the part."""
        return self.source.image(self.indices[index])

    def content(self, index: int) -> bytes:
        """Its file, as it is."""
        return self.source.content(self.indices[index])

    def name(self, index: int) -> str:
        """Where it comes from."""
        return self.source.name(self.indices[index])


def hold_out(source: Source, share: float, seed: int) -> tuple[Part, Part]:
    """Split off `share` of each class, drawn from `seed`: (the rest, the share)."""
    rng = np.random.default_rng(seed)
    labels = np.asarray(source.labels)
    kept: list[int] = []
    held: list[int] = []
    for c in range(len(source.classes)):
        members = rng.permutation(np.flatnonzero(labels == c))
        n = round(share * len(members))
        if not 0 < n < len(members):
            raise ValueError(
                f"a hold-out share of {share} of the {len(members)} images of class "
                f"{source.classes[c]!r} leaves one side empty; choose another share"
            )
        held += members[:n].tolist()
        kept += members[n:].tolist()
    return Part(source, sorted(kept)), Part(source, sorted(held))


def pictures(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Files, and all pictures in folders, with the name that their results get; no two alike."""
    found: list[tuple[Path, str]] = []
    for path in paths:
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if is_picture(f)]
            found += [(f, str(f.relative_to(path).with_suffix(""))) for f in inside]
        elif path.is_file():
            found.append((path, path.stem))
        else:
            raise ValueError(f"there is no picture or folder {path}")
    if not found:
        raise ValueError(f"there are no pictures in {paths[0]} ({', '.join(SUFFIXES)})")
    stems = [stem for _, stem in found]
    if len(set(stems)) < len(stems):
        twice = next(stem for stem in stems if stems.count(stem) > 1)
        raise ValueError(f"two pictures would be written as {twice}.png; predict them apart")
    return found
