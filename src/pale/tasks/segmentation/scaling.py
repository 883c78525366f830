"""Resize a part of an image without the rest of it, so that windows over a large image need no resized copy.

This is Pillow's bilinear resizing in Pillow's integer arithmetic: weights of 22 bits, rows first, rounded to 8 bits
after each axis. So a part is bit-equal to the same part of the whole resized image. Pillow from version 13 on resizes
the cheaper axis first and may differ by one of 256 levels in a few pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 22  # of a weight; sums of products with 8 bits stay within 32 bits


def taps(before: int, after: int, start: int, end: int) -> tuple[NDArray[np.int64], Tensor]:
    """Return first input pixel (n,) and weights (n, t) of the output pixels from `start` to `end` of an axis."""
    scale = before / after
    support = max(scale, 1.0)  # wider when the image shrinks: anti-aliasing
    centre = (np.arange(start, end) + 0.5) * scale
    first = np.maximum(centre - support + 0.5, 0).astype(np.int64)
    last = np.minimum((centre + support + 0.5).astype(np.int64), before)
    places = first[:, None] + np.arange((last - first).max())
    share = np.maximum(0, 1 - np.abs((places - centre[:, None] + 0.5) / support))
    share[places >= last[:, None]] = 0
    share /= np.add.accumulate(share, axis=1)[:, -1:]  # summed one by one, as Pillow does
    return first, torch.from_numpy((share * 2**BITS + 0.5).astype(np.int32))


def scaled_part(
    image: Tensor,
    size: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Return rows and columns, from and to, of an image, uint8 (3, h, w), resized to `size`; computed on `device`."""
    if tuple(image.shape[1:]) == size:
        return image[:, slice(*rows), slice(*columns)].to(device)
    (y, y_weights), (x, x_weights) = (
        taps(before, after, *part)
        for before, after, part in zip(image.shape[1:], size, (rows, columns), strict=True)
    )
    bottom, right = (int(first[-1]) + s.shape[1] for first, s in ((y, y_weights), (x, x_weights)))
    part = image[:, int(y[0]) : bottom, int(x[0]) : right].to(device)
    part = _along(part, 2, x - x[0], x_weights.to(device))
    return _along(part, 1, y - y[0], y_weights.to(device))


def _along(part: Tensor, axis: int, first: NDArray[np.int64], weights: Tensor) -> Tensor:
    if axis == 1:
        weights = weights[:, :, None]
    places = torch.from_numpy(first).to(part.device)
    total: Tensor | int = 1 << BITS - 1  # rounds to nearest
    for t in range(weights.shape[1]):
        at = (places + t).clamp(max=part.shape[axis] - 1)  # beyond the end the weights are 0
        total = total + part.index_select(axis, at) * weights[:, t]
    assert isinstance(total, Tensor)
    return (total >> BITS).to(torch.uint8)
