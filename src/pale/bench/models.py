"""Speed and memory of whole Pale and timm models; `op.py` measures the parts of a block.

Models are warmed up and compiled first and run on random data. Latency is a batch of one, on a GPU as a CUDA graph.
Inference converts the weights of every model to the dtype, or leaves them in fp32 under autocast; training is forward
and backward under autocast with fp32 weights, without optimiser and without stochastic depth.

The FLOPs of a model are two for each multiply-add of PyTorch's own operators, and in training three times that
(PyTorch's counter counts the backward pass of a depthwise convolution as that of a full one). Peak memory is the peak
of one step minus the memory allocated before the model was built: images and other models are not included.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Literal, TypeVar

import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..errors import SettingsError
from ..model.optimize import optimize
from .settings import BenchSettings
from .timing import (
    DTYPES,
    WARMUP_CALLS,
    Step,
    describe_run,
    error_line,
    measure_ceilings,
    quartiles,
    record_cuda_graph,
    spread_warning,
    time_in_turns,
)

Task = Literal["inference", "training", "latency"]
Mode = Literal["eager", "compiled", "graphs"]
T = TypeVar("T")

MODELS = ("pale_tiny", "swin_tiny_patch4_window7_224")
BATCH = {"cuda": 256, "cpu": 8}


@dataclass
class Row:
    """One model in one task; `ratio` is the speed of the first model over the speed of this one."""

    model: str
    task: Task
    mode: Mode
    batch: int
    ms: float | None = None
    quartiles: tuple[float, float] | None = None
    images_per_s: float | None = None
    ratio: float | None = None
    flops: int | None = None  # of one step
    matrix_share: float | None = None  # of the measured matrix product
    peak_bytes: int | None = None
    error: str | None = None


def bench(
    models: Sequence[str] = MODELS,
    settings: BenchSettings | None = None,
    *,
    tasks: Sequence[Task] = ("inference",),
    modes: Sequence[Mode] = ("eager",),
    batches: Sequence[int] = (),
    report: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure whole models, a Pale model first, and return a JSON-serialisable report.

    Args:
        models: timm model names.
        settings: settings of all rows.
        tasks: tasks to measure; "latency" has a batch of one.
        modes: execution modes to measure.
        batches: batch sizes; default: 256 on CUDA, 8 on a CPU.
        report: called with the name of each measurement before it starts.
    """
    settings = (settings or BenchSettings()).resolved()
    if not models or min(batches, default=1) < 1:
        raise SettingsError(
            f"a model and batches of at least 1 are needed, got {models=}, {batches=}"
        )
    if settings.optimized and "training" in tasks:
        raise SettingsError(
            "an optimized model is for inference; leave out 'training' or 'optimized'"
        )
    report("ceilings")
    limits, rows = measure_ceilings(settings), []
    for task in tasks:
        for batch in (1,) if task == "latency" else batches or (BATCH[settings.device],):
            for mode in modes:
                report(f"{task}, {mode}, batch {batch}")
                rows += compare(models, task, mode, batch, settings, limits["matrix"])
    times = {
        f"{r.model} ({r.task}, {r.mode}, batch {r.batch})": (r.ms, r.quartiles)
        for r in rows
        if r.ms and r.quartiles
    }
    return {
        "about": describe_run(settings),
        "ceilings": limits,
        "rows": [asdict(row) for row in rows],
        "warning": spread_warning(times),
    }


def compare(
    models: Sequence[str],
    task: Task,
    mode: Mode,
    batch: int,
    settings: BenchSettings,
    matrix: float,
) -> list[Row]:
    """Measure one group of rows with all models in memory, in turns; `matrix` is the ceiling in FLOP/s."""
    torch.compiler.reset()
    x = torch.randn(batch, 3, *settings.size, device=settings.device)
    if task != "training" and not settings.autocast:
        x = x.to(DTYPES[settings.dtype])
    rows = {name: Row(name, task, mode, batch) for name in models}
    steps: dict[str, Step] = {}
    for name, row in rows.items():
        ours = name == models[0]
        if ready := _attempt(row, partial(_prepare, name, task, mode, x, settings, ours)):
            steps[name], row.peak_bytes = ready
    # Run each once more with all models in memory: one may have fitted only without the others.
    for name in list(steps):
        _attempt(rows[name], steps[name])
        if rows[name].error:
            del steps[name]
    for name, times in time_in_turns(steps, settings).items():
        row = rows[name]
        row.ms, row.quartiles = statistics.median(times), quartiles(times)
        row.images_per_s = 1e3 * batch / row.ms
        if flops := model_flops(name, settings.size, settings.features):
            row.flops = batch * flops * (3 if task == "training" else 1)
            row.matrix_share = row.flops / (1e-3 * row.ms) / matrix
    if ours_ms := rows[models[0]].ms:
        for row in rows.values():
            row.ratio = row.ms and row.ms / ours_ms
    return list(rows.values())


def _prepare(
    name: str, task: Task, mode: Mode, x: Tensor, settings: BenchSettings, ours: bool
) -> tuple[Step, int | None]:
    """Return a warm step, and its peak memory in bytes (only on CUDA)."""
    others = torch.cuda.memory_allocated() - x.nbytes if x.is_cuda else 0
    # Latency and "graphs" record the step of every model, which excludes the time of the CPU.
    recorded = x.is_cuda and (task == "latency" or mode == "graphs")
    model = create_model(name, settings.size).to(x.device).train(task == "training")
    call: Callable[[Tensor], Tensor]
    if ours and settings.optimized:
        own_graph = x.is_cuda and not recorded and not settings.features
        model = optimize(model, dtype=DTYPES[settings.dtype], cuda_graph=own_graph)
        call = _features(model) if settings.features else model
    else:
        model = model.to(x.dtype)
        call = _features(model) if settings.features else model
        call = call if mode == "eager" else torch.compile(call, dynamic=False)
    step = _make_step(model, call, x, _cast_dtype(task, settings), task == "training")
    for _ in range(WARMUP_CALLS):
        step()
    if not x.is_cuda:
        return step, None
    peak = _measure_peak(step) - others
    return (record_cuda_graph(step) if recorded else step), peak


def _cast_dtype(task: Task, settings: BenchSettings) -> torch.dtype | None:
    """Return the dtype of autocast, None without autocast."""
    dtype = DTYPES[settings.dtype]
    casts = (task == "training" or settings.autocast) and dtype != torch.float32
    return dtype if casts else None


def _measure_peak(step: Step) -> int:
    """Return the peak of the allocated bytes in one step on CUDA."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def _make_step(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    cast: torch.dtype | None,
    training: bool,
) -> Step:
    def autocast() -> AbstractContextManager[object]:
        return nullcontext() if cast is None else torch.autocast(x.device.type, cast)

    def infer() -> None:
        with torch.inference_mode(), autocast():
            call(x)

    def train() -> None:
        with autocast():
            loss = call(x).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return train if training else infer


def _features(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the method of a timm model that computes the features."""
    method: Callable[[Tensor], Tensor] = model.forward_features
    return method


def create_model(name: str, size: tuple[int, ...]) -> nn.Module:
    """Return a timm model for images of this size, without stochastic depth, which slows some models by default."""
    if not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; `timm.list_models()` lists them"
        raise SettingsError(f"timm has no model {name!r}{hint}")
    try:
        model: nn.Module = timm.create_model(name, img_size=size)
    except TypeError as error:  # most convolutional networks take any size and no such argument
        if "img_size" not in str(error):
            raise
        model = timm.create_model(name)
    for part in model.modules():
        if isinstance(part, DropPath):
            part.drop_prob = 0.0
    return model


def _attempt(row: Row, action: Callable[[], T]) -> T | None:
    """Return the result of `action`. A failure of a model is stored in its row, and the others continue."""
    try:
        return action()
    except Exception as error:
        row.error = error_line(error)
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA
    return None


@cache
def model_flops(name: str, size: tuple[int, ...], features: bool) -> int | None:
    """Return the forward FLOPs for one image, counted on the meta device; None for a model that cannot run there."""
    try:
        with torch.device("meta"):
            model = create_model(name, size).eval()
            x = torch.empty(1, 3, *size)
        call = _features(model) if features else model
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            call(x)
    except Exception:
        return None
    return int(counter.get_total_flops())
