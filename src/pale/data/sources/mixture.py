"""Several datasets as one source, with one joint list of classes.

The classes of single-label sources come first, in the order in which they first occur; sources with equal class names
share them. The classes of multi-label sources (tags) follow and are merged in the same way, but never with those of
single-label sources: the latter are outputs of a softmax, tags are outputs of a sigmoid. A tag with the name of a
class gets the suffix " (tag)". Class names that are numbers have another meaning in each source, so they get the
name of the source as a prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...errors import DataError, SettingsError
from ..stream import Part
from .holding import hold_out
from .images import ImageSource, ImageSubset
from .tags import MAX_CLASSES, TagFiles, TagShards

TAG = " (tag)"  # suffix of a tag with the name of a class


class TagSubset(ImageSubset):
    """Some images of a tagged source.

    Attributes:
        tags: class numbers of each image.
    """

    def __init__(self, source: TagFiles | TagShards, indices: Sequence[int]) -> None:
        super().__init__(source, indices)
        self.tags = [source.tags[i] for i in indices]


Tagged = TagFiles | TagShards | TagSubset


@dataclass(frozen=True)
class Member:
    """One source of a mixture.

    Attributes:
        name: name of the source.
        source: its images; tagged images are multi-label.
        weight: sampling frequency of an image relative to the images of other members.
    """

    name: str
    source: ImageSource | Tagged
    weight: float = 1.0

    @property
    def multi(self) -> bool:
        """Whether an image can have any number of classes."""
        return isinstance(self.source, Tagged)

    def label_rows(self) -> list[tuple[int, ...]]:
        """Return the classes of each image, as numbers of this source."""
        if isinstance(self.source, Tagged):
            return list(self.source.tags)
        return [(label,) for label in self.source.labels]

    def class_names(self) -> list[str]:
        """Return the names of the classes in the joint list, before tags get their suffix."""
        names = list(self.source.classes)
        if any(name.endswith(TAG) for name in names):
            raise DataError(f"{self.name}: a class name must not end with {TAG!r}; rename it")
        if all(name.isdecimal() for name in names):
            return [f"{self.name} {name}" for name in names]
        return names


def hold_out_tags(
    source: TagFiles | TagShards, share: float, seed: int
) -> tuple[TagSubset, TagSubset]:
    """Split off `share` of the images, drawn from `seed`; return the rest and the split-off part."""
    kept, held = hold_out(len(source), source.name, share, seed)
    return TagSubset(source, kept), TagSubset(source, held)


def joint_classes(members: Sequence[Member]) -> tuple[list[str], int]:
    """Return the joint classes, and the number of tags at their end."""
    single = dict.fromkeys(n for m in members if not m.multi for n in m.class_names())
    tags = dict.fromkeys(n for m in members if m.multi for n in m.class_names())
    classes = [*single, *(name + TAG if name in single else name for name in tags)]
    if len(classes) > MAX_CLASSES:
        raise DataError(
            f"the sources have {len(classes)} classes together, at most {MAX_CLASSES}; leave out a source"
        )
    return classes, len(tags)


def epoch_quotas(members: Sequence[Member], epoch: int | None) -> tuple[Part, ...]:
    """Return how many samples an epoch takes from each member, in proportion to weight times images.

    Args:
        members: the sources.
        epoch: samples of an epoch; None: an image is drawn as many times as its weight, once with weight 1.
    """
    wanted = np.array([m.weight * len(m.source) for m in members])
    total = round(float(wanted.sum())) if epoch is None else epoch
    shares = wanted / wanted.sum() * total
    quotas = np.floor(shares).astype(np.int64)
    # The largest remainders are rounded up, so that the sum is exact.
    rest = np.argsort(-(shares - quotas), kind="stable")[: total - int(quotas.sum())]
    quotas[rest] += 1
    for member, quota in zip(members, quotas, strict=True):
        if quota == 0:
            raise SettingsError(
                f"an epoch of {total} samples has none of {member.name}, weight {member.weight:g}; give a larger "
                "weight or a larger data.epoch"
            )
    return tuple(Part(len(m.source), int(q)) for m, q in zip(members, quotas, strict=True))


class Mixture:
    """The images of several sources, one source after the other.

    Args:
        members: the sources.
        classes: the joint classes of weights, for evaluation; None: those of the members.
        epoch: samples of an epoch (see `epoch_quotas`).

    Attributes:
        classes: the joint classes.
        tags: number of tags at the end of `classes`.
        numbers: for each member the numbers of its classes in `classes`.
        labels: the index of each image; `class_table` has its classes.
        parts: number of samples that an epoch takes from each member.
    """

    def __init__(
        self,
        members: Sequence[Member],
        classes: Sequence[str] | None = None,
        epoch: int | None = None,
    ) -> None:
        self.members = tuple(members)
        self.classes, self.tags = joint_classes(members)
        if classes is not None:
            self.classes = list(classes)
        number_of = {name: i for i, name in enumerate(self.classes)}
        self.numbers = [_joint_numbers(m, number_of) for m in members]
        self.starts = [0, *accumulate(len(m.source) for m in members)]
        self.labels: Sequence[int] = range(self.starts[-1])
        self.parts = epoch_quotas(members, epoch)

    def __len__(self) -> int:
        return self.starts[-1]

    def member_of(self, index: int) -> int:
        """Return the number of the member that has an image."""
        return bisect_right(self.starts, index) - 1

    def image(self, index: int) -> Image.Image:
        """Return an image as RGB."""
        number = self.member_of(index)
        return self.members[number].source.image(index - self.starts[number])

    def content(self, index: int) -> bytes:
        """Return the encoded file."""
        number = self.member_of(index)
        return self.members[number].source.content(index - self.starts[number])

    def name(self, index: int) -> str:
        """Return the origin of an image."""
        number = self.member_of(index)
        return self.members[number].source.name(index - self.starts[number])

    def class_table(self) -> NDArray[np.int32]:
        """Return the joint classes of each image, (images, n), with rows padded with the number of classes."""
        rows = [member.label_rows() for member in self.members]
        width = max(1, max(len(row) for each in rows for row in each))
        table = np.full((len(self), width), len(self.classes), np.int32)
        for start, each, numbers in zip(self.starts, rows, self.numbers, strict=False):
            counts = np.array([len(row) for row in each])
            flat = np.array([label for row in each for label in row], np.int64)
            at = np.repeat(np.arange(len(each)), counts)
            column = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
            table[start + at, column] = numbers[flat]
        return table

    def member_table(self) -> NDArray[np.int64]:
        """Return the number of the member of each image, (images,)."""
        counts = [len(member.source) for member in self.members]
        return np.repeat(np.arange(len(counts)), counts)


def _joint_numbers(member: Member, number_of: dict[str, int]) -> NDArray[np.int64]:
    """Return the number of each class of a member in the joint list."""
    names = member.class_names()
    if member.multi:
        names = [name + TAG if name + TAG in number_of else name for name in names]
    if unknown := [name for name in names if name not in number_of]:
        raise DataError(
            f"{member.name} has the class {unknown[0]!r}, which the weights do not have; leave the source out of "
            "data.mix, or evaluate weights that were trained with it"
        )
    return np.array([number_of[name] for name in names], np.int64)
