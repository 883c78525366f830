"""Header of a weights file: what it states about the weights, its bounds and its checksum."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..core.plain_json import Json, parse_json
from ..errors import WeightsError
from .pack import checksum

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}  # bytes
DTYPES |= {"I8": 1, "U8": 1, "BOOL": 1}
ENTRY = "pale"  # key of our JSON in the metadata of a safetensors file
CHECKSUM = "crc32"  # key in that JSON: checksum of tensors and header
# Bounds of a header, which is read before anything else is known about a file.
MAX_HEADER = 1 << 22  # bytes
MAX_TENSORS = 1 << 12
MAX_CLASSES = 1 << 16
MAX_NAME = 1000  # characters of a class name
MAX_DIMENSIONS = 8


def file_checksum(about: Mapping[str, object], stored: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of header and tensors: safetensors itself does not notice a changed byte."""
    return checksum(stored, zlib.crc32(json.dumps(about).encode()))


def damaged(path: Path, reason: object) -> WeightsError:
    """Return the error for a file whose content is not what was written."""
    return WeightsError(
        f"{path} is damaged ({reason}); use another file, or an earlier checkpoint of the run"
    )


def read_header(path: Path) -> tuple[Json, dict[str, list[int]]]:
    """Read what a safetensors file states about its weights, and the shape of each tensor, but no tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise damaged(path, f"its header has {length} bytes, the maximum is {MAX_HEADER}")
        text = file.read(length)
        size = os.fstat(file.fileno()).st_size - 8 - length
    try:
        content = parse_json(text.decode())
        metadata = content.pop("__metadata__", {})
        if len(content) > 2 * MAX_TENSORS:  # packed files hold a scale beside each matrix
            raise ValueError(f"it has {len(content)} tensors, the maximum is {2 * MAX_TENSORS}")
        shapes = {name: _parse_shape(name, entry, size) for name, entry in content.items()}
        held = sum(DTYPES[content[name]["dtype"]] * math.prod(s) for name, s in shapes.items())
        if held > size:  # tensors that share bytes: a model of any size in a small file
            raise ValueError(f"its tensors have {held} bytes, the file {size}")
        about = parse_json(metadata.get(ENTRY, "{}"))
        if not isinstance(about, dict):
            raise ValueError("its metadata is not a JSON object")
        if (problem := classes_problem(about)) is not None:
            raise ValueError(problem)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise damaged(path, error) from None
    return about, shapes


def _parse_shape(name: str, entry: Any, size: int) -> list[int]:
    """Return the shape in a tensor's entry; the tensor must lie inside the file of `size` bytes."""
    kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in DTYPES:
        raise ValueError(f"{name[:80]} has the unknown type {str(kind)[:20]}")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 31 for n in shape):
        raise ValueError(f"{name[:80]} has an invalid shape")
    if not 0 <= start <= end <= size or math.prod(n for n in shape if n) > max(size, 1):
        raise ValueError(f"{name[:80]} does not lie in the file")
    if end - start != DTYPES[kind] * math.prod(shape):
        raise ValueError(f"{name[:80]} has {end - start} bytes, not those of its shape")
    return list(shape)


def classes_problem(about: Mapping[str, object]) -> str | None:
    """Return what is wrong with the classes of a header and their readable names, or None."""
    for key in ("classes", "label_names"):
        names = about.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return f"its {key} are not a list of names"
        longest = max(map(len, names), default=0)
        if len(names) > MAX_CLASSES or longest > MAX_NAME:
            return (
                f"it has {len(names)} classes with names of up to {longest} characters, at most {MAX_CLASSES} and "
                f"{MAX_NAME} are allowed"
            )
    classes, labels = (
        cast("list[str] | None", about.get(key)) for key in ("classes", "label_names")
    )
    if labels is None or len(labels) == len(set(labels)) == len(classes or ()):
        return None
    return "its label_names are not one different name for each class"
