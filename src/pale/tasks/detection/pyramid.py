"""Feature pyramid on a backbone, with the interface that torchvision's detectors expect."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import (
    ExtraFPNBlock,
    LastLevelMaxPool,
    LastLevelP6P7,
)

from ...model.layers import LayerNorm2d
from ..backbones import STRIDES, build_backbone
from ..classification.model import Model

Extra = Literal["pool", "p6p7"]


class LastLevelSlice(LastLevelMaxPool):  # type: ignore[misc]
    """Additional level by max pooling with kernel 1 and stride 2, or by slicing if that is better.

    torch 2.11 would compile the pooling separately for odd and even sizes. Its gradient has no deterministic algorithm
    on a GPU, while that of a slice has.
    """

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        """Append every second pixel of the last level."""
        if not (torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled()):
            return super().forward(results, x, names)
        last = results[-1][..., ::2, ::2].clone(memory_format=torch.contiguous_format)
        return [*results, last], [*names, "pool"]


class FeaturePyramid(nn.Module):
    """A backbone with a feature pyramid (Lin et al., CVPR 2017), as torchvision's `BackboneWithFPN`.

    Each map is normalised first, as Swin and CSWin do for detection. Images may have any size: for timm models with
    fixed multiples they are padded right and below, and the maps are cropped.

    Args:
        backbone: returns maps at strides 4, 8, 16, 32.
        channels: channels of each map.
        width: channels of the pyramid.
        multiple: the image is padded to a multiple of this.
        first: index of the map that is the finest level: 0 for Faster and Mask R-CNN (P2), 1 for RetinaNet and FCOS
            (P3).
        extra: "pool": one more level, every second pixel of the last (P6); "p6p7": two more, by convolutions.
    """

    apart = True  # `pale.optimize` may change its dtype separately: the heads compute in float32

    def __init__(
        self,
        backbone: nn.Module,
        channels: Sequence[int],
        width: int = 256,
        multiple: int = 1,
        first: int = 0,
        extra: Extra = "pool",
    ) -> None:
        super().__init__()
        self.backbone, self.multiple, self.first = backbone, multiple, first
        self.norms = nn.ModuleList(LayerNorm2d(c) for c in channels[first:])
        top: ExtraFPNBlock = LastLevelSlice() if extra == "pool" else LastLevelP6P7(width, width)
        self.fpn = FeaturePyramidNetwork(list(channels[first:]), width, extra_blocks=top)
        for module in (*self.fpn.inner_blocks.modules(), *self.fpn.layer_blocks.modules()):
            if isinstance(module, nn.Conv2d):  # as in mmdetection
                nn.init.xavier_uniform_(module.weight)
        self.out_channels = width
        self.strides = (*STRIDES[first:], *((64,) if extra == "pool" else (64, 128)))

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """Images (b, 3, h, w) -> maps (b, width, h / stride, w / stride), rounded up, finest first."""
        h, w = x.shape[-2:]
        if self.multiple > 1:
            x = F.pad(x, (0, -w % self.multiple, 0, -h % self.multiple))
        maps = self.backbone(x)[self.first :]
        strides = STRIDES[self.first :]
        if self.multiple > 1:
            maps = [y[..., : -(-h // s), : -(-w // s)] for y, s in zip(maps, strides, strict=True)]
        normed = [norm(y) for norm, y in zip(self.norms, maps, strict=True)]
        levels: OrderedDict[str, Tensor] = self.fpn(
            OrderedDict((str(i), y) for i, y in enumerate(normed))
        )
        return levels

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks of the backbone in the backward pass."""
        cast("Any", self.backbone).model.set_grad_checkpointing(enable)


def feature_pyramid(
    name: str = "pale_tiny",
    *,
    size: int | tuple[int, int] = 224,
    width: int = 256,
    first: int = 0,
    extra: Extra = "pool",
    **options: object,
) -> FeaturePyramid:
    """Build a pyramid on Pale or any hierarchical timm model, for any detector of torchvision.

        FasterRCNN(feature_pyramid("pale_tiny"), 91, ...)
        RetinaNet(feature_pyramid("pale_tiny", first=1, extra="p6p7"), 91)

    Args:
        name: name of the model.
        size: size of training images, for models that need it.
        width: channels of the pyramid.
        first: see `FeaturePyramid`.
        extra: see `FeaturePyramid`.
        **options: arguments of the model, by timm's names.
    """
    settings = Model(name=name, options=options)
    return build_pyramid(settings, size, width, first, extra)


def build_pyramid(
    model: Model,
    size: int | tuple[int, int],
    width: int,
    first: int = 0,
    extra: Extra = "pool",
) -> FeaturePyramid:
    """Build the pyramid on the model that the settings name."""
    backbone, channels = build_backbone(model, size, "a feature pyramid")
    multiple = 1 if model.name.startswith("pale_") else STRIDES[-1]
    return FeaturePyramid(backbone, channels, width, multiple, first, extra)
