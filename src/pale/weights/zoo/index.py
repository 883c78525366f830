"""Read and write index.json, which lists the weights of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ...core.plain_json import Json, parse_json
from ...errors import WeightsError

FOLDER = Path(__file__).parent
INDEX = "index.json"
FORMAT = 1
TIMM_CONFIG = ("input_size", "crop_pct", "interpolation", "mean", "std", "label_names")
TAG = re.compile(r"[a-z0-9_]{1,40}")
UNTRAINED = "untrained"  # tag of the models without weights
# Metrics that tables show, and their names there, as `Task.headline` has them; tasks are not imported here.
HEADLINE = {"top1": "top-1", "miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}
HEADLINE |= {"score": "mean of top-1 and mAP"}  # over the sources of a mixture


@dataclass(frozen=True)
class ZooEntry:
    """A weights file of the index.

    Attributes:
        name: by which users request it.
        task: kind of the task, such as "classification".
        model: name of the backbone.
        file: file name in the folder.
        card: file name in the folder; describes training data, recipe and accuracy.
        bytes: size of the file.
        sha256: SHA-256 of the file.
        params: number of parameters of the model.
        classes: number of classes.
        figures: metrics of this file, unpacked, in per cent; "images" is the number of evaluated images.
        data: description of the training and evaluation data.
        recipe: name of the recipe.
        command: command that trains these weights.
        license: licence of the weights, an SPDX identifier in lower case.
        timm: of a classifier that timm loads by a tagged name: "tag", `timm_config` and, if the weights are those of
            the name without a tag, "default"; else empty.
    """

    name: str
    task: str
    model: str
    file: str
    card: str
    bytes: int
    sha256: str
    params: int
    classes: int
    figures: dict[str, float] = field(default_factory=dict)
    data: str = ""
    recipe: str = ""
    command: str = ""
    license: str = ""
    timm: Json = field(default_factory=dict)

    @property
    def timm_name(self) -> str:
        """Return the name for `timm.create_model`, such as "pale_nano.pets"; empty if there is none."""
        return f"{self.model}.{self.timm['tag']}" if self.timm else ""

    @property
    def timm_config(self) -> Json:
        """Return the preprocessing and the class names, as timm's `pretrained_cfg` calls them."""
        return {name: self.timm[name] for name in TIMM_CONFIG} if self.timm else {}

    @property
    def headline(self) -> str:
        """Return the main metrics as text; the first one of a task that `HEADLINE` does not know."""
        metrics = [
            f"{word} {self.figures[key]:.1f}"
            for key, word in HEADLINE.items()
            if key in self.figures
        ]
        others = [f"{key} {value:.1f}" for key, value in self.figures.items() if key != "images"]
        return ", ".join(metrics or others[:1]) or "-"


def list_entries(folder: Path | None = None) -> list[ZooEntry]:
    """Return the entries of the folder's index, sorted by name; an empty list if there is no index."""
    path = (folder or FOLDER) / INDEX
    if not path.is_file():
        return []
    try:
        content = parse_json(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        known = {each.name for each in fields(ZooEntry)}
        found = [
            ZooEntry(**{k: v for k, v in row.items() if k in known}) for row in content["weights"]
        ]
        for entry in found:
            _check_entry(entry)
        _check_names(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path} is not a valid index of weights ({error}); install the package again"
        ) from None
    return sorted(found, key=lambda entry: entry.name)


def _check_entry(entry: ZooEntry) -> None:
    """Raise `ValueError` unless the values have the right types and name files inside the folder."""
    words = (
        entry.name,
        entry.task,
        entry.model,
        entry.file,
        entry.card,
        entry.sha256,
        entry.license,
    )
    if not all(isinstance(word, str) for word in words) or not isinstance(entry.figures, dict):
        raise ValueError("an entry has a value of a wrong type")
    for name in (entry.file, entry.card):
        if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise ValueError(f"{name[:80]!r} is not a file of this folder")
    if entry.timm:
        _check_timm(entry)


def _check_timm(entry: ZooEntry) -> None:
    """Raise `ValueError` unless the part for timm is complete and has valid values."""
    given = entry.timm
    if given.keys() - {"default"} != {"tag", *TIMM_CONFIG}:
        raise ValueError(f"timm of {entry.name[:80]!r} must have tag, {', '.join(TIMM_CONFIG)}")
    size, labels = given["input_size"], given["label_names"]
    numbers = (*given["mean"], *given["std"], given["crop_pct"])
    valid = {
        "tag": bool(TAG.fullmatch(given["tag"])) and given["tag"] != UNTRAINED,
        "default": type(given.get("default", False)) is bool,
        "input_size": len(size) == 3 and all(type(n) is int and 0 < n <= 4096 for n in size),
        "crop_pct": 0 < given["crop_pct"] <= 1,
        "interpolation": given["interpolation"] in ("bicubic", "bilinear"),
        "mean and std": len(numbers) == 7 and all(type(n) in (int, float) for n in numbers),
        "label_names": len(labels) == entry.classes and all(isinstance(n, str) for n in labels),
    }
    if wrong := [name for name, right in valid.items() if not right]:
        raise ValueError(f"timm of {entry.name[:80]!r} has an invalid {', '.join(wrong)}")


def _check_names(entries: Sequence[ZooEntry]) -> None:
    """Raise `ValueError` if two entries have one tagged name, or are the default of one model."""
    tagged = [entry for entry in entries if entry.timm]
    names = [entry.timm_name for entry in tagged]
    names += [entry.model for entry in tagged if entry.timm.get("default")]
    if several := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several entries are {several[0][:80]!r} in timm")


def require_index(folder: Path) -> Path:
    """Return the folder; raise `WeightsError` if it holds no index."""
    if not (folder / INDEX).is_file():
        raise WeightsError(
            f"{folder} holds no {INDEX}; benchmarks/demo_weights.py writes such folders"
        )
    return folder


def get_entry(name: str, folder: Path | None = None) -> ZooEntry:
    """Return the entry of a name, its own or timm's; raise `WeightsError` if there is none."""
    folder = folder or FOLDER
    known = list_entries(folder)
    for entry in known:
        if name and name in (entry.name, entry.timm_name):
            return entry
    names = ", ".join(entry.name for entry in known)
    raise WeightsError(
        f"there are no weights {name!r} in {folder}; there are {names}"
        if names
        else f"there are no weights {name!r}: {folder} holds none; docs/weights.md explains how to make them"
    )


def find_file(name: str, folder: Path | None = None) -> Path | None:
    """Return the weights file of a name, its own or timm's, or None if the index has no such name."""
    if not name or os.path.basename(name) != name:
        return None
    for entry in list_entries(folder):
        if name in (entry.name, entry.timm_name):
            path = (folder or FOLDER) / entry.file
            if not path.is_file():
                raise WeightsError(
                    f"{path} is missing, although the index lists it; install the package again"
                )
            return path
    return None


def default_name(task: str) -> str | None:
    """Return the first name, in alphabetical order, of weights for a task, or None."""
    return next((entry.name for entry in list_entries() if entry.task == task), None)


def best_start(task: str, model: str, folder: Path | None = None) -> str | None:
    """Return the name of the weights with the most classes for a task and a model, or None."""
    known = [entry for entry in list_entries(folder) if (entry.task, entry.model) == (task, model)]
    return max(known, key=lambda entry: entry.classes).name if known else None


def add_entry(entry: ZooEntry, folder: Path) -> None:
    """Add an entry to the folder's index; replace an entry of the same name."""
    kept = [old for old in list_entries(folder) if old.name != entry.name]
    write_index([*kept, entry], folder)


def write_index(entries: Sequence[ZooEntry], folder: Path) -> None:
    """Write the index atomically."""
    rows = [asdict(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
    temporary = folder / f".{INDEX}.{os.getpid()}"
    temporary.write_text(json.dumps({"format": FORMAT, "weights": rows}, indent=1) + "\n")
    temporary.replace(folder / INDEX)
