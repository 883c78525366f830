"""Weights that come with the package: this folder holds the files, a card for each, and index.json.

Reading the index needs nothing but the standard library, so that a name can be looked up anywhere. Every
function takes another folder with such an index, as benchmarks/demo_weights.py writes it; None is this one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
INDEX = "index.json"
FORMAT = 1
# What a task is judged by: figures and their names in tables.
HEADLINE: dict[str, dict[str, str]] = {
    "classification": {"top1": "top-1"},
    "segmentation": {"miou": "mIoU"},
    "detection": {"box_ap": "box AP", "mask_ap": "mask AP"},
}


@dataclass(frozen=True)
class Entry:
    """One file of weights.

    Attributes:
        name: by which it is asked for.
        task: classification, segmentation or detection.
        model: of the backbone.
        file: in the folder.
        card: in the folder; what it was trained on, how, and how good it is.
        bytes: of the file.
        sha256: of the file.
        params: how many the model has.
        classes: how many it tells apart.
        figures: of this very file, unpacked, per cent; with "images", how many it was measured on.
        data: what it was trained and measured on, in words.
        recipe: name of the recipe.
        command: that trains it again.
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
        """The figures that count, in words."""
        names = HEADLINE.get(self.task, {})
        told = [
            f"{word} {self.figures[key]:.1f}" for key, word in names.items() if key in self.figures
        ]
        return ", ".join(told) or "-"


@dataclass(frozen=True)
class Checked:
    """One file, and what is wrong with it, or None."""

    name: str
    file: str
    problem: str | None


def entries(folder: Path | None = None) -> list[Entry]:
    """What the folder's index lists, by name; nothing where there is no index."""
    path = (folder or FOLDER) / INDEX
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        known = {each.name for each in fields(Entry)}
        found = [
            Entry(**{k: v for k, v in row.items() if k in known}) for row in content["weights"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no index of weights ({error}); install the package again"
        ) from None
    return sorted(found, key=lambda entry: entry.name)


def get(name: str, folder: Path | None = None) -> Entry:
    """The entry of a name."""
    folder = folder or FOLDER
    known = entries(folder)
    for entry in known:
        if entry.name == name:
            return entry
    there = ", ".join(entry.name for entry in known)
    raise ValueError(
        f"there are no weights {name!r} in {folder}; there are {there}"
        if there
        else f"there are no weights {name!r}: {folder} holds none yet (docs/weights.md says how to make them)"
    )


def find(name: str, folder: Path | None = None) -> Path | None:
    """The file that goes by a name, or None where none does."""
    if not name or os.path.basename(name) != name:
        return None
    for entry in entries(folder):
        if entry.name == name:
            path = (folder or FOLDER) / entry.file
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing, though the index lists it; install the package again"
                )
            return path
    return None


def default(task: str, folder: Path | None = None) -> str | None:
    """The name of the weights of a task, the first by name; None where there are none."""
    return next((entry.name for entry in entries(folder) if entry.task == task), None)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path | None = None) -> list[Checked]:
    """Every file of the index against its size and sum, and weights that no index lists."""
    folder = folder or FOLDER
    listed = entries(folder)
    found = [Checked(entry.name, entry.file, _problem(entry, folder)) for entry in listed]
    files = {entry.file for entry in listed}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in files:
            found.append(Checked(path.stem, path.name, f"is not in {INDEX}"))
    return found


def _problem(entry: Entry, folder: Path) -> str | None:
    path = folder / entry.file
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != entry.bytes:
        return f"has {path.stat().st_size} bytes, expected {entry.bytes}"
    if (found := digest(path)) != entry.sha256:
        return f"has sha256 {found}, expected {entry.sha256}"
    if not (folder / entry.card).is_file():
        return f"its card {entry.card} is missing"
    return None


def add(entry: Entry, folder: Path) -> None:
    """Put an entry into the folder's index, in place of one of the same name."""
    kept = [old for old in entries(folder) if old.name != entry.name]
    write([*kept, entry], folder)


def write(listed: Sequence[Entry], folder: Path) -> None:
    """Write the index, whole or not at all."""
    rows: list[dict[str, Any]] = [asdict(e) for e in sorted(listed, key=lambda e: e.name)]
    temporary = folder / f".{INDEX}.{os.getpid()}"
    temporary.write_text(json.dumps({"format": FORMAT, "weights": rows}, indent=1) + "\n")
    temporary.replace(folder / INDEX)
