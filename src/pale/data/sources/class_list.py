"""Class lists of segmentation masks: the values and colours of each class in a mask."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...core.lists import list_first
from ..reading import (
    UnreadableImageError,
    display_name,
    read_bytes,
    repeated_value,
    require_distinct_names,
)

IGNORED = 255
MAX_CLASSES = 255
MAX_VALUE = 65535  # 16 bits
STRIP_VALUES = 2**22  # values that are processed at a time
Labels = NDArray[np.uint8]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class ClassEntry:
    """One line of a class list: value in the mask, name, and colour; value and colour are optional."""

    value: int | None
    name: str
    colour: Colour | None = None


def parse_entry(line: str) -> ClassEntry:
    """Parse a line `[value] name [r g b]` or `[value] name [#rrggbb]`; the name may contain spaces."""
    words = line.split()
    value, colour = None, None
    if len(words) > 1 and words[0].isdigit():
        value = int(words.pop(0))
    last = words[-1]
    if len(words) > 1 and len(last) == 7 and last.startswith("#"):
        try:
            r, g, b = bytes.fromhex(last[1:])
        except ValueError:
            raise ValueError(f"{last!r} in {line!r} is not a colour; write #rrggbb") from None
        colour, words = (r, g, b), words[:-1]
    elif len(words) > 3 and all(word.isdigit() for word in words[-3:]):
        r, g, b = (int(word) for word in words[-3:])
        if max(r, g, b) > 255:
            raise ValueError(f"the colour {r} {g} {b} in {line!r} is out of range; 0 to 255 each")
        colour, words = (r, g, b), words[:-3]
    return ClassEntry(value, " ".join(words), colour)


def read_entries(path: Path) -> list[ClassEntry]:
    """Read a class list (# for comments) or ADE20K's objectInfo150.txt (the first synonym is the name)."""
    if not path.is_file():
        raise ValueError(
            f"there is no class list {path}; an example of a line: 3 road 128 64 128 (value in the mask, name, colour)"
        )
    lines = [line for line in _read_utf8(path).splitlines() if line.strip()]
    if lines and lines[0].split("\t")[0] == "Idx":
        fields = [line.split("\t") for line in lines[1:]]
        return [ClassEntry(int(row[0]), row[-1].partition(",")[0].strip()) for row in fields]
    entries = [parse_entry(line) for line in lines if not line.startswith("#")]
    if not entries:
        raise ValueError(f"{path} lists no classes; an example of a line: 3 road 128 64 128")
    return entries


def _read_utf8(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{display_name(path)} is not UTF-8 text ({error}); save it as UTF-8"
        ) from None


def palette(count: int) -> list[Colour]:
    """Return the first `count` colours of PASCAL VOC after black."""
    colours = []
    for i in range(1, count + 1):
        r = g = b = 0
        for bit in range(8):
            r |= ((i >> (3 * bit)) & 1) << (7 - bit)
            g |= ((i >> (3 * bit + 1)) & 1) << (7 - bit)
            b |= ((i >> (3 * bit + 2)) & 1) << (7 - bit)
        colours.append((r, g, b))
    return colours


def _wrong_count(
    count: int, listed: Sequence[tuple[int, ClassEntry]], ignore: Container[int]
) -> str:
    dropped = [f"{value} {entry.name}" for value, entry in listed if value in ignore]
    ignored = "; ignored (data.ignore, data.reduce_zero): " if dropped else ""
    ignored += list_first(dropped, 3)
    return (
        f"a class list needs 2 to {MAX_CLASSES} classes, got {count} that are not ignored{ignored}"
    )


class ClassList:
    """Classes with their values and colours in a mask.

    Args:
        entries: lines of the list, in order.
        ignore: values of unlabelled pixels; listed classes with such a value are dropped.
        reduce_zero: also ignore the value 0; lists without values then start at 1.
        unlisted: whether values and colours that are not listed are an error or ignored.
    """

    def __init__(
        self,
        entries: Sequence[ClassEntry],
        ignore: Sequence[int] = (IGNORED,),
        reduce_zero: bool = False,
        unlisted: Literal["error", "ignore"] = "error",
    ) -> None:
        values = _class_values(entries, reduce_zero)
        if wrong := [v for v in (*values, *ignore) if not 0 <= v <= MAX_VALUE]:
            raise ValueError(
                f"values in a mask are 0 to {MAX_VALUE}, got {wrong[0]} in the class list or in data.ignore"
            )
        _require_distinct_values(values)
        self.ignore = {*ignore, *([0] if reduce_zero else [])}
        self.unlisted = unlisted
        listed = list(zip(values, entries, strict=True))
        kept = [(value, entry) for value, entry in listed if value not in self.ignore]
        if not 1 < len(kept) <= MAX_CLASSES:
            raise ValueError(_wrong_count(len(kept), listed, self.ignore))
        self.names = [entry.name for _, entry in kept]
        require_distinct_names(self.names, "the class list")
        self.values = [value for value, _ in kept]
        self.coloured = all(entry.colour is not None for entry in entries)
        default = palette(len(kept))
        self.colours = [entry.colour or default[i] for i, (_, entry) in enumerate(kept)]
        labels = {value: i for i, value in enumerate(self.values)}
        self.label_of = labels | dict.fromkeys(self.ignore, IGNORED)
        self.by_colour = self._labels_by_colour(listed)

    def _labels_by_colour(self, listed: Sequence[tuple[int, ClassEntry]]) -> dict[int, int]:
        """Return the label of each listed colour, packed into one integer; ignored classes are included."""
        coloured = [(value, entry.colour) for value, entry in listed if entry.colour is not None]
        found = {_pack_colour(colour): self.label_of[value] for value, colour in coloured}
        if len(found) < len(coloured):
            raise ValueError("the class list gives two classes the same colour")
        return found

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _table(self) -> tuple[Labels, NDArray[np.bool_]]:
        # Label of every 16-bit value, and whether it is listed.
        table = np.full(MAX_VALUE + 1, IGNORED, np.uint8)
        known = np.zeros(MAX_VALUE + 1, np.bool_)
        for value, label in self.label_of.items():
            table[value], known[value] = label, True
        return table, known

    def from_values(self, values: NDArray[np.number], name: str) -> Labels:
        """Convert a map of values to labels; `name` is used in messages."""
        if values.min() < 0 or values.max() > MAX_VALUE:
            raise UnreadableImageError(
                f"{name}: values from {values.min()} to {values.max()}, labels are 0 to {MAX_VALUE}"
            )
        table, known = self._table
        labels = np.empty(values.shape, np.uint8)
        unlisted: set[int] = set()
        for rows in row_strips(values):
            part = values[rows].astype(np.int64)
            labels[rows] = table[part]
            unlisted |= {int(v) for v in np.unique(part[~known[part]])}
        if self.unlisted == "error" and unlisted:
            raise UnreadableImageError(
                f"{name}: the label {min(unlisted)} is out of range, there are {self._describe_range()}; add it to the "
                "class list, to data.ignore, or set data.unlisted=ignore"
            )
        return labels

    def from_colours(self, pixels: Labels, name: str) -> Labels:
        """Convert a map of colours, (h, w, 3), to labels; `name` is used in messages."""
        if not self.coloured:
            raise UnreadableImageError(
                f"{name}: a colour mask needs a class list with a colour for every class; give "
                "data.classes, or set data.mask_kind=index if the colours are grey values"
            )
        out = np.empty(pixels.shape[:2], np.uint8)
        unknown: int | None = None
        for rows in row_strips(pixels):
            packed = pixels[rows].astype(np.int32) @ np.array([65536, 256, 1], np.int32)
            found, where = np.unique(packed, return_inverse=True)
            labels = np.array([self.by_colour.get(int(c), -1) for c in found])
            if (labels < 0).any():
                first = int(found[labels < 0][0])
                unknown = first if unknown is None else min(unknown, first)
            mapped = np.where(labels < 0, IGNORED, labels).astype(np.uint8)
            out[rows] = mapped[where].reshape(packed.shape)
        if self.unlisted == "error" and unknown is not None:
            r, g, b = unknown >> 16, unknown >> 8 & 255, unknown & 255
            raise UnreadableImageError(
                f"{name}: the colour {r} {g} {b} is not in the class list; add it, or set data.unlisted=ignore"
            )
        return out

    def _describe_range(self) -> str:
        low, high = min(self.values), max(self.values)
        contiguous = high - low + 1 == len(self.values)
        return f"{low} to {high}" if contiguous else f"{len(self.values)} classes up to {high}"


def _class_values(entries: Sequence[ClassEntry], reduce_zero: bool) -> list[int]:
    """Return the value of each class in a mask: as listed, or counted from 0 (from 1 with `reduce_zero`)."""
    given = [entry.value for entry in entries if entry.value is not None]
    if given and len(given) < len(entries):
        raise ValueError(
            f"either every class has a value or none, got {len(given)} values for {len(entries)} classes"
        )
    return given or [i + reduce_zero for i in range(len(entries))]


def _require_distinct_values(values: Sequence[int]) -> None:
    if len(set(values)) < len(values):
        twice = repeated_value(values)
        raise ValueError(f"the class list has the value {twice} twice; each class needs its own")


def row_strips(pixels: NDArray[np.generic]) -> Iterator[slice]:
    """Yield slices of rows with a bounded number of values, which bounds the memory of intermediate results."""
    rows = max(1, STRIP_VALUES // max(1, pixels[:1].size))
    for top in range(0, len(pixels), rows):
        yield slice(top, top + rows)


def _pack_colour(colour: Colour) -> int:
    r, g, b = colour
    return r << 16 | g << 8 | b
