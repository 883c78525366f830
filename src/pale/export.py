"""Models as files that run without this package: torch.export, AOTInductor, ONNX, ONNX in int8.

Each file takes normalised images, float32 (batch, 3, height, width), and gives logits: (batch, classes) of a
classifier, (batch, classes, height, width) of a segmenter. One file serves every batch and size. It carries a note
(`read_about`): task, class names, how pictures are resized and normalised.

A file is checked before it gets its name: it is read back, run beside PyTorch at three sizes, and compared. int8 is
onnxruntime's dynamic quantisation of the linear layers, weights by channel; torch.ao's is no longer kept up, and the
ONNX file runs without torch.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops.pale_attention.region import check_word
from .ops.sizes import symbolic_sizes

if TYPE_CHECKING:
    from .loading import Loaded

Format = Literal["pt2", "aoti", "onnx", "int8"]
Size = tuple[int, int, int]  # batch, height, width
Run = Callable[[Tensor], Tensor]
Say = Callable[[str], object]

FORMATS = get_args(Format)
NOTE = "pale"  # the name under which files carry the note
OPSET = 20
MOST = {"batch": 256, "side": 8192}
# Largest difference from PyTorch, as a share of the largest logit. CUDA convolutions run in TF32.
BOUND = {"cpu": 1e-3, "cuda": 2e-2}
TRACED = (388, 521)  # height and width, for AOTInductor
ROUNDS, SECONDS = 10, 2.0  # of timing, at each size, whichever ends first


@dataclass(frozen=True)
class Check:
    """The file beside PyTorch on one input.

    Attributes:
        size: batch, height, width.
        difference: the largest, of any logit.
        scale: the largest logit of PyTorch's, without sign.
        torch_ms: of the model in eager mode.
        ms: of the file.
    """

    size: Size
    difference: float
    scale: float
    torch_ms: float
    ms: float

    @property
    def share(self) -> float:
        """The difference as a share of the scale."""
        return self.difference / self.scale if self.scale else self.difference


@dataclass(frozen=True)
class OnData:
    """The file beside PyTorch on pictures.

    Attributes:
        pictures: how many.
        agreement: per cent of the pictures (segmentation: of the pixels) with the same class.
        top1: PyTorch's accuracy in per cent, where folders are named as the classes.
        top1_file: likewise, of the file.
    """

    pictures: int
    agreement: float
    top1: float | None = None
    top1_file: float | None = None


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares."""

    path: Path
    format: Format
    device: str
    bytes: int
    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    data: OnData | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {
            "path": str(self.path),
            "checks": [asdict(c) | {"share": c.share} for c in self.checks],
        }


class Whole(nn.Module):
    """A model whose logits have the size of the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, classes, h, w)."""
        return F.interpolate(
            self.model(images), images.shape[-2:], mode="bilinear", align_corners=False
        )


class Plain(nn.Module):
    """A model whose argument goes by the name that the files give it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, classes)."""
        return self.model(images)


def export(
    source: str | Path | nn.Module | Loaded,
    path: str | Path,
    format: Format | None = None,
    *,
    recipe: str | None = None,
    device: str = "cpu",
    fixed: bool = False,
    opset: int = OPSET,
    sizes: Sequence[Size] | None = None,
    data: str | Path | None = None,
    say: Say = lambda _: None,
) -> Exported:
    """Write a model as a file, check it against PyTorch, and say how they compare.

    Args:
        source: a run's folder, weights, a model's name, or a module.
        path: the file. It appears when it has passed the check.
        format: pt2 (torch.export), aoti (AOTInductor), onnx, or int8 (ONNX, quantised). By default the path's suffix
            says it: .pt2 or .onnx.
        recipe: for foreign weights: the recipe that says the model.
        device: of aoti: cpu or cuda.
        fixed: one size alone, that of the first of `sizes`; for models that take no other.
        opset: of ONNX.
        sizes: (batch, height, width) to check at; by default three about the model's own size.
        data: a folder of pictures on which both are compared; where they lie in folders named as the classes, with
            the accuracy of both.
        say: is told what is done.
    """
    from .loading import load

    target, kind = _target(Path(path)), _format(Path(path), format)
    _require(kind, device, opset)
    temporary = _temporary(target)
    try:
        loaded = load(source, recipe)
        pictures = _pictures(Path(data), loaded) if data is not None else []
        model = (Whole if loaded.kind == "segmentation" else Plain)(loaded.model).eval()
        model.requires_grad_(False).to(device)
        sizes = _sizes(loaded, sizes, fixed)
        about = loaded.about() | {"format": kind, "fixed": list(sizes[0][1:]) if fixed else None}
        example = _images(loaded, sizes[0] if fixed else (2, 97, 130), device)
        with _quiet():
            run = WRITERS[kind](model, example, fixed, opset, about, temporary, say)
        say("checking")
        checks = [_check(model, run, _images(loaded, size, device)) for size in sizes]
        if kind != "int8":
            _pass(checks, BOUND[device])
        found = _on_data(loaded, model, run, pictures, device, say) if pictures else None
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # temporary files are private
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(target, kind, device, target.stat().st_size, about, checks, found)


def read_about(path: str | Path) -> dict[str, Any]:
    """The note in a file that `export` wrote."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    text = None
    try:
        if path.suffix == ".onnx":
            text = dict(_session(path).get_modelmeta().custom_metadata_map).get(NOTE)
        else:
            text = _archived(path)
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({_first(error)})") from None
    if text is None:
        raise ValueError(f"{path} holds no note; was it written by pale export?")
    found: dict[str, Any] = json.loads(text)
    return found


def _archived(path: Path) -> str | None:
    """The note in a .pt2, which is a zip file; nothing of it is run."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(f"extra/{NOTE}.json"):
                return archive.read(name).decode()
            if name.endswith("_metadata.json") or name.endswith("wrapper_metadata.json"):
                found = json.loads(archive.read(name))
                if NOTE in found:
                    return str(found[NOTE])
    return None


def _format(path: Path, format: str | None) -> Format:
    if format is None:
        found = {".pt2": "pt2", ".onnx": "onnx"}.get(path.suffix)
        if found is None:
            raise ValueError(
                f"the file's suffix does not say the format, got {path.name!r}; give one of {', '.join(FORMATS)}"
            )
        format = found
    check_word("format", format, FORMATS)
    suffix = ".pt2" if format in ("pt2", "aoti") else ".onnx"
    if path.suffix != suffix:
        raise ValueError(
            f"a file of format {format} must end in {suffix}, or nobody could read it, got {path.name!r}"
        )
    return format  # type: ignore[return-value]


def _target(path: Path) -> Path:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, such as {path / 'model.onnx'}")
    return path


def _temporary(target: Path) -> Path:
    """A file beside the target, made at once: minutes of compiling should not end in a folder that is closed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The suffix stays: loaders ask for it.
        handle, name = tempfile.mkstemp(target.suffix, f".{target.stem}.", target.parent)
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error.strerror})") from None
    os.close(handle)
    return Path(name)


def _require(kind: Format, device: str, opset: int) -> None:
    check_word("device", device, ("cpu", "cuda"))
    if device == "cuda" and kind != "aoti":
        raise ValueError(
            f"only aoti is made for a device, got device='cuda' for {kind}; leave it out: "
            "the file runs on any"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a CUDA device, and there is none; use 'cpu'")
    if kind in ("onnx", "int8"):
        if opset < OPSET:
            raise ValueError(f"opset must be at least {OPSET}, got {opset}")
        for package in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.import_module(package)
            except ImportError:
                raise RuntimeError(
                    f"format {kind} needs the package {package}, which is not installed; "
                    "pip install 'pale-transformer[export]'"
                ) from None


def _sizes(loaded: Loaded, sizes: Sequence[Size] | None, fixed: bool) -> list[Size]:
    if sizes is None:
        side = loaded.size if loaded.kind == "classification" else min(loaded.short or 128, 512)
        # Its own, one that divides by nothing, and a small one.
        sizes = [(1, side, side), (2, side - side // 5 - 1, side + side // 7 + 1), (3, 33, 47)]
    given = [tuple(size) for size in sizes]
    if not given or any(len(size) != 3 or min(size) < 1 for size in given):
        raise ValueError(f"sizes must be (batch, height, width), each at least 1, got {sizes!r}")
    if fixed:
        h, w = given[0][1:]
        return [(b, h, w) for b in (1, 2, 3)]
    return [(b, h, w) for b, h, w in given]


def _images(loaded: Loaded, size: Size, device: str) -> Tensor:
    b, h, w = size
    generator = torch.Generator().manual_seed(0)
    channels = next(
        (m.in_channels for m in loaded.model.modules() if isinstance(m, nn.Conv2d)),
        len(loaded.mean),
    )
    return torch.randn(b, channels, h, w, generator=generator).to(device)


def _program(
    model: nn.Module, example: Tensor, fixed: bool, ranges: bool = True
) -> torch.export.ExportedProgram:
    """The traced model; with `ranges` the tracer must prove that it runs at all of them."""
    dim = torch.export.Dim
    sizes: dict[int, Any] = {0: dim("batch", min=1, max=MOST["batch"])}
    if not fixed:
        sizes |= {2: dim("height", min=1, max=MOST["side"])}
        sizes |= {3: dim("width", min=1, max=MOST["side"])}
    if not ranges:
        sizes = dict.fromkeys((0, 2, 3), dim.DYNAMIC)
    if fixed and len(example) == 1:
        example = example.expand(2, -1, -1, -1).contiguous()  # a batch of one would be fixed too
    try:
        return torch.export.export(model, (example,), dynamic_shapes=(sizes,), strict=False)
    except Exception as error:
        way = "" if fixed else "; if it takes one size alone, export it for that: fixed (--fixed)"
        raise RuntimeError(
            f"torch.export cannot trace this model ({_first(error)}){way}"
        ) from error


def _pt2(
    model: nn.Module,
    example: Tensor,
    fixed: bool,
    opset: int,
    about: dict[str, Any],
    path: Path,
    say: Say,
) -> Run:
    say("tracing")
    program = _program(model, example, fixed)
    torch.export.save(program, path, extra_files={f"{NOTE}.json": json.dumps(about)})
    return torch.export.load(path).module()


def _aoti(
    model: nn.Module,
    example: Tensor,
    fixed: bool,
    opset: int,
    about: dict[str, Any],
    path: Path,
    say: Say,
) -> Run:
    say("tracing")
    if fixed:
        program = _program(model, example, fixed)
    else:
        # Large enough for several groups everywhere: what holds of one group holds of several, not the reverse.
        large = example[:1, :, :1, :1].new_zeros(2, example.shape[1], *TRACED)
        with symbolic_sizes():
            program = _program(model, large, fixed, ranges=False)
    say("compiling, which takes minutes")
    try:
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {NOTE: json.dumps(about)}},
        )
    except Exception as error:
        raise RuntimeError(
            f"AOTInductor cannot compile this model here ({_first(error)}); it needs a C++ compiler; "
            "format pt2 needs none"
        ) from error
    run: Run = torch._inductor.aoti_load_package(str(path))
    return run


def _onnx(
    model: nn.Module,
    example: Tensor,
    fixed: bool,
    opset: int,
    about: dict[str, Any],
    path: Path,
    say: Say,
) -> Run:
    say("tracing")
    program = _program(model, example, fixed)
    say("translating to ONNX")
    import onnx

    try:
        made = torch.onnx.export(
            program,
            (),
            input_names=["images"],
            output_names=["logits"],
            dynamo=True,
            opset_version=opset,
            verbose=False,
        )
        assert made is not None
        made.model.metadata_props[NOTE] = json.dumps(about)
        proto = made.model_proto
        _name_sizes(proto.graph)
        onnx.save(proto, path)
    except Exception as error:
        raise RuntimeError(
            f"the ONNX exporter cannot translate this model ({_first(error)}); format pt2 takes every "
            "operator of PyTorch"
        ) from error
    return _ort(path)


def _name_sizes(graph: Any) -> None:
    """Call the sizes batch, height and width, where the exporter says s34 and the like."""

    def dims(value: Any) -> Any:
        return value.type.tensor_type.shape.dim

    (images,), (logits,) = graph.input, graph.output
    names = {0: "batch", 2: "height", 3: "width"}
    called = {dims(images)[n].dim_param: name for n, name in names.items()}
    called.pop("", None)  # a fixed size
    for value in (images, *graph.value_info):
        for dim in dims(value):
            if dim.dim_param:
                dim.dim_param = re.sub(
                    r"\w+", lambda word: called.get(word[0], word[0]), dim.dim_param
                )
    for n, dim in enumerate(dims(logits)):
        if dim.dim_param:
            dim.dim_param = names[n]


def _int8(
    model: nn.Module,
    example: Tensor,
    fixed: bool,
    opset: int,
    about: dict[str, Any],
    path: Path,
    say: Say,
) -> Run:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        _onnx(model, example, fixed, opset, about, plain, say)
        say("quantising")
        graph = onnx.load(plain)
        # Shapes in between, which the quantiser would find wrong after it has turned weights over.
        del graph.graph.value_info[:]
        quantize_dynamic(
            graph,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    return _ort(path)


WRITERS: dict[str, Callable[..., Run]] = {
    "pt2": _pt2,
    "aoti": _aoti,
    "onnx": _onnx,
    "int8": _int8,
}


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that spin while they wait would slow PyTorch down, which is timed in the same process.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _ort(path: Path) -> Run:
    session = _session(path)

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run(None, {"images": images.numpy()})
        return torch.from_numpy(logits)

    return run


@torch.no_grad()
def _check(model: nn.Module, run: Run, images: Tensor) -> Check:
    b, _, h, w = images.shape
    wanted, got = model(images), run(images)
    if wanted.shape != got.shape:
        raise RuntimeError(
            f"the file gives logits of shape {tuple(got.shape)} in place of {tuple(wanted.shape)} for "
            f"{b} images of {h}x{w}"
        )
    difference = float((wanted - got).abs().max())
    scale = float(wanted.abs().max())
    times = [median_ms(lambda call=call: call(images), images.is_cuda) for call in (model, run)]  # type: ignore[misc]
    return Check((b, h, w), difference, scale, times[0], times[1])


def _pass(checks: Sequence[Check], bound: float) -> None:
    for check in checks:
        if not check.share <= bound:
            b, h, w = check.size
            raise RuntimeError(
                f"the file does not compute what PyTorch does: at {b} x {h} x {w} a logit is off by "
                f"{check.difference:.3g}, where the largest is {check.scale:.3g} (allowed: {bound:.0e} of it); "
                "nothing was written; please report it"
            )


def median_ms(call: Callable[[], object], cuda: bool = False) -> float:
    """Milliseconds of a warm call."""
    times: list[float] = []
    call()
    began = time.perf_counter()
    while len(times) < ROUNDS and (not times or time.perf_counter() - began < SECONDS):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _pictures(folder: Path, loaded: Loaded) -> list[tuple[Path, int | None]]:
    """Pictures with the number of their class, where the folder that they lie in is named as one."""
    from .data.images import SUFFIXES

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} of pictures")
    found = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in SUFFIXES]
    if not found:
        raise ValueError(f"there are no pictures in {folder} ({', '.join(SUFFIXES)})")
    number = {name: i for i, name in enumerate(loaded.classes)}
    return [(file, number.get(file.parent.name)) for file in found]


@torch.no_grad()
def _on_data(
    loaded: Loaded,
    model: nn.Module,
    run: Run,
    pictures: Sequence[tuple[Path, int | None]],
    device: str,
    say: Say,
) -> OnData:
    from .data.images import read_image

    labelled = loaded.kind == "classification" and all(n is not None for _, n in pictures)
    same, right, right_file = 0.0, 0, 0
    for i, (path, label) in enumerate(pictures):
        if i % 20 == 0:
            say(f"comparing, {i} of {len(pictures)} pictures")
        images = loaded.normalise(loaded.pixels(read_image(path))[None].to(device))
        ours, files = model(images).argmax(1), run(images).argmax(1)
        same += float((ours == files).float().mean())
        if labelled:
            right += int(ours == label)
            right_file += int(files == label)
    n = len(pictures)
    top1 = (100 * right / n, 100 * right_file / n) if labelled else (None, None)
    return OnData(n, 100 * same / n, *top1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' chatter, which is about their own insides."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _first(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
