"""Linear layers of a block: the pointwise halves of phi_q, phi_k and phi_v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..registration import define, differentiate
from ..sizes import ceil_div
from . import grids
from .grids import (
    launch_kernel,
    needs_small_blocks,
    next_power,
    sum_rows,
    tokens_per_image,
    zeros_if_none,
)


def launch_linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    out: tuple[Tensor, ...],
    gelu: bool = False,
    both: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Run linear layers of equal size, one of (..., c) or three of (3, ..., c); `both` is the scaled GELU of one."""
    n, c = weights[0].shape
    tokens = out[0].numel() // n
    few = tokens <= grids.FEW and not needs_small_blocks(x)
    block_t, block_n, block_k, warps = (
        (64, 64, 32, 4) if needs_small_blocks(x) else (128, 128, 64, 8)
    )
    if both is not None:
        block_t = 64
    if few:
        block_t, block_n, block_k, warps = 64, 64, 64, 4
    block_n = min(block_n, next_power(n))
    block_k = next(k for k in (block_k, 128, 64, 32, 16) if k <= block_k and c % k == 0)
    blocks = {"BLOCK_T": block_t, "BLOCK_N": block_n, "BLOCK_K": block_k}
    grid = ceil_div(tokens, block_t) * ceil_div(n, block_n), len(weights)
    three = [(y * 3)[:3] for y in (weights, biases, out)]
    optional = x if both is None else both, x if scale is None else scale
    tensors = x, *three[0], *three[1], *three[2], *optional
    given = {"GELU": gelu, "BOTH": both is not None, "SCALE": scale is not None}
    given["QUICK"] = x.dtype != torch.float32
    options = {"warps": warps, "stages": 4 if few else 3}
    numbers = tokens, tokens_per_image(x)
    launch_kernel("linear", grid, *tensors, *numbers, C=c, N=n, **options, **given, **blocks)


@define(
    "linear_three(Tensor x, Tensor w_q, Tensor w_k, Tensor w_v, Tensor b_q, Tensor b_k, Tensor b_v)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, *rest: tuple(x.new_empty((*x.shape[1:-1], len(w))) for w in rest[:3]),
)
def linear_three(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three linear layers of (3, b, h, w, c); biases may have another dtype than `x`."""
    x = x.contiguous()
    q, k, v = (x.new_empty((*x.shape[1:-1], len(w))) for w in rest[:3])
    launch_linear(x, rest[:3], rest[3:], (q, k, v))
    return q, k, v


@define(
    "linear_three_backward(Tensor g_q, Tensor g_k, Tensor g_v, Tensor x, Tensor w_q, Tensor w_k, Tensor w_v)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda g_q, g_k, g_v, x, *ws: (
        x.new_empty(x.shape),
        *(w.new_empty(w.shape) for w in ws),
        x.new_empty((3, len(ws[0])), dtype=torch.float32),
    ),
)
def linear_three_backward(
    g_q: Tensor, g_k: Tensor, g_v: Tensor, x: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x, of the weights, and of the biases, (3, n) in float32."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, flat = dx.flatten(1, -2), x.flatten(1, -2)
    gs = [g.contiguous().flatten(0, -2) for g in (g_q, g_k, g_v)]
    dws = []
    for i, (g, weight) in enumerate(zip(gs, weights, strict=True)):
        torch.mm(g, weight, out=rows[i])
        dws.append(g.T @ flat[i])
    return dx, *dws, sum_rows(*gs, dtype=torch.float32).view(3, -1)


def _linear_three_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype = inputs[4].dtype
    ctx.save_for_backward(*inputs[:4])


def _linear_three_backward(ctx: Any, *gs: Tensor | None) -> Any:
    x, *weights = ctx.saved_tensors
    *rest, db = linear_three_backward(*(zeros_if_none(g, x[0]) for g in gs), x, *weights)
    return *rest, *db.to(ctx.dtype).unbind()


differentiate("linear_three", _linear_three_backward, _linear_three_save)


@register_flop_formula(torch.ops.pale.linear_three)
def _(x: tuple[int, ...], *_: Any, **__: object) -> int:
    return 2 * torch.Size(x).numel() * x[-1]


@register_flop_formula(torch.ops.pale.linear_three_backward)
def _(g_q: Any, g_k: Any, g_v: Any, x: tuple[int, ...], *_: Any, **__: object) -> int:
    return 4 * torch.Size(x).numel() * x[-1]
