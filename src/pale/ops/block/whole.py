"""A whole block as one operator, and its backward as another.

A call of an operator costs the host as much time as the launches of several kernels: dispatcher, autograd node, saved
tensors, small operations around it. Inside these two operators the kernels and matrix products of the pieces
(`conv.py`, `norm.py`, `linear.py`, `mlp.py`, the attention) are launched directly on tensors.

What the backward needs is what the pieces would save. All maps of the size of the input are in one tensor, `kept`. The
gradients of the matrices are written into one tensor and those of all vectors and convolutions into another, by one
launch; results of an operator must not share memory, so that autograd's function takes them apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...compat import foreach_copy_
from ..launching import capability
from ..pale_attention import triton_op as attention
from ..registration import autograd_function, define, differentiate
from .conv import launch_conv_norm, launch_conv_three, stack_taps
from .layout import (
    AT,
    MAPS,
    MATRICES,
    MATRICES_AT,
    NAMES,
    VECTORS_AT,
    aligned,
    attention_calls,
    attention_outs,
    attention_parts,
    count_maps,
    lse_of,
    matrix_places,
    vector_places,
)
from .linear import launch_linear
from .mlp import run_finish
from .norm import launch_add_norm
from .whole_backward import block_backward


def _fake(x: Tensor, w_cpe: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    b, h, w, c = x.shape
    weights = [rest[AT[name] - 2] for name in (*MATRICES, "b_1")]
    heads, _, _, scope, _ = rest[-5:]
    cast = _is_cast(x.dtype, weights)
    return (
        x.new_empty(x.shape),
        x.new_empty((count_maps(w_cpe is not None, scope), b, h, w, c)),
        x.new_empty((b, h, w, len(weights[-1]))),
        x.new_empty((attention_calls(scope), aligned(b * heads * h * w)), dtype=torch.float32),
        weights[0].new_empty((27 if w_cpe is None else 36, c), dtype=torch.float32),
        x.new_empty(sum(weight.numel() for weight in weights) if cast else 0),
    )


def _is_cast(dtype: torch.dtype, weights: list[Tensor]) -> bool:
    return any(weight.dtype != dtype for weight in weights)


@define(
    "block(Tensor x, Tensor? w_cpe, Tensor? b_cpe, Tensor gamma_1, Tensor beta_1, Tensor t_q, Tensor t_k, Tensor t_v,"
    " Tensor w_q, Tensor w_k, Tensor w_v, Tensor b_q, Tensor b_k, Tensor b_v, Tensor w_proj, Tensor b_proj,"
    " Tensor gamma_2, Tensor beta_2, Tensor w_1, Tensor b_1, Tensor w_2, Tensor b_2,"
    " Tensor? scale, Tensor? next_scale, float eps_1, float eps_2,"
    " int heads, int s_r, int s_c, str scope, str grouping)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _(
    x: Tensor,
    w_cpe: Tensor | None,
    b_cpe: Tensor | None,
    gamma_1: Tensor,
    beta_1: Tensor,
    t_q: Tensor,
    t_k: Tensor,
    t_v: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    b_q: Tensor,
    b_k: Tensor,
    b_v: Tensor,
    w_proj: Tensor,
    b_proj: Tensor,
    gamma_2: Tensor,
    beta_2: Tensor,
    w_1: Tensor,
    b_1: Tensor,
    w_2: Tensor,
    b_2: Tensor,
    scale: Tensor | None,
    next_scale: Tensor | None,
    eps_1: float,
    eps_2: float,
    heads: int,
    *region: Any,
) -> tuple[Tensor, ...]:
    """Return the block's output, and for the backward: `kept`, output of fc1, lse of the attention, taps, cast weights.

    Weights of the dtype of `x` are not cast, and the last result is empty.
    """
    x = x.contiguous()
    c = x.shape[-1]
    kept = x.new_empty((count_maps(w_cpe is not None, region[2]), *x.shape))
    normed, *_, attended, total_2, normed_2 = kept[:MAPS].unbind()
    if w_cpe is not None:
        taps = stack_taps(w_cpe, t_q, t_k, t_v)
        total = kept[MAPS]
        launch_conv_norm(x, taps, b_cpe, gamma_1, beta_1, total, normed, eps_1)
    else:
        taps, total = stack_taps(t_q, t_k, t_v), x
        none = (None,) * 5
        launch_add_norm(x, *none, gamma_1, beta_1, None, normed, normed, eps_1)
    maps, qkv = kept[1:4], kept[4:7]
    launch_conv_three(normed, taps[-27:], maps)
    flat, weights = _cast(x, (w_q, w_k, w_v, w_proj, w_1, w_2, b_1))
    w_q, w_k, w_v, w_proj, w_1, w_2, b_1 = weights
    launch_linear(maps, (w_q, w_k, w_v), (b_q, b_k, b_v), qkv.unbind())
    lse = _attend(kept, heads, *region)
    y = (attended.view(-1, c) @ w_proj.T).view(x.shape)
    residual, mlp = (total, y, b_proj, scale), (w_1, b_1, w_2, b_2)
    affine = gamma_2, beta_2, eps_2
    out, hidden = run_finish(*residual, *affine, *mlp, next_scale, total_2, normed_2)
    return out, kept, hidden, lse, taps, flat


def _cast(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the weights in the dtype of `x`, and the tensor that holds them all: there are many, most are small."""
    if not _is_cast(x.dtype, list(weights)):
        return x.new_empty(0), weights
    n, c = weights[4].shape
    flat = x.new_empty(4 * c * c + 2 * n * c + n)
    views = tuple(flat.as_strided(*where) for where in matrix_places(n, c))
    foreach_copy_(views, weights)
    return flat, views


def _attend(kept: Tensor, heads: int, s_r: int, s_c: int, scope: str, grouping: str) -> Tensor:
    """Write the attention of the queries, keys and values in `kept`; return log2 of the sums of exponentials."""
    _, b, h, w, c = kept.shape
    used = b * heads * h * w
    lse = kept.new_empty((attention_calls(scope), aligned(used)), dtype=torch.float32)
    if used < lse.shape[1]:
        lse[:, used:].zero_()  # an operator's result must not depend on what was in memory before
    if not b:
        return lse
    qkv = kept[4:7].view(3, b, h, w, heads, c // heads).unbind()
    outs = attention_outs(kept, scope)
    for part, out, sums in zip(attention_parts(scope), outs, lse.unbind(), strict=True):
        plan = attention.plan_of(qkv[0].shape, kept.dtype, s_r, s_c, part, grouping)
        configs = attention.choose(plan, capability(kept.device))
        attention.run_forward(plan, configs, qkv, out, lse_of(sums, b, heads, h * w))
    if scope == "pale":
        torch.add(*outs, out=kept[7]).div_(2)
    return lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, kept, hidden, lse, taps, flat = output
    matrices = [inputs[AT[name]] for name in MATRICES]
    weights = [flat] if _is_cast(inputs[0].dtype, [*matrices, inputs[AT["b_1"]]]) else matrices
    gammas, scales = (inputs[AT["gamma_1"]], inputs[AT["gamma_2"]]), inputs[22:24]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(inputs[0], kept, hidden, lse, taps, *gammas, *scales, *weights)
    ctx.rest = inputs[24:]
    ctx.dtypes = [None if y is None else y.dtype for y in inputs[: len(NAMES)]]


def _backward(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    absent = (None,) * (2 + len(ctx.rest))
    if g is None:
        return (None,) * len(NAMES) + absent
    x, kept, hidden, lse, taps, gamma_1, gamma_2, scale, next_scale, *weights = ctx.saved_tensors
    vectors = gamma_1, gamma_2, scale, next_scale
    needs = list(ctx.needs_input_grad[: len(NAMES)])
    given = g, x, kept, hidden, lse, taps, weights, *vectors, *ctx.rest, needs
    dx, matrices, sums = block_backward(*given)
    c, n, dtypes = len(gamma_1), hidden.shape[-1], ctx.dtypes
    matrices = matrices.to(dtypes[AT["w_1"]])
    found: list[Tensor | None] = [dx if needs[0] else None, *[None] * (len(NAMES) - 1)]
    places = (
        (matrices, MATRICES_AT, matrix_places(n, c)),
        (sums, VECTORS_AT, vector_places(n, c)),
    )
    for flat, at, layout in places:
        for i, where in zip(at, layout, strict=False):
            if needs[i]:
                y = flat.as_strided(*where)
                found[i] = y if y.dtype == dtypes[i] else y.to(dtypes[i])
    return *found, *absent


differentiate("block", _backward, _save)
_call = autograd_function("block", _backward, _save)


def block(x: Tensor, *rest: Any) -> Tensor:
    """Return a block's output; the arguments are those of the operator."""
    out: Tensor = _call(x, *rest)[0]
    return out


def _pairs(x: tuple[int, ...], heads: int, s_r: int, s_c: int, scope: str, grouping: str) -> int:
    """Return the query-key pairs of the attention, times the channels per head."""
    b, h, w, c = x
    shape = b, h, w, heads, c // heads
    pairs = (attention.pairs(shape, s_r, s_c, part, grouping) for part in attention_parts(scope))
    return shape[-1] * sum(pairs)


@register_flop_formula(torch.ops.pale.block)
def _(x: tuple[int, ...], *args: Any, **_: object) -> int:
    # Four square matrices, two of the MLP, and two products of the attention.
    n, tokens = args[AT["b_1"] - 1][0], torch.Size(x[:-1]).numel()
    return tokens * 2 * (4 * x[-1] ** 2 + 2 * x[-1] * n) + 4 * _pairs(x, *args[-5:])


@register_flop_formula(torch.ops.pale.block_backward)
def _(
    g: Any, x: tuple[int, ...], kept: Any, hidden: tuple[int, ...], *args: Any, **_: object
) -> int:
    # Two products for each matrix; five of the attention, as PyTorch counts its own.
    c, n, tokens = x[-1], hidden[-1], torch.Size(x[:-1]).numel()
    return tokens * 4 * (4 * c**2 + 2 * c * n) + 10 * _pairs(x, *args[-6:-1])
