"""Settings of several datasets in one run, and functions that open their sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ...core.settings import Settings, vary
from ...data.remote import address_of
from ...data.sources.mixture import Member, Mixture, Tagged, hold_out_tags
from ...data.sources.tags import TagFiles, TagShards
from ...errors import SettingsError

if TYPE_CHECKING:
    from .data import Data

MAX_SOURCES = 256


class MixSource(Settings):
    """One dataset of several that a run trains on."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")  # in logs and figures
    root: Path | None = None  # relative to data.root; null: data.root/<name>
    kind: Literal["folder", "list", "shards", "pets"] = "shards"
    labels: Literal["single", "multi"] = "single"  # one class for each image, or any number of tags
    # Sampling frequency of an image relative to images of the other sources; without data.epoch it is also the number
    # of times that an epoch contains each image.
    weight: float = Field(default=1.0, gt=0, le=1e6)
    train: str = "train"
    val: str | None = "val"  # null: the source is not evaluated
    hold_out: float = Field(default=0.0, ge=0, lt=1)  # validate on this share of the training set

    @model_validator(mode="after")
    def _multi_kinds(self) -> MixSource:
        if self.labels == "multi" and self.kind not in ("folder", "shards"):
            raise ValueError(
                f"{self.name}: labels=multi needs kind folder (with labels.json or labels.csv) or shards, "
                f"got {self.kind}"
            )
        return self

    @property
    def evaluated(self) -> bool:
        """Whether the source has validation images."""
        return self.val is not None or self.hold_out > 0


def train_mixture(data: Data, seed: int) -> Mixture:
    """Return the training images of all sources."""
    members = []
    for source in _sources(data):
        one = _source_settings(data, source)
        found = _tagged_train(one, seed) if source.labels == "multi" else one.train_source(seed)
        members.append(Member(source.name, found, source.weight))
    return Mixture(members, epoch=data.epoch)


def val_mixture(
    data: Data, seed: int, train: Mixture | None, classes: Sequence[str] | None
) -> Mixture:
    """Return the validation images of all sources that have some.

    Args:
        data: settings of the run.
        seed: seed of held-out images.
        train: the training images; None: each source has its own classes.
        classes: the joint classes.
    """
    known = {m.name: m.source.classes for m in train.members} if train is not None else {}
    members = []
    for source in _sources(data):
        if source.evaluated:
            one, names = _source_settings(data, source), known.get(source.name)
            multi = source.labels == "multi"
            found = _tagged_val(one, seed, names) if multi else one.val_source(seed, names)
            members.append(Member(source.name, found))
    if not members:
        raise SettingsError(
            "no source in data.mix is evaluated; give val or hold_out to at least one of them"
        )
    return Mixture(members, classes)


def _sources(data: Data) -> tuple[MixSource, ...]:
    """Return the sources; a dataset with tags is the only one."""
    if data.mix is not None:
        return data.mix
    if data.kind == "scenes":
        raise SettingsError(
            "data.labels=multi needs images with tags, got data.kind=scenes; set data.kind"
        )
    shared = {name: getattr(data, name) for name in ("kind", "train", "val", "hold_out", "labels")}
    return (MixSource(name="data", root=Path(), **shared),)


def _source_settings(data: Data, source: MixSource) -> Data:
    """Return the settings with this source as the only dataset."""
    own = Path(source.name) if source.root is None else source.root
    if data.root is None and not own.is_absolute() and address_of(own) is None:
        raise SettingsError(
            f"data.mix: the folder {own} of {source.name} is relative to data.root, which is not set; give "
            "--data.root DIR"
        )
    joined = own if data.root is None or address_of(own) is not None else data.root / own
    changes = {
        "mix": None,
        "epoch": None,
        "labels": "single",
        "kind": source.kind,
        "root": joined,
        "train": source.train,
        "val": source.val or "val",
        "hold_out": source.hold_out,
    }
    return vary(data, **changes)


def _tagged_train(data: Data, seed: int) -> Tagged:
    found = _read_tagged(data, data.train, None)
    return hold_out_tags(found, data.hold_out, seed)[0] if data.hold_out else found


def _tagged_val(data: Data, seed: int, classes: Sequence[str] | None) -> Tagged:
    if data.hold_out:
        return hold_out_tags(_read_tagged(data, data.train, classes), data.hold_out, seed)[1]
    return _read_tagged(data, data.val, classes)


def _read_tagged(data: Data, split: str, classes: Sequence[str] | None) -> TagFiles | TagShards:
    assert data.root is not None
    if address_of(data.root) is not None:
        raise SettingsError(
            f"shards with tags are read from folders, got {data.root}; copy them to a folder"
        )
    if data.kind == "folder":
        return TagFiles(data.root / split, classes)
    return TagShards(data.root, split, classes)
