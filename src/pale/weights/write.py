"""Write weights as safetensors, with recipe, classes and a checksum in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..errors import WeightsError
from .header import CHECKSUM, ENTRY, MAX_HEADER, classes_problem, file_checksum
from .pack import FORMAT, checksum, pack_tensors


def save_weights(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object], packed: bool = False
) -> None:
    """Write a safetensors file with `about` and a checksum in its header.

    Args:
        path: the file.
        tensors: by name.
        about: see `Weights`.
        packed: use a quarter of the space, with rounded values (see `pack`); `load_weights` reads both.
    """
    header = dict(about)
    if packed:
        stored = pack_tensors(tensors)
        header["packed"] = {"format": FORMAT, "crc32": checksum(stored)}
    else:
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header[CHECKSUM] = file_checksum(header, stored)
    text = json.dumps(header)
    if (problem := classes_problem(header)) is not None or len(text) > MAX_HEADER // 2:
        problem = problem or f"its header has {len(text)} bytes, the maximum is {MAX_HEADER // 2}"
        raise WeightsError(f"{path} cannot be written: {problem}; shorten the class names")
    # A single entry: safetensors writes several in random order, and equal weights would not give equal files.
    save_file(stored, path, metadata={ENTRY: text})
