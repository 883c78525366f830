"""Identity of a training set, which is stored in checkpoints so that a run is not resumed with other samples.

Names are relative to the root of the dataset, which may be moved. A million files take about a second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import singledispatch
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .coco import CocoFiles
from .images import ImageFiles, ImageSubset
from .instances import InstanceSubset, PetSilhouettes
from .masks import MaskFiles
from .mixture import Mixture
from .scenes import SceneSource
from .shards import ShardFiles
from .tags import TagFiles, TagShards

CHUNK = 65536  # names that are hashed at a time


class Digest(Protocol):
    """A hash object of `hashlib`."""

    def update(self, data: bytes, /) -> None:
        """Add data."""

    def hexdigest(self) -> str:
        """Return the digest."""


@dataclass(frozen=True)
class DataIdentity:
    """Classes and samples of a training set.

    Attributes:
        classes: names in order; for masks with the values or colours that stand for them.
        samples: number of samples.
        digest: SHA-256 of the names of all samples, in order, and of their classes if they have one each; for shards
            also of the names and sizes of the files.
    """

    classes: tuple[str, ...]
    samples: int
    digest: str

    def plain(self) -> dict[str, object]:
        """Return the identity as numbers, strings and lists."""
        return {"classes": list(self.classes), "samples": self.samples, "digest": self.digest}


def identify(source: Sized, classes: Sequence[str]) -> DataIdentity:
    """Return the identity of a training set.

    Args:
        source: the samples.
        classes: names of the classes.
    """
    described = tuple(_describe_classes(source, classes))
    return DataIdentity(described, len(source), _digest(source).hexdigest())


def _describe_classes(source: Sized, classes: Sequence[str]) -> list[str]:
    """Return the names of the classes; for masks with the value, and the colour if masks contain colours."""
    while isinstance(source, ImageSubset | InstanceSubset):
        source = source.source
    if not isinstance(source, MaskFiles):
        return [str(name) for name in classes]
    known = source.classes
    colours = known.colours if known.coloured else [None] * len(known)
    return [
        f"{name} (value {value}" + ("" if colour is None else f", colour {tuple(colour)}") + ")"
        for name, value, colour in zip(known.names, known.values, colours, strict=True)
    ]


@singledispatch
def _digest(source: Sized) -> Digest:
    """Hash the names and classes of all samples."""
    raise TypeError(f"samples of a {type(source).__name__} have no persistent names")


@_digest.register
def _(source: ImageFiles) -> Digest:
    return _hash_names("files", source.paths, np.asarray(source.labels, np.int64))


@_digest.register
def _(source: ShardFiles) -> Digest:
    index = source.index
    digest = _hash_names("shards", index.tars, np.asarray(index.bytes, np.int64))
    # The size of a tar is rounded up, so the sizes of its images are included, too.
    for numbers in (index.shard, index.size, index.label):
        digest.update(np.asarray(numbers, np.int64).tobytes())
    digest.update(index.key.tobytes())
    return digest


@_digest.register(TagFiles)
@_digest.register(TagShards)
def _(source: TagFiles | TagShards) -> Digest:
    base = ShardFiles if isinstance(source, ShardFiles) else ImageFiles
    digest = _digest.dispatch(base)(source)
    for numbers in ([len(tags) for tags in source.tags], [n for tags in source.tags for n in tags]):
        digest.update(b"\0tags\0" + np.asarray(numbers, np.int64).tobytes())
    return digest


@_digest.register
def _(source: Mixture) -> Digest:
    """Hash names, samples, classes and the samples per epoch of all members."""
    members = zip(source.members, source.parts, source.numbers, strict=True)
    rows = [
        [m.name, part.quota, numbers.tolist(), _digest(m.source).hexdigest()]
        for m, part, numbers in members
    ]
    return _hash_names("mixture", [json.dumps(row) for row in rows])


@_digest.register(ImageSubset)
@_digest.register(InstanceSubset)
def _(source: ImageSubset | InstanceSubset) -> Digest:
    digest = _digest(source.source)
    digest.update(b"\0part\0" + np.asarray(source.indices, np.int64).tobytes())
    return digest


@_digest.register
def _(source: MaskFiles) -> Digest:
    images, masks = (_relative_paths([str(pair[i]) for pair in source.pairs]) for i in (0, 1))
    pairs = (f"{image}\t{mask}" for image, mask in zip(images, masks, strict=True))
    return _hash_names("masks", pairs)


@_digest.register
def _(source: CocoFiles) -> Digest:
    return _hash_names("coco", source.file_names, np.asarray(source.ids, np.int64))


@_digest.register
def _(source: PetSilhouettes) -> Digest:
    names, labels = zip(*source.rows, strict=True)
    return _hash_names("pets", names, np.asarray(labels, np.int64))


@_digest.register
def _(source: SceneSource) -> Digest:
    scenes = source.scenes
    settings = [scenes.length, scenes.seed, list(scenes.objects), list(scenes.shapes)]
    return _hash_names("scenes", [json.dumps(settings)])


def _hash_names(
    kind: str, names: Iterable[str], numbers: NDArray[np.int64] | None = None
) -> Digest:
    digest = hashlib.sha256(kind.encode())
    rest = iter(names)
    while chunk := list(islice(rest, CHUNK)):
        text = "\0".join(chunk)
        if os.sep != "/":
            text = text.replace(os.sep, "/")
        digest.update(b"\0" + text.encode("utf-8", "surrogateescape"))
    if numbers is not None:
        digest.update(b"\0numbers\0" + numbers.tobytes())
    return digest


def _relative_paths(paths: list[str]) -> list[str]:
    """Remove the common parent folder of all paths."""
    # A common prefix of the first and the last sorted path is a prefix of all.
    first, last = min(paths), max(paths)
    folder = os.path.commonpath([os.path.dirname(first), os.path.dirname(last)])
    return [path[len(folder) :].lstrip(os.sep) for path in paths]
