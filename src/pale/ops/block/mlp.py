"""Second half of a block: residual, norm, MLP, residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..registration import define, differentiate
from ..sizes import ceil_div
from . import grids
from .grids import PROGRAMS, launch_kernel, sum_rows, tokens_per_image
from .linear import launch_linear
from .norm import add_sums, launch_add_norm, launch_norm_backward


@define(
    "finish(Tensor x, Tensor y, Tensor bias, Tensor? scale, Tensor gamma, Tensor beta, float eps,"
    " Tensor w_1, Tensor b_1, Tensor w_2, Tensor b_2, Tensor? next_scale) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, y, bias, scale, gamma, beta, eps, w_1, *_: (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty((*x.shape[:-1], w_1.shape[0])),
    ),
)
def _finish(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = torch.empty_like(total)
    residual, mlp = (x, y.contiguous(), bias, scale), (w_1, b_1, w_2, b_2)
    out, hidden = run_finish(*residual, gamma, beta, eps, *mlp, next_scale, total, normed)
    return out, total, normed, hidden


def run_finish(
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
    total: Tensor,
    normed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the result of `finish` and the output of fc1; fill the sum and its norm."""
    out = torch.empty_like(total)
    launch_add_norm(x, y, bias, scale, b_2, next_scale, gamma, beta, total, out, normed, eps)
    n, c = w_1.shape
    tokens = x.numel() // c
    if c <= grids.WHOLE:
        hidden = x.new_empty((*x.shape[:-1], n))
        a = torch.empty_like(hidden)
        launch_linear(normed, (w_1,), (b_1,), (hidden,), both=a, scale=next_scale)
    else:
        hidden = F.linear(normed, w_1, b_1)
        a = torch.empty_like(hidden)
        blocks = _hidden_blocks(n)
        grid = ceil_div(tokens, blocks["BLOCK_T"]), ceil_div(n, blocks["BLOCK_C"])
        tensors = hidden, x if next_scale is None else next_scale, a
        scaled = {"SCALE": next_scale is not None}
        launch_kernel(
            "gelu_forward", grid, *tensors, tokens, tokens_per_image(x), **scaled, **blocks
        )
    # `out` contains the bias: cuBLAS can add a product to a matrix or add a bias, not both.
    out.view(tokens, c).addmm_(a.view(tokens, n), w_2.T)
    return out, hidden


def _hidden_blocks(n: int) -> dict[str, int]:
    block_c = 128 if n % 128 == 0 else 64
    return {"C": n, "BLOCK_C": block_c, "BLOCK_T": 2048 // block_c}


@define(
    "finish_backward(Tensor g, Tensor sum, Tensor normed, Tensor hidden, Tensor? scale, Tensor? next_scale,"
    " Tensor gamma, Tensor w_1, Tensor w_2, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda g, total, normed, hidden, scale, next_scale, gamma, w_1, w_2, eps: (
        total.new_empty(total.shape),
        total.new_empty(total.shape if scale is not None else 0),
        gamma.new_empty((4, *gamma.shape)),
        w_1.new_empty(w_1.shape),
        w_1.new_empty(w_1.shape[:1]),
        w_2.new_empty(w_2.shape),
    ),
)
def finish_backward(
    g: Tensor,
    total: Tensor,
    normed: Tensor,
    hidden: Tensor,
    scale: Tensor | None,
    next_scale: Tensor | None,
    gamma: Tensor,
    w_1: Tensor,
    w_2: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of x and, with `scale`, of y; of gamma, beta, the bias and b_2, (4, c); of w_1, b_1, w_2.

    GELU(hidden) is computed again, not stored.
    """
    g, c = g.contiguous(), g.shape[-1]
    rows = g.view(-1, c)
    a, dh, sums = launch_gelu_backward(g, hidden, next_scale, w_2)
    dw_2, dw_1 = rows.T @ a, dh.T @ normed.view(-1, c)
    del a
    dnormed = (dh @ w_1).view(g.shape)
    dx, dy, vectors = launch_norm_backward(
        dnormed, g, total, gamma, eps, None, scale, next_scale, True
    )
    dy = dy if scale is not None else dy.new_empty(0)
    db_1 = sum_rows(sums, dtype=w_1.dtype)
    return dx, dy, add_sums(vectors, gamma.dtype), dw_1, db_1, dw_2


def launch_gelu_backward(
    g: Tensor, hidden: Tensor, next_scale: Tensor | None, w_2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scaled GELU, (tokens, n), the gradient of its input, and partial sums of the latter, (programs, n)."""
    n, rows = hidden.shape[-1], g.view(-1, g.shape[-1])
    tokens, per_image = len(rows), tokens_per_image(g)
    a, dh = g.new_empty((tokens, n)), g.new_empty((tokens, n))
    given = {"SCALE": next_scale is not None}
    blocks = _hidden_blocks(n)
    channels, block_t = ceil_div(n, blocks["BLOCK_C"]), blocks["BLOCK_T"]
    each = max(1, ceil_div(ceil_div(tokens, block_t) * channels, 4 * PROGRAMS))
    programs = ceil_div(tokens, each * block_t)
    sums = g.new_empty((programs, n), dtype=torch.float32)
    tensors = hidden, g if next_scale is None else next_scale, rows @ w_2, a, dh, sums
    numbers = tokens, per_image, each
    launch_kernel("gelu_backward", (programs, channels), *tensors, *numbers, **given, **blocks)
    return a, dh, sums


def _finish_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, scale, gamma, _, ctx.eps, w_1, _, w_2, _, next_scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], scale, next_scale, gamma, w_1, w_2)


def _finish_backward(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 12
    saved = ctx.saved_tensors  # read once: activation checkpointing allows a single access
    dx, dy, vectors, dw_1, db_1, dw_2 = finish_backward(g, *saved, ctx.eps)
    dgamma, dbeta, dbias, db_2 = vectors
    dy = dx if saved[3] is None else dy
    return dx, dy, dbias, None, dgamma, dbeta, None, dw_1, db_1, dw_2, db_2, None


differentiate("finish", _finish_backward, _finish_save)


def finish(x: Tensor, *rest: Any) -> Tensor:
    """Return s + next_scale MLP(LayerNorm(s)), s = x + scale (y + bias): the block after the projection."""
    out: Tensor = _finish(x, *rest)[0]
    return out


@register_flop_formula(torch.ops.pale.finish)
def _(x: tuple[int, ...], *args: Any, **_: object) -> int:
    return 4 * torch.Size(x).numel() * int(args[6][0])


@register_flop_formula(torch.ops.pale.finish_backward)
def _(
    g: tuple[int, ...], x: Any, normed: Any, hidden: tuple[int, ...], *_: Any, **__: object
) -> int:
    return 8 * torch.Size(g).numel() * hidden[-1]
