"""Cross-entropy over pixels, with class weights, hard pixels alone, or dice beside it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ...data.draws import number
from ...data.masks import IGNORED
from ...settings import Settings
from . import fused_loss
from .resizing import bilinear


class Loss(Settings):
    """What is minimised.

    Attributes:
        auxiliary: weight of the auxiliary head's loss.
        class_weights: a factor for each class; "balanced": by the root of how rare its pixels are in training.
        ohem: only pixels whose class got a probability below this count, and at least `ohem_keep` of them an image.
        ohem_keep: pixels an image.
        dice: weight of the dice loss, added.
    """

    auxiliary: float = Field(default=0.4, ge=0)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    ohem: float | None = Field(default=None, gt=0, le=1)
    ohem_keep: int = Field(default=6250, ge=1)  # mmsegmentation's 100000 a batch of 16
    dice: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _weights(self) -> Loss:
        if isinstance(self.class_weights, tuple) and min(self.class_weights, default=0) <= 0:
            raise ValueError(f"class_weights must all be above 0, got {self.class_weights}")
        return self


def balanced(pixels: NDArray[np.int64]) -> list[float]:
    """Weights that fall with the root of a class's share and leave the mean loss as it is; absent ones get 1."""
    share = pixels / max(1, pixels.sum())
    weights = np.where(share > 0, 1 / np.sqrt(np.maximum(share, 1e-12)), 0)
    weights = weights / max(1e-12, float((share * weights).sum()))
    return [float(w) for w in np.where(share > 0, weights, 1.0)]


def pixel_loss(logits: Tensor, masks: Tensor, settings: Loss, weights: Tensor | None) -> Tensor:
    """The loss of one head: logits (b, n, h', w') are brought to the size of the masks, (b, h, w).

    The sum over labelled pixels is divided by the number of all pixels, as in mmsegmentation: so an
    image without labels adds nothing, and the loss does not depend on how a batch is shared out.
    """
    if settings.ohem is None and not settings.dice and fused_loss.takes(logits):
        return fused_loss.pixel_losses(logits, masks, weights).mean()
    logits = bilinear(logits.float(), masks.shape[-2:])
    labels = masks.long()
    pixels = logits.movedim(1, -1).flatten(0, -2)  # whose classes lie side by side
    each = F.cross_entropy(
        pixels, labels.flatten(), weights, ignore_index=IGNORED, reduction="none"
    )  # 0 where ignored
    each = each.view_as(labels)
    if settings.ohem is not None:
        each = each * hard(logits.detach(), labels, settings.ohem, settings.ohem_keep)
    loss = each.mean()
    if settings.dice:
        loss = loss + settings.dice * dice_loss(logits, labels)
    return loss


def hard(logits: Tensor, labels: Tensor, threshold: float, keep: int) -> Tensor:
    """1 for pixels to learn from, (b, h, w): the uncertain ones, and at least `keep` labelled ones an image.

    Scaled so that each image counts as if all its labelled pixels did.
    """
    labelled = labels != IGNORED
    sure = logits.softmax(1).gather(1, labels.where(labelled, 0)[:, None])[:, 0]
    sure = sure.where(labelled, 2.0)
    least = sure.flatten(1).sort(1).values[:, min(keep, sure[0].numel()) - 1]
    chosen = (sure <= least.clamp(min=threshold)[:, None, None]) & labelled
    factor = labelled.flatten(1).sum(1) / chosen.flatten(1).sum(1).clamp(min=1)
    return chosen * factor[:, None, None]


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - dice, mean over the classes that an image holds, then over images."""
    labelled = labels != IGNORED
    ones = F.one_hot(labels.where(labelled, 0), logits.shape[1]).movedim(-1, 1) * labelled[:, None]
    chance = logits.softmax(1) * labelled[:, None]
    both = (chance * ones).flatten(2).sum(2)
    sizes = (chance + ones).flatten(2).sum(2)
    present = ones.flatten(2).any(2)
    dice = (1 - 2 * both / sizes.clamp(min=1e-6)) * present
    return (dice.sum(1) / present.sum(1).clamp(min=1)).mean()


def keep_masks(keys: Tensor, channels: int, rate: float, seed: int, device: torch.device) -> Tensor:
    """Dropout of whole channels, (b, channels): 0 or 1 / (1 - rate), drawn from (seed, epoch, sample)."""
    rows = []
    for epoch, index in keys.tolist():
        rng = np.random.default_rng(number(seed, epoch, index, channels))
        rows.append(rng.random(channels) >= rate)
    masks = torch.from_numpy(np.stack(rows)).float() / (1 - rate)
    return masks.to(device)
