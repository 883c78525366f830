"""Parts with no paper content. Everything works on channels-last maps, (b, h, w, c)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops.depthwise_conv import depthwise_conv, depthwise_convs
from .ops.linear import linear


class Linear(nn.Linear):
    """PyTorch's linear layer, faster on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., c_in) -> (..., c_out)."""
        return linear(x, self.weight, self.bias)


class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, c: int, hidden: int, **dd: Any) -> None:
        super().__init__()
        self.fc1 = Linear(c, hidden, **dd)
        self.act = nn.GELU()
        self.fc2 = Linear(hidden, c, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(..., c) -> (..., c)."""
        if untouched(self.fc1, Linear) and untouched(self.act, nn.GELU):
            return self.fc2(linear(x, self.fc1.weight, self.fc1.bias, gelu=True))
        return self.fc2(self.act(self.fc1(x)))


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether nothing but the forward pass of `kind` runs when `module` is called: not replaced, no hooks."""
    return type(module).forward is kind.forward and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class DepthwiseConv(nn.Conv2d):
    """3x3 convolution of each channel alone; the size of the map stays."""

    def __init__(self, channels: int, bias: bool = True, **dd: Any) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels, bias=bias, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        return depthwise_conv(x, self.weight, self.bias)


class SeparableConv(nn.Module):
    """3x3 depthwise, then pointwise; the depthwise bias would be lost in the pointwise one."""

    def __init__(self, channels: int, **dd: Any) -> None:
        super().__init__()
        self.depthwise = DepthwiseConv(channels, bias=False, **dd)
        self.pointwise = Linear(channels, channels, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        return separable_convs(x, self)[0]


def separable_convs(x: Tensor, *convs: SeparableConv) -> list[Tensor]:
    """Several separable convolutions of one map, whose depthwise halves read it together."""
    weights = [conv.depthwise.weight for conv in convs]
    maps = depthwise_convs(x, weights, [conv.depthwise.bias for conv in convs])
    return [conv.pointwise(y) for conv, y in zip(convs, maps, strict=True)]


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an NCHW map."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c, h, w)."""
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class TokenMix(nn.Module):
    """MixToken: where `mask` is set, tokens come from the image at the other end of the batch.

    The mask is no buffer: it is not saved, and a training step writes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None  # (h, w), bool

    def set(self, mask: Tensor) -> None:
        """Take a mask; its memory stays where it was, so that a compiled model sees the new one."""
        if (
            self.mask is not None
            and self.mask.shape == mask.shape
            and self.mask.device == mask.device
        ):
            self.mask.copy_(mask)
        else:
            self.mask = mask.clone()

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        return x if self.mask is None else torch.where(self.mask[..., None], x.flip(0), x)
