"""timm's Mixup and CutMix, and MixToken, with one draw for the global batch of a step."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field, model_validator
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from ...core.settings import Settings
from ..seeding import seeded


class Mix(Settings):
    """Settings of Mixup, CutMix and MixToken; values of DeiT, Swin and CSWin, which the paper follows."""

    mixup: float = Field(default=0.8, ge=0)  # alpha; 0 is off
    cutmix: float = Field(default=1.0, ge=0)
    probability: float = Field(default=1.0, ge=0, le=1)
    switch: float = Field(default=0.5, ge=0, le=1)  # probability of CutMix if both are on
    smoothing: float = Field(default=0.1, ge=0, lt=1)
    tokens: float = Field(default=0.0, ge=0)  # alpha of MixToken, which replaces the other two

    @model_validator(mode="after")
    def _exclusive(self) -> Mix:
        if self.tokens and (self.mixup or self.cutmix):
            raise ValueError(
                f"MixToken replaces Mixup and CutMix, got tokens={self.tokens:g}, "
                f"mixup={self.mixup:g} and cutmix={self.cutmix:g}; set mixup and cutmix to 0"
            )
        return self

    @property
    def on(self) -> bool:
        """Whether images are mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)


class Mixer:
    """Mix a shard of a batch with the same result as mixing the whole batch (see `shard_positions`)."""

    def __init__(self, mix: Mix, classes: int, seed: int) -> None:
        self.mix, self.classes, self.seed = mix, classes, seed
        self.timm = Mixup(
            mix.mixup,
            mix.cutmix,
            prob=mix.probability,
            switch_prob=mix.switch,
            label_smoothing=mix.smoothing,
            num_classes=classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return mixed images (b, 3, h, w) and soft labels (b, classes) for labels (b,)."""
        if not self.mix.on:
            return images, mixup_target(labels, self.classes, 1.0, self.mix.smoothing)
        require_even(len(images))
        with seeded(self.seed, step):
            mixed: tuple[Tensor, Tensor] = self.timm(images, labels)
        return mixed


class TokenMixer:
    """Draw MixToken's box as a rectangle of cells of the last map, so that no token of any stage belongs to two images.

    LV-ViT draws it on its only map. Here a cell of the last map is a block of tokens in each earlier map.
    """

    def __init__(self, mix: Mix, classes: int, seed: int) -> None:
        self.mix, self.classes, self.seed = mix, classes, seed

    def cells(self, grid: tuple[int, int], step: int) -> Tensor:
        """Return which cells of the last map come from the partner image, (h, w), bool; equal for the whole batch."""
        cells = torch.zeros(grid, dtype=torch.bool)
        rng = np.random.default_rng((self.seed, step))
        if self.mix.tokens and rng.random() < self.mix.probability:
            ratio = np.sqrt(1 - rng.beta(self.mix.tokens, self.mix.tokens))
            sides = [round(n * ratio) for n in grid]
            starts = [int(rng.integers(n)) - side // 2 for n, side in zip(grid, sides, strict=True)]
            rows, columns = (
                slice(max(start, 0), max(start + side, 0))
                for start, side in zip(starts, sides, strict=True)
            )
            cells[rows, columns] = True
        return cells

    def targets(self, labels: Tensor, cells: Tensor) -> Tensor:
        """Return soft labels (b, classes), mixed by area, for labels (b,)."""
        share = float(cells.float().mean())
        if share:
            require_even(len(labels))
        mixed: Tensor = mixup_target(labels, self.classes, 1 - share, self.mix.smoothing)
        return mixed


def require_even(images: int) -> None:
    """Raise if the number of images is odd: both images of a pair must be on one process."""
    if images % 2:
        raise ValueError(
            f"mixing needs an even number of images on each process, got {images}; "
            "change batch or accumulate, or set mix.mixup, mix.cutmix and mix.tokens to 0"
        )
