"""Speed and memory of whole models, ours beside timm's; `bench_op.py` measures the pieces of a block.

All that is compared lives in one process and takes turns, so that whatever slows the machine down slows all alike.
Everything is warmed up and compiled first, runs on random data, and counts with the median of its rounds; CUDA events
keep the time on a GPU. Latency is a batch of one, on a GPU each model as a CUDA graph. Inference converts the weights
of every model to the dtype, or leaves them in fp32 under autocast; training is forward and backward under autocast
with fp32 weights, without an optimiser and without stochastic depth.

The ceilings are what this machine does in the same process: a large matrix product and a large copy. A model's FLOPs
are two for each multiply-add of PyTorch's own operators, and in training three times that (PyTorch's counter takes the
backward of a depthwise convolution for that of a full one). Peak memory is the peak of one step less what was allocated
before the model was built, the images excepted: the other models do not count.
"""

from __future__ import annotations

import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import timm
import torch
from PIL import Image
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .doctor import examine
from .ops.pale_attention.region import check_word
from .optimize import optimize
from .view import DIRECTION_TINTS, FAINT, INK, _text

Task = Literal["inference", "training", "latency"]
Mode = Literal["eager", "compiled", "graphs"]
Step = Callable[[], object]

MODELS = ("pale_tiny", "swin_tiny_patch4_window7_224")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = {"cuda": 256, "cpu": 8}
MATRIX, COPY = {"cuda": 8192, "cpu": 2048}, {"cuda": 2**30, "cpu": 2**28}  # side; bytes
WARMUP, SPREAD = 3, 0.2  # calls; quartile distance over median from which numbers are poor


@dataclass(frozen=True)
class Setting:
    """What all rows of a run share; "auto" is CUDA where there is one, and bf16 there, fp32 on a CPU."""

    size: tuple[int, int] = (224, 224)
    device: str = "auto"
    dtype: str = "auto"
    rounds: int = 30
    seconds: float = 60.0  # after which a row gets no more rounds
    autocast: bool = False
    features: bool = False  # `forward_features` alone
    optimized: bool = False  # ours through `pale.optimize`

    def __post_init__(self) -> None:
        """Check, and replace "auto" by what it means here."""
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if torch.cuda.is_available() else "cpu")
        check_word("device", self.device, ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda' needs a CUDA device, and there is none; use 'cpu'")
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", "bf16" if self.device == "cuda" else "fp32")
        check_word("dtype", self.dtype, tuple(DTYPES))
        if min(self.size) < 1 or self.rounds < 2 or self.seconds <= 0:
            raise ValueError(
                "size must be at least 1, rounds at least 2 (for quartiles), seconds more than 0, "
                f"got size={self.size}, rounds={self.rounds}, seconds={self.seconds}"
            )
        if self.optimized and self.autocast:
            raise ValueError(
                "an optimized model has its own dtype and takes no autocast; leave one of the two out"
            )


@dataclass
class Row:
    """One model in one task; `ratio` is the first model's speed over this one's."""

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
    setting: Setting | None = None,
    *,
    tasks: Sequence[Task] = ("inference",),
    modes: Sequence[Mode] = ("eager",),
    batches: Sequence[int] = (),
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure whole models, the first of them ours; everything in the result is ready for JSON.

    Args:
        models: names that timm knows.
        setting: what all rows share.
        tasks: each is a group of rows; "latency" has a batch of one.
        modes: likewise.
        batches: likewise; by default 256 on CUDA, 8 on a CPU.
        say: is told what is about to be measured.
    """
    setting = setting or Setting()
    if not models or min(batches, default=1) < 1:
        raise ValueError(f"a model and batches of at least 1 are needed, got {models=}, {batches=}")
    if setting.optimized and "training" in tasks:
        raise ValueError("an optimized model is for inference; leave out 'training' or 'optimized'")
    say("ceilings")
    roof, rows = ceilings(setting), []
    for task in tasks:
        for batch in (1,) if task == "latency" else batches or (BATCH[setting.device],):
            for mode in modes:
                say(f"{task}, {mode}, batch {batch}")
                rows += compare(models, task, mode, batch, setting, roof["matrix"])
    times = {
        f"{r.model} ({r.task}, {r.mode}, batch {r.batch})": (r.ms, r.quartiles)
        for r in rows
        if r.ms and r.quartiles
    }
    return {
        "about": about(setting),
        "ceilings": roof,
        "rows": [asdict(row) for row in rows],
        "warning": spread_warning(times),
    }


def compare(
    models: Sequence[str], task: Task, mode: Mode, batch: int, setting: Setting, matrix: float
) -> list[Row]:
    """One group of rows: all models in memory, in turn; `matrix` is the ceiling in FLOP/s."""
    torch.compiler.reset()
    x = torch.randn(batch, 3, *setting.size, device=setting.device)
    if task != "training" and not setting.autocast:
        x = x.to(DTYPES[setting.dtype])
    rows = {name: Row(name, task, mode, batch) for name in models}
    steps: dict[str, Step] = {}
    for name, row in rows.items():
        ours = name == models[0]
        if ready := _attempt(row, partial(_prepare, name, task, mode, x, setting, ours)):
            steps[name], row.peak_bytes = ready
    # Once more, now that all are there: a model may have fitted only without the others.
    for name in list(steps):
        _attempt(rows[name], steps[name])
        if rows[name].error:
            del steps[name]
    for name, times in alternate(steps, setting).items():
        row = rows[name]
        row.ms, row.quartiles = statistics.median(times), quartiles(times)
        row.images_per_s = 1e3 * batch / row.ms
        if flops := model_flops(name, setting.size, setting.features):
            row.flops = batch * flops * (3 if task == "training" else 1)
            row.matrix_share = row.flops / (1e-3 * row.ms) / matrix
    if ours_ms := rows[models[0]].ms:
        for row in rows.values():
            row.ratio = row.ms and row.ms / ours_ms
    return list(rows.values())


def _prepare(
    name: str, task: Task, mode: Mode, x: Tensor, setting: Setting, ours: bool
) -> tuple[Step, int | None]:
    """A warm step, and its peak memory in bytes (CUDA only)."""
    cuda, training, dtype = x.is_cuda, task == "training", DTYPES[setting.dtype]
    others = torch.cuda.memory_allocated() - x.nbytes if cuda else 0
    model = create(name, setting.size).to(x.device).train(training)
    # Latency and "graphs" record every model's step, which takes the CPU out of the measurement.
    graph = False
    if optimized := ours and setting.optimized:
        graph = cuda and task != "latency" and mode != "graphs" and not setting.features
        model = optimize(model, dtype=dtype, cuda_graph=graph)
    else:
        model = model.to(x.dtype)
    call: Any = model.forward_features if setting.features else model
    if mode != "eager" and not optimized:
        call = torch.compile(call, dynamic=False)
    casts = (training or setting.autocast) and dtype != torch.float32

    def cast() -> AbstractContextManager[Any]:
        return torch.autocast(x.device.type, dtype) if casts else nullcontext()

    def infer() -> None:
        with torch.inference_mode(), cast():
            call(x)

    def train() -> None:
        with cast():
            loss = call(x).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    step = train if training else infer
    for _ in range(WARMUP):
        step()
    if not cuda:
        return step, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - others
    recorded = task == "latency" or (mode == "graphs" and not graph)
    return (graphed(step) if recorded else step), peak


def create(name: str, size: tuple[int, int]) -> nn.Module:
    """A model by timm's name for images of this size, without stochastic depth, which costs peers time by default."""
    if not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; `timm.list_models()` lists them"
        raise ValueError(f"timm has no model {name!r}{hint}")
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


def _attempt(row: Row, action: Callable[[], Any]) -> Any:
    """What `action` gives. A peer may fail in any way, out of memory above all: its row says how, the others go on."""
    try:
        return action()
    except Exception as error:
        row.error = why(error)
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA
    return None


def why(error: Exception) -> str:
    """An error in one line."""
    return shorten(f"{type(error).__name__}: {error}", 200)


@cache
def model_flops(name: str, size: tuple[int, int], features: bool) -> int | None:
    """Forward FLOPs for one image, counted without computing; None for a model that needs real numbers to run."""
    try:
        with torch.device("meta"):
            model: Any = create(name, size).eval()
            x = torch.empty(1, 3, *size)
        call = model.forward_features if features else model
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            call(x)
    except Exception:
        return None
    return int(counter.get_total_flops())


def milliseconds(step: Step, device: str) -> float:
    """Time of one call."""
    if device != "cuda":
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def alternate(steps: dict[str, Step], setting: Setting) -> dict[str, list[float]]:
    """Times in ms, all steps in turn in each round; two rounds at least, then until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.monotonic() + setting.seconds * len(steps)
    for n in range(setting.rounds):
        if n >= 2 and time.monotonic() > end:
            break
        for name, step in steps.items():
            times[name].append(milliseconds(step, setting.device))
    return times


def graphed(step: Step) -> Step:
    """The step as one CUDA graph: no time is lost between its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    """The graph reads weights and images that nobody but the step keeps alive."""
    graph.replay()


def ceilings(setting: Setting) -> dict[str, float]:
    """A square matrix product in the run's dtype, FLOP/s, and a copy, bytes read and written per second."""
    device, n = setting.device, MATRIX[setting.device]
    a, b = (torch.randn(n, n, device=device).to(DTYPES[setting.dtype]) for _ in range(2))
    source = torch.ones(COPY[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Step] = {"matrix": lambda: a @ b, "copy": lambda: target.copy_(source)}
    for step in steps.values():
        step()
    work = {"matrix": 2 * n**3, "copy": 2 * source.nbytes}
    times = alternate(steps, replace(setting, rounds=min(10, setting.rounds)))
    return {name: work[name] / (1e-3 * statistics.median(t)) for name, t in times.items()}


def quartiles(times: list[float]) -> tuple[float, float]:
    """The first and the third."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def spread_warning(times: dict[str, tuple[float, tuple[float, float]]]) -> str | None:
    """A line about the rows, by name, whose quartiles lie far apart; values are medians and quartiles."""
    poor = [name for name, (ms, (low, high)) in times.items() if high - low > SPREAD * ms]
    if not poor:
        return None
    return (
        f"quartiles further apart than {SPREAD:.0%} of the median in {len(poor)} of {len(times)} times, "
        f"first {poor[0]}: is there other load on this machine?"
    )


def about(setting: Setting) -> dict[str, Any]:
    """Hardware, versions, commit, setting."""
    facts = examine()
    return {
        "hardware": _hardware(setting.device),
        "threads": torch.get_num_threads(),
        "pale": facts["pale"],
        "commit": _commit(),
        "python": facts["python"],
        "system": facts["system"],
        "packages": facts["packages"],
        "cuda": torch.version.cuda,
        "setting": asdict(setting),
    }


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    n = torch.get_num_threads()
    return f"{names[0] if names else platform.processor()}, {n} thread{'s' * (n > 1)}"


def _commit() -> str | None:
    """The commit that this package runs from, None for an installed one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", "cli.py"], capture_output=True, check=True
        )
        describe = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True)
class Bar:
    """A line of the picture; bars of one group share a scale."""

    group: str
    label: str
    value: float
    note: str
    ours: bool = False


def bars(report: dict[str, Any]) -> list[Bar]:
    """The rows of either report that have a time: images per second, or times of each version."""
    lines = []
    for row in report["rows"]:
        if "piece" in row:
            group = f"{row['piece']}, stage {row['stage']}, {row['passes']}, ms"
            group += f" (plain / fused: {row['ratio']:.2f})" if row["ratio"] else ""
            for name, ms in row["ms"].items():
                lines.append(Bar(group, name, ms, f"{ms:.4g}", name == "fused"))
        elif row["ms"]:
            group = f"{row['task']}, {row['mode']}, batch {row['batch']}, images/s"
            ours = row["model"] == report["rows"][0]["model"]
            note = f"{row['images_per_s']:.1f}"
            note += f"   (ours / it: {row['ratio']:.2f})" if row["ratio"] and not ours else ""
            lines.append(Bar(group, row["model"], row["images_per_s"], note, ours))
    return lines


def save_plot(report: dict[str, Any], path: str | Path) -> None:
    """Write either report as a bar chart, to a file whose suffix names the format."""
    path, lines, facts = check_suffix(path), bars(report), report["about"]
    groups = list(dict.fromkeys(line.group for line in lines))
    image = Image.new("RGB", (1400, 130 + 50 * len(groups) + 38 * len(lines)), "white")
    h, w = facts["setting"]["size"]
    what = f"{facts['hardware']}, {facts['setting']['dtype']}, {h}x{w}"
    versions = f"torch {facts['packages']['torch']}, timm {facts['packages']['timm']}"
    versions += f", pale {facts['pale']} {facts['commit'] or ''}"
    _text(image, 40, 30, 30, INK, ("", what))
    _text(image, 40, 76, 20, FAINT, ("", versions))
    y = 120
    for group in groups:
        _text(image, 40, y + 12, 22, INK, ("", group))
        y += 50
        members = [line for line in lines if line.group == group]
        for line in members:
            _text(image, 60, y + 6, 20, INK, ("", line.label))
            width = round(560 * line.value / max(m.value for m in members))
            image.paste(DIRECTION_TINTS[not line.ours], (480, y, 480 + max(1, width), y + 28))
            _text(image, 490 + width, y + 6, 20, INK, ("", line.note))
            y += 38
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def check_suffix(path: str | Path) -> Path:
    """The path, if Pillow can write such a picture."""
    path = Path(path)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(
            f"the suffix must name an image format that Pillow writes, got {path.name!r}; use .png"
        )
    return path
