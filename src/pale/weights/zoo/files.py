"""Check the files of the zoo against the index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...errors import WeightsError
from . import index
from .index import INDEX, ZooEntry, list_entries


@dataclass(frozen=True)
class FileCheck:
    """A weights file and what is wrong with it, or None."""

    name: str
    file: str
    problem: str | None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(folder: Path | None = None) -> list[FileCheck]:
    """Check size and SHA-256 of every file in the index, and list weights that the index does not mention."""
    folder = folder or index.FOLDER
    entries = list_entries(folder)
    found = [FileCheck(entry.name, entry.file, _find_problem(entry, folder)) for entry in entries]
    listed = {entry.file for entry in entries}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in listed:
            found.append(FileCheck(path.stem, path.name, f"is not in {INDEX}"))
    return found


def require_intact(path: Path) -> None:
    """Raise `WeightsError` if a file of the zoo differs from the index; files elsewhere have no entry."""
    folder = index.FOLDER
    if path.resolve().parent != folder.resolve():
        return
    entry = next((each for each in list_entries(folder) if each.file == path.name), None)
    problem = f"is not in {INDEX}" if entry is None else _find_problem(entry, folder)
    if problem is not None:
        raise WeightsError(f"{path} {problem}; install the package again")


def _find_problem(entry: ZooEntry, folder: Path) -> str | None:
    path = folder / entry.file
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != entry.bytes:
        return f"has {path.stat().st_size} bytes, expected {entry.bytes}"
    if (found := file_sha256(path)) != entry.sha256:
        return f"has sha256 {found}, expected {entry.sha256}"
    if not (folder / entry.card).is_file():
        return f"its card {entry.card} is missing"
    return None
