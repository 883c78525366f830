"""UperNet (Xiao et al., ECCV 2018) on a backbone of four maps, as the paper uses it for ADE20K.

Pyramid pooling on the last map, a feature pyramid down from it, the fusion of its levels, a linear
classifier; in training an auxiliary FCN head on the third map. Every head ends at a quarter of the
image's size (the auxiliary one at a sixteenth); the caller resizes. As in the segmentation models
of Swin and CSWin, which the paper follows, each map of the backbone is normalised first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ...core.settings import MAX_WIDTH
from ...model.layers import LayerNorm2d
from ...model.pale_transformer import VARIANTS
from ...ops.sizes import any_size
from ..backbones import STRIDES, DenseModel, build_backbone, layer_groups, parameters_without_decay
from .resizing import bilinear

POOLS = (1, 2, 3, 6)  # cells on each side, for each level of pyramid pooling
AUXILIARY_MAP = 2  # stage 3


class ConvNormAct(nn.Sequential):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, c_in: int, c: int, kernel: int) -> None:
        super().__init__(
            nn.Conv2d(c_in, c, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(inplace=True),
        )


class PyramidPooling(nn.Module):
    """Concatenates the last map with its means over 1, 4, 9 and 36 cells, and merges them by a 3x3 convolution."""

    def __init__(self, c_in: int, c: int) -> None:
        super().__init__()
        self.pools = POOLS
        self.cells = nn.ModuleList(ConvNormAct(c_in, c, 1) for _ in POOLS)
        self.merge = ConvNormAct(c_in + len(POOLS) * c, c, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c_in, h, w) -> (b, c, h, w)."""
        means = [
            resize(cell(cell_means(x, n)), x)
            for n, cell in zip(self.pools, self.cells, strict=True)
        ]
        return self.merge(concatenate([x, *means]))


class UperNetHead(nn.Module):
    """Pyramid pooling, feature pyramid, fusion, classifier."""

    def __init__(self, c_in: Sequence[int], c: int, classes: int) -> None:
        super().__init__()
        self.pyramid = PyramidPooling(c_in[-1], c)
        self.laterals = nn.ModuleList(ConvNormAct(n, c, 1) for n in c_in[:-1])
        self.smooth = nn.ModuleList(ConvNormAct(c, c, 3) for _ in c_in[:-1])
        self.fuse = ConvNormAct(len(c_in) * c, c, 3)
        self.classifier = nn.Conv2d(c, classes, 1)

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps, the finest first -> (b, c, h, w) of the finest."""
        levels = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=False)]
        levels.append(self.pyramid(maps[-1]))
        for i in range(len(levels) - 2, -1, -1):  # from coarse to fine
            levels[i] = levels[i] + resize(levels[i + 1], levels[i])
        finer = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=False)]
        levels = [resize(x, levels[0]) for x in [*finer, levels[-1]]]
        return self.fuse(concatenate(levels))

    def forward(self, maps: Sequence[Tensor], keep: Tensor | None = None) -> Tensor:
        """Return logits, (b, classes, h, w) of the finest map."""
        return self.classifier(drop_channels(self.features(maps), keep))


class FCNHead(nn.Module):
    """A 3x3 convolution and a classifier on one map."""

    def __init__(self, c_in: int, c: int, classes: int) -> None:
        super().__init__()
        self.conv = ConvNormAct(c_in, c, 3)
        self.classifier = nn.Conv2d(c, classes, 1)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return logits, (b, classes, h, w)."""
        return self.classifier(drop_channels(self.conv(x), keep))


class UperNet(nn.Module):
    """A backbone with both heads.

    Args:
        backbone: returns four maps at strides 4, 8, 16, 32.
        channels: channels of each map.
        classes: number of classes.
        width: channels of the decode head.
        auxiliary: channels of the auxiliary head, 0 for none.
        multiple: images are padded on the right and bottom to a multiple of this; 1 for backbones that accept any size.
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: Sequence[int],
        classes: int,
        width: int = 512,
        auxiliary: int = 256,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        self.backbone, self.multiple, self.width = backbone, multiple, width
        self.norms = nn.ModuleList(LayerNorm2d(c) for c in channels)
        self.decode = UperNetHead(channels, width, classes)
        self.auxiliary = None
        if auxiliary:
            self.auxiliary = FCNHead(channels[AUXILIARY_MAP], auxiliary, classes)
        # Layers that new classes replace; `load_into` reads this.
        classifiers = ["decode.classifier"] + ["auxiliary.classifier"] * bool(auxiliary)
        self.pretrained_cfg = {"classifier": tuple(classifiers)}
        for head in (self.decode, self.auxiliary):
            if head is not None:
                init_head(head)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Images (b, 3, h, w) -> logits (b, classes, h / 4, w / 4), rounded up; in training also auxiliary logits.

        Args:
            x: normalised images.
            keep: (b, width + auxiliary) factors of the channels before the classifiers: dropout, drawn by the task.
        """
        h, w = x.shape[-2:]
        if self.multiple > 1:
            x = F.pad(x, (0, -w % self.multiple, 0, -h % self.multiple))
        maps = [norm(y) for norm, y in zip(self.norms, self.backbone(x), strict=True)]
        if self.multiple > 1:
            maps = [y[..., : -(-h // s), : -(-w // s)] for y, s in zip(maps, STRIDES, strict=True)]
        keeps = (None, None) if keep is None else (keep[:, : self.width], keep[:, self.width :])
        logits = self.decode(maps, keeps[0])
        if not self.training or self.auxiliary is None:
            return logits
        return logits, self.auxiliary(maps[AUXILIARY_MAP], keeps[1])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks of the backbone in the backward pass."""
        cast("Any", self.backbone).model.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone exempts."""
        return parameters_without_decay(self.backbone, "backbone.model.")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the layers for layer-wise learning rates: those of the backbone, then the heads."""
        return layer_groups(self.backbone, coarse, "backbone.model.")


def cell_means(x: Tensor, n: int) -> Tensor:
    """Adaptive average pooling, (b, c, h, w) -> (b, c, n, n).

    PyTorch's own ties an exported program to the size it was traced with, and its gradient has no deterministic
    algorithm on a GPU, so in both cases it is computed by two matrix products.
    """
    repeatable = x.is_cuda and torch.are_deterministic_algorithms_enabled()
    if not (any_size(*x.shape[2:]) or repeatable):
        return F.adaptive_avg_pool2d(x, n)
    rows, columns = (_cell_weights(x.shape[axis], n, x) for axis in (2, 3))
    return rows @ x @ columns.mT


def _cell_weights(length: int, n: int, like: Tensor) -> Tensor:
    """Return the weight of each row (or column) in the mean of each cell, (n, length)."""
    i = torch.arange(length, device=like.device)
    cell = torch.arange(n, device=like.device)[:, None]
    # Both as tensors: the ONNX exporter cannot multiply by a size.
    all_ = torch.full_like(cell, length)
    start, end = cell * all_ // n, ((cell + 1) * all_ + n - 1) // n
    inside = torch.logical_and(start <= i, i < end)
    return inside.to(like.dtype) / (end - start).to(like.dtype)


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Resize to the height and width of `like`: bilinear, corners not aligned."""
    if not any_size(*like.shape[-2:]) and x.shape[-2:] == like.shape[-2:]:
        return x
    return bilinear(x, like.shape[-2:])


def concatenate(maps: Sequence[Tensor]) -> Tensor:
    """Concatenate maps; channels last in memory, like those of the backbone: fast for convolutions on a GPU."""
    x = torch.cat(list(maps), 1)
    return x if any_size(*x.shape[2:]) else x.contiguous(memory_format=torch.channels_last)


def drop_channels(x: Tensor, keep: Tensor | None) -> Tensor:
    """Scale whole channels by `keep`, (b, c)."""
    return x if keep is None else x * keep[..., None, None].to(x.dtype)


@torch.no_grad()
def init_head(head: nn.Module) -> None:
    """Initialise as mmsegmentation does: He for convolutions before ReLU, a normal of 0.01 for the classifier."""
    for module in head.modules():
        if isinstance(module, nn.Conv2d) and module.bias is None:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(cast("Tensor", module.bias))


class SegmentationModel(DenseModel):
    """Settings of UperNet, of its backbone, and of the weights that they start from.

    Attributes:
        width: channels of the decode head.
        auxiliary: channels of the auxiliary head; 0 for none.
        dropout: dropout of channels before the classifiers, as in the heads of mmsegmentation.
    """

    width: int = Field(default=512, ge=1, le=MAX_WIDTH)
    auxiliary: int = Field(default=256, ge=0, le=MAX_WIDTH)
    dropout: float = Field(default=0.1, ge=0, lt=1)

    def network(self, classes: int, size: int | tuple[int, int]) -> UperNet:
        """Build the model with random weights."""
        backbone, channels = build_backbone(self, size, "UperNet")
        multiple = 1 if self.name in VARIANTS else STRIDES[-1]
        return UperNet(backbone, channels, classes, self.width, self.auxiliary, multiple)
