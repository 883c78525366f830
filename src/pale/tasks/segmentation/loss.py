"""Cross-entropy over pixels, optionally with class weights, hard example mining (OHEM) or dice loss."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ...core.settings import Settings
from ...data.seeding import derive_seed
from ...data.sources.class_list import IGNORED
from . import fused_loss
from .resizing import bilinear


class Loss(Settings):
    """Settings of the loss.

    Attributes:
        auxiliary: weight of the loss of the auxiliary head.
        class_weights: a factor for each class; "balanced": inverse root of the class's share of the training pixels.
        ohem: only pixels whose class has a probability below this count, but at least `ohem_keep` per image.
        ohem_keep: minimum number of pixels per image.
        dice: weight of the dice loss, which is added.
    """

    auxiliary: float = Field(default=0.4, ge=0)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    ohem: float | None = Field(default=None, gt=0, le=1)
    ohem_keep: int = Field(default=6250, ge=1)  # mmsegmentation has 100000 per batch of 16
    dice: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _weights(self) -> Loss:
        if isinstance(self.class_weights, tuple) and min(self.class_weights, default=0) <= 0:
            raise ValueError(f"class_weights must all be above 0, got {self.class_weights}")
        return self


def balanced(pixels: NDArray[np.int64]) -> list[float]:
    """Return weights by the inverse root of each class's share, with an unchanged mean loss; absent classes get 1."""
    share = pixels / max(1, pixels.sum())
    weights = np.where(share > 0, 1 / np.sqrt(np.maximum(share, 1e-12)), 0)
    weights = weights / max(1e-12, float((share * weights).sum()))
    return [float(w) for w in np.where(share > 0, weights, 1.0)]


def pixel_loss(logits: Tensor, masks: Tensor, settings: Loss, weights: Tensor | None) -> Tensor:
    """Return the loss of one head; logits (b, n, h', w') are resized to the masks, (b, h, w).

    The sum over labelled pixels is divided by the number of all pixels, as in mmsegmentation: an image without labels
    adds nothing, and the loss does not depend on how a batch is divided among processes.
    """
    if settings.ohem is None and not settings.dice and fused_loss.can_fuse(logits):
        return fused_loss.pixel_losses(logits, masks, weights).mean()
    logits = bilinear(logits.float(), masks.shape[-2:])
    labels = masks.long()
    pixels = logits.movedim(1, -1).flatten(0, -2)  # contiguous in the classes
    each = F.cross_entropy(
        pixels, labels.flatten(), weights, ignore_index=IGNORED, reduction="none"
    )  # 0 where ignored
    each = each.view_as(labels)
    if settings.ohem is not None:
        each = each * ohem_weights(logits.detach(), labels, settings.ohem, settings.ohem_keep)
    loss = each.mean()
    if settings.dice:
        loss = loss + settings.dice * dice_loss(logits, labels)
    return loss


def ohem_weights(logits: Tensor, labels: Tensor, threshold: float, keep: int) -> Tensor:
    """Return the weights of OHEM, (b, h, w): above 0 for uncertain pixels, at least `keep` labelled ones per image.

    Weights are scaled so that each image counts as much as with all its labelled pixels.
    """
    labelled = labels != IGNORED
    probability = logits.softmax(1).gather(1, labels.where(labelled, 0)[:, None])[:, 0]
    probability = probability.where(labelled, 2.0)
    limit = probability.flatten(1).sort(1).values[:, min(keep, probability[0].numel()) - 1]
    chosen = (probability <= limit.clamp(min=threshold)[:, None, None]) & labelled
    factor = labelled.flatten(1).sum(1) / chosen.flatten(1).sum(1).clamp(min=1)
    return chosen * factor[:, None, None]


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 - dice, averaged over the classes that occur in an image, then over images."""
    labelled = labels != IGNORED
    ones = F.one_hot(labels.where(labelled, 0), logits.shape[1]).movedim(-1, 1) * labelled[:, None]
    chance = logits.softmax(1) * labelled[:, None]
    both = (chance * ones).flatten(2).sum(2)
    sizes = (chance + ones).flatten(2).sum(2)
    present = ones.flatten(2).any(2)
    dice = (1 - 2 * both / sizes.clamp(min=1e-6)) * present
    return (dice.sum(1) / present.sum(1).clamp(min=1)).mean()


def keep_masks(keys: Tensor, channels: int, rate: float, seed: int, device: torch.device) -> Tensor:
    """Return factors for dropout of channels, (b, channels): 0 or 1 / (1 - rate), drawn from (seed, epoch, sample)."""
    rows = []
    for epoch, index in keys.tolist():
        rng = np.random.default_rng(derive_seed(seed, epoch, index, channels))
        rows.append(rng.random(channels) >= rate)
    masks = torch.from_numpy(np.stack(rows)).float() / (1 - rate)
    return masks.to(device)
