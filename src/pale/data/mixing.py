"""Mixup and CutMix, timm's, with one draw for the global batch of a step."""

from __future__ import annotations

from pydantic import Field
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from ..settings import Settings
from .draws import seeded


class Mix(Settings):
    """How two images of a batch become one; values of DeiT, Swin and CSWin, which the paper follows."""

    mixup: float = Field(default=0.8, ge=0)  # alpha; 0 is off
    cutmix: float = Field(default=1.0, ge=0)
    probability: float = Field(default=1.0, ge=0, le=1)
    switch: float = Field(default=0.5, ge=0, le=1)  # share of CutMix where both are on
    smoothing: float = Field(default=0.1, ge=0, lt=1)

    @property
    def on(self) -> bool:
        """Whether anything is mixed at all."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)


class Mixer:
    """Mixes a shard of a step's batch as the whole batch would be mixed (see `shard_positions`)."""

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
        """(b, 3, h, w) and (b,) to mixed images and soft labels (b, classes)."""
        if not self.mix.on:
            return images, mixup_target(labels, self.classes, 1.0, self.mix.smoothing)
        if len(images) % 2:
            raise ValueError(
                f"mixing needs an even number of images on each process, got {len(images)}; "
                "change batch or accumulate, or set mix.mixup and mix.cutmix to 0"
            )
        with seeded(self.seed, step):
            mixed: tuple[Tensor, Tensor] = self.timm(images, labels)
        return mixed
