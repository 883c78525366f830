"""Bilinear resizing of maps without aligned corners, as `F.interpolate` with `align_corners=False`.

The gradient of `F.interpolate` on a GPU uses four atomic additions per element, which are slow and round differently in
every run. Bilinear resizing is also a product with a small matrix along each axis, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def bilinear(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize (b, c, h, w) to (b, c, *size)."""
    if x.is_cuda and x.requires_grad:
        return resize_by_products(x, size)
    return F.interpolate(x, tuple(size), mode="bilinear", align_corners=False)


def resize_by_products(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize by matrix products; the result is channels last in memory, and fastest if `x` is too."""
    b, c, h, w = x.shape
    with torch.autocast(x.device.type, enabled=False):
        # Not matmul, which copies the map twice to merge batch and columns.
        y = x.movedim(1, -1).reshape(b, h, w * c)
        y = torch.bmm(axis_weights(h, size[0], x).expand(b, -1, -1), y).view(b * size[0], w, c)
        y = torch.bmm(axis_weights(w, size[1], x).expand(len(y), -1, -1), y)
    return y.view(b, *size, c).movedim(-1, 1)


def axis_weights(before: int, after: int, like: Tensor) -> Tensor:
    """Return the interpolation weights along an axis, (after, before)."""
    places = torch.arange(after, device=like.device, dtype=torch.float32)
    at = ((places + 0.5) * (before / after) - 0.5).clamp(0, before - 1)
    distance = at[:, None] - torch.arange(before, device=like.device)
    return (1 - distance.abs()).clamp(min=0).to(like.dtype)
