"""Losses of the box head, and targets of the mask head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from .roi import roi_align

MASK_SIDE = 28  # of a predicted mask
MAX_PIXELS = 2**27  # of masks in float32 at a time


def box_losses(scores: Tensor, guesses: Tensor, labels: Tensor, codes: Tensor) -> dict[str, Tensor]:
    """Return the cross-entropy of the sampled regions and the L1 distance of box codes, divided by their number."""
    positive = (labels > 0).nonzero()[:, 0]
    own = guesses.view(len(labels), -1, 4)[positive, labels[positive]]
    count = max(1, len(labels))
    return {
        "class": F.cross_entropy(scores, labels, reduction="sum") / count,
        "box": F.l1_loss(own, codes[positive], reduction="sum") / count,
    }


def mask_targets(masks: Sequence[Tensor], regions: Tensor, which: Tensor) -> Tensor:
    """Return the part of a mask in each region (m, 5), image and box: 0 or 1, (m, side, side).

    Args:
        masks: masks of each image, (n, h, w).
        regions: in order of their images.
        which: the mask of each region, by its number in its image.
    """
    out = []
    for start, stop in _runs([x.numel() for x in masks], MAX_PIXELS):
        whole = len(masks) == stop - start
        mine = slice(None) if whole else (regions[:, 0] >= start) & (regions[:, 0] < stop)
        some, numbers = regions[mine], which[mine]
        several = _padded(masks[start:stop])
        before = torch.tensor([0, *accumulate(len(x) for x in masks[start : stop - 1])])
        first = before.to(regions.device, non_blocking=True)[some[:, 0].long() - start]
        own = torch.cat([(first + numbers)[:, None].to(some), some[:, 1:]], 1)
        inside = roi_align(several[:, None].to(some), own, MASK_SIDE, 1.0)
        out.append((inside[:, 0] >= 0.5).to(some))
    return torch.cat(out)


def _padded(masks: Sequence[Tensor]) -> Tensor:
    """Pad masks to one size and concatenate them."""
    h, w = (max(x.shape[i] for x in masks) for i in (1, 2))
    return torch.cat([F.pad(x, (0, w - x.shape[2], 0, h - x.shape[1])) for x in masks])


def _runs(sizes: Sequence[int], maximum: int) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbours, first and last plus one, whose sizes sum up to at most `maximum` or that are single."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > maximum:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)
