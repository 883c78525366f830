"""Read and write index.json, which lists the weights of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ...errors import WeightsError

FOLDER = Path(__file__).parent
INDEX = "index.json"
FORMAT = 1
# Metrics that tables show, and their names there, as `Task.headline` has them; tasks are not imported here.
HEADLINE = {"top1": "top-1", "miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}


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
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        known = {each.name for each in fields(ZooEntry)}
        found = [
            ZooEntry(**{k: v for k, v in row.items() if k in known}) for row in content["weights"]
        ]
        for entry in found:
            _check_entry(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{path} is not a valid index of weights ({error}); install the package again"
        ) from None
    return sorted(found, key=lambda entry: entry.name)


def _check_entry(entry: ZooEntry) -> None:
    """Raise `ValueError` unless the values have the right types and name files inside the folder."""
    words = (entry.name, entry.task, entry.model, entry.file, entry.card, entry.sha256)
    if not all(isinstance(word, str) for word in words) or not isinstance(entry.figures, dict):
        raise ValueError("an entry has a value of a wrong type")
    for name in (entry.file, entry.card):
        if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise ValueError(f"{name[:80]!r} is not a file of this folder")


def require_index(folder: Path) -> Path:
    """Return the folder; raise `WeightsError` if it holds no index."""
    if not (folder / INDEX).is_file():
        raise WeightsError(
            f"{folder} holds no {INDEX}; benchmarks/demo_weights.py writes such folders"
        )
    return folder


def get_entry(name: str, folder: Path | None = None) -> ZooEntry:
    """Return the entry of a name; raise `WeightsError` if there is none."""
    folder = folder or FOLDER
    known = list_entries(folder)
    for entry in known:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in known)
    raise WeightsError(
        f"there are no weights {name!r} in {folder}; there are {names}"
        if names
        else f"there are no weights {name!r}: {folder} holds none; docs/weights.md explains how to make them"
    )


def find_file(name: str, folder: Path | None = None) -> Path | None:
    """Return the weights file of a name, or None if the index has no such name."""
    if not name or os.path.basename(name) != name:
        return None
    for entry in list_entries(folder):
        if entry.name == name:
            path = (folder or FOLDER) / entry.file
            if not path.is_file():
                raise WeightsError(
                    f"{path} is missing, although the index lists it; install the package again"
                )
            return path
    return None


def default_name(task: str, folder: Path | None = None) -> str | None:
    """Return the first name, in alphabetical order, of weights for a task, or None."""
    return next((entry.name for entry in list_entries(folder) if entry.task == task), None)


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
