"""LayerNorm of a block, alone or with the residual before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..registration import define, differentiate
from ..sizes import ceil_div
from .grids import PROGRAMS, fake_like, launch_kernel, sum_rows, token_blocks, tokens_per_image


def launch_add_norm(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    next_bias: Tensor | None,
    next_scale: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    total: Tensor | None,
    base: Tensor,
    normed: Tensor,
    eps: float,
) -> None:
    """Write s = x + scale (y + bias) to `total`, s + next_scale next_bias to `base`, and LayerNorm(s) to `normed`."""
    x = x.contiguous()
    c = x.shape[-1]
    tokens = x.numel() // c
    blocks = token_blocks(c)
    optional = {"ADD": y, "BIAS": bias, "SCALE": scale, "NEXT_SCALE": next_scale, "SUM": total}
    given = {name: z is not None for name, z in optional.items()}
    y, bias, scale, next_scale, total = (x if z is None else z for z in optional.values())
    vectors = x if next_bias is None else next_bias, next_scale, gamma, beta
    tensors = x, y, bias, scale, *vectors, total, base, normed
    grid = (ceil_div(tokens, blocks["BLOCK_T"]),)
    launch_kernel("add_norm", grid, *tensors, tokens, tokens_per_image(x), eps, **given, **blocks)


def launch_norm_backward(
    g: Tensor,
    g_x: Tensor | None,
    x: Tensor,
    gamma: Tensor,
    eps: float,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    next_scale: Tensor | None = None,
    next_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x given those of x and LayerNorm(x), the same times `scale`, and partial sums.

    The latter are (programs, 3 or 4, c).
    """
    c = x.shape[-1]
    tokens = x.numel() // c
    blocks = token_blocks(c, 512)  # four sums and four maps in registers
    each = max(1, ceil_div(ceil_div(tokens, blocks["BLOCK_T"]), 2 * PROGRAMS))
    programs = ceil_div(tokens, each * blocks["BLOCK_T"])
    dx = torch.empty_like(x)
    n = 4 if next_bias else 3
    sums = x.new_empty((programs, n, c), dtype=torch.float32)
    g_x = None if g_x is None else g_x.contiguous()
    dy = dx if scale is None else torch.empty_like(x)
    optional = {"ADD": g_x, "BIAS": bias, "SCALE": scale, "NEXT_SCALE": next_scale}
    given = {name: y is not None for name, y in optional.items()} | {"NEXT": next_bias}
    g_x, bias, scale, next_scale = (g if y is None else y for y in optional.values())
    tensors = g.contiguous(), g_x, x, bias, gamma, scale, next_scale, dx, dy, sums
    numbers = tokens, tokens_per_image(x), each, eps
    launch_kernel("norm_backward", (programs,), *tensors, *numbers, **given, **blocks)
    return dx, dy, sums


def add_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of `launch_norm_backward`, (3 or 4, c)."""
    return sum_rows(sums.flatten(1), dtype=dtype).view(sums.shape[1:])


@define(
    "norm(Tensor x, Tensor? bias, Tensor gamma, Tensor beta, float eps) -> Tensor", fake_like(0)
)
def norm(x: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Return LayerNorm of x + bias in the dtype of its input."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_add_norm(x, None, bias, None, None, None, gamma, beta, None, normed, normed, eps)
    return normed


@define(
    "norm_backward(Tensor g, Tensor x, Tensor? bias, Tensor gamma, float eps) -> (Tensor, Tensor)",
    lambda g, x, bias, gamma, eps: (x.new_empty(x.shape), gamma.new_empty((3, *gamma.shape))),
)
def norm_backward(
    g: Tensor, x: Tensor, bias: Tensor | None, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of gamma, beta and the bias, (3, c)."""
    dx, _, sums = launch_norm_backward(g, None, x.contiguous(), gamma, eps, bias)
    return dx, add_sums(sums, gamma.dtype)


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, gamma, _, ctx.eps = inputs
    ctx.save_for_backward(x, bias, gamma)


def _backward_of_norm(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, gamma = ctx.saved_tensors
    dx, (dgamma, dbeta, dbias) = norm_backward(g, x, bias, gamma, ctx.eps)
    return dx, None if bias is None else dbias, dgamma, dbeta, None


differentiate("norm", _backward_of_norm, _norm_save)
