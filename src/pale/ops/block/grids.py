"""Grids, block sizes and launches of the operators of a block; Triton is imported at the first launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launching import AVAILABLE, DTYPES, INTERPRETED, capability, launch
from ..sizes import ceil_div

# Number of programs that keep a large GPU busy, and the maximum number of channels in one program.
PROGRAMS, CHANNELS = 528, 1024
# Up to this many rows are added by one program per block of columns.
FEW_ROWS = 4 * PROGRAMS
# Up to this many channels a layer is bound by memory, and fused kernels are faster than cuBLAS.
WHOLE = 128
# Up to this many tokens a layer does not fill a large GPU: blocks are small, so that there are more programs.
FEW = 8192
KERNELS, CONVOLUTIONS = __package__ + ".triton_kernels", __package__ + ".conv_kernels"


def unsupported(x: Tensor, channels: int) -> str | None:
    """Return why the kernels cannot run maps with `channels` channels, with device and dtype of `x`, or None."""
    if not AVAILABLE:
        return "Triton is not installed"
    if x.device.type != "cuda" and not INTERPRETED:
        return f"they need a CUDA device, got {x.device.type!r}"
    if x.dtype not in DTYPES:
        return f"they compute in float16, bfloat16 or float32, got {x.dtype}"
    if channels > CHANNELS or channels % 16:
        return f"they need a multiple of 16 channels, {CHANNELS} at most, got {channels}"
    return None


def launch_kernel(
    name: str, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    """Run a kernel of this package."""
    options = {"num_warps": warps, "num_stages": stages}
    module = CONVOLUTIONS if name.startswith("conv") else KERNELS
    launch(module, name, grid, *args, options=options, **constants)


def needs_small_blocks(x: Tensor) -> bool:
    """Return whether matrix products need small blocks: float32 needs twice the shared memory, old GPUs have little."""
    return x.dtype == torch.float32 or capability(x.device) < 80


def next_power(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def token_blocks(c: int, size: int = 2048) -> dict[str, int]:
    """Return blocks of tokens with all their channels."""
    block_c = next_power(c)
    return {"C": c, "BLOCK_C": block_c, "BLOCK_T": max(1, size // block_c)}


def conv_grid(x: Tensor, whole: bool) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Return grid, rows per program and blocks of a convolution; `whole`: a program has all channels of a token."""
    b, h, w, c = x.shape
    # Four channels of a token per thread; with three windows or sums, two.
    block_c = next_power(c) if whole else 64 if c % 64 == 0 else 32 if c % 32 == 0 else 16
    block_w = max(1, (512 if whole else 256) // block_c)
    strips, channels = b * ceil_div(w, block_w), ceil_div(c, block_c)
    rows = 28 if strips * channels * ceil_div(h, 28) >= PROGRAMS else 4
    blocks = {"C": c, "BLOCK_C": block_c, "BLOCK_W": block_w}
    return (strips * ceil_div(h, rows), channels), rows, blocks


def add_rows(*matrices: Tensor, dtype: torch.dtype, taps: int = 0) -> Tensor:
    """Add rows of one matrix or three, with at least one row, by one launch: (programs, matrices * columns).

    The result has one row, of `dtype`, if there are few rows; otherwise several, in float32. The arguments are those of
    `sum_rows`.
    """
    rows, columns = matrices[0].shape
    x, n = matrices[0], len(matrices)
    many = rows > FEW_ROWS
    block_c = min(64 if many else 16, next_power(columns))
    blocks = ceil_div(columns, block_c)
    each = ceil_div(rows, max(1, 2 * PROGRAMS // blocks)) if many else rows
    programs = ceil_div(rows, each)
    last = programs == 1
    sums = x.new_empty((programs, n * columns), dtype=dtype if last else torch.float32)
    constants = {"TAPS": taps if last else 0, "BLOCK_R": 4096 // block_c, "BLOCK_C": block_c}
    tensors = *(matrices * 3)[:3], sums
    grid = programs, blocks, n
    launch_kernel("sum_rows", grid, *tensors, rows, columns // 16, each, warps=8, **constants)
    return sums


def sum_rows(*matrices: Tensor, dtype: torch.dtype, taps: int = 0) -> Tensor:
    """Return the column sums of one matrix or three, in several steps if there are many rows.

    The number of columns is a multiple of 16. `taps`: number of channels c if the columns are (convolutions, 9, c); the
    sums are then (convolutions, c, 9).
    """
    rows, columns = matrices[0].shape
    if not rows:
        return matrices[0].new_zeros(len(matrices) * columns, dtype=dtype)
    sums = add_rows(*matrices, dtype=dtype, taps=taps)
    return sums[0] if len(sums) == 1 else sum_rows(sums, dtype=dtype, taps=taps)


# Columns of the partial results that `sum_parts` adds, as multiples of n (the first) and c.
COLUMNS = 1, 4, 3, 27, 3, 9
BLOCK = 16


def sum_parts(parts: list[Tensor | None], like: Tensor, n: int, c: int) -> Tensor:
    """Return the column sums of partial results in float32, one after the other, by one launch.

    They have n, 4 c, 3 c, 27 c, 3 c and 9 c columns; `None` is one without rows, and the last may be absent.
    """
    shortened = []
    for part in parts:
        if part is not None and len(part) > FEW_ROWS:
            part = add_rows(part, dtype=torch.float32)  # at most 2 * PROGRAMS rows
        shortened.append(part)
    sums = like.new_empty(parts_size(n, c, len(parts) == len(COLUMNS)), dtype=torch.float32)
    shortened += [None] * (len(COLUMNS) - len(parts))
    tensors = [sums if part is None else part for part in shortened]
    rows = [0 if part is None else len(part) for part in shortened]
    constants = {"N": n, "C": c, "BLOCK_R": 4096 // BLOCK, "BLOCK_C": BLOCK}
    launch_kernel("sum_parts", (len(sums) // BLOCK,), *tensors, sums, *rows, warps=8, **constants)
    return sums


def parts_size(n: int, c: int, whole: bool) -> int:
    """Return the number of sums that `sum_parts` computes, with the last matrix (`whole`) or without it."""
    return n + c * (sum(COLUMNS[1:]) if whole else sum(COLUMNS[1:-1]))


def tokens_per_image(x: Tensor) -> int:
    """Return the number of tokens per image."""
    return max(1, x.shape[1:-1].numel())


def fake_like(*names: int) -> Callable[..., Any]:
    """Return a fake implementation whose results have the shapes of the arguments at these positions."""

    def fake(*args: Any) -> Any:
        results = tuple(args[i].new_empty(args[i].shape) for i in names)
        return results if len(results) > 1 else results[0]

    return fake


def zeros_if_none(g: Tensor | None, like: Tensor) -> Tensor:
    """Return `g`, or zeros if it is None: the gradient of an unused result."""
    return torch.zeros_like(like) if g is None else g
