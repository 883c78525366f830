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
# Up to this many channels a layer moves more than it multiplies, and our kernels with all around it beat cuBLAS.
WHOLE = 128
# Up to this many tokens a layer is over before it keeps a large GPU busy: blocks are small, so that many take part.
FEW = 8192
KERNELS, CONVOLUTIONS = __package__ + ".triton_kernels", __package__ + ".conv_kernels"


def unsupported(x: Tensor, channels: int) -> str | None:
    """Why the kernels cannot run for maps of so many channels, of the device and dtype of `x`, or None."""
    if not AVAILABLE:
        return "Triton is not installed"
    if x.device.type != "cuda" and not INTERPRETED:
        return f"they need a CUDA device, got {x.device.type!r}"
    if x.dtype not in DTYPES:
        return f"they compute in float16, bfloat16 or float32, got {x.dtype}"
    if channels > CHANNELS or channels % 16:
        return f"they need a multiple of 16 channels, {CHANNELS} at most, got {channels}"
    return None


def _launch(
    name: str, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    options = {"num_warps": warps, "num_stages": stages}
    module = CONVOLUTIONS if name.startswith("conv") else KERNELS
    launch(module, name, grid, *args, options=options, **constants)


def _small(x: Tensor) -> bool:
    """Whether matrix products need small blocks: float32 takes twice the shared memory, and old GPUs have little."""
    return x.dtype == torch.float32 or _capability(x.device) < 80


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _rows(c: int, size: int = 2048) -> dict[str, int]:
    """Blocks of tokens with all their channels."""
    block_c = _power(c)
    return {"C": c, "BLOCK_C": block_c, "BLOCK_T": max(1, size // block_c)}


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


def _sum_rows(*matrices: Tensor, dtype: torch.dtype, taps: int = 0) -> Tensor:
    """Sums of the columns, a multiple of 16, of one matrix or of three, over as many programs as rows want, then again.

    `taps`: the columns are (convolutions, 9, that many channels); their sums come as (convolutions, channels, 9).
    """
    rows, columns = matrices[0].shape
    x, n = matrices[0], len(matrices)
    if not rows:
        return x.new_zeros(n * columns, dtype=dtype)
    many = rows > 4 * PROGRAMS
    block_c = min(64 if many else 16, _power(columns))
    blocks = _ceil(columns, block_c)
    each = _ceil(rows, max(1, 2 * PROGRAMS // blocks)) if many else rows
    programs = _ceil(rows, each)
    last = programs == 1
    sums = x.new_empty((programs, n * columns), dtype=dtype if last else torch.float32)
    constants = {"TAPS": taps if last else 0, "BLOCK_R": 4096 // block_c, "BLOCK_C": block_c}
    tensors = *(matrices * 3)[:3], sums
    grid = programs, blocks, n
    _launch("sum_rows", grid, *tensors, rows, columns // 16, each, warps=8, **constants)
    return sums[0] if last else _sum_rows(sums, dtype=dtype, taps=taps)


def _per_image(x: Tensor) -> int:
    """Tokens of an image."""
    return max(1, x.shape[1:-1].numel())


def _like(*names: int) -> Callable[..., Any]:
    """A fake whose results look like the arguments of these positions."""

    def fake(*args: Any) -> Any:
        results = tuple(args[i].new_empty(args[i].shape) for i in names)
        return results if len(results) > 1 else results[0]

    return fake


# Position encoding, residual, norm


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
    total, normed, taps = torch.empty_like(x), torch.empty_like(x), _taps(weight)
    _conv_norm(x, taps, bias, gamma, beta, total, normed, eps)
    return total, normed, taps


def conv_norm(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The sum x + conv(x) + bias, and its LayerNorm."""
    total, normed, _ = _conv_norm_op(x, weight, *rest)
    return total, normed


def _conv_norm(x: Tensor, *rest: Any) -> None:
    *tensors, eps = rest
    grid, rows, blocks = _strips(x, whole=True)
    _launch("conv_norm", grid, x, *tensors, x.shape[1], x.shape[2], rows, eps, **blocks)


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
    """Gradients of x, of the weight, (1, c, 9), and (3, c), of gamma, beta and the bias."""
    g, _, sums = _norm_backward(g_norm, g_sum, total, gamma, eps)
    x = x.contiguous()
    grid, rows, blocks = _strips(x, whole=False)
    dx = torch.empty_like(x)
    _, h, w, _ = x.shape
    _launch("conv_backward_x", grid, g, taps, dx, h, w, rows, **blocks)
    return dx, _weights_gradient(x, g), sums


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
    both = _zeros(g_sum, saved[1]), _zeros(g_norm, saved[1])
    dx, dw, (dgamma, dbeta, dbias) = conv_norm_backward(*both, *saved, ctx.eps)
    shape, dtype = ctx.weight
    return dx, dw.view(shape).to(dtype), dbias, dgamma, dbeta, None


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
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    next_scale: Tensor | None = None,
    next_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x under (x, LayerNorm(x)), this times `scale`, and sums of the kernel, (3 or 4, c)."""
    c = x.shape[-1]
    tokens = x.numel() // c
    blocks = _rows(c, 512)  # four sums and four maps in registers
    each = max(1, _ceil(_ceil(tokens, blocks["BLOCK_T"]), 2 * PROGRAMS))
    programs = _ceil(tokens, each * blocks["BLOCK_T"])
    dx = torch.empty_like(x)
    n = 4 if next_bias else 3
    sums = x.new_empty((programs, n, c), dtype=torch.float32)
    g_x = None if g_x is None else g_x.contiguous()
    dy = dx if scale is None else torch.empty_like(x)
    optional = {"ADD": g_x, "BIAS": bias, "SCALE": scale, "NEXT_SCALE": next_scale}
    given = {name: y is not None for name, y in optional.items()} | {"NEXT": next_bias}
    g_x, bias, scale, next_scale = (g if y is None else y for y in optional.values())
    tensors = g.contiguous(), g_x, x, bias, gamma, scale, next_scale, dx, dy, sums
    numbers = tokens, _per_image(x), each, eps
    _launch("norm_backward", (programs,), *tensors, *numbers, **given, **blocks)
    return dx, dy, _sum_rows(sums.flatten(1), dtype=gamma.dtype).view(n, c)


def _taps(*weights: Tensor) -> Tensor:
    """Weights of convolutions, (c, 1, 3, 3), as (9 for each, c) in float32: a tap of neighbouring channels in a row."""
    return torch.cat([weight.flatten(1).T for weight in weights]).float()


def _weights_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Gradients of the weights of one or three convolutions, (1 or 3, c, 9), from (b, h, w, c) or (3, b, h, w, c)."""
    b, h, w, c = x.shape
    n = 3 if g.ndim > x.ndim else 1
    (_, channels), _, blocks = _strips(x, whole=False)
    blocks["BLOCK_W"] = max(1, blocks["BLOCK_W"] // 2)
    strips = _ceil(w, blocks["BLOCK_W"])
    # As many programs as run at once: each has 27 sums to bring together at its end.
    each = max(1, _ceil(b * strips * channels, 2 * PROGRAMS))
    programs = strips * _ceil(b, each)
    dt = x.new_empty((programs, 9 * n * c), dtype=torch.float32)
    tensors, numbers, three = (x, g, dt), (b, h, w, each), {"THREE": n == 3}
    grid = programs, channels
    _launch("conv_backward_w", grid, *tensors, *numbers, warps=2, **three, **blocks)
    return _sum_rows(dt, dtype=torch.float32, taps=c).view(n, c, 9)


# The depthwise halves of phi_q, phi_k, phi_v


@define(
    "conv_three(Tensor x, Tensor w_q, Tensor w_k, Tensor w_v) -> (Tensor, Tensor)",
    lambda x, w_q, *_: (
        x.new_empty((3, *x.shape)),
        w_q.new_empty((27, len(w_q)), dtype=torch.float32),
    ),
)
def _conv_three_op(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, taps = x.new_empty((3, *x.shape)), _taps(*weights)
    _conv_three(x, taps, y)
    return y, taps


def conv_three(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Three convolutions of one map, (3, b, h, w, c)."""
    y: Tensor = _conv_three_op(x, w_q, w_k, w_v)[0]
    return y


def _conv_three(x: Tensor, taps: Tensor, y: Tensor) -> None:
    grid, rows, blocks = _strips(x, whole=False)
    _launch("conv_three", grid, x, taps, y, *_sizes(x), rows, **blocks)


@define(
    "conv_three_backward(Tensor g, Tensor x, Tensor taps) -> (Tensor, Tensor)",
    lambda g, x, taps: (x.new_empty(x.shape), taps.new_empty((3, taps.shape[1], 9))),
)
def conv_three_backward(g: Tensor, x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the three weights, (3, c, 9)."""
    g, x = g.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    grid, rows, blocks = _strips(x, whole=False)
    _launch("conv_three_backward_x", grid, g, taps, dx, *_sizes(x), rows, **blocks)
    return dx, _weights_gradient(x, g)


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


# Their pointwise halves


def _linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    out: tuple[Tensor, ...],
    gelu: bool = False,
    both: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Linear layers of equal size, one of (..., c) or three of (3, ..., c); `both` takes the scaled GELU of one."""
    n, c = weights[0].shape
    tokens = out[0].numel() // n
    few = tokens <= FEW and not _small(x)
    block_t, block_n, block_k, warps = (64, 64, 32, 4) if _small(x) else (128, 128, 64, 8)
    if both is not None:
        block_t = 64
    if few:
        block_t, block_n, block_k, warps = 64, 64, 64, 4
    block_n = min(block_n, _power(n))
    block_k = next(k for k in (block_k, 128, 64, 32, 16) if k <= block_k and c % k == 0)
    blocks = {"BLOCK_T": block_t, "BLOCK_N": block_n, "BLOCK_K": block_k}
    grid = _ceil(tokens, block_t) * _ceil(n, block_n), len(weights)
    three = [(y * 3)[:3] for y in (weights, biases, out)]
    optional = x if both is None else both, x if scale is None else scale
    tensors = x, *three[0], *three[1], *three[2], *optional
    given = {"GELU": gelu, "BOTH": both is not None, "SCALE": scale is not None}
    given["QUICK"] = x.dtype != torch.float32
    options = {"warps": warps, "stages": 4 if few else 3}
    numbers = tokens, _per_image(x)
    _launch("linear", grid, *tensors, *numbers, C=c, N=n, **options, **given, **blocks)


@define(
    "linear_three(Tensor x, Tensor w_q, Tensor w_k, Tensor w_v, Tensor b_q, Tensor b_k, Tensor b_v)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, *rest: tuple(x.new_empty((*x.shape[1:-1], len(w))) for w in rest[:3]),
)
def linear_three(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three linear layers, of (3, b, h, w, c); biases may have another dtype than `x`."""
    x = x.contiguous()
    q, k, v = (x.new_empty((*x.shape[1:-1], len(w))) for w in rest[:3])
    _linear(x, rest[:3], rest[3:], (q, k, v))
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
    """Gradients of x and of the weights, and those of the biases, (3, n), in float32."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, flat = dx.flatten(1, -2), x.flatten(1, -2)
    gs = [g.contiguous().flatten(0, -2) for g in (g_q, g_k, g_v)]
    dws = []
    for i, (g, weight) in enumerate(zip(gs, weights, strict=True)):
        torch.mm(g, weight, out=rows[i])
        dws.append(g.T @ flat[i])
    return dx, *dws, _sum_rows(*gs, dtype=torch.float32).view(3, -1)


def _linear_three_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype = inputs[4].dtype
    ctx.save_for_backward(*inputs[:4])


def _linear_three_backward(ctx: Any, *gs: Tensor | None) -> Any:
    x, *weights = ctx.saved_tensors
    *rest, db = linear_three_backward(*(_zeros(g, x[0]) for g in gs), x, *weights)
    return *rest, *db.to(ctx.dtype).unbind()


differentiate("linear_three", _linear_three_backward, _linear_three_save)


# Norm


def _add_norm(
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
    x = x.contiguous()
    c = x.shape[-1]
    tokens = x.numel() // c
    blocks = _rows(c)
    optional = {"ADD": y, "BIAS": bias, "SCALE": scale, "NEXT_SCALE": next_scale, "SUM": total}
    given = {name: z is not None for name, z in optional.items()}
    y, bias, scale, next_scale, total = (x if z is None else z for z in optional.values())
    vectors = x if next_bias is None else next_bias, next_scale, gamma, beta
    tensors = x, y, bias, scale, *vectors, total, base, normed
    grid = (_ceil(tokens, blocks["BLOCK_T"]),)
    _launch("add_norm", grid, *tensors, tokens, _per_image(x), eps, **given, **blocks)


@define("norm(Tensor x, Tensor? bias, Tensor gamma, Tensor beta, float eps) -> Tensor", _like(0))
def norm(x: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """LayerNorm of x + bias in the dtype of its input."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    _add_norm(x, None, bias, None, None, None, gamma, beta, None, normed, normed, eps)
    return normed


@define(
    "norm_backward(Tensor g, Tensor x, Tensor? bias, Tensor gamma, float eps) -> (Tensor, Tensor)",
    lambda g, x, bias, gamma, eps: (x.new_empty(x.shape), gamma.new_empty((3, *gamma.shape))),
)
def norm_backward(
    g: Tensor, x: Tensor, bias: Tensor | None, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradient of x, and (3, c), of gamma, beta and the bias."""
    dx, _, sums = _norm_backward(g, None, x.contiguous(), gamma, eps, bias)
    return dx, sums


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, gamma, _, ctx.eps = inputs
    ctx.save_for_backward(x, bias, gamma)


def _backward_of_norm(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, gamma = ctx.saved_tensors
    dx, (dgamma, dbeta, dbias) = norm_backward(g, x, bias, gamma, ctx.eps)
    return dx, None if bias is None else dbias, dgamma, dbeta, None


differentiate("norm", _backward_of_norm, _norm_save)


# Residual, norm, MLP, residual


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
    out, normed = torch.empty_like(total), torch.empty_like(total)
    given = y.contiguous(), bias, scale, b_2, next_scale
    _add_norm(x, *given, gamma, beta, total, out, normed, eps)
    n, c = w_1.shape
    tokens = x.numel() // c
    if c <= WHOLE:
        hidden = x.new_empty((*x.shape[:-1], n))
        a = torch.empty_like(hidden)
        _linear(normed, (w_1,), (b_1,), (hidden,), both=a, scale=next_scale)
    else:
        hidden = F.linear(normed, w_1, b_1)
        a = torch.empty_like(hidden)
        blocks = _rows_of_hidden(n)
        grid = _ceil(tokens, blocks["BLOCK_T"]), _ceil(n, blocks["BLOCK_C"])
        tensors = hidden, x if next_scale is None else next_scale, a
        scaled = {"SCALE": next_scale is not None}
        _launch("gelu_forward", grid, *tensors, tokens, _per_image(x), **scaled, **blocks)
    # The bias is in `out` already: cuBLAS can add a product to a matrix or add a bias, not both.
    out.view(tokens, c).addmm_(a.view(tokens, n), w_2.T)
    return out, total, normed, hidden


def _rows_of_hidden(n: int) -> dict[str, int]:
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
    """Gradients of x and, with `scale`, of y; (4, c), of gamma, beta, the bias and b_2; of w_1, b_1 and w_2.

    GELU(hidden) is computed once more, not kept.
    """
    g, c, n = g.contiguous(), g.shape[-1], w_1.shape[0]
    rows = g.view(-1, c)
    tokens, per_image = len(rows), _per_image(g)
    a, dh = g.new_empty((tokens, n)), g.new_empty((tokens, n))
    given = {"SCALE": next_scale is not None}
    blocks = _rows_of_hidden(n)
    channels, block_t = _ceil(n, blocks["BLOCK_C"]), blocks["BLOCK_T"]
    each = max(1, _ceil(_ceil(tokens, block_t) * channels, 4 * PROGRAMS))
    programs = _ceil(tokens, each * block_t)
    sums = g.new_empty((programs, n), dtype=torch.float32)
    tensors = hidden, g if next_scale is None else next_scale, rows @ w_2, a, dh, sums
    numbers = tokens, per_image, each
    _launch("gelu_backward", (programs, channels), *tensors, *numbers, **given, **blocks)
    dw_2, dw_1 = rows.T @ a, dh.T @ normed.view(-1, c)
    del a
    dnormed = (dh @ w_1).view(g.shape)
    dx, dy, vectors = _norm_backward(dnormed, g, total, gamma, eps, None, scale, next_scale, True)
    dy = dy if scale is not None else dy.new_empty(0)
    return dx, dy, vectors, dw_1, _sum_rows(sums, dtype=w_1.dtype), dw_2


def _finish_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, scale, gamma, _, ctx.eps, w_1, _, w_2, _, next_scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], scale, next_scale, gamma, w_1, w_2)


def _finish_backward(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 12
    saved = ctx.saved_tensors  # once: a checkpoint gives them once
    dx, dy, vectors, dw_1, db_1, dw_2 = finish_backward(g, *saved, ctx.eps)
    dgamma, dbeta, dbias, db_2 = vectors
    dy = dx if saved[3] is None else dy
    return dx, dy, dbias, None, dgamma, dbeta, None, dw_1, db_1, dw_2, db_2, None


differentiate("finish", _finish_backward, _finish_save)


def finish(x: Tensor, *rest: Any) -> Tensor:
    """The sum s = x + scale (y + bias), and s + next_scale MLP(LayerNorm(s)): what comes after the projection."""
    out: Tensor = _finish(x, *rest)[0]
    return out


@register_flop_formula(torch.ops.pale.linear_three)
def _(x: tuple[int, ...], *_: Any, **__: object) -> int:
    return 2 * torch.Size(x).numel() * x[-1]


@register_flop_formula(torch.ops.pale.linear_three_backward)
def _(g_q: Any, g_k: Any, g_v: Any, x: tuple[int, ...], *_: Any, **__: object) -> int:
    return 4 * torch.Size(x).numel() * x[-1]


@register_flop_formula(torch.ops.pale.finish)
def _(x: tuple[int, ...], *args: Any, **_: object) -> int:
    return 4 * torch.Size(x).numel() * int(args[6][0])


@register_flop_formula(torch.ops.pale.finish_backward)
def _(
    g: tuple[int, ...], x: Any, normed: Any, hidden: tuple[int, ...], *_: Any, **__: object
) -> int:
    return 8 * torch.Size(g).numel() * hidden[-1]
