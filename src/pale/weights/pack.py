"""Pack weights into a quarter of the space: matrices as int8 with one scale per row.

A row holds all values of one index of the first dimension: an output channel of linear layers and convolutions. Its
largest value becomes 127, so the error of a value is at most 1/254 of it. Rows shorter than `MIN_ROW` (depthwise
kernels) would save little: they are float16. Vectors (norms, biases, statistics) stay float32, and integers keep their
type. After unpacking, every floating-point tensor is float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import WeightsError

FORMAT = 1
MIN_ROW = 32  # shorter rows are float16 instead of int8
SCALE = "::scale"  # appended to the name of a matrix: its scales, float32


def pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name in packed form."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            raise WeightsError(
                f"a tensor name cannot end in {SCALE!r}, which marks scales, got {name}"
            )
        if not tensor.is_floating_point():
            if tensor.dtype is torch.int8:
                raise WeightsError(f"{name} is int8 already; pack weights as training wrote them")
            stored[name] = tensor.detach().cpu().contiguous()
            continue
        values = tensor.detach().cpu().to(torch.float32)
        if not values.isfinite().all():
            raise WeightsError(f"{name} holds NaN or Inf; pack weights of a run without them")
        if values.ndim < 2 or values.numel() == 0:
            stored[name] = values.contiguous()
        elif values[0].numel() < MIN_ROW:
            stored[name] = _to_half(values)
        else:
            stored[name], stored[name + SCALE] = _quantise(values)
    return stored


def _to_half(values: Tensor) -> Tensor:
    """Return float16 values, or the unchanged ones if an error would exceed 1/2048 of the largest value."""
    half = values.to(torch.float16)
    fits = (half.float() - values).abs().max() <= values.abs().max() / 2048
    return (half if fits else values).contiguous()


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    rows = values.flatten(1)
    scale = rows.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    numbers = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return numbers.view(values.shape).contiguous(), scale


def unpack_tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name as a model loads them; raise `WeightsError` if matrices and scales do not match."""
    tensors: dict[str, Tensor] = {}
    largest = torch.finfo(torch.float32).max
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in stored:
                raise WeightsError(f"scales without their matrix: {name}")
        elif tensor.dtype is torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None or tensor.ndim < 2 or scale.shape != tensor.shape[:1]:
                raise WeightsError(f"{name} has no scales")
            rows = tensor.flatten(1).float() * scale.float()[:, None]
            tensors[name] = rows.clamp(-largest, largest).view(tensor.shape)
        else:
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return tensors


def checksum(stored: Mapping[str, Tensor], total: int = 0) -> int:
    """Return the CRC-32 of names, types, shapes and bytes, continued from `total`."""
    for name in sorted(stored):
        tensor = stored[name]
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        total = zlib.crc32(head.encode(), total)
        total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return total
