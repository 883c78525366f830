"""Images with a mask each: class lists, label rules, and sources from folders or generated scenes.

A mask leaves here as uint8 labels: 0 to n - 1 are classes, 255 (`IGNORED`) is no label. Everything
else that a file may hold (palette, grey, 16 bits, colours, a void class, labels that count from 1) is
settled by the `ClassList`, and what does not fit is an error that names the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..progress import Track, silent
from . import images
from .images import SUFFIXES, UnreadableImageError, read_image
from .scenes import CLASSES as SHAPES
from .scenes import Scenes

IGNORED = 255
MOST_CLASSES = 255
MOST_VALUE = 65535  # of 16 bits
MASK_SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff")  # lossless ones
MaskKind = Literal["auto", "index", "colour"]
Labels = NDArray[np.uint8]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """One line of a class list: the value in the mask, the name, the colour if one is given."""

    value: int | None
    name: str
    colour: Colour | None = None


def parse_entry(line: str) -> Entry:
    """`[value] name [r g b]` or `[value] name [#rrggbb]`; a name may hold spaces."""
    words = line.split()
    value, colour = None, None
    if len(words) > 1 and words[0].isdigit():
        value = int(words.pop(0))
    last = words[-1]
    if len(words) > 1 and len(last) == 7 and last.startswith("#"):
        try:
            r, g, b = bytes.fromhex(last[1:])
        except ValueError:
            raise ValueError(f"{last!r} in {line!r} is no colour; write #rrggbb") from None
        colour, words = (r, g, b), words[:-1]
    elif len(words) > 3 and all(word.isdigit() for word in words[-3:]):
        r, g, b = (int(word) for word in words[-3:])
        if max(r, g, b) > 255:
            raise ValueError(f"the colour {r} {g} {b} in {line!r} is out of range; 0 to 255 each")
        colour, words = (r, g, b), words[:-3]
    return Entry(value, " ".join(words), colour)


def read_entries(path: Path) -> list[Entry]:
    """A file of such lines, # for comments; or ADE20K's objectInfo150.txt (the first synonym is the name)."""
    if not path.is_file():
        raise ValueError(
            f"there is no class list {path}; a line of one is: 3 road 128 64 128 (value in the mask, name, colour)"
        )
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if lines and lines[0].split("\t")[0] == "Idx":
        fields = [line.split("\t") for line in lines[1:]]
        return [Entry(int(row[0]), row[-1].partition(",")[0].strip()) for row in fields]
    entries = [parse_entry(line) for line in lines if not line.startswith("#")]
    if not entries:
        raise ValueError(f"{path} lists no classes; a line is: 3 road 128 64 128")
    return entries


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None


def palette(count: int) -> list[Colour]:
    """PASCAL VOC's colours, from the second on: far apart, and the same for everybody."""
    colours = []
    for i in range(1, count + 1):
        r = g = b = 0
        for bit in range(8):
            r |= ((i >> (3 * bit)) & 1) << (7 - bit)
            g |= ((i >> (3 * bit + 1)) & 1) << (7 - bit)
            b |= ((i >> (3 * bit + 2)) & 1) << (7 - bit)
        colours.append((r, g, b))
    return colours


class ClassList:
    """Which classes there are, and what in a mask stands for them.

    Args:
        entries: the lines of the list, in order.
        ignore: values that are no label; a listed class with such a value is none.
        reduce_zero: 0 is no label either, and lists without values count from 1.
        unlisted: what to do with values and colours that are not listed.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        ignore: Sequence[int] = (IGNORED,),
        reduce_zero: bool = False,
        unlisted: Literal["error", "ignore"] = "error",
    ) -> None:
        given = [entry.value for entry in entries if entry.value is not None]
        if given and len(given) < len(entries):
            raise ValueError(
                f"either every class has a value or none, got {len(given)} values for "
                f"{len(entries)} classes"
            )
        values = given or [i + reduce_zero for i in range(len(entries))]
        if wrong := [v for v in (*values, *ignore) if not 0 <= v <= MOST_VALUE]:
            raise ValueError(
                f"values in a mask are 0 to {MOST_VALUE}, got {wrong[0]} in the class list or in data.ignore"
            )
        if len(set(values)) < len(values):
            twice = next(v for v in values if values.count(v) > 1)
            raise ValueError(
                f"the class list has the value {twice} twice; each class needs its own"
            )
        self.ignore = {*ignore, *([0] if reduce_zero else [])}
        self.unlisted = unlisted
        kept = [(v, e) for v, e in zip(values, entries, strict=True) if v not in self.ignore]
        if not 1 < len(kept) <= MOST_CLASSES:
            raise ValueError(
                f"2 to {MOST_CLASSES} classes can be told apart, the list has {len(kept)} beside "
                "those that are ignored"
            )
        self.names = [entry.name for _, entry in kept]
        if len(set(self.names)) < len(self.names):
            same = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(
                f"the class list has the name {same!r} twice; figures are told by name, so each class needs its own"
            )
        self.values = [value for value, _ in kept]
        self.coloured = all(entry.colour is not None for entry in entries)
        plain = palette(len(kept))
        self.colours = [e.colour or plain[i] for i, (_, e) in enumerate(kept)]
        label_of = {v: i for i, v in enumerate(self.values)} | dict.fromkeys(self.ignore, IGNORED)
        self.label_of = label_of
        # Listed colours, void ones included, as one number each.
        self.by_colour = {
            _packed(entry.colour): label_of[value]
            for value, entry in zip(values, entries, strict=True)
            if entry.colour is not None
        }
        if len(self.by_colour) < sum(entry.colour is not None for entry in entries):
            raise ValueError("the class list gives two classes the same colour")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _table(self) -> tuple[Labels, NDArray[np.bool_]]:
        # Label of every 16-bit value, and whether it is known.
        table = np.full(MOST_VALUE + 1, IGNORED, np.uint8)
        known = np.zeros(MOST_VALUE + 1, np.bool_)
        for value, label in self.label_of.items():
            table[value], known[value] = label, True
        return table, known

    def from_values(self, values: NDArray[Any], name: str) -> Labels:
        """Labels of a map of values."""
        if values.min() < 0 or values.max() > MOST_VALUE:
            raise UnreadableImageError(
                f"{name}: values from {values.min()} to {values.max()} are no labels"
            )
        table, known = self._table
        labels = table[values]
        if self.unlisted == "error" and not known[values].all():
            value = int(np.min(values[~known[values]]))
            raise UnreadableImageError(
                f"{name}: the label {value} is out of range, there are {self._range()}; add it to the class "
                "list, to data.ignore, or set data.unlisted=ignore"
            )
        return labels

    def from_colours(self, pixels: Labels, name: str) -> Labels:
        """Labels of a map of colours, (h, w, 3)."""
        if not self.coloured:
            raise UnreadableImageError(
                f"{name}: a colour mask needs a class list with a colour for every class; give "
                "data.classes, or set data.mask_kind=index if the colours are grey values"
            )
        packed = pixels.astype(np.int32) @ np.array([65536, 256, 1], np.int32)
        found, where = np.unique(packed, return_inverse=True)
        labels = np.array([self.by_colour.get(int(c), -1) for c in found])
        if self.unlisted == "error" and (labels < 0).any():
            unknown = int(found[labels < 0][0])
            r, g, b = unknown >> 16, unknown >> 8 & 255, unknown & 255
            raise UnreadableImageError(
                f"{name}: the colour {r} {g} {b} is not in the class list; add it, or set data.unlisted=ignore"
            )
        return np.where(labels < 0, IGNORED, labels).astype(np.uint8)[where].reshape(packed.shape)

    def _range(self) -> str:
        low, high = min(self.values), max(self.values)
        whole = high - low + 1 == len(self.values)
        return f"{low} to {high}" if whole else f"{len(self.values)} classes up to {high}"


def _packed(colour: Colour) -> int:
    r, g, b = colour
    return r << 16 | g << 8 | b


def read_mask(path: str | os.PathLike[str], classes: ClassList, kind: MaskKind = "auto") -> Labels:
    """Labels of a mask file, (h, w).

    Args:
        path: palette, grey or colour; never a lossy format.
        classes: what stands for what.
        kind: "index": palette indices and grey values are labels; "colour": colours are, also those of a palette;
            "auto": as the file's mode says.
    """
    name = str(path)
    try:
        with Image.open(path) as image:
            image.load()
    except FileNotFoundError:
        raise UnreadableImageError(f"{name}: there is no such mask") from None
    except Exception as error:
        raise UnreadableImageError(
            f"{name}: cannot be read as a mask ({error}); replace it"
        ) from None
    if image.format == "JPEG":
        raise UnreadableImageError(
            f"{name}: a JPEG does not keep labels exactly; save masks as PNG"
        )
    colour = kind == "colour" or (kind == "auto" and len(image.getbands()) >= 3)
    if colour:
        return classes.from_colours(np.asarray(image.convert("RGB")), name)
    pixels = np.asarray(image)
    if pixels.ndim == 3:
        if len(image.getbands()) >= 3 and (pixels[..., :3] != pixels[..., :1]).any():
            raise UnreadableImageError(
                f"{name}: mask_kind=index needs one value a pixel, but its channels differ; "
                "set data.mask_kind=colour"
            )
        pixels = pixels[..., 0]
    if pixels.dtype.kind == "f" and not (pixels == np.rint(pixels)).all():
        odd = pixels[pixels != np.rint(pixels)][0]
        raise UnreadableImageError(
            f"{name}: the value {odd:g} is no label; labels are whole numbers, save masks with 8 or 16 bits"
        )
    return classes.from_values(pixels.astype(np.int64), name)


class MaskSource(Protocol):
    """Pictures with a mask each, by number."""

    classes: ClassList

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Picture number `index`, RGB."""

    def mask(self, index: int) -> Labels:
        """Its labels, (h, w)."""

    def name(self, index: int) -> str:
        """Where it comes from, for messages."""


class MaskFiles:
    """Pictures and masks in files."""

    def __init__(
        self, pairs: Sequence[tuple[Path, Path]], classes: ClassList, kind: MaskKind = "auto"
    ) -> None:
        self.pairs, self.classes, self.kind = pairs, classes, kind

    def __len__(self) -> int:
        return len(self.pairs)

    def image(self, index: int) -> Image.Image:
        """The picture."""
        return read_image(self.pairs[index][0])

    def mask(self, index: int) -> Labels:
        """Its labels."""
        return read_mask(self.pairs[index][1], self.classes, self.kind)

    def name(self, index: int) -> str:
        """The picture's path."""
        return str(self.pairs[index][0])


class SceneMasks:
    """Scenes with their semantic masks."""

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes
        self.classes = ClassList([Entry(None, name) for name in ("background", *SHAPES)])

    def __len__(self) -> int:
        return len(self.scenes)

    def image(self, index: int) -> Image.Image:
        """The picture."""
        return Image.fromarray(self.scenes[index].image)

    def mask(self, index: int) -> Labels:
        """Its labels."""
        return self.scenes[index].mask

    def pair(self, index: int) -> tuple[Image.Image, Labels]:
        """Both, drawn once."""
        scene = self.scenes[index]
        return Image.fromarray(scene.image), scene.mask

    def name(self, index: int) -> str:
        """For messages."""
        return f"scene {index} of seed {self.scenes.seed}"


def find_pairs(
    images: Path, masks: Path, names: Path | None = None, absent: list[str] | None = None
) -> list[tuple[Path, Path]]:
    """Pictures under `images` with the masks of the same path under `masks`, whatever their suffixes.

    Args:
        images: folder of pictures.
        masks: folder of masks.
        names: a list of paths under `images` without suffix, the first word of each line; others are left out.
        absent: takes the pictures without a mask, which are an error otherwise.
    """
    for folder, what in ((images, "pictures"), (masks, "masks")):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}, where the {what} should lie")
    pictures = _stems(images, SUFFIXES)
    labels = _stems(masks, MASK_SUFFIXES)
    wanted = list(pictures)
    if names is not None:
        if not names.is_file():
            raise ValueError(f"there is no list {names}; a line begins with a picture's name")
        lines = [line.split() for line in _text(names).splitlines()]
        wanted = [words[0] for words in lines if words and not words[0].startswith("#")]
        wanted = [word if word in pictures else os.path.splitext(word)[0] for word in wanted]
        if unknown := [word for word in wanted if word not in pictures]:
            raise ValueError(
                f"{names} lists {unknown[0]}, but there is no such picture in {images}"
            )
    if not wanted:
        raise ValueError(f"there are no pictures in {images} ({', '.join(SUFFIXES)})")
    missing = [word for word in wanted if word not in labels]
    if absent is not None:
        absent += [str(images / pictures[word]) for word in missing]
        wanted = [word for word in wanted if word in labels]
    elif missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{images / pictures[missing[0]]}{more} have no mask in {masks}; expected is "
            f"{masks / missing[0]}.png"
        )
    return [(images / pictures[word], masks / labels[word]) for word in wanted]


def _stems(root: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    # Path without suffix -> path, both under root, sorted.
    found: dict[str, str] = {}
    for where, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            if name.lower().endswith(suffixes) and not name.startswith("."):
                path = os.path.normpath(os.path.join(os.path.relpath(where, root), name))
                stem = os.path.splitext(path)[0]
                if stem in found:
                    raise ValueError(f"{root} holds {found[stem]} and {path}; one name, one file")
                found[stem] = path
    return found


def hold_out(
    pairs: Sequence[tuple[Path, Path]], share: float, seed: int
) -> tuple[list[tuple[Path, Path]], list[tuple[Path, Path]]]:
    """Split off `share` of the pairs, drawn from `seed`: (the rest, the share)."""
    held = round(share * len(pairs))
    if not 0 < held < len(pairs):
        raise ValueError(
            f"a hold-out share of {share} of {len(pairs)} images leaves one side empty; choose another"
        )
    order = np.random.default_rng(seed).permutation(len(pairs)).tolist()
    return [pairs[i] for i in sorted(order[held:])], [pairs[i] for i in sorted(order[:held])]


@dataclass(frozen=True)
class Seen:
    """What one pair tells: an error, or the pixels of each class and of none, (n + 1,)."""

    error: str | None
    pixels: NDArray[np.int64]
    size: tuple[int, int] = (0, 0)


def examine(source: MaskSource, index: int, decode: bool = False) -> Seen:
    """Look at one pair: the mask in full, of the picture the size alone unless `decode`."""
    none = np.zeros(len(source.classes) + 1, np.int64)
    try:
        if isinstance(source, MaskFiles):
            size = source.image(index).size if decode else image_size(source.pairs[index][0])
        else:
            size = source.image(index).size
        mask = source.mask(index)
    except UnreadableImageError as error:
        return Seen(str(error), none)
    if size != (mask.shape[1], mask.shape[0]):
        told = (
            f"{source.name(index)} is {size[0]}x{size[1]}, its mask {mask.shape[1]}x{mask.shape[0]}; "
            "both must have one size"
        )
        if (
            isinstance(source, MaskFiles)
            and size == mask.shape
            and _head(source.pairs[index][0])[1]
        ):
            told += " (the picture's EXIF entry turns it; a mask is that of the turned picture)"
        return Seen(told, none, size)
    counts = np.bincount(mask.ravel(), minlength=256)
    none[:-1], none[-1] = counts[: len(none) - 1], counts[IGNORED]
    return Seen(None, none, size)


def image_size(path: Path) -> tuple[int, int]:
    """Width and height as the picture will be read, from the file's head alone."""
    (w, h), turned = _head(path)
    if w * h > images.MOST_PIXELS:  # of far more than that Pillow tells itself
        raise UnreadableImageError(
            f"{path}: more than {images.MOST_PIXELS:,} pixels ({w}x{h}); shrink it before training"
        )
    return (h, w) if turned else (w, h)


def _head(path: Path) -> tuple[tuple[int, int], bool]:
    """Width and height of what is stored, and whether its EXIF entry turns it by a quarter."""
    try:
        with Image.open(path) as image:
            return image.size, image.getexif().get(0x0112, 1) >= 5
    except Exception as error:
        raise UnreadableImageError(
            f"{path}: cannot be read as an image ({error}); delete it or replace it"
        ) from None


def survey(
    source: MaskSource, threads: int = 8, decode: bool = False, track: Track = silent
) -> list[Seen]:
    """`examine` all pairs; decoding leaves Python's lock, so threads do."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            seen = pool.map(lambda i: examine(source, i, decode), range(len(source)))
            return list(track(seen, "reading", len(source)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def require_good(seen: Sequence[Seen]) -> None:
    """Raise the first error of a survey, with how many more there are."""
    errors = [entry.error for entry in seen if entry.error is not None]
    if errors:
        more = f" (and {len(errors) - 1} more such pairs)" if len(errors) > 1 else ""
        raise UnreadableImageError(errors[0] + more)
