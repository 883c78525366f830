"""Writers of the formats: each writes a traced model to a file and returns the file as a function."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..errors import PaleError
from ..ops.sizes import every_size, fixed_sizes, symbolic_sizes

Run = Callable[[Tensor], tuple[Tensor, ...]]
Say = Callable[[str], object]

NOTE = "pale"  # name of the metadata in a file
MAX_SIZES = {"batch": 256, "side": 8192}
TRACED = (388, 521)  # height and width of the example for AOTInductor


class ExportError(PaleError, RuntimeError):
    """A model cannot be exported, or the file does not compute the same as PyTorch."""


@dataclass(frozen=True)
class Job:
    """A model to be written, with its options.

    Attributes:
        model: normalised images in, tensors out.
        outputs: their names.
        example: images to trace with.
        about: metadata.
        fixed: only the height and width of the example.
        single: one image at a time.
        opset: ONNX opset version.
    """

    model: nn.Module
    outputs: tuple[str, ...]
    example: Tensor
    about: dict[str, Any]
    fixed: bool
    single: bool
    opset: int


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _program(
    job: Job,
    ranges: bool = True,
    sizes_are: Callable[[], AbstractContextManager[None]] = every_size,
) -> torch.export.ExportedProgram:
    """Trace the model; with `ranges` the tracer must prove that it runs at all sizes in them."""
    dim = torch.export.Dim
    sizes: dict[int, Any] = {0: dim("batch", min=1, max=MAX_SIZES["batch"])}
    if not job.fixed:
        sizes |= {2: dim("height", min=1, max=MAX_SIZES["side"])}
        sizes |= {3: dim("width", min=1, max=MAX_SIZES["side"])}
    if not ranges:
        sizes = dict.fromkeys(sizes, dim.DYNAMIC)
    example = job.example
    if job.single:
        del sizes[0]
        example = example[:1]
    elif len(example) == 1:
        example = example.expand(2, -1, -1, -1).contiguous()  # a batch of one would be fixed
    try:
        with fixed_sizes() if job.fixed else sizes_are():
            return torch.export.export(job.model, (example,), dynamic_shapes=(sizes,), strict=False)
    except Exception as error:
        way = ""
        if not job.fixed:
            way = "; if the model accepts one size only, export it for that size: fixed (--fixed)"
        raise ExportError(
            f"torch.export cannot trace this model ({first_line(error)}){way}"
        ) from error


def _pt2(job: Job, path: Path, report: Say) -> Run:
    report("tracing")
    program = _program(job)
    torch.export.save(program, path, extra_files={f"{NOTE}.json": json.dumps(job.about)})
    return _run(torch.export.load(path).module())


def _aoti(job: Job, path: Path, report: Say) -> Run:
    report("tracing")
    if job.fixed:
        program = _program(job)
    else:
        # Large enough for several groups in every stage: a trace with one group is not valid for several.
        large = job.example[:1, :, :1, :1].new_zeros(2, job.example.shape[1], *TRACED)
        program = _program(replace(job, example=large), ranges=False, sizes_are=symbolic_sizes)
    report("compiling (takes minutes)")
    try:
        compat.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {NOTE: json.dumps(job.about)}},
        )
    except Exception as error:
        raise ExportError(
            f"AOTInductor cannot compile this model here ({first_line(error)}); it needs a C++ compiler; "
            "format pt2 needs none"
        ) from error
    return _run(compat.aoti_load_package(str(path)))


def _onnx(job: Job, path: Path, report: Say, quantize: bool = False) -> Run:
    import onnx

    # Needs onnxscript, as this format does.
    from .onnx_attention import translations
    from .onnx_blocks import rewrite

    report("tracing")
    if (model := rewrite(job.model, quantize)) is None:
        program = _program(job)
    else:
        # Without the sizes of groups, which are not traced, no operation depends on a size being large.
        program = _program(replace(job, model=model), ranges=job.fixed, sizes_are=symbolic_sizes)
    report("converting to ONNX")
    try:
        with redirect_stdout(
            sys.stderr
        ):  # onnxscript 0.6 prints statistics, which would be part of --json
            made = torch.onnx.export(
                program,
                (),
                input_names=["images"],
                output_names=list(job.outputs),
                dynamo=True,
                opset_version=job.opset,
                verbose=False,
                custom_translation_table=translations(),
                optimize=model is None,
            )
            assert made is not None
            if model is not None:
                _simplify(made.model)
        made.model.metadata_props[NOTE] = json.dumps(job.about)
        proto = made.model_proto
        _name_sizes(proto.graph)
        onnx.save(proto, path)
    except Exception as error:
        raise ExportError(
            f"the ONNX exporter cannot convert this model ({first_line(error)}); format pt2 supports every "
            "operator of PyTorch"
        ) from error
    return run_onnx(path)


def _simplify(model: Any) -> None:
    """Fold constants and remove duplicates.

    onnxscript's rewrite rules are left out: they take almost half of the conversion, and onnxruntime has such rules
    itself. It ends with as many nodes for a classifier as after them, and with 3 % more for a detector.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    for each in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        each(model)


def _name_sizes(graph: Any) -> None:
    """Name the sizes batch, height and width, instead of the exporter's names such as s34."""

    def dims(value: Any) -> Any:
        return value.type.tensor_type.shape.dim

    (images,) = graph.input
    names = {0: "batch", 2: "height", 3: "width"}
    called = {dims(images)[n].dim_param: name for n, name in names.items()}
    called.pop("", None)  # a fixed size
    for value in (images, *graph.value_info):
        for dim in dims(value):
            if dim.dim_param:
                dim.dim_param = re.sub(
                    r"\w+", lambda word: called.get(word[0], word[0]), dim.dim_param
                )
    for output in graph.output:
        for n, dim in enumerate(dims(output)):
            if dim.dim_param:
                dim.dim_param = names[n]


def _int8(job: Job, path: Path, report: Say) -> Run:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        _onnx(job, plain, report, quantize=True)
        report("quantising")
        graph = onnx.load(plain)
        # Shapes of intermediate results, which the quantiser reports as wrong after it has transposed weights.
        del graph.graph.value_info[:]
        quantize_dynamic(
            graph,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    return run_onnx(path)


WRITERS: dict[str, Callable[[Job, Path, Say], Run]] = {
    "pt2": _pt2,
    "aoti": _aoti,
    "onnx": _onnx,
    "int8": _int8,
}


def session(path: Path) -> Any:
    """Return a session of onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that spin while they wait slow down PyTorch, which is timed in the same process.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_onnx(path: Path) -> Run:
    """Return an ONNX file as a function of tensors."""
    held = session(path)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(x) for x in held.run(None, {"images": images.numpy()}))

    return run


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return outputs as a tuple, also if there is only one."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _run(program: Callable[[Tensor], Any]) -> Run:
    return lambda images: as_tuple(program(images))
