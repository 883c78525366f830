"""Runtimes outside PyTorch, each in an environment of its own (`make test-interop`)."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from interop.models import build, client_warnings, difference, each_model, eager, images
from support.weights import TASKS, weights
from torch import Tensor, nn

pytestmark = pytest.mark.slow
SHALLOW = {"depths": (1, 1, 2, 1)}
FIXED_SIZES = [(1, 64, 96)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that writes a small model of a task with `pale export`."""
    import pale

    folder = tmp_path_factory.mktemp("exported")
    made = weights(folder)

    def write(task: str, suffix: str, fixed: bool) -> Path:
        path = folder / f"{task}_{'fixed' if fixed else 'any'}{suffix}"
        sizes = FIXED_SIZES if fixed else [*FIXED_SIZES, (1, 61, 75)]
        pale.export(made[task], path, fixed=fixed, sizes=sizes)
        return path

    return write


def convert(project: Path, *words: object) -> float | None:
    """Run examples/other_runtimes.py; return the difference that it measured."""
    main = runpy.run_path(str(project / "examples/other_runtimes.py"))["main"]
    return main([str(word) for word in words])


@client_warnings
class TestExecuTorch:
    client = "executorch"

    @pytest.fixture(autouse=True)
    def _executorch(self) -> None:
        pytest.importorskip("executorch.exir", reason="executorch is not installed")

    def lowered(self, model: nn.Module, x: Tensor, xnnpack: bool) -> object:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        program = torch.export.export(model, (x,))
        parts = [XnnpackPartitioner()] if xnnpack else []
        return to_edge_transform_and_lower(program, partitioner=parts).to_executorch()

    @each_model
    @pytest.mark.parametrize("xnnpack", [True, False], ids=["xnnpack", "portable"])
    def test_a_lowered_program_gives_the_logits(self, xnnpack: bool, name: str, measured) -> None:
        """`to_edge_transform_and_lower` with XNNPACK and with portable kernels, one size"""
        from executorch.runtime import Runtime

        model, x = build(name, **SHALLOW), images(1, seed=2)
        program = self.lowered(model, images(1, seed=1), xnnpack)
        method = Runtime.get().load_program(program.buffer).load_method("forward")
        (logits,) = method.execute([x])
        measured(difference(logits, eager(model, x)), 1e-4)

    @pytest.mark.parametrize("task", ["classification", "segmentation"])
    def test_a_file_of_pale_export_is_converted(
        self, task: str, exported, project, measured, tmp_path
    ) -> None:
        """`examples/other_runtimes.py`, XNNPACK: a `.pt2` of `pale export --fixed`, classifier and segmenter"""
        target = tmp_path / "model.pte"
        found = convert(project, exported(task, ".pt2", True), "-o", target)
        assert target.stat().st_size > 100_000
        measured(found, 1e-4, "of the largest value")

    def test_a_file_for_every_size_is_refused(self, exported, project, tmp_path) -> None:
        """`examples/other_runtimes.py`: a file for every size is refused, with what to do"""
        with pytest.raises(SystemExit, match="write it with pale export --fixed"):
            convert(project, exported("classification", ".pt2", False), "-o", tmp_path / "m.pte")


@client_warnings
class TestOpenVino:
    client = "openvino"

    @pytest.fixture(autouse=True)
    def _openvino(self) -> None:
        self.openvino = pytest.importorskip("openvino", reason="openvino is not installed")

    def run(self, model: object, x: Tensor) -> Tensor:
        # Its own choice on some processors is bfloat16.
        config = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = self.openvino.compile_model(model, "CPU", config)
        (logits,) = compiled(x.numpy()).values()
        return torch.from_numpy(np.array(logits))

    # OpenVINO's Swin errs by 0.13 of the largest logit.
    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_a_converted_module_gives_the_logits(self, name: str, measured) -> None:
        """`convert_model` of the module (traced)"""
        model, x = build(name), images(1, seed=2)
        shape = list(x.shape)
        converted = self.openvino.convert_model(model, input=[shape], example_input=images(1))
        measured(difference(self.run(converted, x), eager(model, x)), 1e-4)

    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_a_converted_program_gives_the_logits(self, name: str, measured) -> None:
        """`convert_model` of a `torch.export` program, one size"""
        model, x = build(name), images(1, seed=2)
        converted = self.openvino.convert_model(torch.export.export(model, (images(1),)))
        measured(difference(self.run(converted, x), eager(model, x)), 1e-4)

    @pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "any size"])
    def test_a_file_of_pale_export_gives_the_logits(
        self, fixed: bool, measured, tmp_path: Path
    ) -> None:
        """`read_model` of an ONNX file of `pale export`, for one size and for every size"""
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
        import pale

        model = build("pale", **SHALLOW)
        sizes = [(1, 64, 96), (2, 64, 96)] if fixed else [(1, 64, 96), (2, 61, 75)]
        done = pale.export(model, tmp_path / "model.onnx", fixed=fixed, sizes=sizes)
        read = self.openvino.Core().read_model(done.path)
        gaps = []
        for size in [(64, 96)] if fixed else [(64, 96), (61, 75), (96, 64)]:
            x = images(1, size, seed=2)
            gaps.append(difference(self.run(read, x), eager(model, x)))
        measured(max(gaps), 1e-4)

    @pytest.mark.parametrize("task", TASKS)
    def test_a_file_of_pale_export_is_converted(
        self, task: str, exported, project, measured, tmp_path
    ) -> None:
        """`examples/other_runtimes.py`: an ONNX file of `pale export` for every size, each task; detector: 1e-3"""
        target = tmp_path / "model.xml"
        file = exported(task, ".onnx", False)
        sizes = [(64, 96), (61, 75)]
        gaps = [convert(project, file, "-o", target, "--size", h, w) for h, w in sizes]
        measured(max(gaps), 1e-3 if task == "detection" else 1e-4, "of an output's largest value")


@client_warnings
class TestCoreMl:
    client = "coremltools"

    # coremltools has no alias operator, which exported Swins have.
    @pytest.mark.parametrize("name", ["pale", "convnext"])
    @pytest.mark.parametrize("way", ["trace", "export"])
    def test_a_converted_model_has_the_weights_and_the_output(
        self, way: str, name: str, tmp_path: Path
    ) -> None:
        """`convert` to an ML program; Core ML runs on macOS alone, so shapes, operators and all weights are compared"""
        coremltools = pytest.importorskip("coremltools", reason="coremltools is not installed")
        model, x = build(name, **SHALLOW), images(1, (64, 96))
        if way == "trace":
            with torch.no_grad():
                source = torch.jit.trace(model, x, check_trace=False)
            inputs = [coremltools.TensorType("images", shape=tuple(x.shape))]
        else:
            source, inputs = torch.export.export(model, (x,)).run_decompositions({}), None
        converted = coremltools.convert(
            source,
            inputs=inputs,
            convert_to="mlprogram",
            compute_precision=coremltools.precision.FLOAT32,
            skip_model_load=True,
        )
        (output,) = converted.get_spec().description.output
        assert tuple(output.type.multiArrayType.shape) in ((1, 10), ())
        found = list(operations(converted))
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert [op.op_type for op in found].count("conv") >= len(convolutions)
        if name == "pale":  # the layer scale of a ConvNeXt becomes part of its linear layers
            assert missing_weights(model.state_dict().values(), found) == 0
        converted.save(str(tmp_path / "model.mlpackage"))

    @pytest.mark.parametrize("task", ["classification", "segmentation"])
    def test_a_file_of_pale_export_is_converted(
        self, task: str, exported, project, tmp_path
    ) -> None:
        """`examples/other_runtimes.py`: a `.pt2` of `pale export --fixed`; input, output and size of the weights"""
        coremltools = pytest.importorskip("coremltools", reason="coremltools is not installed")
        file, target = exported(task, ".pt2", True), tmp_path / "model.mlpackage"
        assert convert(project, file, "-o", target) is None  # not run: this is no macOS
        description = (
            coremltools.models.MLModel(str(target), skip_model_load=True).get_spec().description
        )
        shapes = [
            tuple(x.type.multiArrayType.shape) for x in (*description.input, *description.output)
        ]
        rest = (64, 96) if task == "segmentation" else ()
        assert shapes == [(1, 3, 64, 96), (1, 9, *rest)]
        program = torch.export.load(file)
        used = program.state_dict.values()
        size = sum(path.stat().st_size for path in target.rglob("weight.bin"))
        assert size >= 4 * sum(tensor.numel() for tensor in used if tensor.numel() > 10)


def operations(converted: object):
    """Yield all operations of an ML program."""
    for function in converted._mil_program.functions.values():
        yield from function.operations


def missing_weights(tensors, found) -> int:
    """Return how many tensors with more than ten entries are not among the constants, in any order of entries."""
    values = [np.asarray(op.outputs[0].val) for op in found if op.op_type == "const"]
    known = {
        np.sort(value.astype(np.float32).ravel()).tobytes() for value in values if value.size > 10
    }
    wanted = [tensor for tensor in tensors if tensor.numel() > 10]
    return sum(tensor.ravel().sort().values.numpy().tobytes() not in known for tensor in wanted)
