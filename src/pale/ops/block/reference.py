"""The operators of a block in plain PyTorch: the definition of what the kernels compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..depthwise_conv import depthwise_conv, depthwise_convs
from ..linear import linear


def conv_norm(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + conv(x) + bias (position encoding and residual), and its LayerNorm."""
    x = x + depthwise_conv(x, weight, bias)
    return x, norm(x, None, gamma, beta, eps)


def conv_three(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Return the depthwise halves of phi_q, phi_k and phi_v, (3, b, h, w, c)."""
    return torch.stack(depthwise_convs(x, [w_q, w_k, w_v], [None, None, None]))


def linear_three(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, b_q: Tensor, b_k: Tensor, b_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pointwise halves of phi_q, phi_k and phi_v, from (3, b, h, w, c)."""
    return linear(x[0], w_q, b_q), linear(x[1], w_k, b_k), linear(x[2], w_v, b_v)


def finish(
    x: Tensor,
    y: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    w_1: Tensor,
    b_1: Tensor,
    w_2: Tensor,
    b_2: Tensor,
    next_scale: Tensor | None,
) -> Tensor:
    """Return the block after the projection: residual, norm, MLP, residual.

    Scales are one number per image, for drop path.
    """
    x = x + _scaled(y + bias, scale)
    y = linear(norm(x, None, gamma, beta, eps), w_1, b_1, gelu=True)
    return x + _scaled(linear(y, w_2, b_2), next_scale)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else scale.to(x.dtype).view(-1, 1, 1, 1) * x


def norm(x: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Return LayerNorm of x, or of x + bias."""
    return F.layer_norm(x if bias is None else x + bias, x.shape[-1:], gamma, beta, eps)


def separable_three(
    x: Tensor,
    taps: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    b_q: Tensor,
    b_k: Tensor,
    b_v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three separable convolutions of one map: depthwise by `taps`, (27, c), then linear layers."""
    c = x.shape[-1]
    three = [t.T.reshape(c, 1, 3, 3).to(x.dtype) for t in taps.view(3, 9, c)]
    return linear_three(conv_three(x, *three), w_q, w_k, w_v, b_q, b_k, b_v)


def linear_norm(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    next_bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the sum x + linear(y) + next_bias, and the LayerNorm of the sum without `next_bias`."""
    x = x + linear(y, weight, bias)
    return x + next_bias, norm(x, None, gamma, beta, eps)


def mlp_residual(x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, total: Tensor) -> Tensor:
    """Return linear, GELU and linear added to `total`, which contains the last bias."""
    return total + linear(linear(x, w_1, b_1, gelu=True), w_2, None)
