"""Backward of a whole block, as one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launching import capability
from ..pale_attention import triton_op as attention
from ..registration import define
from .conv import launch_conv_backward_x, launch_conv_three_backward_x, launch_weights_gradient
from .grids import add_rows, parts_size, sum_parts
from .layout import (
    AT,
    MAPS,
    MATRICES,
    NAMES,
    attention_outs,
    attention_parts,
    lse_of,
    matrix_places,
)
from .mlp import launch_gelu_backward
from .norm import launch_norm_backward


def _fake_backward(g: Tensor, x: Tensor, kept: Tensor, hidden: Tensor, *rest: Any) -> Any:
    _, taps, _, gamma, *_ = rest
    c, n, needs = len(gamma), hidden.shape[-1], rest[-1]
    return (
        x.new_empty(x.shape if needs[0] else 0),
        x.new_empty(4 * c * c + 2 * n * c),
        gamma.new_empty(parts_size(n, c, len(taps) == 36), dtype=torch.float32),
    )


@define(
    "block_backward(Tensor g, Tensor x, Tensor kept, Tensor hidden, Tensor lse, Tensor taps, Tensor[] weights,"
    " Tensor gamma_1, Tensor gamma_2, Tensor? scale, Tensor? next_scale, float eps_1, float eps_2,"
    " int heads, int s_r, int s_c, str scope, str grouping, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def block_backward(
    g: Tensor,
    x: Tensor,
    kept: Tensor,
    hidden: Tensor,
    lse: Tensor,
    taps: Tensor,
    weights: list[Tensor],
    gamma_1: Tensor,
    gamma_2: Tensor,
    scale: Tensor | None,
    next_scale: Tensor | None,
    eps_1: float,
    eps_2: float,
    heads: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the matrices, and (in float32) of vectors and convolutions, as in `sum_parts`.

    Args:
        g: gradient of the output.
        x: input of the block.
        kept: second result of `block`.
        hidden: its third.
        lse: its fourth.
        taps: its fifth.
        weights: the cast weights in one tensor, its last result, or the matrices.
        gamma_1: weight of the first norm.
        gamma_2: weight of the second.
        scale: first factor of drop path.
        next_scale: second factor.
        eps_1: of the first norm.
        eps_2: of the second.
        heads: of the attention.
        rest: region, and which tensors of `NAMES` need gradients; a result that none needs is not computed.
    """
    *region, needs = rest
    c, n = g.shape[-1], hidden.shape[-1]
    if len(weights) == 1:
        weights = [weights[0].as_strided(*where) for where in matrix_places(n, c)[:-1]]
    w_q, w_k, w_v, w_proj, w_1, w_2 = weights
    found = _Gradients(g, n, c, needs)
    affine = gamma_2, scale, next_scale, eps_2
    if (pair := _finish_backward(found, g.contiguous(), kept, hidden, w_1, w_2, *affine)) is None:
        return found.results(x, taps)
    g, dy = pair
    dqkv = _attention_backward(found, dy, w_proj, kept, lse, heads, *region)
    del dy, pair
    if dqkv is None or (dmaps := _linear_backward(found, dqkv, kept, (w_q, w_k, w_v))) is None:
        return found.results(x, taps)
    del dqkv
    _conv_backward(found, dmaps, g, x, kept, taps, gamma_1, eps_1)
    return found.results(x, taps)


class _Gradients:
    """The gradients of a block's parameters: which are needed, and where they are written."""

    def __init__(self, g: Tensor, n: int, c: int, needs: list[bool]) -> None:
        self.need = dict(zip(NAMES, needs, strict=True))
        self.n, self.c = n, c
        self.flat = g.new_empty(4 * c * c + 2 * n * c)
        layout = zip(MATRICES, matrix_places(n, c), strict=False)
        self.matrices = {name: self.flat.as_strided(*where) for name, where in layout}
        self.parts: list[Tensor | None] = [None] * 6  # as in `sum_parts`
        self.x: Tensor | None = None

    def any(self, *names: str) -> bool:
        """Return whether one of these is needed."""
        return any(map(self.need.__getitem__, names))

    def before(self, name: str) -> bool:
        """Return whether one of the tensors before `name` in `NAMES` is needed."""
        return any(self.need[other] for other in NAMES[: AT[name]])

    def multiply(self, name: str, g: Tensor, x: Tensor) -> None:
        """Write the gradient of a matrix, if it is needed, from those of the layer's output, and its input."""
        if self.need[name]:
            torch.mm(g.T, x, out=self.matrices[name])

    def results(self, x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of `x`, of the matrices, and of vectors and convolutions."""
        dx = x.new_empty(0) if self.x is None else self.x
        parts = self.parts if len(taps) == 36 else self.parts[:-1]
        return dx, self.flat, sum_parts(parts, self.flat, self.n, self.c)


def _finish_backward(
    found: _Gradients,
    g: Tensor,
    kept: Tensor,
    hidden: Tensor,
    w_1: Tensor,
    w_2: Tensor,
    gamma: Tensor,
    scale: Tensor | None,
    next_scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor] | None:
    """Return the gradients of the sum before the MLP and of the projection; None if nothing before needs them."""
    c = g.shape[-1]
    total, normed = kept[8], kept[9]
    a, dh, found.parts[0] = launch_gelu_backward(g, hidden, next_scale, w_2)
    found.multiply("w_2", g.view(-1, c), a)
    del a
    found.multiply("w_1", dh, normed.view(-1, c))
    if not (found.before("w_1") or found.need["b_2"]):
        return None
    dnormed = (dh @ w_1).view(g.shape)
    del dh
    dx, dy, sums = launch_norm_backward(
        dnormed, g, total, gamma, eps, None, scale, next_scale, True
    )
    found.parts[1] = sums.flatten(1)
    return (dx, dy) if found.before("b_proj") else None


def _attention_backward(
    found: _Gradients,
    g: Tensor,
    weight: Tensor,
    kept: Tensor,
    lse: Tensor,
    heads: int,
    *region: Any,
) -> tuple[Tensor, ...] | None:
    """Return the gradients of queries, keys and values from that of the projection; None if nothing needs them."""
    rows = g.view(-1, g.shape[-1])
    found.multiply("w_proj", rows, kept[7].view(rows.shape))
    if not found.before("w_proj"):
        return None
    return _differentiate_attention((rows @ weight).view(g.shape), kept, lse, heads, *region)


def _linear_backward(
    found: _Gradients, gs: tuple[Tensor, ...], kept: Tensor, weights: tuple[Tensor, ...]
) -> Tensor | None:
    """Return the gradients of the three convolutions from those of q, k and v; None if nothing needs them."""
    c = kept.shape[-1]
    rows = [g.view(-1, c) for g in gs]
    for name, g, x in zip(MATRICES, rows, kept[1:4].view(3, -1, c).unbind(), strict=False):
        found.multiply(name, g, x)
    if found.any("b_q", "b_k", "b_v") and len(rows[0]):
        found.parts[2] = add_rows(*rows, dtype=torch.float32)
    if not found.before("w_q"):
        return None
    dmaps = kept.new_empty((3, *kept.shape[1:]))
    for g, weight, out in zip(rows, weights, dmaps.view(3, -1, c).unbind(), strict=True):
        torch.mm(g, weight, out=out)
    return dmaps


def _conv_backward(
    found: _Gradients,
    dmaps: Tensor,
    g: Tensor,
    x: Tensor,
    kept: Tensor,
    taps: Tensor,
    gamma: Tensor,
    eps: float,
) -> None:
    """Differentiate norm and convolutions; `g` is the gradient of the residual."""
    if found.any("t_q", "t_k", "t_v"):
        found.parts[3] = launch_weights_gradient(kept[0], dmaps)
    if not found.before("t_q"):
        return
    dnormed = launch_conv_three_backward_x(dmaps, taps[-27:])
    x, cpe = x.contiguous(), len(taps) == 36
    g, _, sums = launch_norm_backward(dnormed, g, kept[MAPS] if cpe else x, gamma, eps)
    found.parts[4] = sums.flatten(1)
    if cpe and found.need["w_cpe"]:
        found.parts[5] = launch_weights_gradient(x, g)
    if found.need["x"]:
        found.x = launch_conv_backward_x(g, taps[:9]) if cpe else g


def _differentiate_attention(
    g: Tensor, kept: Tensor, lse: Tensor, heads: int, *region: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, given that of the attention."""
    _, b, h, w, c = kept.shape
    s_r, s_c, scope, grouping = region
    shape = b, h, w, heads, c // heads
    qkv = kept[4:7].view(3, *shape).unbind()
    if not b:
        return qkv
    if scope == "pale":
        g = g / 2
    found: tuple[Tensor, ...] = ()
    g = g.view(shape)
    for part, out, sums in zip(
        attention_parts(scope), attention_outs(kept, scope), lse.unbind(), strict=True
    ):
        plan = attention.plan_of(g.shape, kept.dtype, s_r, s_c, part, grouping)
        configs = attention.choose(plan, capability(kept.device))
        saved = out, lse_of(sums, b, heads, h * w)
        dq = g.new_empty(shape)
        if scope != "pale":
            dk, dv = g.new_empty(shape), g.new_empty(shape)
            attention.run_backward(plan, configs, (g, *qkv), saved, (dq, dk[None], dv[None]))
            return dq, dk, dv
        dk, dv = (g.new_empty((2, *shape), dtype=torch.float32) for _ in range(2))
        attention.run_backward(plan, configs, (g, *qkv), saved, (dq, dk, dv))
        new = dq, dk.sum(0).to(g.dtype), dv.sum(0).to(g.dtype)
        found = new if not found else tuple(map(torch.add, found, new))
    return found
