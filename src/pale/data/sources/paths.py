"""Find image files, and name the files of their results."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from ...errors import DataError, SettingsError
from ..reading import SUFFIXES, UNSUPPORTED_SUFFIXES, display_name

MAX_NAME = 180  # bytes of the name of an output file or folder


def require_root(root: Path | None) -> Path:
    """Return the root of a dataset; raise an error if the setting is missing."""
    if root is None:
        raise SettingsError("data.root is not set; give the folder of the dataset: --data.root DIR")
    return root


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or was added to an archive by macOS: `._photo.jpg`, `__MACOSX`."""
    last = name.rpartition("/")[2]
    return last.startswith(".") or last == "__MACOSX"


def is_image_file(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Return whether a path is neither hidden nor a folder, and has the suffix of an image."""
    return not is_hidden(path.name) and path.suffix.lower() in suffixes and not path.is_dir()


def missing_folder(path: Path) -> str:
    """Return why a path is not a folder: it is a file, or the first part of it that does not exist."""
    for each in (*reversed(path.parents), path):
        if each.is_file():
            return f"{each} is a file, not a folder"
        if not each.exists():
            return f"there is no folder {each}"
    return f"{path} is not a folder"


def folder_names(root: Path) -> list[str]:
    """Return the sorted names of the folders in a folder; a link that leads to itself is none."""
    return sorted(name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name)))


def walk_files(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the sorted paths, relative to `root`, of all files with these suffixes; hidden files are skipped."""
    for folder, _, names in sorted(os.walk(root)):
        inside = os.path.relpath(folder, root)
        for name in sorted(names):
            if name.lower().endswith(suffixes) and not is_hidden(name):
                yield os.path.normpath(os.path.join(inside, name))


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of `walk_files`, sorted as paths."""
    return sorted(folder / path for path in walk_files(folder, suffixes))


def files_by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of `walk_files` by their paths below the folder, without suffix."""
    found: dict[str, Path] = {}
    for path in walk_files(folder, suffixes):
        stem = os.path.splitext(path)[0].replace(os.sep, "/")
        if stem in found:
            raise DataError(
                f"{folder} contains {display_name(found[stem].relative_to(folder))} and {display_name(path)}; names "
                "must differ in more than the suffix"
            )
        found[stem] = folder / path
    return found


def find_images(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return files, and all images in folders except hidden ones, with a unique name for the results of each.

    Images in formats that cannot be read are among them, so that they are reported.
    """
    found: list[tuple[Path, Path]] = []
    for path in paths:
        if path.is_dir():
            known = SUFFIXES + UNSUPPORTED_SUFFIXES
            inside = [f for f in sorted(path.rglob("*")) if is_image_file(f, known)]
            found += [(f, f.relative_to(path)) for f in inside]
        elif path.exists():  # reading it reports what is not a regular file
            found.append((path, Path(path.name)))
        else:
            raise ValueError(f"there is no image or folder {display_name(path)}")
    if not found:
        raise ValueError(f"there are no images in {display_name(paths[0])} ({', '.join(SUFFIXES)})")
    return list(zip([f for f, _ in found], output_names([n for _, n in found]), strict=True))


def output_names(names: Sequence[Path]) -> list[str]:
    """Return a unique name for the results of each file, in linear time.

    The name is that of the file without its suffix; with the suffix if two would be equal (`a.jpg`, `a.png`), and
    with a number if these are equal, too.
    """
    stems = [os.path.splitext(name)[0] for name in names]
    counts = Counter(stems)
    taken = {stem for stem, count in counts.items() if count == 1}
    last: dict[str, int] = {}
    found = []
    for name, stem in zip(names, stems, strict=True):
        if counts[stem] > 1:
            stem = base = str(name)
            number = last.get(base, 1)
            while stem in taken:
                number += 1
                stem = f"{base}-{number}"
            last[base] = number
            taken.add(stem)
        found.append(stem)
    return found


def output_stem(name: str) -> str:
    """Return the name of an image's files, below the output folder for every name.

    The suffix stays (`a.jpg_mask.png`): one of several jobs does not know the names of the others. A name that leads
    elsewhere, or is too long for a file system, gets a hash instead.
    """
    path = PurePosixPath(name.replace("\\", "/"))
    parts = path.parts
    unsafe = path.is_absolute() or ".." in parts or ":" in (parts or ("",))[0] or "\0" in name
    if unsafe or not parts or any(len(part.encode()) > MAX_NAME for part in parts):
        return f"other/{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
    return str(path)
