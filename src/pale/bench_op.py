"""Speed of the attention and of each fused piece of a block, by stage, beside plain PyTorch.

On a GPU each figure comes from CUDA graphs that run through several sets of inputs, together larger than the L2 cache,
so that neither launch gaps nor the cache are measured. The plain versions are compiled; the attention's is permute,
scaled dot product by the best of PyTorch's kernels, permute back. Otherwise all is measured as in `bench.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .bench import (
    DTYPES,
    Setting,
    Step,
    about,
    alternate,
    ceilings,
    graphed,
    quartiles,
    spread_warning,
    why,
)
from .ops.pale_attention import pale_attention
from .ops.pale_attention.region import Region, check_word
from .pale_transformer import variant

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BATCH = {"cuda": 256, "cpu": 2}
PASSES = {False: "forward", True: "forward + backward"}
NOTHING_FUSED = (
    "Nothing fused to measure: the fused pieces need a CUDA device and Triton. These are the plain attention "
    "back-ends, eager; reference is a definition and not made to be fast, so sdpa against it is no claim of speed."
)
EPS, TOLERANCE = 1e-5, 0.02
# Arguments of each function that `ops.block.reference` and `ops.block.triton_op` share, for a map (b, h, w, c): a shape
# stands for a random tensor.
PIECES: dict[str, Callable[[int, int, int, int], tuple[Any, ...]]] = {
    "conv_norm": lambda *m: (m, (m[3], 1, 3, 3), (m[3],), (m[3],), (m[3],), EPS),
    "conv_three": lambda *m: (m, *[(m[3], 1, 3, 3)] * 3),
    "linear_three": lambda *m: ((3, *m), *[(m[3], m[3])] * 3, *[(m[3],)] * 3),
    "finish": lambda *m: (
        m,
        m,
        (m[3],),
        None,
        (m[3],),
        (m[3],),
        EPS,
        (4 * m[3], m[3]),
        (4 * m[3],),
        (m[3], 4 * m[3]),
        (m[3],),
        None,
    ),
}


@dataclass
class OpRow:
    """One piece in one stage; `ratio` is the best plain time over the fused one's."""

    piece: str
    passes: str  # of `PASSES`
    stage: int
    map: tuple[int, ...]  # (b, h, w, c)
    # That must move at least: a pass reads what it is given (outputs' gradients) and writes what it gives, once.
    bytes: int = 0
    ms: dict[str, float] = field(default_factory=dict)  # by version
    quartiles: dict[str, tuple[float, float]] = field(default_factory=dict)
    ratio: float | None = None
    copy_share: float | None = None  # of the measured copy
    errors: dict[str, str] = field(default_factory=dict)


def bench_op(
    model: str = "pale_tiny",
    setting: Setting | None = None,
    *,
    batch: int | None = None,
    stages: Sequence[int] = (),
    pieces: Sequence[str] = (),
    kernels: Sequence[str] = (),
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure; everything in the result is ready for JSON.

    Args:
        model: one of ours, for the maps of its stages.
        setting: of it size, device, dtype, rounds and seconds are used.
        batch: by default 256 on CUDA, 2 on a CPU.
        stages: counted from 1; by default all, as for pieces and kernels.
        pieces: "attention" or of `PIECES`.
        kernels: of the plain attention, from `KERNELS`.
        say: is told what is about to be measured.
    """
    setting, config = setting or Setting(), variant(model)
    every, known = range(1, len(config.depths) + 1), ("attention", *PIECES)
    for what, given, allowed in (
        ("stage", stages, tuple(map(str, every))),
        ("piece", pieces, known),
        ("kernel", kernels, tuple(KERNELS)),
    ):
        for word in given:
            check_word(what, str(word), allowed)
    if batch is not None and batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    cuda, b = setting.device == "cuda", batch or BATCH[setting.device]
    say("ceilings")
    roof, rows = ceilings(setting), []
    for piece in (pieces or known) if cuda else known[:1]:
        for backward in (False, True):
            for stage in stages or every:
                say(f"{piece}, stage {stage}, {PASSES[backward]}")
                i = stage - 1
                shape = (b, *config.maps(*setting.size)[i], config.channels[i])
                row = OpRow(piece, PASSES[backward], stage, shape)
                if piece == "attention":
                    heads = config.heads[i]
                    shapes: Any = ((*shape[:3], heads, shape[3] // heads),) * 3
                    versions = _attentions(shape, config.region(i, 0), cuda, kernels or [*KERNELS])
                else:
                    from .ops.block import reference, triton_op

                    shapes = PIECES[piece](*shape)
                    versions = {
                        "fused": getattr(triton_op, piece),
                        "plain": getattr(reference, piece),
                    }
                _measure(row, shapes, versions, setting, roof["copy"])
                rows.append(row)
    times = {
        f"{r.piece} {r.passes} stage {r.stage}, {name}": (r.ms[name], r.quartiles[name])
        for r in rows
        for name in r.ms
    }
    return {
        "about": about(setting) | {"model": model},
        "ceilings": roof,
        "rows": [asdict(row) for row in rows],
        "means": _means(rows),
        "note": None if cuda else NOTHING_FUSED,
        "warning": spread_warning(times),
    }


def _means(rows: list[OpRow]) -> dict[str, float]:
    """Geometric means of the ratios over the stages, by piece and pass."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            ratios.setdefault(f"{row.piece}, {row.passes}", []).append(row.ratio)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


def _attentions(
    shape: tuple[int, ...], region: Region, cuda: bool, kernels: Sequence[str]
) -> dict[str, Callable[..., Any]]:
    """The versions of the attention; those that are named after a kernel of PyTorch's are to run with it."""
    s_r, s_c = region.pale_size
    ways = {
        name: partial(pale_attention, pale_size=(s_r, s_c), backend=name)
        for name in ("triton", "sdpa", "reference")
    }
    if not cuda:
        return {name: ways[name] for name in ("sdpa", "reference")}
    if shape[1] % s_r or shape[2] % s_c:
        return {"fused": ways["triton"], "sdpa": ways["sdpa"]}
    plain = partial(plain_attention, pale_size=(s_r, s_c))
    return {"fused": ways["triton"], **dict.fromkeys(kernels, plain)}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, pale_size: tuple[int, int]) -> Tensor:
    """What one would write for maps that the pale divides: (b, h, w, heads, d) -> (b, h, w, heads, d)."""
    halves = []
    for axis in (1, 2):
        s, packed = pale_size[axis - 1], []
        for x in (q, k, v):
            y = x.chunk(2, dim=3)[axis - 1]
            y = y.transpose(1, axis).unflatten(1, (s, -1))  # (b, s, n, w, heads, d)
            packed.append(y.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(0, 1))
        y = F.scaled_dot_product_attention(*packed)  # (b*n, heads, s*w, d)
        y = y.unflatten(2, (s, -1)).unflatten(0, (q.shape[0], -1))  # (b, n, heads, s, w, d)
        halves.append(y.permute(0, 3, 1, 4, 2, 5).flatten(1, 2).transpose(1, axis))
    return torch.cat(halves, dim=3)


def _measure(
    row: OpRow,
    shapes: tuple[Any, ...],
    versions: dict[str, Callable[..., Any]],
    setting: Setting,
    copy: float,
) -> None:
    """Fill in the row: all versions in turn, the fused one after a look at its numbers."""
    cuda, backward = setting.device == "cuda", row.passes == PASSES[True]
    first = _draw(shapes, setting, False)
    *_, plain = versions.values()
    expected = _outputs(plain(*first))
    moved = sum(x.nbytes for x in (*first, *expected) if isinstance(x, Tensor))
    row.bytes = (1 + backward) * moved
    count = max(4, math.ceil(256e6 / moved)) if cuda else 1
    sets = [
        (_draw(shapes, setting, backward), [torch.randn_like(y) for y in expected])
        for _ in range(count)
    ]

    def run(function: Callable[..., Any]) -> None:
        for inputs, gradients in sets:
            outputs = _outputs(function(*inputs))
            if backward:
                torch.autograd.grad(
                    outputs, [x for x in inputs if isinstance(x, Tensor)], gradients
                )

    steps: dict[str, Step] = {}
    for name, version in versions.items():
        torch.compiler.reset()
        # A cached graph would not know of the kernel that is asked for.
        fresh = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
        try:
            with sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext(), fresh:
                if name == "fused":
                    _check(_outputs(version(*first)), expected)
                elif cuda:
                    version = torch.compile(version, dynamic=False)
                step = partial(run, version)
                step()
                steps[name] = graphed(step) if cuda else step
        except (RuntimeError, ValueError) as error:  # a version that cannot run, or is wrong
            row.errors[name] = why(error)
    for name, times in alternate(steps, setting).items():
        times = [t / count for t in times]
        row.ms[name], row.quartiles[name] = statistics.median(times), quartiles(times)
    others = [ms for name, ms in row.ms.items() if name != "fused"]
    if (fused := row.ms.get("fused")) is not None:
        row.ratio = min(others) / fused if others else None
        row.copy_share = row.bytes / (1e-3 * fused) / copy


def _check(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """No speed for wrong numbers. As a whole: single numbers may differ by the rounding of a sum before its norm."""
    for y, plain in zip(outputs, expected, strict=True):
        error = float((y.float() - plain.float()).norm() / plain.float().norm())
        if not error < TOLERANCE:
            raise ValueError(f"wrong numbers: {error:.1%} away from plain PyTorch's")


def _draw(shapes: tuple[Any, ...], setting: Setting, gradient: bool) -> list[Any]:
    """Random tensors in place of shapes; matrices and filters with unit gain."""
    inputs = list(shapes)
    for i, shape in enumerate(shapes):
        if isinstance(shape, tuple):
            filters = len(shape) == 2 or shape[1:] == (1, 3, 3)
            gain = math.prod(shape[1:]) ** -0.5 if filters else 1.0
            x = gain * torch.randn(shape, device=setting.device)
            inputs[i] = x.to(DTYPES[setting.dtype]).requires_grad_(gradient)
    return inputs


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
