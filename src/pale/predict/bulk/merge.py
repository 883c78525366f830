"""Merge the parts of all shards into the files that a prediction without shards writes.

Parts are read one after the other, so memory does not grow with the number of images, except for eight bytes per image.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...core.escaping import csv_cell
from ...data.reading import MAX_TEXT_BYTES, read_bytes
from ...data.sources.items import MAX_SHARDS, Shard
from ...errors import RunError
from .parts import (
    FAILURES,
    LINES,
    OBJECTS,
    ROWS,
    Part,
    as_damage,
    line_name,
    list_parts,
    load_json,
    open_text,
    shard_folder,
    verify_part,
)

MAX_LISTED = 10  # shards in a message


@dataclass(frozen=True)
class Merged:
    """Result of merging.

    Attributes:
        shards: shards of the output folder.
        parts: parts of all shards.
        predicted: images with a prediction.
        failed: images without one, listed in failures.jsonl.
        repeated: predictions that were in two parts and were written once.
    """

    shards: int
    parts: int
    predicted: int
    failed: int
    repeated: int


def merge_parts(output: Path) -> Merged:
    """Write predictions.jsonl, predictions.csv, failures.jsonl and, for detection, objects.json from all parts.

    Every shard must be complete and every part undamaged. Images are in the order of shards and parts; one in two parts
    is written once, and one that failed and was predicted later counts as predicted.
    """
    if not (output / "bulk.json").exists():
        raise RunError(f"{output} holds no parts; pale predict --shard i/n -o {output} writes them")
    shards = load_json(output / "bulk.json").get("shards")
    if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
        raise RunError(f"{output / 'bulk.json'} does not state the number of shards; it is damaged")
    parts = _complete_parts(output, shards)
    repeated = _Repeated(parts)
    _replace(output / LINES, lambda file: _write_lines(file, parts, repeated))
    _replace(output / ROWS, lambda file: _write_rows(file, parts, repeated))
    failed = _replace(output / FAILURES, lambda file: _write_failures(file, parts))
    if any((part.path / OBJECTS).exists() for part in parts):
        _replace(output / OBJECTS, lambda file: _write_objects(file, parts, repeated))
    predicted = sum(part.predicted for part in parts)
    dropped = repeated.count
    return Merged(shards, len(parts), predicted - dropped, failed, dropped)


def _complete_parts(output: Path, shards: int) -> list[Part]:
    missing, damaged, parts = [], [], []
    for index in range(shards):
        folder = shard_folder(output, Shard(index, shards))
        if not (folder / "done.json").exists():
            missing.append(f"{index}/{shards}")
            continue
        found = []
        for path in list_parts(folder):
            try:
                found.append(verify_part(path))
            except RunError as error:
                damaged.append(f"{index}/{shards} ({error})")
        parts += found
    for wrong, what in ((missing, "not complete"), (damaged, "damaged")):
        if wrong:
            more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
            raise RunError(
                f"all {shards} shards are needed, and these are {what}: {', '.join(wrong[:MAX_LISTED])}{more}; run "
                "them again with the same command, which predicts what is missing"
            )
    return parts


def _hash(name: str) -> int:
    content = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


class _Repeated:
    """Detects predictions of images that an earlier part already has.

    Only names whose hash occurs twice are kept as text.
    """

    def __init__(self, parts: list[Part]) -> None:
        hashes = np.zeros(sum(part.predicted for part in parts), np.uint64)
        place = 0
        for part in parts:
            end = place + part.predicted
            for name in part.names():
                if place < end:
                    hashes[place] = _hash(name)
                place += 1
            if place != end:
                raise RunError(
                    f"{part.path / LINES} has another number of lines than part.json states; remove the part, and "
                    "repeat the command of its shard"
                )
        hashes.sort()
        self.hashes = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        self.count = 0
        if self.hashes:
            self.count = sum(not first for _, _, first in self.lines(parts))

    def lines(self, parts: list[Part]) -> Iterator[tuple[Part, str, bool]]:
        """Yield each line of all parts, and whether it is the first of its image."""
        seen: set[str] = set()
        for part in parts:
            for line in part.lines():
                if not self.hashes:
                    yield part, line, True
                    continue
                name = line_name(line)
                yield part, line, name not in seen
                if _hash(name) in self.hashes:
                    seen.add(name)

    def dropped(self, parts: list[Part]) -> dict[Path, set[str]]:
        """Return the names of the images that are left out of each part."""
        found: dict[Path, set[str]] = {}
        if self.hashes:
            for part, line, first in self.lines(parts):
                if not first:
                    found.setdefault(part.path, set()).add(line_name(line))
        return found


def _replace(path: Path, write: Callable[[TextIO], int]) -> int:
    """Write a file under a temporary name, sync it and rename it; return what `write` returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            found = write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return found


def _write_lines(file: TextIO, parts: list[Part], repeated: _Repeated) -> int:
    file.writelines(line for _, line, first in repeated.lines(parts) if first)
    return 0


def _write_rows(file: TextIO, parts: list[Part], repeated: _Repeated) -> int:
    dropped, columns = repeated.dropped(parts), ""
    for part in parts:
        names = {csv_cell(name) for name in dropped.get(part.path, ())}
        with as_damage(part.path / ROWS), open_text(part.path / ROWS) as rows:
            head = rows.readline()
            if head and not columns:
                file.write(columns := head)
            if head and head != columns:
                raise RunError(
                    f"{part.path / ROWS} has the columns {head.strip()!r}, others have {columns.strip()!r}; were the "
                    "parts written by two versions? Use the same, and another output folder"
                )
            if not names:
                while block := rows.read(2**20):
                    file.write(block)
                continue
            writer = csv.writer(file)
            writer.writerows(row for row in csv.reader(rows) if row and row[0] not in names)
    return 0


def _write_failures(file: TextIO, parts: list[Part]) -> int:
    """Write the last failure of each image that has no prediction; return their number."""
    failures: dict[str, str] = {}
    for part in parts:
        for line in part.lines(FAILURES):
            with as_damage(part.path / FAILURES):
                failures[line_name(line)] = line
    if failures:
        for part in parts:
            for name in part.names(LINES):
                failures.pop(name, None)
    file.writelines(failures.values())
    return len(failures)


def _write_objects(file: TextIO, parts: list[Part], repeated: _Repeated) -> int:
    """Write one COCO file, its images numbered anew; one part at a time is held in memory."""
    dropped = repeated.dropped(parts)
    annotations = Path(f"{file.name}.annotations")
    categories: list[Any] = []
    number, separator = 0, ""
    try:
        with annotations.open("w+", encoding="utf-8") as rest:
            file.write('{"images": [')
            for part in parts:
                if not (part.path / OBJECTS).exists():
                    continue
                with as_damage(part.path / OBJECTS):
                    content = json.loads(read_bytes(part.path / OBJECTS, MAX_TEXT_BYTES))
                    categories = content["categories"] or categories
                    numbers = {}
                    names = dropped.get(part.path, set())
                    for image in content["images"]:
                        if image["file_name"] not in names:
                            number += 1
                            numbers[image["id"]] = number
                            file.write(", " * (number > 1) + json.dumps(image | {"id": number}))
                    for entry in content["annotations"]:
                        if entry["image_id"] in numbers:
                            entry |= {"image_id": numbers[entry["image_id"]]}
                            rest.write(separator + json.dumps(entry))
                            separator = ", "
            file.write(f'], "categories": {json.dumps(categories)}, "annotations": [')
            rest.seek(0)
            while block := rest.read(2**20):
                file.write(block)
            file.write("]}\n")
    finally:
        annotations.unlink(missing_ok=True)
    return 0
