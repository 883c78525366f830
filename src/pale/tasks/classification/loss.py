"""Cross-entropy of classes, and of tokens with token labelling.

Token labelling follows "All Tokens Matter" (LV-ViT), whose two tricks the starred rows of the paper use: each token
of the last map learns the label that a teacher predicts at its position. The total loss is that of the class plus
`weight` times the mean over the tokens. There is no class token and no second head: the classifier is applied at
every token, so the class logits are the mean of the dense logits.

In a mixture of datasets, the loss of an image uses only the classes of its own source (`mixture_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ...core.settings import Settings


class TokenLabels(Settings):
    """Dense labels for training."""

    store: Path | None = None  # a folder that `pale token-labels make` wrote; None: no dense loss
    # Weight of the dense loss. The Pale paper states none; LV-ViT's paper has 0.5, the default of its code is 1.0.
    weight: float = Field(default=0.5, ge=0)


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (b, classes) with soft labels (b, classes)."""
    return F.cross_entropy(logits.float(), targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens; both are (b, h, w, classes)."""
    return F.cross_entropy(logits.float().flatten(0, 2), targets.flatten(0, 2))


@dataclass(frozen=True)
class SourceClasses:
    """Facts about the sources of a mixture that its loss needs.

    Attributes:
        masks: which classes a source has, (sources, classes), bool.
        multi: which sources have tags, (sources,), bool.
        scale: factor of the loss of a source with tags, (sources,): 1 / mean number of tags of an image. The binary
            cross-entropy is then comparable to a cross-entropy over as many classes.
    """

    masks: Tensor
    multi: Tensor
    scale: Tensor

    def to(self, device: torch.device) -> SourceClasses:
        """Return the tensors on a device."""
        return SourceClasses(*(x.to(device) for x in (self.masks, self.multi, self.scale)))


OUTSIDE = -1e9  # logit of a class that a source does not have; finite, so that 0 times it is 0


def smooth_targets(
    targets: Tensor, sources: Tensor, known: SourceClasses, smoothing: float
) -> Tensor:
    """Smooth the labels (b, classes) of sources with one class per image, over the classes of the source."""
    mask = known.masks[sources].float()
    smoothed = (1 - smoothing) * targets + smoothing * mask / mask.sum(1, keepdim=True)
    return torch.where(known.multi[sources][:, None], targets, smoothed)


def mixture_loss(logits: Tensor, targets: Tensor, sources: Tensor, known: SourceClasses) -> Tensor:
    """Return the loss of each image, (b,), over the classes of its source.

    It is the cross-entropy of a softmax over these classes, or with tags the sum of the binary cross-entropies times
    `scale`.

    Args:
        logits: logits of all classes, (b, classes).
        targets: (soft) labels, (b, classes), 0 for classes that the source does not have.
        sources: source of each image, (b,).
        known: the sources.
    """
    logits, mask = logits.float(), known.masks[sources]
    single = -(targets * logits.masked_fill(~mask, OUTSIDE).log_softmax(1)).sum(1)
    each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    multi = (each * mask).sum(1) * known.scale[sources]
    return torch.where(known.multi[sources], multi, single)


def blocks(cells: Tensor, grid: tuple[int, int], each: int) -> Tensor:
    """Repeat the cells of the last map, (h, w), on a map of size `grid` with `each` times as many cells per side."""
    return cells.repeat_interleave(each, 0).repeat_interleave(each, 1)[: grid[0], : grid[1]]


def dense_targets(
    scores: Tensor, classes: Tensor, places: Tensor, grid: tuple[int, int], n: int
) -> Tensor:
    """Return the labels of the tokens of augmented images, (b, h, w, n), from label maps of the whole images.

    The label of a token is the mean over points spread over its cell, each interpolated linearly on the stored
    map. This is RoIAlign, as in the reference implementation, but for any affine map, since RandAugment also rotates
    and shears. Points outside the image, and the probability not covered by the k classes, are spread over all classes.

    Args:
        scores: probabilities, (b, k, H, W).
        classes: classes of the scores, (b, k, H, W).
        places: affine maps from the augmented to the whole image, (b, 2, 3), of `TrainTransform.with_places`.
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
    """Return the weight of each stored cell for each token, (b, h, w, H, W)."""
    s = max(2, *(-(-full // out) for full, out in zip(stored, grid, strict=True)))
    y, x = ((torch.arange(size * s, device=places.device) + 0.5) / (size * s) for size in grid)
    # Points by token and by their place in its cell: (b, h, s, w, s).
    points = places[:, :, 0, None, None] * x + places[:, :, 1, None, None] * y[:, None]
    points = (points + places[:, :, 2, None, None]).unflatten(3, (-1, s)).unflatten(2, (-1, s))
    inside = ((points >= 0) & (points <= 1)).all(1)
    across, down = (
        _linear_weights(points[:, axis], size) for axis, size in ((0, stored[1]), (1, stored[0]))
    )
    return torch.einsum("bhswtj,bhswti->bhwij", across, down * inside[..., None]) / s**2


def _linear_weights(points: Tensor, size: int) -> Tensor:
    """Return weights of linear interpolation between the centres of `size` cells in 0..1: (...) -> (..., size)."""
    at = (points * size - 0.5).clamp(0, size - 1)
    return (1 - (at[..., None] - torch.arange(size, device=points.device)).abs()).clamp(min=0)
