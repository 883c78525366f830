"""3x3 depthwise convolution of channels-last maps.

Eager and exported programs call PyTorch's own convolution. Compiled programs do not: for a convolution between two
permutations, Inductor chooses slow layouts for the intermediate tensors and copies each input once for every
convolution that reads it (a tenth of the time of a compiled Pale-T on two CPU cores). The compiler sees one operator on
(b, h, w, c) instead, and for inference on a CPU nine shifted products of a padded map, which it fuses with the
surrounding operations into one vectorised loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .sizes import exporting


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel of `x`, (b, h, w, c), with its 3x3 kernel in `weight`, (c, 1, 3, 3); zero padding."""
    return depthwise_convs(x, [weight], [bias])[0]


def depthwise_convs(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return several depthwise convolutions of one map."""
    pairs = list(zip(weights, biases, strict=True))
    if not torch.compiler.is_compiling() or exporting():
        return [convolve(x, weight, bias) for weight, bias in pairs]
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        pairs = [(w.to(dtype), None if b is None else b.to(dtype)) for w, b in pairs]
    if device != "cpu" or torch.is_grad_enabled():
        return [opaque(x, weight, bias) for weight, bias in pairs]
    padded = _written(F.pad(x, (0, 0, 1, 1, 1, 1)))
    return [_shifted(padded, _written(w.flatten(1).T.contiguous()), b) for w, b in pairs]


def _written(x: Tensor) -> Tensor:
    """Make the compiler compute `x` once; otherwise it repeats the computation for each reader."""
    from ..compat import force_stride_order

    return force_stride_order(x, x.stride())


def _shifted(padded: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution as nine products; `padded` is (b, h + 2, w + 2, c), `taps` is (9, c)."""
    h, w = padded.shape[1] - 2, padded.shape[2] - 2
    y = None
    for t in range(9):
        i, j = divmod(t, 3)
        term = padded[:, i : i + h, j : j + w] * taps[t]
        y = term if y is None else y + term
    assert y is not None
    return y if bias is None else y + bias


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution by PyTorch; both permutations are views."""
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1, groups=weight.shape[0])
    return y.permute(0, 2, 3, 1)


# Without `custom_op`, which would add about 15 us to each of the 88 calls of a Pale-T.
_library = torch.library.Library("pale", "FRAGMENT")
_library.define("depthwise_conv(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "depthwise_conv_backward(Tensor grad, Tensor x, Tensor weight, bool bias) -> (Tensor, Tensor, Tensor)"
)
opaque = torch.ops.pale.depthwise_conv.default


@torch.library.impl(_library, "depthwise_conv", "CompositeExplicitAutograd")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return convolve(x, weight, bias).contiguous()


@torch.library.register_fake("pale::depthwise_conv", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.impl(_library, "depthwise_conv_backward", "CompositeExplicitAutograd")
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad.permute(0, 3, 1, 2),
        x.permute(0, 3, 1, 2),
        weight,
        bias_sizes=[weight.shape[0]],
        stride=[1, 1],
        padding=[1, 1],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=weight.shape[0],
        output_mask=[True, True, bias],
    )
    grad_bias = grad_bias if bias else grad.new_empty(0)
    return grad_x.permute(0, 2, 3, 1).contiguous(), grad_weight.contiguous(), grad_bias


@torch.library.register_fake("pale::depthwise_conv_backward", lib=_library)
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = x.new_empty(weight.shape[0] if bias else 0)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), grad_bias


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_x, grad_weight, grad_bias = torch.ops.pale.depthwise_conv_backward(
        grad, *ctx.saved_tensors, ctx.bias
    )
    return grad_x, grad_weight, grad_bias if ctx.bias else None


torch.library.register_autograd(
    "pale::depthwise_conv", _backward, setup_context=_save, lib=_library
)
