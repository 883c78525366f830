"""3x3 depthwise convolution of channels-last maps.

PyTorch's own, seen by the compiler as one operator on (b, h, w, c): handed the convolution and the
two permutations around it, Inductor picks odd layouts for the tensors in between and copies each
input once for every convolution that reads it (on two CPU cores this took a tenth of a compiled
Pale-T).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel of `x`, (b, h, w, c), with its 3x3 of `weight`, (c, 1, 3, 3), zeros around the map."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return opaque(x, weight, bias)
    return convolve(x, weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The computation itself; both permutations are views."""
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1, groups=weight.shape[0])
    return y.permute(0, 2, 3, 1)


@torch.library.custom_op("pale::depthwise_conv", mutates_args=())
def opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`convolve` as one operator."""
    return convolve(x, weight, bias).contiguous()


@opaque.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("pale::depthwise_conv_backward", mutates_args=())
def _opaque_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    c = weight.shape[0]
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad.permute(0, 3, 1, 2),
        x.permute(0, 3, 1, 2),
        weight,
        [c],
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        c,
        [True, True, bias],
    )
    grad_bias = grad_bias if bias else grad.new_empty(0)
    return grad_x.permute(0, 2, 3, 1).contiguous(), grad_weight.contiguous(), grad_bias


@_opaque_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(weight.shape[0] * bias)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_x, grad_weight, grad_bias = _opaque_backward(grad, *ctx.saved_tensors, ctx.bias)
    return grad_x, grad_weight, grad_bias if ctx.bias else None


opaque.register_autograd(_backward, setup_context=_save)
