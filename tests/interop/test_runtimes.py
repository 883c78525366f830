"""Runtimes outside PyTorch, each in an environment of its own (`make test-interop`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from interop.models import build, client_warnings, difference, each_model, eager, images
from torch import Tensor, nn

pytestmark = pytest.mark.slow
SHALLOW = {"depths": (1, 1, 2, 1)}


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


@client_warnings
class TestCoreMl:
    client = "coremltools"

    # coremltools has no alias operator, which exported Swins have.
    @pytest.mark.parametrize("name", ["pale", "convnext"])
    @pytest.mark.parametrize("way", ["trace", "export"])
    def test_a_converted_model_has_the_weights_and_the_output(
        self, way: str, name: str, tmp_path: Path
    ) -> None:
        """`convert` to an ML program; CoreML runs on macOS alone, so shapes and operators are compared"""
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
        operators = [
            op.op_type for f in converted._mil_program.functions.values() for op in f.operations
        ]
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert operators.count("conv") >= len(convolutions)
        converted.save(str(tmp_path / "model.mlpackage"))
