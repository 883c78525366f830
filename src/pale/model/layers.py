"""Layers that are not specific to the paper, on channels-last maps, (b, h, w, c).

The layers are PyTorch's own, `nn.Linear`, `nn.Conv2d`, `nn.LayerNorm` and `nn.GELU`: other libraries know them by their
exact classes. The modules that contain a layer use a faster implementation if it `is_plain`, and call it otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.depthwise_conv import depthwise_conv, depthwise_convs
from ..ops.linear import can_use_onednn, onednn
from ..ops.shortcuts import is_plain, is_plain_depthwise, is_watched, plain_kind
from ..ops.sizes import exporting


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer(x)`, (..., c_in) -> (..., c_out), of a linear layer; faster on a CPU."""
    if can_use_onednn(x) and is_plain(layer, nn.Linear) and not is_watched():
        return onednn(x, layer.weight, layer.bias)
    y: Tensor = layer(x)
    return y


@plain_kind
class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, c: int, hidden: int, **dd: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(c, hidden, **dd)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, c, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(..., c) -> (..., c)."""
        if (
            can_use_onednn(x)
            and is_plain(self.fc1, nn.Linear)
            and is_exact_gelu(self.act)
            and not is_watched()
        ):
            y = onednn(x, self.fc1.weight, self.fc1.bias, gelu=True)
        else:
            y = self.act(self.fc1(x))
        return project(self.fc2, y)


def is_exact_gelu(module: nn.Module) -> bool:
    """Return whether calling `module` is GELU without approximation, and nothing else."""
    return is_plain(module, nn.GELU) and module.approximate == "none"


def depthwise(channels: int, bias: bool = True, **dd: Any) -> nn.Conv2d:
    """Return a depthwise 3x3 convolution that keeps the size of the map."""
    return nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=bias, **dd)


def compiling() -> bool:
    """Return whether `torch.compile` is tracing, not `torch.export`."""
    return torch.compiler.is_compiling() and not exporting()


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """Return `conv` of a channels-last map, (b, h, w, c) -> (b, h, w, c); both permutations are views."""
    if compiling() and is_plain_depthwise(conv) and not is_watched():
        return depthwise_conv(x, conv.weight, conv.bias)
    y: Tensor = conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return y


@plain_kind
class SeparableConv(nn.Module):
    """3x3 depthwise, then pointwise convolution; a depthwise bias would be redundant."""

    def __init__(self, channels: int, **dd: Any) -> None:
        super().__init__()
        self.depthwise = depthwise(channels, bias=False, **dd)
        self.pointwise = nn.Linear(channels, channels, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        return project(self.pointwise, convolve(self.depthwise, x))


def separable_convs(x: Tensor, *convs: SeparableConv) -> list[Tensor]:
    """Return several separable convolutions of one map; compiled, their depthwise halves are computed together."""
    if not compiling() or is_watched() or not all(map(_separable, convs)):
        return [conv(x) for conv in convs]
    weights = [conv.depthwise.weight for conv in convs]
    maps = depthwise_convs(x, weights, [conv.depthwise.bias for conv in convs])
    return [project(conv.pointwise, y) for conv, y in zip(convs, maps, strict=True)]


def _separable(conv: SeparableConv) -> bool:
    return is_plain(conv, SeparableConv) and is_plain_depthwise(conv.depthwise)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an NCHW map."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c, h, w)."""
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)
