"""A model repository of NVIDIA's Triton Inference Server: the ONNX file, its configuration and its labels.

    REPOSITORY/NAME/config.pbtxt      inputs, outputs, dynamic batching, warm-up, metadata of the file
    REPOSITORY/NAME/labels.txt        a class name per line
    REPOSITORY/NAME/1/model.onnx      version 1

The configuration is written in protobuf's text format; `inference.ModelConfig` of Triton is its schema.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..predict.bundle import ModelBundle

VERSION = "1"
CONFIG, LABELS, MODEL = "config.pbtxt", "labels.txt", "model.onnx"
QUEUE_MICROSECONDS = (
    5000  # time that the first request of a batch waits for others, as in `pale serve`
)
VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# ONNX's numbers of the types in exported files.
TYPES = {1: "TYPE_FP32", 7: "TYPE_INT64"}
Tensor = tuple[str, str, tuple[int, ...]]  # name, type, sizes


@contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes the folder of a model, unless an error is raised."""
    if not VALID.fullmatch(folder.name):
        raise SettingsError(
            "the last part of the output is the name of the model in the repository: letters, digits, '.', '_' and "
            f"'-', got {folder.name!r}; write it as REPOSITORY/NAME"
        )
    if folder.exists():
        raise SettingsError(f"{folder} exists; choose another name, or remove it first")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise SettingsError(
            f"{folder} cannot be written ({error.strerror}); choose another folder"
        ) from None
    try:
        (temporary / VERSION).mkdir()
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # temporary folders are private
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_configuration(
    folder: Path, name: str, bundle: ModelBundle, about: dict[str, Any]
) -> None:
    """Write config.pbtxt and labels.txt beside a model file.

    Args:
        folder: folder of the model.
        name: name of the model.
        bundle: the model that was exported.
        about: metadata of the file.
    """
    inputs, outputs = read_tensors(folder / VERSION / MODEL)
    classes = [_one_line(name) for name in about["classes"]]
    if classes:
        (folder / LABELS).write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    single = bundle.pipeline.export_graph(bundle.model).single
    # Without batches, shapes in the configuration include the first size.
    batch = 0 if single else bundle.pipeline.batch_size
    side = bundle.pipeline.export_side()
    text = configuration(name, inputs, outputs, batch, side, len(classes), about)
    (folder / CONFIG).write_text(text, encoding="utf-8")


def read_tensors(path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs of an ONNX file; -1 is any size."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph

    def read(value: Any) -> Tensor:
        kind = value.type.tensor_type
        sizes = tuple(-1 if dim.dim_param else dim.dim_value for dim in kind.shape.dim)
        return value.name, TYPES[kind.elem_type], sizes

    return [read(value) for value in graph.input], [read(value) for value in graph.output]


def configuration(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    batch: int,
    side: int,
    classes: int,
    about: dict[str, Any],
) -> str:
    """Return the text of config.pbtxt.

    Args:
        name: name of the model.
        inputs: inputs of the file.
        outputs: outputs of the file.
        batch: maximum batch size; 0: the model has no batches.
        side: side of the images of the warm-up.
        classes: number of class names; 0: there is no file of labels.
        about: metadata of the file, which becomes a parameter, without the class names.
    """
    note = {key: value for key, value in about.items() if key != "classes"}
    lines = [
        f"name: {quote(name)}",
        'backend: "onnxruntime"',
        f"default_model_filename: {quote(MODEL)}",
        f"max_batch_size: {batch}",
    ]
    for tensor in inputs:
        lines.append(f"input [ {_describe(tensor, batch)} ]")
    for tensor in outputs:
        labels = f" label_filename: {quote(LABELS)}" if tensor[2][1:] == (classes,) else ""
        lines.append(f"output [ {_describe(tensor, batch, labels)} ]")
    if batch:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_MICROSECONDS} }}")
    for tensor in inputs:
        sizes = [side if size == -1 else size for size in tensor[2]]
        lines.append(
            f'model_warmup [ {{ name: "zeros" batch_size: {min(batch, 1)} inputs {{ key: {quote(tensor[0])} '
            f"value: {{ data_type: {tensor[1]} {_dims(sizes, batch)} zero_data: true }} }} }} ]"
        )
    lines.append(
        f'parameters {{ key: "pale" value: {{ string_value: {quote(json.dumps(note))} }} }}'
    )
    return "\n".join(lines) + "\n"


def _describe(tensor: Tensor, batch: int, more: str = "") -> str:
    name, kind, sizes = tensor
    return f"{{ name: {quote(name)} data_type: {kind} {_dims(sizes, batch)}{more} }}"


def _dims(sizes: Sequence[int], batch: int) -> str:
    return f"dims: [ {', '.join(map(str, sizes[1:] if batch else sizes))} ]"


def quote(text: str) -> str:
    """Return a text as a string of protobuf's text format."""
    escaped = (
        chr(byte) if 32 <= byte < 127 and byte not in b"\"\\'" else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{"".join(escaped)}"'


def _one_line(name: str) -> str:
    """Return a class name without line breaks."""
    return "".join(c if c.isprintable() else " " for c in name)
