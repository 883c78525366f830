"""UperNet (Xiao et al., ECCV 2018) on a backbone of four maps, as the paper uses it for ADE20K.

Pyramid pooling on the last map, a feature pyramid down from it, the fusion of its levels, a linear
classifier; in training an auxiliary FCN head on the third map. Every head ends at a quarter of the
image's size (the auxiliary one at a sixteenth); who calls resizes. As in Swin's and CSWin's
segmentation models, which the paper follows, each map of the backbone is normalised first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers import LayerNorm2d
from ...ops.sizes import any_size
from ..backbones import STRIDES, layer_groups, spared
from .resizing import bilinear

POOLS = (1, 2, 3, 6)  # cells a side of the pyramid
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
    """The last map beside its means over 1, 4, 9 and 36 cells, merged by a 3x3 convolution."""

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
        return self.merge(joined([x, *means]))


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
        """The maps, finest first -> (b, c, h, w) of the finest."""
        levels = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=False)]
        levels.append(self.pyramid(maps[-1]))
        for i in range(len(levels) - 2, -1, -1):  # from coarse to fine
            levels[i] = levels[i] + resize(levels[i + 1], levels[i])
        finer = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=False)]
        levels = [resize(x, levels[0]) for x in [*finer, levels[-1]]]
        return self.fuse(joined(levels))

    def forward(self, maps: Sequence[Tensor], keep: Tensor | None = None) -> Tensor:
        """Logits, (b, classes, h, w) of the finest map."""
        return self.classifier(dropped(self.features(maps), keep))


class FCNHead(nn.Module):
    """A 3x3 convolution and a classifier on one map."""

    def __init__(self, c_in: int, c: int, classes: int) -> None:
        super().__init__()
        self.conv = ConvNormAct(c_in, c, 3)
        self.classifier = nn.Conv2d(c, classes, 1)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits, (b, classes, h, w)."""
        return self.classifier(dropped(self.conv(x), keep))


class UperNet(nn.Module):
    """A backbone with both heads.

    Args:
        backbone: gives four maps at strides 4, 8, 16, 32 and names their channels.
        channels: of each map.
        classes: how many.
        width: channels of the decode head.
        auxiliary: channels of the auxiliary head, 0 for none.
        multiple: the image is padded, right and below, to a multiple of this; 1 for backbones that take any size.
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
        # What a new set of classes replaces; `weights.put` reads it.
        classifiers = ["decode.classifier"] + ["auxiliary.classifier"] * bool(auxiliary)
        self.pretrained_cfg = {"classifier": tuple(classifiers)}
        for head in (self.decode, self.auxiliary):
            if head is not None:
                init_head(head)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Images (b, 3, h, w) -> logits (b, classes, h / 4, w / 4), rounded up; in training the auxiliary ones too.

        Args:
            x: normalised images.
            keep: (b, width + auxiliary) factors of the channels before the classifiers: dropout, drawn outside.
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
        """Compute the backbone's blocks again in the backward pass."""
        cast("Any", self.backbone).model.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """What the backbone names."""
        return spared(self.backbone, "backbone.model.")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates: those of the backbone, then the heads."""
        return layer_groups(self.backbone, coarse, "backbone.model.")


def cell_means(x: Tensor, n: int) -> Tensor:
    """Adaptive average pooling, (b, c, h, w) -> (b, c, n, n).

    PyTorch's own ties an exported program to the size it was traced with, so there it is two products.
    """
    if not any_size():
        return F.adaptive_avg_pool2d(x, n)
    rows, columns = (_shares(x.shape[axis], n, x) for axis in (2, 3))
    return rows @ x @ columns.mT


def _shares(length: int, n: int, like: Tensor) -> Tensor:
    """(n, length): the share that each row (or column) has in the mean of each cell."""
    i = torch.arange(length, device=like.device)
    cell = torch.arange(n, device=like.device)[:, None]
    # Both by tensors: the ONNX exporter knows no product with a size.
    all_ = torch.full_like(cell, length)
    start, end = cell * all_ // n, ((cell + 1) * all_ + n - 1) // n
    inside = (start <= i) & (i < end)
    return inside.to(like.dtype) / (end - start).to(like.dtype)


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear, corners not aligned, to the height and width of `like`."""
    if not any_size() and x.shape[-2:] == like.shape[-2:]:
        return x
    return bilinear(x, like.shape[-2:])


def joined(maps: Sequence[Tensor]) -> Tensor:
    """Maps beside each other; channels last in memory, as the backbone's are and convolutions on a GPU want them."""
    x = torch.cat(list(maps), 1)
    return x if any_size() else x.contiguous(memory_format=torch.channels_last)


def dropped(x: Tensor, keep: Tensor | None) -> Tensor:
    """Whole channels scaled by `keep`, (b, c)."""
    return x if keep is None else x * keep[..., None, None].to(x.dtype)


@torch.no_grad()
def init_head(head: nn.Module) -> None:
    """mmsegmentation's: He for convolutions under ReLU, a normal of 0.01 for the classifier."""
    for module in head.modules():
        if isinstance(module, nn.Conv2d) and module.bias is None:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(cast("Tensor", module.bias))
