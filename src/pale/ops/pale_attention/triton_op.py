"""Pale attention as Triton kernels: launch, configurations, registration. README.md explains the kernels.

Triton itself is imported at the first launch. To PyTorch forward and backward are two opaque operators with fakes,
autograd and FLOP formulas, so that one compiled graph serves many sizes. The scope `pale` is two calls, one with the
queries of the rows and one with those of the columns of each pale, and their mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..launching import AVAILABLE, DTYPES, INTERPRETED, capability, launch, launches
from ..registration import define, differentiate
from ..shortcuts import is_transformed
from ..sizes import exporting
from .region import Region

__all__ = ["AVAILABLE", "INTERPRETED", "attention", "forward", "launches", "unsupported"]

HEAD_DIMS = (16, 32, 48, 64)

# Maximum number of programs in the last dimension of a grid, and the number that keeps a large GPU busy.
GRID, PROGRAMS = 65535, 1024
LOG2_E = 1.4426950408889634
KERNELS = __package__ + ".triton_kernels"


def unsupported(q: Tensor, region: Region) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    if not AVAILABLE:
        return "Triton is not installed"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, got {q.device.type!r}"
    if exporting():
        return "an exported program must run without these kernels"
    if is_transformed(q):
        return "tensor subclasses, tracers and transforms of torch.func do not know its kernels"
    if q.dtype not in DTYPES:
        return f"it computes in float16, bfloat16 or float32, got {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"it has kernels for head dims {', '.join(map(str, HEAD_DIMS))}, got d={q.shape[-1]}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """Return attention inside each group of `region`; q, k, v and the result are (b, h, w, heads, d)."""
    (s_r, s_c), grouping = region.pale_size, region.grouping
    if region.scope == "pale":
        x_r: Tensor = attention(q, k, v, s_r, s_c, "pale_row", grouping)[0]
        x_c: Tensor = attention(q, k, v, s_r, s_c, "pale_column", grouping)[0]
        return (x_r + x_c) / 2
    out: Tensor = attention(q, k, v, s_r, s_c, region.scope, grouping)[0]
    return out


@dataclass(frozen=True)
class Config:
    """Block sizes and launch options of one kernel."""

    block_m: int  # queries of a step
    block_n: int  # keys of a step
    warps: int = 4
    stages: int = 1
    max_heads: int = 1  # that a program processes in sequence, if there are enough programs
    registers: int | None = None  # maximum number of registers per thread


@dataclass(frozen=True)
class Configs:
    """The kernels of one call: those that process a group in one block have priority over those that use steps."""

    forward: Config
    backward_q: Config
    backward_kv: Config
    forward_group: Config | None = None
    backward_group: Config | None = None


@dataclass(frozen=True)
class Lines:
    """Sizes of row groups (or column groups): `many` groups of `big` lines, then groups of `small` lines."""

    n: int
    first: int  # the first line of group p is p * first
    step: int  # from one line to the next
    many: int
    big: int
    small: int
    width: int  # tokens of a line

    @classmethod
    def of(cls, length: int, width: int, s: int, n: int, interlaced: bool) -> Lines:
        """Return the groups of the `length` rows (or columns) of a map."""
        if interlaced:
            return cls(n, 1, n, length % n, length // n + 1, length // n, width)
        return cls(n, s, 1, n - 1, s, length - (n - 1) * s, width)

    def numbers(self) -> tuple[int, ...]:
        """Return them in the order of the kernels' arguments."""
        return self.n, self.first, self.step, self.many, self.big, self.small

    def tokens(self) -> list[int]:
        """Return the one or two sizes of groups."""
        sizes = [self.big] * (self.many > 0) + [self.small] * (self.many < self.n)
        return [size * self.width for size in sizes]


@dataclass(frozen=True)
class Plan:
    """Run-time numbers and constants that all kernels of a call share."""

    b: int
    h: int
    w: int
    heads: int
    d: int
    dtype: torch.dtype
    scope: str  # of the queries: "parallel", "row", "column"
    pale: bool  # whether keys come from rows and columns
    rows: Lines
    columns: Lines

    def lines(self, scope: str) -> tuple[Lines, ...]:
        """Return row groups, column groups or both."""
        every = {"row": (self.rows,), "column": (self.columns,)}
        return every.get(scope, (self.rows, self.columns))

    def tokens(self, scope: str | None = None) -> list[int]:
        """Return the sizes of groups in a direction, by default that of the queries."""
        return [n for lines in self.lines(scope or self.scope) for n in lines.tokens()]

    def rest(self, block: int) -> int:
        """Return BLOCK_T, the block for the last tokens of a group, which do not fill a block of `block`."""
        return 16 if max(n % block for n in self.tokens()) <= 16 else block

    def heads_per_program(self, limit: int, groups: int) -> int:
        """Return the heads per program: all by rows or all by columns, with enough programs for a large GPU."""
        span = self.heads // 2 if self.scope == "parallel" else self.heads
        limit = min(limit, max(1, self.b * groups * self.heads // PROGRAMS))
        return max(n for n in range(1, limit + 1) if span % n == 0)

    def launch(
        self,
        name: str,
        config: Config,
        tensors: tuple[Tensor, ...],
        *,
        inputs: int,
        block: int,
        tokens: int,
        **constants: object,
    ) -> None:
        """Run a kernel over the blocks of all groups.

        Args:
            name: name of the kernel.
            config: its launch options; the block sizes are among the `constants`.
            tensors: the first `inputs` of them are passed with their strides, the others are contiguous.
            inputs: see `tensors`.
            block: tokens per program.
            tokens: tokens of the largest group.
            constants: compile-time arguments of this kernel only.
        """
        if self.b > GRID:
            for start in range(0, self.b, GRID):
                some = tuple(x[start : start + GRID] for x in tensors)
                same = {"inputs": inputs, "block": block, "tokens": tokens, **constants}
                replace(self, b=len(some[0])).launch(name, config, some, **same)  # type: ignore[arg-type]
            return
        groups = max(x.n for x in self.lines("parallel" if self.pale else self.scope))
        per = self.heads_per_program(config.max_heads, groups) if config.max_heads > 1 else 1
        align = 16 // self.dtype.itemsize
        strides = [s // align for x in tensors[:inputs] for s in x.stride()[:4]]
        split = {"row": self.heads, "column": 0}.get(self.scope, self.heads // 2)
        lines = *self.rows.numbers(), *self.columns.numbers()
        constants |= {"D": self.d, "BLOCK_D": _power(self.d), "ALIGN": align}
        constants["SCALE"] = self.d**-0.5 * LOG2_E  # exp(x) = exp2(x log2 e)
        options = {"num_warps": config.warps, "num_stages": config.stages}
        if config.registers is not None:
            options["maxnreg"] = config.registers
        grid = -(-tokens // block), groups * (self.heads // per), self.b
        numbers = self.h, self.w, self.heads, split, per, *lines, *strides
        launch(KERNELS, name, grid, *tensors, *numbers, options=options, **constants)


@lru_cache(maxsize=1024)
def plan_of(
    shape: torch.Size, dtype: torch.dtype, s_r: int, s_c: int, scope: str, grouping: str
) -> Plan:
    """Return the plan for q of this shape."""
    b, h, w, heads, d = shape
    n_r, n_c = _region(s_r, s_c, scope, grouping).counts(h, w)
    rows = Lines.of(h, w, s_r, n_r, grouping == "interlaced")
    columns = Lines.of(w, h, s_c, n_c, grouping == "interlaced")
    pale = scope.startswith("pale")
    return Plan(b, h, w, heads, d, dtype, scope.removeprefix("pale_"), pale, rows, columns)


@lru_cache(maxsize=1024)
def choose(plan: Plan, capability: int) -> Configs:
    """Return configurations for the groups of `plan`, measured on an H200 (`capability` 90)."""
    block = _power(max(plan.tokens()))
    whole = None if plan.pale else block  # a pale is never one block
    if plan.dtype == torch.float32 or capability < 80:
        # Without matrix units (Triton has none for float32 and before Ampere) every product is unrolled: small blocks.
        step = Config(32, 32)
        group = Config(block, block) if whole is not None and whole <= 32 else None
        return Configs(step, step, step, group, group)
    # The right number of registers, and with it of programs on a multiprocessor, holds for Hopper's matrix unit only.
    registers = 128 if capability == 90 else None
    return _choose_wide(whole) if plan.d > 32 else _choose_narrow(plan, whole, registers)


def _choose_wide(whole: int | None) -> Configs:
    """Return configurations for more than 32 channels per head; `whole` is the block of a group in one block."""
    step_q, step_kv = Config(64, 32, stages=3), Config(32, 64, stages=3)
    if whole is not None and whole <= 64:
        groups = Config(whole, whole, stages=2, max_heads=8), Config(whole, whole)
        return Configs(step_q, step_q, step_kv, *groups)
    if whole == 128:
        return Configs(step_q, step_q, step_kv, None, Config(128, 128, warps=8))
    return Configs(step_q, step_q, step_kv)


def _choose_narrow(plan: Plan, whole: int | None, registers: int | None) -> Configs:
    """Return configurations for at most 32 channels per head."""
    forward_group = backward_group = None
    if whole is not None and whole <= 64:
        forward_group = Config(whole, whole, stages=3, max_heads=8)
        backward_group = Config(whole, whole)
    elif whole == 128:
        forward_group = Config(64, 128, stages=2, max_heads=4, registers=registers)
        backward_group = Config(128, 128, warps=8, registers=registers)
    many = max(plan.tokens()) > 256
    step_q = Config(64, 64, stages=3) if many else Config(64, 32, stages=4)
    step_kv = Config(32, 64, stages=3, registers=registers)
    if many and plan.rest(64) == 16:
        step_kv = Config(64, 64, stages=3)
    step = Config(64, 64, stages=3, registers=None if registers is None else 80)
    return Configs(step, step_q, step_kv, forward_group, backward_group)


def run_forward(
    plan: Plan, configs: Configs, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor
) -> None:
    """Fill `out` and `lse` from `inputs`, q, k and v."""
    config = configs.forward_group or configs.forward
    blocks: dict[str, object] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    name = "attention_forward_group"
    if configs.forward_group is None:
        name = "attention_forward"
        blocks |= {"PALE": plan.pale, "BLOCK_T": plan.rest(config.block_n)}
    tensors, tokens = (*inputs, out, lse), max(plan.tokens())
    plan.launch(name, config, tensors, inputs=3, block=config.block_m, tokens=tokens, **blocks)


def run_backward(
    plan: Plan,
    configs: Configs,
    inputs: tuple[Tensor, ...],
    saved: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill `gradients` from `inputs`, the output's gradient, q, k and v, and `saved`, the output and `lse`.

    The first dimension of dk and dv is 1, or 2 if a token is a key both in its row and in its column.
    """
    tokens = max(plan.tokens())
    dq, dk, dv = gradients
    if (config := configs.backward_group) is not None:
        blocks: dict[str, object] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        tensors = *inputs, *saved, dq, dk[0], dv[0]
        name = "attention_backward_group"
        plan.launch(name, config, tensors, inputs=4, block=config.block_n, tokens=tokens, **blocks)
        return
    pair = saved[1].new_empty((*saved[1].shape, 2))
    config = configs.backward_q
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PALE": plan.pale}
    blocks["BLOCK_T"] = plan.rest(config.block_n)
    tensors = *inputs, *saved, pair, dq
    name = "attention_backward_q"
    plan.launch(name, config, tensors, inputs=4, block=config.block_m, tokens=tokens, **blocks)
    config = configs.backward_kv
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PALE": plan.pale}
    blocks["BLOCK_T"] = plan.rest(config.block_m)
    for part in range(len(dk)):
        if plan.pale:
            tokens = max(plan.tokens(("row", "column")[part]))
        tensors = *inputs, pair, dk[part], dv[part]
        blocks["PART"] = part
        name = "attention_backward_kv"
        plan.launch(name, config, tensors, inputs=4, block=config.block_n, tokens=tokens, **blocks)


def _power(tokens: int) -> int:
    """Return the next power of two, at least the 16 of a matrix instruction."""
    return max(16, 1 << (tokens - 1).bit_length())


def _region(s_r: int, s_c: int, scope: str, grouping: str) -> Region:
    return Region((s_r, s_c), "pale" if scope.startswith("pale") else scope, grouping)  # type: ignore[arg-type]


def _readable(x: Tensor) -> Tensor:
    """Return `x` if the kernels can read it in place (16-byte steps, 32-bit offsets inside an image), else a copy."""
    unit = 16 // x.dtype.itemsize
    steps = [s for s, n in zip(x.stride()[:4], x.shape[:4], strict=True) if n > 1]
    aligned = x.stride(4) == 1 and x.data_ptr() % 16 == 0 and all(s % unit == 0 for s in steps)
    span = sum((n - 1) * s for s, n in zip(x.stride()[1:], x.shape[1:], strict=True))
    return x if aligned and span < 2**31 else x.contiguous()


def _fake(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    b, h, w, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, heads, h * w), dtype=torch.float32)


@define(
    "triton_attention(Tensor q, Tensor k, Tensor v, int s_r, int s_c, str scope, str grouping) -> (Tensor, Tensor)",
    _fake,
)
def attention(
    q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, scope: str, grouping: str
) -> tuple[Tensor, Tensor]:
    """Return the output, (b, h, w, heads, d), and log2 of the sums of exponentials, (b, heads, h*w) by groups."""
    b, h, w, heads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((b, heads, h * w), dtype=torch.float32)
    if q.numel():
        plan = plan_of(q.shape, q.dtype, s_r, s_c, scope, grouping)
        inputs = _readable(q), _readable(k), _readable(v)
        run_forward(plan, choose(plan, capability(q.device)), inputs, out, lse)
    return out, lse


@define(
    "triton_attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " int s_r, int s_c, str scope, str grouping) -> (Tensor, Tensor, Tensor)",
    lambda g, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    s_r: int,
    s_c: int,
    scope: str,
    grouping: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the gradient `g` of the output."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not q.numel():
        return dq, dk, dv
    plan = plan_of(q.shape, q.dtype, s_r, s_c, scope, grouping)
    configs = choose(plan, capability(q.device))
    inputs = tuple(_readable(x) for x in (g, q, k, v))
    saved = out.contiguous(), lse.contiguous()
    if not plan.pale:
        run_backward(plan, configs, inputs, saved, (dq, dk[None], dv[None]))
        return dq, dk, dv
    parts_k, parts_v = (x.new_empty((2, *x.shape), dtype=torch.float32) for x in (k, v))
    run_backward(plan, configs, inputs, saved, (dq, parts_k, parts_v))
    return dq, parts_k.sum(0).to(k.dtype), parts_v.sum(0).to(v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:3], out, lse)
    ctx.region = inputs[3:]


def _backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 7
    return *attention_backward(g, *ctx.saved_tensors, *ctx.region), None, None, None, None


differentiate("triton_attention", _backward, _save)


def pairs(shape: tuple[int, ...], s_r: int, s_c: int, scope: str, grouping: str) -> int:
    """Return the query-key pairs of a call; the two calls of scope `pale` count a token with two places twice."""
    b, h, w, heads, _ = shape
    region = _region(s_r, s_c, scope, grouping)
    if region.scope != "pale":
        return b * region.pairs(h, w, heads)
    queries = region.members("row" if scope == "pale_row" else "column", h, w).flatten(1).sum(1)
    keys = region.members("pale", h, w).flatten(1).sum(1)[: len(queries)]
    return b * heads * int((queries * keys).sum())


@register_flop_formula(torch.ops.pale.triton_attention)
def _(q: tuple[int, ...], k: object, v: object, *region: Any, **_: object) -> int:
    # Two matrix products: q k and p v.
    return 4 * q[-1] * pairs(q, *region)


@register_flop_formula(torch.ops.pale.triton_attention_backward)
def _(
    g: object,
    q: tuple[int, ...],
    k: object,
    v: object,
    out: object,
    lse: object,
    *region: Any,
    **_: object,
) -> int:
    # Five, as PyTorch counts its own: q k again, dv, dp, dq, dk.
    return 10 * q[-1] * pairs(q, *region)
