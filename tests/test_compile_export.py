"""`torch.compile`, `torch.export` and ONNX: one program for all sizes, and the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.testing import assert_close

import pale
from pale import PaleTransformer

MODES = ["parallel", "sequential", "vanilla", "axial", "cross"]
ONE_STAGE = {"channels": (8,), "heads": (2,), "depths": (2,), "mlp_ratio": (2,), "stem_stride": 2}


def nano(**kwargs: Any) -> PaleTransformer:
    """pale_nano with four blocks."""
    return pale.create_model("pale_nano", **{"depths": (1, 1, 1, 1), "num_classes": 10, **kwargs})


def one_stage(**kwargs: Any) -> PaleTransformer:
    """Two blocks: all that an attention mode can do, in a fraction of the time."""
    return nano(**{**ONE_STAGE, **kwargs})


def gradients(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return list(torch.autograd.grad(loss, [*model.parameters(), x]))


class Graphs:
    """A back-end for `torch.compile` that counts the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.count += 1
        return graph.forward


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize("attention", MODES)
    def test_two_graphs_serve_all_sizes(self, attention: str) -> None:
        model, graphs = nano(attention=attention).eval(), Graphs()
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        with torch.no_grad():
            for size in [(64, 96), (97, 130), (224, 224), (33, 47)]:
                x = torch.randn(2, 3, *size)
                assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert 1 <= graphs.count <= 2

    @pytest.mark.slow
    def test_compiled_code_gives_the_outputs_and_gradients_of_eager(self) -> None:
        model = one_stage(depths=(1,))
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for size in [(30, 44), (17, 59)]:
            x = torch.randn(2, 3, *size, requires_grad=True)
            assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            for a, b in zip(gradients(compiled, x), gradients(model, x), strict=True):
                assert_close(a, b, rtol=1e-3, atol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("attention", MODES)
    def test_gradients_through_the_compiler_are_those_of_eager(self, attention: str) -> None:
        # Forward and backward graphs as they are handed to the code generator, in double precision.
        model = one_stage(attention=attention).double()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for size in [(30, 44), (17, 59)]:
            x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
            for a, b in zip(gradients(compiled, x), gradients(model, x), strict=True):
                assert_close(a, b)

    @pytest.mark.slow
    def test_maps_of_one_pixel_compile(self) -> None:
        model, graphs = nano().eval(), Graphs()
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        with torch.no_grad():
            for size in [(97, 130), (32, 32), (32, 200), (1, 1)]:
                x = torch.randn(2, 3, *size)
                assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("position", ["cpe", "ape", "none"])
    def test_a_fixed_size_compiles(self, position: str) -> None:
        model, graphs = nano(position=position, img_size=64).eval(), Graphs()
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=False)
        with torch.no_grad():
            for _ in range(2):
                x = torch.randn(1, 3, 64, 64)
                assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert graphs.count == 1

    @pytest.mark.slow
    def test_autocast_compiles(self) -> None:
        model = one_stage().eval()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        x = torch.randn(2, 3, 44, 60)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


def export(model: PaleTransformer, *, strict: bool = False) -> ExportedProgram:
    sizes = {0: Dim("b", min=1, max=64), 2: Dim("h", min=1, max=4096), 3: Dim("w", min=1, max=4096)}
    x = torch.randn(2, model.in_chans, 97, 130)
    return torch.export.export(model.eval(), (x,), dynamic_shapes=(sizes,), strict=strict)


def runs_as_eager(
    program: ExportedProgram, model: PaleTransformer, *sizes: tuple[int, ...]
) -> None:
    run = program.module()
    with torch.no_grad():
        for b, h, w in sizes:
            x = torch.randn(b, model.in_chans, h, w)
            assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


class TestExport:
    @pytest.mark.slow
    def test_one_saved_program_runs_at_every_size(self, tmp_path: Path) -> None:
        model = nano()
        torch.export.save(export(model), tmp_path / "pale.pt2")
        program = torch.export.load(tmp_path / "pale.pt2")
        runs_as_eager(program, model, (2, 33, 47), (2, 97, 130), (3, 224, 224), (2, 512, 640))
        runs_as_eager(program, model, (1, 33, 47), (1, 224, 224), (1, 32, 32), (1, 1, 1))

    @pytest.mark.parametrize("attention", MODES)
    def test_every_attention_mode_exports_for_every_size(self, attention: str) -> None:
        model = one_stage(attention=attention)
        program = export(model)
        runs_as_eager(
            program, model, (2, 33, 47), (1, 97, 130), (1, 28, 28), (1, 3, 200), (3, 1, 1)
        )

    @pytest.mark.parametrize("position", ["ape", "none"])
    def test_every_position_encoding_exports_for_every_size(self, position: str) -> None:
        model = one_stage(position=position, img_size=56)
        runs_as_eager(export(model), model, (2, 33, 47), (1, 56, 56), (1, 112, 90), (1, 2, 2))

    @pytest.mark.slow
    def test_strict_export_works_too(self) -> None:
        model = one_stage()
        runs_as_eager(export(model, strict=True), model, (2, 33, 47), (1, 97, 130), (1, 2, 2))

    def test_feature_maps_export(self) -> None:
        model = one_stage(features_only=True, out_indices=(0,)).eval()
        sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
        program = torch.export.export(model, (torch.randn(2, 3, 97, 130),), dynamic_shapes=(sizes,))
        x = torch.randn(1, 3, 33, 47)
        with torch.no_grad():
            for a, b in zip(program.module()(x), model(x), strict=True):
                assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_an_exported_program_needs_none_of_our_operators(self) -> None:
        targets = {str(node.target) for node in export(one_stage()).graph.nodes}
        assert "aten.scaled_dot_product_attention.default" in targets
        assert [target for target in targets if "pale" in target] == []


class TestOnnx:
    @pytest.mark.slow
    @pytest.mark.parametrize("attention", ["parallel", "vanilla"])
    def test_one_file_gives_the_outputs_of_eager_at_every_size(
        self, attention: str, tmp_path: Path
    ) -> None:
        pytest.importorskip("onnxscript")
        onnx = pytest.importorskip("onnx")
        runtime = pytest.importorskip("onnxruntime")
        model, path = one_stage(attention=attention).eval(), tmp_path / "pale.onnx"
        sizes = {0: Dim("b", min=1, max=64), 2: Dim("h", min=1, max=4096), 3: Dim("w", min=1)}
        torch.onnx.export(
            model,
            (torch.randn(2, 3, 97, 130),),
            path,
            dynamo=True,
            opset_version=20,
            dynamic_shapes=(sizes,),
            verbose=False,
        )
        operators = [node.op_type for node in onnx.load(path).graph.node]
        # One node each, so that a runtime can keep them in full precision.
        assert operators.count("LayerNormalization") == 1 + 2 * 2 + 1
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (name,) = (x.name for x in session.get_inputs())
        for b, h, w in [(2, 97, 130), (1, 33, 47), (1, 112, 112), (3, 1, 1)]:
            x = torch.randn(b, 3, h, w)
            (y,) = session.run(None, {name: x.numpy()})
            with torch.no_grad():
                assert_close(torch.from_numpy(y), model(x), rtol=1e-4, atol=1e-5)
