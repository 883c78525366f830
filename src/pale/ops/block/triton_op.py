"""The fused pieces of a block as operators: launches, configurations, registration.

Triton itself is imported at the first launch. To PyTorch each piece and each backward is one opaque operator with a
fake, autograd and, where it multiplies matrices, a FLOP formula. Kernels read and write float16, bfloat16 or float32
and compute in float32; matrix products are cuBLAS's wherever no kernel gains by having them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..kernels import AVAILABLE, DTYPES, INTERPRETED, define, differentiate, launch, launches
from ..pale_attention.triton_op import _capability

__all__ = ["AVAILABLE", "INTERPRETED", "launches", "unsupported"]

# Programs that keep a large GPU busy, and the largest number of channels that one of them can hold.
PROGRAMS, CHANNELS = 528, 1024
KERNELS = __package__ + ".triton_kernels"


def unsupported(x: Tensor) -> str | None:
    """Why the kernels cannot run for a map like `x`, (b, h, w, c), or None."""
    if not AVAILABLE:
        return "Triton is not installed"
    if x.device.type != "cuda" and not INTERPRETED:
        return f"they need a CUDA device, got {x.device.type!r}"
    if x.dtype not in DTYPES:
        return f"they compute in float16, bfloat16 or float32, got {x.dtype}"
    if x.shape[-1] > CHANNELS or x.shape[-1] % 16:
        return f"they need a multiple of 16 channels, {CHANNELS} at most, got {x.shape[-1]}"
    return None


def _launch(
    name: str, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    options = {"num_warps": warps, "num_stages": stages}
    launch(KERNELS, name, grid, *args, options=options, **constants)


def _small(x: Tensor) -> bool:
    """Whether matrix products need small blocks: float32 takes twice the shared memory, and old GPUs have little."""
    return x.dtype == torch.float32 or _capability(x.device) < 80


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _rows(c: int) -> dict[str, int]:
    """Blocks of tokens with all their channels."""
    block_c = _power(c)
    return {"C": c, "BLOCK_C": block_c, "BLOCK_T": max(1, 2048 // block_c)}


def _strips(x: Tensor, whole: bool) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Grid, rows of a program and blocks of a convolution; `whole` if a program must have all channels of a token."""
    b, h, w, c = x.shape
    # Four channels of a token for a thread; with three windows or sums, two.
    block_c = _power(c) if whole else 64 if c % 64 == 0 else 32 if c % 32 == 0 else 16
    block_w = max(1, (512 if whole else 256) // block_c)
    strips, channels = b * _ceil(w, block_w), _ceil(c, block_c)
    rows = 28 if strips * channels * _ceil(h, 28) >= PROGRAMS else 4
    blocks = {"C": c, "BLOCK_C": block_c, "BLOCK_W": block_w}
    return (strips * _ceil(h, rows), channels), rows, blocks


def _sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of the columns of a matrix, a multiple of 16, over as many programs as its rows want, then over those."""
    rows, columns = x.shape
    if not rows:
        return x.new_zeros(columns, dtype=dtype)
    many = rows > 4 * PROGRAMS
    block_c = min(64 if many else 16, _power(columns))
    blocks = _ceil(columns, block_c)
    each = _ceil(rows, max(1, 2 * PROGRAMS // blocks)) if many else rows
    programs = _ceil(rows, each)
    sums = x.new_empty((programs, columns), dtype=dtype if programs == 1 else torch.float32)
    constants = {"BLOCK_R": 4096 // block_c, "BLOCK_C": block_c}
    _launch(
        "sum_rows", (programs, blocks), x, sums, rows, columns // 16, each, warps=8, **constants
    )
    return sums[0] if programs == 1 else _sum_rows(sums, dtype)


def _like(*names: int) -> Callable[..., Any]:
    """A fake whose results look like the arguments of these positions."""

    def fake(*args: Any) -> Any:
        results = tuple(args[i].new_empty(args[i].shape) for i in names)
        return results if len(results) > 1 else results[0]

    return fake


# Position encoding, residual, norm


@define(
    "conv_norm(Tensor x, Tensor weight, Tensor bias, Tensor gamma, Tensor beta, float eps) -> (Tensor, Tensor)",
    _like(0, 0),
)
def conv_norm(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum x + conv(x) + bias, and its LayerNorm."""
    x = x.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _conv_norm(x, _taps(weight), bias, gamma, beta, total, normed, eps)
    return total, normed


def _conv_norm(x: Tensor, *rest: Any) -> None:
    *tensors, eps = rest
    grid, rows, blocks = _strips(x, whole=True)
    _launch("conv_norm", grid, x, *tensors, x.shape[1], x.shape[2], rows, eps, **blocks)


@define(
    "conv_norm_backward(Tensor g_sum, Tensor g_norm, Tensor x, Tensor sum, Tensor weight, Tensor gamma, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    lambda g, g_norm, x, total, weight, gamma, eps: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        gamma.new_empty((3, *gamma.shape)),
    ),
)
def conv_norm_backward(
    g_sum: Tensor,
    g_norm: Tensor,
    x: Tensor,
    total: Tensor,
    weight: Tensor,
    gamma: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of x and weight, and (3, c), of gamma, beta and the bias."""
    g, _, sums = _norm_backward(g_norm, g_sum, total, gamma, eps)
    x = x.contiguous()
    grid, rows, blocks = _strips(x, whole=False)
    dx = torch.empty_like(x)
    _, h, w, _ = x.shape
    _launch("conv_backward_x", grid, g, _taps(weight), dx, h, w, rows, **blocks)
    (dw,) = _weights_gradient(x, g, weight)
    return dx, dw, sums


def _conv_norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, gamma, _, ctx.eps = inputs
    ctx.save_for_backward(x, output[0], weight, gamma)


def _conv_norm_backward(
    ctx: Any, g_sum: Tensor | None, g_norm: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    both = _zeros(g_sum, saved[1]), _zeros(g_norm, saved[1])
    dx, dw, (dgamma, dbeta, dbias) = conv_norm_backward(*both, *saved, ctx.eps)
    return dx, dw, dbias, dgamma, dbeta, None


def _zeros(g: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of a result that nobody used is zero."""
    return torch.zeros_like(like) if g is None else g


differentiate("conv_norm", _conv_norm_backward, _conv_norm_save)


def _norm_backward(
    g: Tensor,
    g_x: Tensor | None,
    x: Tensor,
    gamma: Tensor,
    eps: float,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x under (x, LayerNorm(x)), this times `scale`, and (3, c): those of gamma, beta and a bias."""
    c = x.shape[-1]
    tokens = x.numel() // c
    blocks = _rows(c)
    each = max(1, _ceil(_ceil(tokens, blocks["BLOCK_T"]), PROGRAMS))
    programs = _ceil(tokens, each * blocks["BLOCK_T"])
    dx = torch.empty_like(x)
    sums = x.new_empty((programs, 3, c), dtype=torch.float32)
    g_x = None if g_x is None else g_x.contiguous()
    dy = dx if scale is None else torch.empty_like(x)
    optional = {"ADD": g_x, "SCALE": scale}
    more = g if g_x is None else g_x, x, gamma, g if scale is None else scale
    tensors = g.contiguous(), *more, dx, dy, sums
    given = {name: y is not None for name, y in optional.items()}
    numbers = tokens, max(1, tokens // max(1, len(x))), each, eps
    _launch("norm_backward", (programs,), *tensors, *numbers, **given, **blocks)
    return dx, dy, _sum_rows(sums.flatten(1), gamma.dtype).view(3, c)


def _taps(*weights: Tensor) -> Tensor:
    """Weights of convolutions, (c, 1, 3, 3), as (9 for each, c) in float32: a tap of neighbouring channels in a row."""
    return torch.cat([weight.flatten(1).T for weight in weights]).float()


def _weights_gradient(x: Tensor, g: Tensor, *weights: Tensor) -> list[Tensor]:
    """Gradients of the weights of one or three convolutions; `g` is (b, h, w, c) or (3, b, h, w, c)."""
    b, h, w, c = x.shape
    (_, channels), _, blocks = _strips(x, whole=False)
    strips = _ceil(w, blocks["BLOCK_W"])
    each = max(1, 2 * b * strips * channels // (3 * PROGRAMS))
    programs = strips * _ceil(b, each)
    dt = x.new_empty((programs, 9 * len(weights), c), dtype=torch.float32)
    three = {"THREE": len(weights) == 3}
    _launch("conv_backward_w", (programs, channels), x, g, dt, b, h, w, each, **three, **blocks)
    parts = _sum_rows(dt.flatten(1), torch.float32).view(-1, c).split(9)
    return [
        part.T.contiguous().view(weight.shape).to(weight.dtype)
        for part, weight in zip(parts, weights, strict=True)
    ]


# The depthwise halves of phi_q, phi_k, phi_v


@define(
    "conv_three(Tensor x, Tensor w_q, Tensor w_k, Tensor w_v) -> Tensor",
    lambda x, *_: x.new_empty((3, *x.shape)),
)
def conv_three(x: Tensor, *weights: Tensor) -> Tensor:
    """Three convolutions of one map, (3, b, h, w, c)."""
    x = x.contiguous()
    y = x.new_empty((3, *x.shape))
    _conv_three(x, _taps(*weights), y)
    return y


def _conv_three(x: Tensor, taps: Tensor, y: Tensor) -> None:
    grid, rows, blocks = _strips(x, whole=False)
    _launch("conv_three", grid, x, taps, y, *_sizes(x), rows, **blocks)


@define(
    "conv_three_backward(Tensor g, Tensor x, Tensor w_q, Tensor w_k, Tensor w_v)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda g, *rest: tuple(y.new_empty(y.shape) for y in rest),
)
def conv_three_backward(g: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x and of the three weights."""
    g, x = g.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    grid, rows, blocks = _strips(x, whole=False)
    _launch("conv_three_backward_x", grid, g, _taps(*weights), dx, *_sizes(x), rows, **blocks)
    return dx, *_weights_gradient(x, g, *weights)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    b, h, w, _ = x.shape
    return b * h * w, h, w


differentiate(
    "conv_three",
    lambda ctx, g: conv_three_backward(g, *ctx.saved_tensors),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# Their pointwise halves


def _linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    out: tuple[Tensor, ...],
    gelu: bool = False,
) -> None:
    """Linear layers of equal size: one of (..., c), or three of (3, ..., c)."""
    n, c = weights[0].shape
    tokens = out[0].numel() // n
    block_t, block_n, block_k, warps = (64, 64, 32, 4) if _small(x) else (128, 128, 64, 8)
    block_n = min(block_n, _power(n))
    block_k = next(k for k in (block_k, 32, 16) if c % k == 0)
    blocks = {"BLOCK_T": block_t, "BLOCK_N": block_n, "BLOCK_K": block_k}
    grid = _ceil(tokens, block_t) * _ceil(n, block_n), len(weights)
    three = [(y * 3)[:3] for y in (weights, biases, out)]
    tensors = x, *three[0], *three[1], *three[2]
    _launch("linear", grid, *tensors, tokens, C=c, N=n, GELU=gelu, warps=warps, **blocks)


@define(
    "linear_three(Tensor x, Tensor w_q, Tensor w_k, Tensor w_v, Tensor b_q, Tensor b_k, Tensor b_v)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, *rest: tuple(x.new_empty((*x.shape[1:-1], len(w))) for w in rest[:3]),
)
def _linear_three(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    q, k, v = (x.new_empty((*x.shape[1:-1], len(w))) for w in rest[:3])
    _linear(x, rest[:3], rest[3:], (q, k, v))
    return q, k, v


@define(
    "linear_three_backward(Tensor g_q, Tensor g_k, Tensor g_v, Tensor x, Tensor w_q, Tensor w_k, Tensor w_v)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda g_q, g_k, g_v, x, *ws: (
        x.new_empty(x.shape),
        *(w.new_empty(w.shape) for w in ws),
        *(w.new_empty(w.shape[:1]) for w in ws),
    ),
)
def linear_three_backward(
    g_q: Tensor, g_k: Tensor, g_v: Tensor, x: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of x, of the weights and of the biases."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, flat = dx.flatten(1, -2), x.flatten(1, -2)
    dw, db = [], []
    for i, (g, weight) in enumerate(zip((g_q, g_k, g_v), weights, strict=True)):
        g = g.contiguous().flatten(0, -2)
        torch.mm(g, weight, out=rows[i])
        dw.append(g.T @ flat[i])
        db.append(_sum_rows(g, weight.dtype))
    return dx, *dw, *db


def _linear_three_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])


def _linear_three_backward(ctx: Any, *gs: Tensor | None) -> Any:
    x, *weights = ctx.saved_tensors
    return linear_three_backward(*(_zeros(g, x[0]) for g in gs), x, *weights)


differentiate("linear_three", _linear_three_backward, _linear_three_save)


def linear_three(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, b_q: Tensor, b_k: Tensor, b_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Three linear layers, of (3, b, h, w, c); the weights are cast to the dtype of `x`."""
    cast = (y.to(x.dtype) for y in (w_q, w_k, w_v, b_q, b_k, b_v))
    result: tuple[Tensor, Tensor, Tensor] = _linear_three(x, *cast)
    return result


# Residual and norm


@define(
    "add_norm(Tensor x, Tensor y, Tensor bias, Tensor? scale, Tensor gamma, Tensor beta, float eps)"
    " -> (Tensor, Tensor)",
    _like(0, 0),
)
def add_norm(
    x: Tensor,
    y: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The sum x + scale (y + bias), and its LayerNorm."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = torch.empty_like(total)
    _add_norm(x, y.contiguous(), bias, scale, None, gamma, beta, total, normed, eps)
    return total, normed


def _add_norm(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    next_bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    total: Tensor,
    normed: Tensor,
    eps: float,
) -> None:
    x = x.contiguous()
    c = x.shape[-1]
    tokens = x.numel() // c
    blocks = _rows(c)
    optional = {"ADD": y, "BIAS": bias, "SCALE": scale, "NEXT": next_bias}
    tensors = x, *(x if z is None else z for z in optional.values()), gamma, beta, total, normed
    given = {name: z is not None for name, z in optional.items()}
    per_image = max(1, tokens // max(1, len(x)))
    grid = (_ceil(tokens, blocks["BLOCK_T"]),)
    _launch("add_norm", grid, *tensors, tokens, per_image, eps, **given, **blocks)


@define(
    "add_norm_backward(Tensor g_sum, Tensor g_norm, Tensor sum, Tensor? scale, Tensor gamma, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    lambda g_sum, g_norm, total, scale, gamma, eps: (
        total.new_empty(total.shape),
        total.new_empty(total.shape if scale is not None else 0),
        gamma.new_empty((3, *gamma.shape)),
    ),
)
def add_norm_backward(
    g_sum: Tensor, g_norm: Tensor, total: Tensor, scale: Tensor | None, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum and, with `scale`, of y; and (3, c), of gamma, beta and the bias."""
    g, dy, sums = _norm_backward(g_norm, g_sum, total, gamma, eps, scale)
    return g, dy if scale is not None else dy.new_empty(0), sums


def _add_norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, _, scale, gamma, _, ctx.eps = inputs
    ctx.save_for_backward(output[0], scale, gamma)


def _add_norm_backward(
    ctx: Any, g_sum: Tensor | None, g_norm: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, scale, gamma = ctx.saved_tensors
    both = _zeros(g_sum, total), _zeros(g_norm, total)
    g, dy, (dgamma, dbeta, dbias) = add_norm_backward(*both, total, scale, gamma, ctx.eps)
    return g, g if scale is None else dy, dbias, None, dgamma, dbeta, None


differentiate("add_norm", _add_norm_backward, _add_norm_save)


@define("norm(Tensor x, Tensor gamma, Tensor beta, float eps) -> Tensor", _like(0))
def norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """LayerNorm in the dtype of its input."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    _add_norm(x, None, None, None, None, gamma, beta, normed, normed, eps)
    return normed


@define(
    "norm_backward(Tensor g, Tensor x, Tensor gamma, float eps) -> (Tensor, Tensor)",
    lambda g, x, gamma, eps: (x.new_empty(x.shape), gamma.new_empty((3, *gamma.shape))),
)
def norm_backward(g: Tensor, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradient of x, and (3, c), of gamma, beta and a bias."""
    dx, _, sums = _norm_backward(g, None, x.contiguous(), gamma, eps)
    return dx, sums


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gamma, _, ctx.eps = inputs
    ctx.save_for_backward(x, gamma)


def _backward_of_norm(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, (dgamma, dbeta, _) = norm_backward(g, *ctx.saved_tensors, ctx.eps)
    return dx, dgamma, dbeta, None


differentiate("norm", _backward_of_norm, _norm_save)


# Linear, GELU, linear


@define(
    "mlp(Tensor x, Tensor w_1, Tensor b_1, Tensor w_2, Tensor b_2) -> (Tensor, Tensor)",
    lambda x, w_1, *_: (x.new_empty(x.shape), x.new_empty((*x.shape[:-1], w_1.shape[0]))),
)
def _mlp(x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, w_1, b_1)
    a = torch.empty_like(hidden)
    _launch("gelu_forward", (_ceil(a.numel(), 2048),), hidden, a, a.numel() // 16, BLOCK=2048)
    return F.linear(a, w_2, b_2), hidden


@define(
    "mlp_backward(Tensor g, Tensor x, Tensor hidden, Tensor w_1, Tensor w_2)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda g, x, hidden, w_1, w_2: (
        x.new_empty(x.shape),
        w_1.new_empty(w_1.shape),
        w_1.new_empty(w_1.shape[:1]),
        w_2.new_empty(w_2.shape),
        w_2.new_empty(w_2.shape[:1]),
    ),
)
def mlp_backward(
    g: Tensor, x: Tensor, hidden: Tensor, w_1: Tensor, w_2: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of x, w_1, b_1, w_2 and b_2; GELU(hidden) is computed once more, not kept."""
    g, rows = g.contiguous().flatten(0, -2), x.flatten(0, -2)
    da = g @ w_2
    tokens, c = da.shape
    block_c = 128 if c % 128 == 0 else 64
    block_t = 2048 // block_c
    channels = _ceil(c, block_c)
    each = max(1, _ceil(_ceil(tokens, block_t) * channels, 4 * PROGRAMS))
    programs = _ceil(tokens, each * block_t)
    a, dh = torch.empty_like(da), torch.empty_like(da)
    sums = x.new_empty((programs, c), dtype=torch.float32)
    tensors = hidden.flatten(0, -2), da, a, dh, sums
    blocks = {"C": c, "BLOCK_C": block_c, "BLOCK_T": block_t}
    _launch("gelu_backward", (programs, channels), *tensors, tokens, each, **blocks)
    db_1, db_2 = _sum_rows(sums, w_1.dtype), _sum_rows(g, w_2.dtype)
    return (dh @ w_1).view(x.shape), dh.T @ rows, db_1, g.T @ a, db_2


def _mlp_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_1, _, w_2, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], w_1, w_2)


def _mlp_backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None,) * 5 if g is None else mlp_backward(g, *ctx.saved_tensors)


differentiate("mlp", _mlp_backward, _mlp_save)


def mlp(x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
    """Linear, GELU, linear; the weights are cast to the dtype of `x`."""
    out: Tensor = _mlp(x, *(y.to(x.dtype) for y in (w_1, b_1, w_2, b_2)))[0]
    return out


@register_flop_formula(torch.ops.pale.linear_three)
def _(x: tuple[int, ...], *_: Any, **__: object) -> int:
    return 2 * torch.Size(x).numel() * x[-1]


@register_flop_formula(torch.ops.pale.linear_three_backward)
def _(g_q: Any, g_k: Any, g_v: Any, x: tuple[int, ...], *_: Any, **__: object) -> int:
    return 4 * torch.Size(x).numel() * x[-1]


@register_flop_formula([torch.ops.pale.mlp, torch.ops.pale.mlp_backward])
def _(x: tuple[int, ...], *args: Any, out_shape: Any, **_: object) -> int:
    tokens, c = torch.Size(x[:-1]).numel(), x[-1]
    hidden = out_shape[1][-1] if len(out_shape) == 2 else args[1][-1]
    return (4 if len(out_shape) == 2 else 8) * tokens * c * hidden


# For inference alone


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
    """The sum x + linear(y) + next_bias, and the LayerNorm of this without `next_bias`."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    c = x.shape[-1]
    if c > 256:
        y = F.linear(y, weight)
        _add_norm(x, y, bias, None, next_bias, gamma, beta, total, normed, eps)
        return total, normed
    tokens = x.numel() // c
    blocks = {"C": c, "BLOCK_C": _power(c), "BLOCK_T": 64}
    blocks["BLOCK_K"] = next(k for k in ((64, 32, 16) if c <= 128 else (32, 16)) if c % k == 0)
    tensors = y, weight, bias, x, next_bias, gamma, beta, total, normed
    _launch("linear_norm", (_ceil(tokens, 64),), *tensors, tokens, eps, **blocks)
    return total, normed


def mlp_residual(x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, total: Tensor) -> Tensor:
    """Linear, GELU and linear added to `total`, in place; the last bias is in it already."""
    hidden, c = w_1.shape
    tokens = x.numel() // c
    if c <= 128 and hidden % 32 == 0:
        out = torch.empty_like(total)
        blocks = {"C": c, "HIDDEN": hidden, "BLOCK_C": _power(c), "BLOCK_H": 32}
        blocks["BLOCK_T"] = 32 if _small(x) else 64 if c <= 64 else 128
        grid = (_ceil(tokens, blocks["BLOCK_T"]),)
        _launch("whole_mlp", grid, x, w_1, b_1, w_2, total, out, tokens, **blocks)
        return out
    y = x.new_empty((tokens, hidden))
    _linear(x, (w_1,), (b_1,), (y,), gelu=True)
    total.view(tokens, c).addmm_(y, w_2.T)
    return total
