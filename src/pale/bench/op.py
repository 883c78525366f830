"""Speed of the attention and of each fused part of a block, by stage, compared with plain PyTorch.

On a GPU the times are those of CUDA graphs that run through several sets of inputs, together larger than the L2 cache,
so that neither launch gaps nor the cache are measured. The plain versions are compiled; plain attention is permute,
scaled dot product with the fastest kernel of PyTorch, permute back. `timing.py` describes the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import SettingsError
from ..model.pale_transformer import PaleConfig, variant
from ..ops.block import reference, triton_op
from ..ops.pale_attention import pale_attention
from ..ops.pale_attention.region import Region, check_word
from .settings import BenchSettings
from .timing import (
    DTYPES,
    Step,
    describe_run,
    error_line,
    measure_ceilings,
    quartiles,
    record_cuda_graph,
    spread_warning,
    time_in_turns,
)

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BATCH = {"cuda": 256, "cpu": 2}
PASSES = {False: "forward", True: "forward + backward"}
NOTHING_FUSED = (
    "Nothing fused to measure: the fused pieces need a CUDA device and Triton. These are the plain attention "
    "back-ends in eager mode; reference is a definition that is not optimised, so do not compare sdpa with it."
)
EPS, TOLERANCE = 1e-5, 0.02
# Arguments of each function that `ops.block.reference` and `ops.block.triton_op` share, for a map (b, h, w, c). A tuple
# is the shape of a random tensor.
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
    """One piece in one stage; `ratio` is the best plain time over the fused time."""

    piece: str
    passes: str  # a value of `PASSES`
    stage: int
    map: tuple[int, ...]  # (b, h, w, c)
    # Minimum traffic: a pass reads its inputs (or the gradients of its outputs) once and writes its outputs once.
    bytes: int = 0
    ms: dict[str, float] = field(default_factory=dict)  # by version
    quartiles: dict[str, tuple[float, float]] = field(default_factory=dict)
    ratio: float | None = None
    copy_share: float | None = None  # of the measured copy
    errors: dict[str, str] = field(default_factory=dict)


def bench_op(
    model: str = "pale_tiny",
    settings: BenchSettings | None = None,
    *,
    batch: int | None = None,
    stages: Sequence[int] = (),
    pieces: Sequence[str] = (),
    kernels: Sequence[str] = (),
    report: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure the parts of a model's blocks and return a JSON-serialisable report.

    Args:
        model: a Pale model, for the maps of its stages.
        settings: size, device, dtype, rounds and seconds are used.
        batch: batch size; default: 256 on CUDA, 2 on a CPU.
        stages: numbers of stages from 1; the default of stages, pieces and kernels is all.
        pieces: "attention" or names in `PIECES`.
        kernels: kernels of the plain attention, names in `KERNELS`.
        report: called with the name of each measurement before it starts.
    """
    settings, config = (settings or BenchSettings()).resolved(), variant(model)
    every, known = range(1, len(config.depths) + 1), ("attention", *PIECES)
    _check_words("stage", stages, tuple(map(str, every)))
    _check_words("piece", pieces, known)
    _check_words("kernel", kernels, tuple(KERNELS))
    if batch is not None and batch < 1:
        raise SettingsError(f"batch must be at least 1, got {batch}")
    cuda, b = settings.device == "cuda", batch or BATCH[settings.device]
    report("ceilings")
    limits, rows = measure_ceilings(settings), []
    chosen = (pieces or known) if cuda else known[:1]
    for piece, backward, stage in product(chosen, (False, True), stages or every):
        report(f"{piece}, stage {stage}, {PASSES[backward]}")
        shape = (b, *config.maps(*settings.size)[stage - 1], config.channels[stage - 1])
        row = OpRow(piece, PASSES[backward], stage, shape)
        arguments, versions = _versions(row, config, cuda, kernels or [*KERNELS])
        _measure(row, arguments, versions, settings, limits["copy"])
        rows.append(row)
    return {
        "about": describe_run(settings) | {"model": model},
        "ceilings": limits,
        "rows": [asdict(row) for row in rows],
        "means": _means(rows),
        "note": None if cuda else NOTHING_FUSED,
        "warning": _spread_warning(rows),
    }


def _check_words(what: str, given: Sequence[object], allowed: tuple[str, ...]) -> None:
    """Raise an error that names the first unknown word."""
    for word in given:
        check_word(what, str(word), allowed)


def _spread_warning(rows: Sequence[OpRow]) -> str | None:
    """Return a warning if the times of a version vary too much."""
    return spread_warning(
        {
            f"{row.piece} {row.passes} stage {row.stage}, {name}": (ms, row.quartiles[name])
            for row in rows
            for name, ms in row.ms.items()
        }
    )


def _versions(
    row: OpRow, config: PaleConfig, cuda: bool, kernels: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Callable[..., Any]]]:
    """Return arguments (shapes of tensors, or values) and versions of a row."""
    if row.piece != "attention":
        b, h, w, c = row.map
        return PIECES[row.piece](b, h, w, c), piece_versions(row.piece)
    heads = config.heads[row.stage - 1]
    shape = (*row.map[:3], heads, row.map[3] // heads)
    region = config.region(row.stage - 1, 0)
    return (shape,) * 3, _attention_versions(row.map, region, cuda, kernels)


def piece_versions(piece: str) -> dict[str, Callable[..., Any]]:
    """Return the two versions of a part of a block: fused kernels, and plain PyTorch."""
    return {"fused": getattr(triton_op, piece), "plain": getattr(reference, piece)}


def _means(rows: list[OpRow]) -> dict[str, float]:
    """Return geometric means of the ratios over the stages, by piece and pass."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            ratios.setdefault(f"{row.piece}, {row.passes}", []).append(row.ratio)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


def _attention_versions(
    shape: tuple[int, ...], region: Region, cuda: bool, kernels: Sequence[str]
) -> dict[str, Callable[..., Any]]:
    """Return the versions of the attention; one with the name of a PyTorch kernel runs with that kernel."""
    s_r, s_c = region.pale_size
    backends = {
        name: partial(pale_attention, pale_size=(s_r, s_c), backend=name)
        for name in ("triton", "sdpa", "reference")
    }
    if not cuda:
        return {name: backends[name] for name in ("sdpa", "reference")}
    if shape[1] % s_r or shape[2] % s_c:
        return {"fused": backends["triton"], "sdpa": backends["sdpa"]}
    plain = partial(plain_attention, pale_size=(s_r, s_c))
    return {"fused": backends["triton"], **dict.fromkeys(kernels, plain)}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, pale_size: tuple[int, ...]) -> Tensor:
    """Return attention in plain PyTorch for maps that the pale size divides: (b, h, w, heads, d) -> the same shape."""
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
    arguments: tuple[object, ...],
    versions: dict[str, Callable[..., Any]],
    settings: BenchSettings,
    copy: float,
) -> None:
    """Fill in the row: time all versions in turns, the fused one only if its results are correct."""
    cuda, backward = settings.device == "cuda", row.passes == PASSES[True]
    first = _draw(arguments, settings, False)
    *_, plain = versions.values()
    expected = _outputs(plain(*first))
    moved = sum(x.nbytes for x in (*first, *expected) if isinstance(x, Tensor))
    row.bytes = (1 + backward) * moved
    count = max(4, math.ceil(256e6 / moved)) if cuda else 1
    sets = [
        (_draw(arguments, settings, backward), [torch.randn_like(y) for y in expected])
        for _ in range(count)
    ]
    steps: dict[str, Step] = {}
    for name, version in versions.items():
        try:
            if name == "fused":
                _check(_outputs(version(*first)), expected)
            steps[name] = _prepare_step(name, version, sets, cuda, backward)
        except (RuntimeError, ValueError) as error:  # a version that cannot run, or is wrong
            row.errors[name] = error_line(error)
    for name, times in time_in_turns(steps, settings).items():
        times = [t / count for t in times]
        row.ms[name], row.quartiles[name] = statistics.median(times), quartiles(times)
    others = [ms for name, ms in row.ms.items() if name != "fused"]
    if (fused := row.ms.get("fused")) is not None:
        row.ratio = min(others) / fused if others else None
        row.copy_share = row.bytes / (1e-3 * fused) / copy


def _prepare_step(
    name: str,
    version: Callable[..., Any],
    sets: Sequence[tuple[list[Any], list[Tensor]]],
    cuda: bool,
    backward: bool,
) -> Step:
    """Return a warm step that runs a version on all sets of inputs; on CUDA, plain versions are compiled."""
    torch.compiler.reset()
    # A cached graph would ignore the choice of the kernel.
    fresh = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    with sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext(), fresh:
        if cuda and name != "fused":
            version = torch.compile(version, dynamic=False)
        step = partial(_run, version, sets, backward)
        step()
        return record_cuda_graph(step) if cuda else step


def _run(
    function: Callable[..., Any], sets: Sequence[tuple[list[Any], list[Tensor]]], backward: bool
) -> None:
    for inputs, gradients in sets:
        outputs = _outputs(function(*inputs))
        if backward:
            torch.autograd.grad(outputs, [x for x in inputs if isinstance(x, Tensor)], gradients)


def _check(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Raise an error if outputs differ from the expected ones in norm; single values may differ by rounding."""
    for y, plain in zip(outputs, expected, strict=True):
        error = float((y.float() - plain.float()).norm() / plain.float().norm())
        if not error < TOLERANCE:
            raise ValueError(f"wrong results: they differ from plain PyTorch by {error:.1%}")


def _draw(arguments: tuple[object, ...], settings: BenchSettings, gradient: bool) -> list[Any]:
    """Return the arguments with random tensors in place of shapes; matrices and filters have unit gain."""
    inputs = list(arguments)
    for i, shape in enumerate(arguments):
        if isinstance(shape, tuple):
            filters = len(shape) == 2 or shape[1:] == (1, 3, 3)
            gain = math.prod(shape[1:]) ** -0.5 if filters else 1.0
            x = gain * torch.randn(shape, device=settings.device)
            inputs[i] = x.to(DTYPES[settings.dtype]).requires_grad_(gradient)
    return inputs


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
