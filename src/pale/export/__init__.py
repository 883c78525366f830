"""Models as files that run without this package: torch.export, AOTInductor, ONNX, ONNX in int8.

Each file takes normalised images, float32 (batch, 3, height, width), and gives logits: (batch, classes) of a
classifier, (batch, classes, height, width) of a segmenter. One file serves every batch and size. That of a
detector takes one image and gives a fixed number of boxes, scores, labels and masks; places without an object
have score 0. A file carries a note (`read_about`): task, class names, how pictures are resized and normalised.

A file is checked before it gets its name: it is read back, run beside PyTorch at three sizes, and compared. int8 is
onnxruntime's dynamic quantisation of the linear layers, weights by channel; torch.ao's is no longer kept up, and the
ONNX file runs without torch.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..ops.pale_attention.region import check_word
from .checks import BOUND, OBJECT_BOUND, Check, OnData, Size, check, must_pass, on_data, pictures_in
from .writers import NOTE, WRITERS, Job, Say, first_line, session

if TYPE_CHECKING:
    from ..loading import Loaded

Format = Literal["pt2", "aoti", "onnx", "int8"]
FORMATS = get_args(Format)
OPSET = 20


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
    from ..loading import load
    from .graphs import graph_of

    target, kind = _target(Path(path)), _format(Path(path), format)
    _require(kind, device, opset)
    temporary = _temporary(target)
    try:
        loaded = load(source, recipe)
        pictures = pictures_in(Path(data), loaded) if data is not None else []
        model, outputs = graph_of(loaded)
        model.eval().requires_grad_(False).to(device)
        single = loaded.kind == "detection"
        sizes = _sizes(loaded, sizes, fixed, single)
        about = loaded.about() | {"format": kind, "fixed": list(sizes[0][1:]) if fixed else None}
        example = _images(loaded, sizes[0] if fixed else (2, 97, 130), device)
        job = Job(model, outputs, example, about, fixed, single, opset)
        with _quiet():
            run = WRITERS[kind](job, temporary, say)
        say("checking")
        checks = [check(model, run, _images(loaded, size, device)) for size in sizes]
        if kind != "int8":
            must_pass(checks, OBJECT_BOUND if single else BOUND[device])
        found = on_data(loaded, model, run, pictures, device, say) if pictures else None
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
            text = dict(session(path).get_modelmeta().custom_metadata_map).get(NOTE)
        else:
            text = _archived(path)
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)})") from None
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


def _sizes(loaded: Loaded, sizes: Sequence[Size] | None, fixed: bool, single: bool) -> list[Size]:
    if sizes is None:
        side = loaded.size if loaded.kind == "classification" else min(loaded.short or 128, 512)
        # Its own, one that divides by nothing, and a small one.
        sizes = [(1, side, side), (2, side - side // 5 - 1, side + side // 7 + 1), (3, 33, 47)]
        if single:
            sizes = [(1, h, w) for _, h, w in sizes]
    given = [tuple(size) for size in sizes]
    if not given or any(len(size) != 3 or min(size) < 1 for size in given):
        raise ValueError(f"sizes must be (batch, height, width), each at least 1, got {sizes!r}")
    if single and any(size[0] != 1 for size in given):
        raise ValueError(
            f"the file of a detector takes one image at a time, got sizes {sizes!r}; give 1xHEIGHTxWIDTH"
        )
    if fixed:
        h, w = given[0][1:]
        return [(1, h, w)] if single else [(b, h, w) for b in (1, 2, 3)]
    return [(b, h, w) for b, h, w in given]


def _images(loaded: Loaded, size: Size, device: str) -> Tensor:
    b, h, w = size
    generator = torch.Generator().manual_seed(0)
    channels = next(
        (m.in_channels for m in loaded.model.modules() if isinstance(m, nn.Conv2d)),
        len(loaded.mean),
    )
    return torch.randn(b, channels, h, w, generator=generator).to(device)


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
