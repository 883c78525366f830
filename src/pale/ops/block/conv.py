"""Depthwise convolutions of a block: position encoding with residual and norm, and phi_q, phi_k, phi_v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..registration import define, differentiate
from ..sizes import ceil_div
from .grids import PROGRAMS, conv_grid, launch_kernel, sum_rows, zeros_if_none
from .norm import add_sums, launch_norm_backward


@define(
    "conv_norm(Tensor x, Tensor weight, Tensor bias, Tensor gamma, Tensor beta, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, weight, *_: (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        weight.new_empty((9, len(weight)), dtype=torch.float32),
    ),
)
def _conv_norm_op(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    total, normed, taps = torch.empty_like(x), torch.empty_like(x), stack_taps(weight)
    launch_conv_norm(x, taps, bias, gamma, beta, total, normed, eps)
    return total, normed, taps


def conv_norm(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the sum x + conv(x) + bias, and its LayerNorm."""
    total, normed, _ = _conv_norm_op(x, weight, *rest)
    return total, normed


def launch_conv_norm(x: Tensor, *rest: Any) -> None:
    """Write sum and norm of a contiguous map; `rest` are taps, bias, gamma, beta, both results and eps."""
    *tensors, eps = rest
    grid, rows, blocks = conv_grid(x, whole=True)
    launch_kernel("conv_norm", grid, x, *tensors, x.shape[1], x.shape[2], rows, eps, **blocks)


@define(
    "conv_norm_backward(Tensor g_sum, Tensor g_norm, Tensor x, Tensor sum, Tensor taps, Tensor gamma, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    lambda g, g_norm, x, total, taps, gamma, eps: (
        x.new_empty(x.shape),
        taps.new_empty((1, taps.shape[1], 9)),
        gamma.new_empty((3, *gamma.shape)),
    ),
)
def conv_norm_backward(
    g_sum: Tensor,
    g_norm: Tensor,
    x: Tensor,
    total: Tensor,
    taps: Tensor,
    gamma: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, of the weight, (1, c, 9), and of gamma, beta and the bias, (3, c)."""
    g, _, sums = launch_norm_backward(g_norm, g_sum, total, gamma, eps)
    x = x.contiguous()
    return launch_conv_backward_x(g, taps), _weights_gradient(x, g), add_sums(sums, gamma.dtype)


def launch_conv_backward_x(g: Tensor, taps: Tensor) -> Tensor:
    """Return the gradient of x of the sum x + conv(x) + bias."""
    grid, rows, blocks = conv_grid(g, whole=False)
    dx = torch.empty_like(g)
    _, h, w, _ = g.shape
    launch_kernel("conv_backward_x", grid, g, taps, dx, h, w, rows, **blocks)
    return dx


def _conv_norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, gamma, _, ctx.eps = inputs
    total, _, taps = output
    ctx.weight = weight.shape, weight.dtype
    ctx.mark_non_differentiable(taps)
    ctx.save_for_backward(x, total, taps, gamma)


def _conv_norm_backward(
    ctx: Any, g_sum: Tensor | None, g_norm: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    both = zeros_if_none(g_sum, saved[1]), zeros_if_none(g_norm, saved[1])
    dx, dw, (dgamma, dbeta, dbias) = conv_norm_backward(*both, *saved, ctx.eps)
    shape, dtype = ctx.weight
    return dx, dw.view(shape).to(dtype), dbias, dgamma, dbeta, None


differentiate("conv_norm", _conv_norm_backward, _conv_norm_save)


def stack_taps(*weights: Tensor) -> Tensor:
    """Return weights of convolutions, (c, 1, 3, 3) each, as rows of taps, (9 per convolution, c), in float32."""
    return torch.cat([weight.flatten(1).T for weight in weights]).float()


def _weights_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradients of the weights of one or three convolutions, (1 or 3, c, 9)."""
    c = x.shape[-1]
    return sum_rows(launch_weights_gradient(x, g), dtype=torch.float32, taps=c).view(-1, c, 9)


def launch_weights_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return partial gradients of the weights of one or three convolutions of `x`; `g` is one map or three."""
    b, h, w, c = x.shape
    n = 3 if g.ndim > x.ndim else 1
    (_, channels), _, blocks = conv_grid(x, whole=False)
    blocks["BLOCK_W"] = max(1, blocks["BLOCK_W"] // 2)
    strips = ceil_div(w, blocks["BLOCK_W"])
    # As many programs as run at the same time: each combines 27 sums at its end.
    each = max(1, ceil_div(b * strips * channels, 2 * PROGRAMS))
    programs = strips * ceil_div(b, each)
    dt = x.new_empty((programs, 9 * n * c), dtype=torch.float32)
    tensors, numbers, three = (x, g, dt), (b, h, w, each), {"THREE": n == 3}
    grid = programs, channels
    launch_kernel("conv_backward_w", grid, *tensors, *numbers, warps=2, **three, **blocks)
    return dt


@define(
    "conv_three(Tensor x, Tensor w_q, Tensor w_k, Tensor w_v) -> (Tensor, Tensor)",
    lambda x, w_q, *_: (
        x.new_empty((3, *x.shape)),
        w_q.new_empty((27, len(w_q)), dtype=torch.float32),
    ),
)
def _conv_three_op(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, taps = x.new_empty((3, *x.shape)), stack_taps(*weights)
    launch_conv_three(x, taps, y)
    return y, taps


def conv_three(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Return three convolutions of one map, (3, b, h, w, c)."""
    y: Tensor = _conv_three_op(x, w_q, w_k, w_v)[0]
    return y


def launch_conv_three(x: Tensor, taps: Tensor, y: Tensor) -> None:
    """Write three convolutions of a contiguous map to `y`, (3, b, h, w, c)."""
    grid, rows, blocks = conv_grid(x, whole=False)
    launch_kernel("conv_three", grid, x, taps, y, *_sizes(x), rows, **blocks)


@define(
    "conv_three_backward(Tensor g, Tensor x, Tensor taps) -> (Tensor, Tensor)",
    lambda g, x, taps: (x.new_empty(x.shape), taps.new_empty((3, taps.shape[1], 9))),
)
def conv_three_backward(g: Tensor, x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the three weights, (3, c, 9)."""
    g, x = g.contiguous(), x.contiguous()
    return launch_conv_three_backward_x(g, taps), _weights_gradient(x, g)


def launch_conv_three_backward_x(g: Tensor, taps: Tensor) -> Tensor:
    """Return the gradient of the map from those of its three convolutions, (3, b, h, w, c)."""
    dx = torch.empty_like(g[0])
    grid, rows, blocks = conv_grid(dx, whole=False)
    launch_kernel("conv_three_backward_x", grid, g, taps, dx, *_sizes(dx), rows, **blocks)
    return dx


def _sizes(x: Tensor) -> tuple[int, int, int]:
    b, h, w, _ = x.shape
    return b * h * w, h, w


def _conv_three_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *weights = inputs
    ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1])


def _conv_three_backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if g is None:
        return (None,) * 4
    dx, dws = conv_three_backward(g, *ctx.saved_tensors)
    like = zip(dws, ctx.weights, strict=True)
    return dx, *(dw.view(shape).to(dtype) for dw, (shape, dtype) in like)


differentiate("conv_three", _conv_three_backward, _conv_three_save)
