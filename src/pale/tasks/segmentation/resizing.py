"""Maps at another size, bilinear with corners not aligned, as `F.interpolate` has it.

Its gradient on a GPU is a sum by atomic operations, four for each number of the larger map, and of another rounding in
every run. Bilinear is a product with a small matrix along each axis, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def bilinear(x: Tensor, size: Sequence[int]) -> Tensor:
    """(b, c, h, w) -> (b, c, *size)."""
    if x.is_cuda and x.requires_grad:
        return by_products(x, size)
    return F.interpolate(x, tuple(size), mode="bilinear", align_corners=False)


def by_products(x: Tensor, size: Sequence[int]) -> Tensor:
    """The same, channels last in memory; fastest where `x` is so too."""
    b, c, h, w = x.shape
    with torch.autocast(x.device.type, enabled=False):
        # Not by matmul, which would fold batch and columns into one, by two copies of the map.
        y = x.movedim(1, -1).reshape(b, h, w * c)
        y = torch.bmm(shares(h, size[0], x).expand(b, -1, -1), y).view(b * size[0], w, c)
        y = torch.bmm(shares(w, size[1], x).expand(len(y), -1, -1), y)
    return y.view(b, *size, c).movedim(-1, 1)


def shares(before: int, after: int, like: Tensor) -> Tensor:
    """(after, before): what each place takes from the places before."""
    places = torch.arange(after, device=like.device, dtype=torch.float32)
    at = ((places + 0.5) * (before / after) - 0.5).clamp(0, before - 1)
    distance = at[:, None] - torch.arange(before, device=like.device)
    return (1 - distance.abs()).clamp(min=0).to(like.dtype)
