"""Output of one shard: folders `part-*` that are written under another name, synced, verified, and then renamed.

```
OUT/bulk.json                                  number of shards, model and options: the same for all jobs
OUT/parts/0003-of-0016/part-000000/            predictions.jsonl, predictions.csv, failures.jsonl, part.json
OUT/parts/0003-of-0016/done.json               written when the shard is complete
```

`part.json` holds size and SHA-256 of each file of its part. The names of the images in the parts determine what is
missing, so a part may have any number of images, and an interrupted job loses only the part that it was writing.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ...data.reading import open_regular, read_bytes
from ...data.sources.items import Shard
from ...errors import PaleError, RunError
from ...tasks.prediction import Prediction
from ..files import Folder
from ..predictor import Failed

VERSION = 1
LINES, ROWS, FAILURES, OBJECTS = (
    "predictions.jsonl",
    "predictions.csv",
    "failures.jsonl",
    "objects.json",
)
FILES = (LINES, ROWS, FAILURES, OBJECTS)
MAX_JSON = 2**20  # bytes of part.json, done.json and bulk.json
PART = re.compile(r"part-(\d{6,9})")
TEMPORARY = re.compile(r"\.part-.*\.writing")
STALE_S = 24 * 3600  # an unfinished part of another machine is removed after this
# Each line starts with the name, so that names are read without the rest.
NAME_KEY = '{"picture": '  # kept name


class PartError(PaleError, OSError):
    """A part could not be written."""


@dataclass(frozen=True)
class Part:
    """A complete part of the output.

    Attributes:
        path: its folder.
        predicted: number of predictions.
        failed: number of images that failed.
    """

    path: Path
    predicted: int
    failed: int

    def lines(self, name: str = LINES) -> Iterator[str]:
        """Yield the lines of a file of it."""
        if (self.path / name).exists():
            with as_damage(self.path / name), open_text(self.path / name) as file:
                yield from file

    def names(self, name: str = LINES) -> Iterator[str]:
        """Yield the names of the images in a file of it."""
        for line in self.lines(name):
            with as_damage(self.path / name):
                yield line_name(line)


def line_name(line: str) -> str:
    """Return the name of the image of a JSON line."""
    if not line.startswith(NAME_KEY + '"'):
        return str(json.loads(line)["picture"])  # kept name
    found: tuple[str, int] = json.decoder.scanstring(line, len(NAME_KEY) + 1, True)  # type: ignore[attr-defined]
    return found[0]


@contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """Raise what shows that a file of a part is not one that a job wrote as an error about the file."""
    try:
        yield
    except RunError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise RunError(
            f"{path} is damaged ({error}); remove its part, and repeat the command of its shard"
        ) from None


def open_text(path: Path) -> TextIO:
    """Open a file of a part; one that is not a regular file is an error."""
    return io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="\n")


def shard_folder(output: Path, shard: Shard) -> Path:
    """Return the folder of a shard's parts."""
    width = max(4, len(str(shard.count)))
    return output / "parts" / f"{shard.index:0{width}d}-of-{shard.count:0{width}d}"


def join_output(output: Path, shards: int, settings: Mapping[str, Any]) -> None:
    """Create the output folder of all jobs, or check that it has the same model, options and shards."""
    wanted = {"version": VERSION, "shards": shards, "settings": dict(settings)}
    path = output / "bulk.json"
    output.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = output / f".bulk.json.{_owner()}"
        write_json(temporary, wanted)
        try:
            os.link(temporary, path)  # if several jobs start at the same time, one creates it
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(output)
    found = load_json(path)
    before = found.get("settings")
    before = before if isinstance(before, dict) else {}
    for name, value in {"shards": shards, **settings}.items():
        other = found.get(name) if name == "shards" else before.get(name)
        if other != value:
            raise RunError(
                f"{output} was started with {name} {other!r}, now it is {value!r}; use the same value, or another "
                "output folder"
            )


def load_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file of the output folder."""
    try:
        found = json.loads(read_bytes(path, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error}); choose another output folder") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} was not written by pale predict; choose another output folder")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and sync it; not atomic by itself."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def verify_part(path: Path, *, read: bool = True) -> Part:
    """Check a part against its part.json; a RunError names what is wrong.

    Args:
        path: path of its folder.
        read: compare the content of the files too, not only their sizes.
    """
    about = load_json(path / "part.json")
    files = about.get("files")
    if not isinstance(files, dict) or not set(files) <= set(FILES) or LINES not in files:
        raise RunError(f"{path}: part.json does not list the files of a part")
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                raise RunError(f"{path / name} has {size:,} bytes, written were {entry['bytes']:,}")
            if read and _checksum(path / name) != entry["sha256"]:
                raise RunError(f"{path / name}: its SHA-256 differs from that in part.json")
        except (OSError, TypeError, KeyError) as error:
            raise RunError(f"{path / name} cannot be checked ({error})") from None
    # A line has more bytes than its key.
    most = (path / LINES).stat().st_size // len(NAME_KEY)
    predicted, failed = about.get("predicted"), about.get("failed")
    if type(predicted) is not int or type(failed) is not int or not 0 <= predicted <= most:
        raise RunError(f"{path}: part.json does not state how many images it has")
    return Part(path, predicted, failed)


def list_parts(folder: Path) -> list[Path]:
    """Return the parts of a shard in the order of their numbers, damaged ones too."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := PART.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def set_aside(path: Path) -> None:
    """Rename a damaged part, so that it is ignored from now on."""
    os.rename(path, path.with_name(f"damaged-{path.name}-{_owner()}"))


def remove_unfinished(folder: Path) -> None:
    """Remove parts that were being written when their job was killed: those of this machine, and old ones."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if TEMPORARY.fullmatch(path.name) is None:
            continue
        host, _, process = path.name.removesuffix(".writing").rpartition("-")
        local = host.endswith(f"-{_host()}") and process.isdecimal() and not _alive(int(process))
        if local or time.time() - path.stat().st_mtime > STALE_S:
            shutil.rmtree(path, ignore_errors=True)


class PartWriter:
    """Writes one part: use `add`, then `commit`.

    Args:
        folder: folder of the shard.
        number: number of the part; if it is taken, the next free one is used.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.predicted = self.failed = 0
        self.discarded = False
        self._names: set[str] = set()
        self._path = folder / f".part-{number:06d}-{_owner()}.writing"
        shutil.rmtree(self._path, ignore_errors=True)
        self._output = Folder(self._path, drawn=False, flush=False)
        self._failures = (self._path / FAILURES).open("w", encoding="utf-8")

    @property
    def images(self) -> int:
        """Images so far."""
        return self.predicted + self.failed

    def add(self, result: Prediction | Failed) -> None:
        """Write one result; a name that the part already has is skipped."""
        if result.name in self._names:
            return
        self._names.add(result.name)
        if isinstance(result, Failed):
            self.failed += 1
            line = {"picture": result.name, "reason": result.reason}  # kept name
            self._failures.write(json.dumps(line) + "\n")
            return
        self.predicted += 1
        self._output.add(result)

    def commit(self) -> Part:
        """Sync the files, write part.json and rename the folder; a part without images is removed."""
        self._output.close()
        self._failures.close()
        if not self.images:
            self.discard()
            return Part(self._path, 0, 0)
        files = {}
        for path in sorted(self._path.iterdir()):
            _sync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _checksum(path)}
        about = {"version": VERSION, "predicted": self.predicted, "failed": self.failed}
        write_json(self._path / "part.json", about | {"files": files})
        _sync(self._path)
        final = self._rename()
        _sync(self.folder)
        return Part(final, self.predicted, self.failed)

    def _rename(self) -> Path:
        while True:
            final = self.folder / f"part-{self.number:06d}"
            if not final.exists():
                try:
                    os.rename(self._path, final)
                    return final
                except OSError:
                    if not final.exists():
                        raise
            self.number += 1  # another job of the same shard; merging keeps each image once

    def discard(self) -> None:
        """Remove what was written."""
        self.discarded = True
        for each in (self._output, self._failures):
            with suppress(OSError):
                each.close()
        shutil.rmtree(self._path, ignore_errors=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64] or "host"


def _owner() -> str:
    return f"{_host()}-{os.getpid()}"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return process != os.getpid()


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on disk; folders only if the system supports it."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
