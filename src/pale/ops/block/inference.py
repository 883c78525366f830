"""Fused operations of a block for inference only: without gradients, not traced by a compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sizes import ceil_div
from . import grids
from .conv import launch_conv_three
from .grids import launch_kernel, needs_small_blocks, next_power
from .linear import launch_linear
from .norm import launch_add_norm


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
    q, k, v = (torch.empty_like(x) for _ in range(3))
    maps = x.new_empty((3, *x.shape))
    launch_conv_three(x, taps, maps)
    launch_linear(maps, (w_q, w_k, w_v), (b_q, b_k, b_v), (q, k, v))
    return q, k, v


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
    total, normed = torch.empty_like(x), torch.empty_like(x)
    c = x.shape[-1]
    if c > 256:
        y = F.linear(y, weight)
        launch_add_norm(x, y, bias, None, next_bias, None, gamma, beta, None, total, normed, eps)
        return total, normed
    tokens = x.numel() // c
    blocks = {"C": c, "BLOCK_C": next_power(c), "BLOCK_T": 16 if tokens <= grids.FEW else 64}
    wide = c <= 128 or tokens <= grids.FEW
    blocks["BLOCK_K"] = next(k for k in ((64, 32, 16) if wide else (32, 16)) if c % k == 0)
    tensors = y, weight, bias, x, next_bias, gamma, beta, total, normed
    grid = (ceil_div(tokens, blocks["BLOCK_T"]),)
    launch_kernel("linear_norm", grid, *tensors, tokens, eps, **blocks)
    return total, normed


def mlp_residual(x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, total: Tensor) -> Tensor:
    """Return linear, GELU and linear added to `total`, which contains the last bias and may be changed in place."""
    hidden, c = w_1.shape
    tokens = x.numel() // c
    if c <= grids.WHOLE and hidden % 32 == 0 and tokens > grids.FEW:
        out = torch.empty_like(total)
        blocks = {"C": c, "HIDDEN": hidden, "BLOCK_C": next_power(c), "BLOCK_H": 32}
        blocks["QUICK"] = x.dtype != torch.float32
        blocks["BLOCK_T"] = 32 if needs_small_blocks(x) else 64 if c <= 64 else 128
        grid = (ceil_div(tokens, blocks["BLOCK_T"]),)
        launch_kernel("whole_mlp", grid, x, w_1, b_1, w_2, total, out, tokens, **blocks)
        return out
    y = x.new_empty((tokens, hidden))
    launch_linear(x, (w_1,), (b_1,), (y,), gelu=True)
    total.view(tokens, c).addmm_(y, w_2.T)
    return total


def stem_weights(weight: Tensor) -> Tensor:
    """Return weights of a convolution, (c, channels, k, k), as the kernel reads them, (k, span, c)."""
    c, channels, k, _ = weight.shape
    rows = weight.permute(2, 3, 1, 0).reshape(k, k * channels, c)
    return F.pad(rows, (0, 0, 0, max(16, next_power(k * channels)) - k * channels)).contiguous()


def stem(
    x: Tensor,
    weights: Tensor,
    kernel: int,
    stride: int,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> Tensor:
    """Return LayerNorm of a convolution of (b, channels, h, w), (b, rows, columns, c); `weights` are `stem_weights`."""
    b, channels, h, w = x.shape
    _, span, c = weights.shape
    rows, columns = ceil_div(h, stride), ceil_div(w, stride)
    y = x.new_empty((b, rows, columns, c))
    tokens = b * rows * columns
    x_b, x_c, x_h, x_w = x.stride()
    numbers = tokens, h, w, rows, columns, x_b, x_c, x_h, x_w, eps
    constants = {"KERNEL": kernel, "STRIDE": stride, "CHANNELS": channels, "SPAN": span}
    blocks = {"C": c, "BLOCK_C": next_power(c), "BLOCK_T": 32 if tokens <= grids.FEW else 64}
    tensors = x, weights, bias, gamma, beta, y
    launch_kernel(
        "stem", (ceil_div(tokens, blocks["BLOCK_T"]),), *tensors, *numbers, **constants, **blocks
    )
    return y
