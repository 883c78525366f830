"""Weights in a quarter of the space: matrices as int8 with a scale a row, the rest as it has to be.

A row is all that belongs to one index of the first dimension: for linear layers and convolutions that is an output
channel. Its largest entry becomes 127, so an entry is off by at most 1/254 of it. Rows shorter than
`SHORTEST` (depthwise kernels) would be half scales: they are float16, single vectors (norms, biases, statistics)
stay float32, integers stay what they are. Everything else is float32 again after unpacking.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

FORMAT = 1
SHORTEST = 32  # entries of a row, from which on it is int8
SCALE = "::scale"  # after a matrix's name: its scales, float32


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name as they are stored."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            raise ValueError(f"a tensor's name cannot end in {SCALE!r}, which marks scales: {name}")
        if not tensor.is_floating_point():
            if tensor.dtype is torch.int8:
                raise ValueError(f"{name} is int8 already; pack weights as training wrote them")
            stored[name] = tensor.detach().cpu().contiguous()
            continue
        values = tensor.detach().cpu().to(torch.float32)
        if not values.isfinite().all():
            raise ValueError(f"{name} holds values that are no numbers; pack weights of a good run")
        if values.ndim < 2 or values.numel() == 0:
            stored[name] = values.contiguous()
        elif values[0].numel() < SHORTEST:
            stored[name] = _half(values)
        else:
            stored[name], stored[name + SCALE] = _quantise(values)
    return stored


def _half(values: Tensor) -> Tensor:
    """As float16, where it holds them: half a per mille of the largest at most is lost."""
    half = values.to(torch.float16)
    most = values.abs().max()
    fits = (half.float() - values).abs().max() <= most / 2048
    return (half if fits else values).contiguous()


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    rows = values.flatten(1)
    scale = rows.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    numbers = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return numbers.view(values.shape).contiguous(), scale


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name as a model takes them; a ValueError where something does not fit together."""
    tensors: dict[str, Tensor] = {}
    most = torch.finfo(torch.float32).max
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in stored:
                raise ValueError(f"scales without their matrix: {name}")
        elif tensor.dtype is torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None or tensor.ndim < 2 or scale.shape != tensor.shape[:1]:
                raise ValueError(f"{name} has no scales of its own")
            rows = tensor.flatten(1).float() * scale.float()[:, None]
            tensors[name] = rows.clamp(-most, most).view(tensor.shape)
        else:
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return tensors


def checksum(stored: Mapping[str, Tensor]) -> int:
    """CRC-32 over names, types, shapes and bytes: safetensors itself would not notice a wrong byte."""
    total = 0
    for name in sorted(stored):
        tensor = stored[name]
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        total = zlib.crc32(head.encode(), total)
        total = zlib.crc32(
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), total
        )
    return total
