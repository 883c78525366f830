"""Settings of labelled images: location, format and size of the input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ...core.settings import MAX_SIZE, Settings
from ...data.loader import usable_cores
from ...data.remote import address_of
from ...data.sources.holding import HoldOutBy
from ...data.sources.images import (
    ImageSource,
    ImageSubset,
    balance_classes,
    hold_out,
    read_folder,
    read_list,
    read_pets,
    require_supported,
    without_unreadable,
)
from ...data.sources.remote_shards import RemoteShardFiles
from ...data.sources.scenes import SceneImages, Scenes
from ...data.sources.shards import ShardFiles
from ...data.sources.words import WORD_LISTS, read_words
from ...errors import SettingsError
from ..base import VAL_SEED
from .mixture_data import MAX_SOURCES, MixSource

MIN_SIZE = 16


class Data(Settings):
    """Settings of the dataset."""

    kind: Literal["folder", "list", "shards", "pets", "scenes"] = "folder"
    root: Path | None = None  # folder of the dataset; scenes need none
    # folder: root/train/<class>/<image>; list: the list file under root; shards: root/train-*.tar; pets: the breeds of
    # Oxford-IIIT Pet, root/annotations/train.txt
    train: str = "train"
    val: str = "val"
    hold_out: float = Field(default=0.0, ge=0, lt=1)  # validate on this share of the training set
    # order: drawn from the sorted list of files; name: by file name and seed, with an image of each class on both sides
    hold_out_by: HoldOutBy = "order"
    balanced: bool = (
        False  # repeat images of rare classes, so that all classes are drawn equally often
    )
    check: bool = False  # decode every image before training
    unreadable: Literal["error", "skip"] = "error"  # skip: check, and leave unreadable images out
    # One class for each image, or any number of tags (multi), which folders have in labels.json or labels.csv and
    # shards in KEY.json.
    labels: Literal["single", "multi"] = "single"
    # Several datasets with one joint list of classes; replaces kind, train, val, hold_out and labels.
    mix: tuple[MixSource, ...] | None = Field(default=None, min_length=1, max_length=MAX_SOURCES)
    # mix: samples of an epoch; null: each image as many times as the weight of its source
    epoch: int | None = Field(default=None, ge=1)
    size: int = Field(default=224, ge=MIN_SIZE, le=MAX_SIZE)
    # Training image size from a share of the run on, [[0, 96], [0.5, 128]]; evaluation uses `size`.
    sizes: tuple[tuple[float, int], ...] = ()
    crop: float = Field(
        default=0.875, ge=0.1, le=1
    )  # evaluation: short side size / crop, centre size
    samples: int = Field(default=4096, ge=1)  # scenes: number generated for training
    val_samples: int = Field(default=1024, ge=1)
    workers: int = Field(default=4, ge=0)  # processes that read images, for each training process
    # Work done by the training device: decode JPEG files and augment them ("decoding"), or keep all images decoded in
    # its memory and augment them ("pictures", a kept name). auto: decoding on a GPU that supports it, else nothing.
    on_device: Literal["auto", "nothing", "decoding", "pictures"] = "auto"  # kept name
    # Names of classes that are WordNet ids, for the report: lines "n01443537 goldfish, Carassius auratus". By default
    # words.txt, classes.txt or LOC_synset_mapping.txt in root, if it exists.
    words: Path | None = None

    @field_validator("sizes")
    @classmethod
    def _ordered_sizes(cls, value: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
        rising = all(a < b for (a, _), (b, _) in pairwise(value))
        if value and not (value[0][0] == 0 and rising and value[-1][0] < 1):
            raise ValueError(
                f"pairs of a share of the run and a size, shares rising from 0 to below 1, got {list(value)}"
            )
        if any(not MIN_SIZE <= size <= MAX_SIZE for _, size in value):
            raise ValueError(f"sizes from {MIN_SIZE} to {MAX_SIZE}, got {[s for _, s in value]}")
        return value

    @model_validator(mode="after")
    def _distinct_sources(self) -> Data:
        names = [source.name for source in self.mix or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"the sources in mix need different names, got {', '.join(names)}")
        return self

    @property
    def is_mixture(self) -> bool:
        """Whether there are several sources, or tags."""
        return self.mix is not None or self.labels == "multi"

    def phases(self, steps: int) -> list[tuple[int, int]]:
        """Return the first step and the training size of each phase of a run."""
        given = [(round(share * steps), size) for share, size in self.sizes or ((0, self.size),)]
        after = [first for first, _ in given[1:]] + [steps]
        # A short run skips phases without a step.
        return [p for p, end in zip(given, after, strict=True) if p[0] < end] or given[:1]

    def train_source(self, seed: int) -> ImageSource:
        """Return the training images."""
        if self.kind == "scenes":
            return SceneImages(Scenes(self.samples, self.size, seed))
        train = self._source(self.train, None)
        if self.hold_out:
            train = hold_out(train, self.hold_out, seed, self.hold_out_by)[0]
        train = self._readable(train, training=True)
        return balance_classes(train) if self.balanced else train

    def val_source(self, seed: int, classes: Sequence[str] | None) -> ImageSource:
        """Return the validation images, labelled with the numbers of `classes`; None: of their own classes."""
        if self.kind == "scenes":
            return SceneImages(Scenes(self.val_samples, self.size, VAL_SEED))
        if self.hold_out:
            source = self._source(self.train, classes)
            return self._readable(hold_out(source, self.hold_out, seed, self.hold_out_by)[1])
        return self._readable(self._source(self.val, classes))

    def _readable(self, source: ImageSource, training: bool = False) -> ImageSource:
        skip = self.unreadable == "skip"
        if not (self.check or skip):
            return source
        return without_unreadable(source, usable_cores(), skip, training)

    def read_words(self) -> dict[str, str]:
        """Return the names of WordNet ids; empty if no list is given and none is found."""
        if self.words is not None:
            return read_words(self.words)
        if self.root is None or address_of(self.root) is not None:
            return {}
        found = (self.root / name for name in WORD_LISTS)
        return next((read_words(path) for path in found if path.is_file()), {})

    def _source(self, name: str, classes: Sequence[str] | None) -> ImageSource:
        if self.root is None:
            raise SettingsError(
                f"data.root is not set; give the folder that holds {self.train} and {self.val}: "
                "--data.root DIR"
            )
        if self.kind == "folder":
            found = read_folder(self.root / name, classes)
            notes = require_supported(found, self.unreadable == "skip")
            return ImageSubset(found, range(len(found)), notes) if notes else found
        if self.kind == "shards":
            if (address := address_of(self.root)) is not None:
                return RemoteShardFiles(address, name, classes)
            return ShardFiles(self.root, name, classes)
        if self.kind == "pets":
            return read_pets(self.root, name, classes)
        return read_list(self.root / name, self.root, classes)
