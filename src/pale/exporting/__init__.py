"""Export models as files that run without this package: torch.export, AOTInductor, ONNX, ONNX in int8.

The input of each file is normalised images, float32 (batch, 3, height, width), of any batch size, height and width.
The output is logits: (batch, classes) of a classifier, (batch, classes, height, width) of a segmenter. The file of a
detector takes one image and returns a fixed number of boxes, scores, labels and masks; entries without an object have
score 0. A file contains metadata (`read_about`): task, class names, and how images are resized and normalised.

A file is checked before it gets its final name: it is loaded, and its outputs are compared with those of PyTorch at
three sizes. int8 is onnxruntime's dynamic quantisation of the linear layers, weights by channel; torch.ao's
quantisation is no longer maintained, and the ONNX file runs without torch.

The format triton is a folder of a Triton model repository, with such an ONNX file (`triton_repository`).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import DataError, SettingsError, UnavailableError
from ..predict.bundle import ModelBundle, load
from .checks import Check, OnData, Size, check, images_in, must_pass, on_data
from .triton_repository import MODEL, VERSION, new_model_folder, write_configuration
from .writers import NOTE, WRITERS, Job, Say, first_line, session

Format = Literal["pt2", "aoti", "onnx", "int8", "triton"]
FORMATS = get_args(Format)
MAX_NOTE = 1 << 22  # bytes
OPSET = 20


@dataclass(frozen=True)
class Exported:
    """An exported file and its comparison with PyTorch."""

    path: Path
    format: Format
    device: str
    bytes: int
    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    data: OnData | None = None

    def plain(self) -> dict[str, Any]:
        """Return the values as a JSON object."""
        return asdict(self) | {
            "path": str(self.path),
            "checks": [asdict(c) | {"share": c.share} for c in self.checks],
        }


def export(
    source: str | Path | nn.Module | ModelBundle,
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
    """Write a model as a file, compare it with PyTorch, and return the comparison.

    Args:
        source: a run's folder, weights, a model's name, or a module.
        path: the file; for triton the folder REPOSITORY/NAME. It is created after it has passed the check.
        format: pt2 (torch.export), aoti (AOTInductor), onnx, int8 (ONNX, quantised), or triton (a model repository
            with an ONNX file). The default depends on the suffix of the path: .pt2 or .onnx.
        recipe: name of the recipe of the model, for weights of another project.
        device: device of an aoti file: cpu or cuda.
        fixed: export for one size only, the first of `sizes`; for models that accept a single size.
        opset: ONNX opset version.
        sizes: (batch, height, width) to check at; by default three around the size of the model.
        data: a folder of images on which file and model are compared; if its folders are named like the classes, their
            accuracy is compared too.
        say: is called with progress messages.
    """
    if format == "triton":
        bundle = load(source, recipe)
        with new_model_folder(Path(path)) as folder:
            file = folder / VERSION / MODEL
            options: dict[str, Any] = {"device": device, "fixed": fixed, "opset": opset}
            done = export(bundle, file, "onnx", sizes=sizes, data=data, say=say, **options)
            write_configuration(folder, Path(path).name, bundle, done.about)
        return replace(done, path=Path(path), format=format)
    target, kind = _target(Path(path)), _format(Path(path), format)
    _require(kind, device, opset)
    temporary = _temporary(target)
    try:
        loaded = load(source, recipe)
        images = images_in(Path(data), loaded) if data is not None else []
        graph = loaded.pipeline.export_graph(loaded.model)
        model, single = graph.model, graph.single
        model.eval().requires_grad_(False).to(device)
        sizes = _check_sizes(loaded, sizes, fixed, single)
        about = loaded.about() | {"format": kind, "fixed": list(sizes[0][1:]) if fixed else None}
        example = _images(loaded, sizes[0] if fixed else (2, 97, 130), device)
        job = Job(model, graph.outputs, example, about, fixed, single, opset)
        with _quiet():
            run = WRITERS[kind](job, temporary, say)
        say("checking")
        checks = [
            check(model, run, _images(loaded, size, device), loaded.pipeline) for size in sizes
        ]
        if kind != "int8":
            must_pass(checks, loaded.pipeline.export_bound(device))
        found = on_data(loaded, model, run, images, device, say) if images else None
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # temporary files are private
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(target, kind, device, target.stat().st_size, about, checks, found)


def read_about(path: str | Path) -> dict[str, Any]:
    """Read the metadata of a file that `export` wrote."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}; give a file that pale export wrote")
    try:
        if path.suffix == ".onnx":
            text = dict(session(path).get_modelmeta().custom_metadata_map).get(NOTE)
        else:
            text = _archived(path)
        found = None if text is None else json.loads(text)
    except Exception as error:
        raise DataError(
            f"{path} cannot be read ({first_line(error)}); give a file that pale export wrote"
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} has no metadata; was it written by pale export?")
    return found


def _archived(path: Path) -> str | None:
    """Read the metadata of a .pt2, which is a zip file; no code in it is run."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            alone = name.endswith(f"extra/{NOTE}.json")
            if not alone and not name.endswith(("_metadata.json", "wrapper_metadata.json")):
                continue
            if archive.getinfo(name).file_size > MAX_NOTE:
                raise DataError(f"{name} has more than {MAX_NOTE} bytes")
            text = archive.read(name).decode()
            if alone:
                return text
            if NOTE in (found := json.loads(text)):
                return str(found[NOTE])
    return None


def _format(path: Path, format: str | None) -> Format:
    if format is None:
        found = {".pt2": "pt2", ".onnx": "onnx"}.get(path.suffix)
        if found is None:
            raise SettingsError(
                f"the suffix must be .pt2 or .onnx if no format is given, got {path.name!r}; give one of "
                f"{', '.join(FORMATS)}"
            )
        format = found
    _require_word("format", format, FORMATS)
    suffix = ".pt2" if format in ("pt2", "aoti") else ".onnx"
    if path.suffix != suffix:
        raise SettingsError(
            f"a file of format {format} must end in {suffix}, which loaders require, got {path.name!r}"
        )
    return format  # type: ignore[return-value]


def _target(path: Path) -> Path:
    if path.is_dir():
        raise SettingsError(f"{path} is a folder; name a file in it, such as {path / 'model.onnx'}")
    return path


def _temporary(target: Path) -> Path:
    """Create a file next to the target first, so that an unwritable folder is reported before minutes of work."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Keep the suffix: loaders check it.
        handle, name = tempfile.mkstemp(target.suffix, f".{target.stem}.", target.parent)
    except OSError as error:
        raise SettingsError(
            f"{target} cannot be written ({error.strerror}); choose another folder"
        ) from None
    os.close(handle)
    return Path(name)


def _require_word(name: str, word: str, allowed: Sequence[str]) -> None:
    if word not in allowed:
        raise SettingsError(f"{name} must be one of {', '.join(allowed)}, got {word!r}")


def _require(kind: Format, device: str, opset: int) -> None:
    _require_word("device", device, ("cpu", "cuda"))
    if device == "cuda" and kind != "aoti":
        raise SettingsError(
            f"only aoti is compiled for a device, got device='cuda' for {kind}; leave it out: "
            "the file runs on any device"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError("device 'cuda' needs a CUDA device, and there is none; use 'cpu'")
    if kind in ("onnx", "int8"):
        if opset < OPSET:
            raise SettingsError(f"opset must be at least {OPSET}, got {opset}")
        for package in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.import_module(package)
            except ImportError:
                raise UnavailableError(
                    f"format {kind} needs the package {package}, which is not installed; "
                    "pip install 'pale-transformer[export]'"
                ) from None


def _check_sizes(
    loaded: ModelBundle, sizes: Sequence[Size] | None, fixed: bool, single: bool
) -> list[Size]:
    """Return the sizes at which a file is compared with PyTorch."""
    if sizes is None:
        chosen = _default_sizes(loaded.pipeline.export_side(), single)
    else:
        chosen = _checked(sizes, loaded.kind, single)
    if not fixed:
        return chosen
    _, h, w = chosen[0]
    return [(b, h, w) for b in ((1,) if single else (1, 2, 3))]


def _default_sizes(side: int, single: bool) -> list[Size]:
    """Return the size of the model, one that is not round, and a small one."""
    sides = [(side, side), (side - side // 5 - 1, side + side // 7 + 1), (33, 47)]
    return [(1 if single else b, h, w) for b, (h, w) in enumerate(sides, start=1)]


def _checked(sizes: Sequence[Size], kind: str, single: bool) -> list[Size]:
    if not sizes or any(len(size) != 3 or min(size) < 1 for size in sizes):
        raise SettingsError(f"sizes must be (batch, height, width), each at least 1, got {sizes!r}")
    if single and any(b != 1 for b, _, _ in sizes):
        raise SettingsError(
            f"the file of a model for {kind} takes one image at a time, got sizes {sizes!r}; give 1xHEIGHTxWIDTH"
        )
    return [(b, h, w) for b, h, w in sizes]


def _images(loaded: ModelBundle, size: Size, device: str) -> Tensor:
    b, h, w = size
    generator = torch.Generator().manual_seed(0)
    channels = next(
        (m.in_channels for m in loaded.model.modules() if isinstance(m, nn.Conv2d)),
        len(loaded.pipeline.mean),
    )
    return torch.randn(b, channels, h, w, generator=generator).to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence log messages and warnings of the exporters, which are about their own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
