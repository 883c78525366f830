"""Token labelling: each token of the last map learns what a teacher sees at its place.

After "All Tokens Matter" (LV-ViT), whose two tricks the starred rows of the paper use. The total loss is that
of the class plus `weight` times the mean over the tokens. There is no class token and no second head: the
classifier is applied at every place, so the class logits are the mean of the dense ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from ..settings import Settings


class TokenLabels(Settings):
    """Dense labels for training."""

    store: Path | None = None  # what pale token-labels make wrote; none: no dense loss
    weight: float = Field(default=0.5, ge=0)  # of the dense loss; the paper's


def blocks(cells: Tensor, grid: tuple[int, int], each: int) -> Tensor:
    """The last map's cells on an earlier map, `each` times as fine: (h, w) -> `grid`."""
    return cells.repeat_interleave(each, 0).repeat_interleave(each, 1)[: grid[0], : grid[1]]


def dense_targets(
    scores: Tensor, classes: Tensor, places: Tensor, grid: tuple[int, int], n: int
) -> Tensor:
    """The labels of an image's tokens, (b, h, w, n), from the map of its whole picture.

    A token's label is the mean over points spread over its cell, each interpolated linearly on the stored
    map: RoIAlign, as the reference has it, but for any affine map, since RandAugment also turns and shears.
    Points outside the picture, and what the k classes leave of 1, share out over all classes.

    Args:
        scores: probabilities, (b, k, H, W).
        classes: of the scores, (b, k, H, W).
        places: from an image to its picture, (b, 2, 3), as `TrainTransform.see` tells.
        grid: h and w of the tokens.
        n: number of classes.
    """
    b, k, *stored = scores.shape
    weights = cell_weights(places.float(), grid, (stored[0], stored[1]))
    maps = torch.zeros(b, stored[0] * stored[1], n, device=scores.device)
    maps.scatter_add_(
        2,
        classes.reshape(b, k, -1).transpose(1, 2).long(),
        scores.reshape(b, k, -1).transpose(1, 2).float(),
    )
    labels = weights.flatten(1, 2).flatten(2) @ maps
    labels = labels + (1 - labels.sum(-1, keepdim=True)).clamp(min=0) / n
    return labels.unflatten(1, grid)


def cell_weights(places: Tensor, grid: tuple[int, int], stored: tuple[int, int]) -> Tensor:
    """How much each stored cell counts for each token, (b, h, w, H, W)."""
    s = max(2, *(-(-full // out) for full, out in zip(stored, grid, strict=True)))
    y, x = ((torch.arange(size * s, device=places.device) + 0.5) / (size * s) for size in grid)
    # Points by token and by their place in its cell: (b, h, s, w, s).
    points = places[:, :, 0, None, None] * x + places[:, :, 1, None, None] * y[:, None]
    points = (points + places[:, :, 2, None, None]).unflatten(3, (-1, s)).unflatten(2, (-1, s))
    inside = ((points >= 0) & (points <= 1)).all(1)
    across, down = (_hats(points[:, axis], size) for axis, size in ((0, stored[1]), (1, stored[0])))
    return torch.einsum("bhswtj,bhswti->bhwij", across, down * inside[..., None]) / s**2


def _hats(points: Tensor, size: int) -> Tensor:
    """Linear interpolation between the centres of `size` cells from 0 to 1: (...) -> (..., size)."""
    at = (points * size - 0.5).clamp(0, size - 1)
    return (1 - (at[..., None] - torch.arange(size, device=points.device)).abs()).clamp(min=0)
