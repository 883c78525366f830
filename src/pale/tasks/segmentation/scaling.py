"""A part of a scaled picture without the rest of it, so that windows over a large one need no scaled copy.

Pillow's bilinear resizing in Pillow's arithmetic: whole-number weights of 22 bits, along each row first, rounded to 8
bits after each axis. So a part has the very bits that it has in the whole; Pillow itself, which from version 13 on
takes the cheaper axis first, gives the same or, here and there, the next of 256 levels.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 22  # of a weight; a sum of them times 8 bits stays within 32


def taps(before: int, after: int, start: int, end: int) -> tuple[NDArray[np.int64], Tensor]:
    """For the places `start` to `end` of the scaled axis: the first place they take from, (n,), and weights (n, t)."""
    scale = before / after
    support = max(
        scale, 1.0
    )  # more than neighbours where the picture shrinks: that is the anti-aliasing
    centre = (np.arange(start, end) + 0.5) * scale
    first = np.maximum(centre - support + 0.5, 0).astype(np.int64)
    last = np.minimum((centre + support + 0.5).astype(np.int64), before)
    places = first[:, None] + np.arange((last - first).max())
    share = np.maximum(0, 1 - np.abs((places - centre[:, None] + 0.5) / support))
    share[places >= last[:, None]] = 0
    share /= np.add.accumulate(share, axis=1)[:, -1:]  # summed in turn, as Pillow does
    return first, torch.from_numpy((share * 2**BITS + 0.5).astype(np.int32))


def scaled_part(
    image: Tensor,
    size: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Rows and columns, from and to, of the image (3, h, w) of uint8 scaled to `size`; on `device`."""
    if tuple(image.shape[1:]) == size:
        return image[:, slice(*rows), slice(*columns)].to(device)
    (y, y_shares), (x, x_shares) = (
        taps(before, after, *part)
        for before, after, part in zip(image.shape[1:], size, (rows, columns), strict=True)
    )
    bottom, right = (int(first[-1]) + s.shape[1] for first, s in ((y, y_shares), (x, x_shares)))
    part = image[:, int(y[0]) : bottom, int(x[0]) : right].to(device)
    part = _along(part, 2, x - x[0], x_shares.to(device))
    return _along(part, 1, y - y[0], y_shares.to(device))


def _along(part: Tensor, axis: int, first: NDArray[np.int64], shares: Tensor) -> Tensor:
    if axis == 1:
        shares = shares[:, :, None]
    places = torch.from_numpy(first).to(part.device)
    total: Tensor | int = 1 << BITS - 1  # rounds
    for t in range(shares.shape[1]):
        at = (places + t).clamp(max=part.shape[axis] - 1)  # beyond the end the shares are 0
        total = total + part.index_select(axis, at) * shares[:, t]
    assert isinstance(total, Tensor)
    return (total >> BITS).to(torch.uint8)
