"""`torch.compile`, `torch.export` and ONNX: one program for all sizes, with equal outputs."""

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
from pale.ops.pale_attention import sdpa
from pale.ops.sizes import every_size

MODES = ["parallel", "sequential", "vanilla", "axial", "cross"]
ONE_STAGE = {"channels": (8,), "heads": (2,), "depths": (2,), "mlp_ratio": (2,), "stem_stride": 2}


def nano(**kwargs: Any) -> PaleTransformer:
    """pale_nano with four blocks."""
    return pale.create_model("pale_nano", **{"depths": (1, 1, 1, 1), "num_classes": 10, **kwargs})


def one_stage(**kwargs: Any) -> PaleTransformer:
    """Two blocks, which cover every attention mode in a fraction of the time."""
    return nano(**{**ONE_STAGE, **kwargs})


def gradients(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return list(torch.autograd.grad(loss, [*model.parameters(), x]))


class Graphs:
    """A back-end for `torch.compile` that counts graphs."""

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

    @pytest.mark.slow
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
    with every_size():
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

    @pytest.mark.slow
    @pytest.mark.parametrize("attention", MODES)
    def test_attention_of_older_versions_exports_for_every_size(
        self, attention: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch 2.11 to 2.13 branch on the keys of a mask; the ONNX exporter takes attention of four dimensions."""
        monkeypatch.setattr(sdpa, "BRANCHES_ON_KEYS", True)
        model = one_stage(attention=attention)
        program = export(model)
        called = [n for n in program.graph.nodes if "matmul" in str(n.target)]
        assert {node.args[0].meta["val"].dim() for node in called} == {4}
        runs_as_eager(
            program, model, (2, 33, 47), (1, 97, 130), (1, 28, 28), (1, 3, 200), (3, 1, 1)
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("position", ["ape", "none"])
    def test_every_position_encoding_exports_for_every_size(self, position: str) -> None:
        model = one_stage(position=position, img_size=56)
        runs_as_eager(export(model), model, (2, 33, 47), (1, 56, 56), (1, 112, 90), (1, 2, 2))

    @pytest.mark.slow
    def test_strict_export_works_too(self) -> None:
        model = one_stage()
        runs_as_eager(export(model, strict=True), model, (2, 33, 47), (1, 97, 130), (1, 2, 2))

    @pytest.mark.slow
    def test_feature_maps_export(self) -> None:
        model = one_stage(features_only=True, out_indices=(0,)).eval()
        sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
        program = torch.export.export(model, (torch.randn(2, 3, 97, 130),), dynamic_shapes=(sizes,))
        x = torch.randn(1, 3, 33, 47)
        with torch.no_grad():
            for a, b in zip(program.module()(x), model(x), strict=True):
                assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_an_exported_program_needs_none_of_our_operators(self) -> None:
        targets = {str(node.target) for node in export(one_stage()).graph.nodes}
        assert "aten.scaled_dot_product_attention.default" in targets
        assert [target for target in targets if "pale" in target] == []


DYNAMIC = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}


class TestPlainExport:
    """Call `torch.export.export` with default arguments."""

    @pytest.mark.slow
    @pytest.mark.parametrize("attention", MODES)
    @pytest.mark.parametrize("dynamic", [None, {0: Dim.DYNAMIC}], ids=["static", "batch"])
    def test_fixed_sizes_are_plain_numbers(self, attention: str, dynamic: Any) -> None:
        model = one_stage(attention=attention).eval()
        x = torch.randn(2, 3, 37, 50)
        shapes = None if dynamic is None else (dynamic,)
        program = torch.export.export(model, (x,), dynamic_shapes=shapes)
        # Sizes read from tensors stop ExecuTorch and slow OpenVINO down; AOTInductor gets them wrong.
        read = ("aten.item", "aten._local_scalar_dense")
        assert not [n for n in program.graph.nodes if str(n.target).startswith(read)]
        sizes = [(2, 37, 50)] if dynamic is None else [(2, 37, 50), (1, 37, 50), (5, 37, 50)]
        runs_as_eager(program, model, *sizes)
        runs_as_eager(program.run_decompositions(), model, *sizes)

    @pytest.mark.slow
    @pytest.mark.parametrize("attention", MODES)
    def test_dynamic_sizes_are_right_where_maps_have_several_pixels(self, attention: str) -> None:
        model = one_stage(attention=attention).eval()
        program = torch.export.export(
            model, (torch.randn(2, 3, 97, 130),), dynamic_shapes=(DYNAMIC,)
        )
        sizes = [(2, 33, 47), (1, 97, 130), (1, 28, 28), (3, 3, 200), (2, 14, 15)]
        runs_as_eager(program, model, *sizes)
        with pytest.raises(AssertionError, match="Guard failed"):
            program.module()(torch.randn(2, 3, 1, 1))

    def test_convolutions_keep_sizes_that_inductor_can_lay_out(self) -> None:
        # From a size read from a tensor, Inductor takes another memory format than the one that runs.
        program = torch.export.export(
            one_stage().eval(), (torch.randn(2, 3, 97, 130),), dynamic_shapes=(DYNAMIC,)
        )
        convs = [n for n in program.graph.nodes if "conv2d" in str(n.target)]
        assert len(convs) == 1 + 2 * 4
        for node in convs:
            assert not torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(
                [*node.args[0].meta["val"].shape, *node.meta["val"].shape]
            )

    def test_a_range_with_maps_of_one_pixel_is_refused(self) -> None:
        sizes = {2: Dim("h", min=1, max=512), 3: Dim("w", min=1, max=512)}
        with pytest.raises(torch._dynamo.exc.UserError, match=r"Dim\('h', min=3"):
            torch.export.export(
                one_stage().eval(), (torch.randn(2, 3, 97, 130),), dynamic_shapes=(sizes,)
            )

    @pytest.mark.slow
    @pytest.mark.parametrize("dynamic", [None, DYNAMIC], ids=["static", "dynamic"])
    def test_aotinductor_gives_the_outputs_of_eager(self, dynamic: Any, tmp_path: Path) -> None:
        model = one_stage(depths=(1,), channels=(16,)).eval()
        x = torch.randn(2, 3, 97, 130)
        program = torch.export.export(model, (x,), dynamic_shapes=dynamic and (dynamic,))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        run = torch._inductor.aoti_load_package(path)
        sizes = [(2, 97, 130)] if dynamic is None else [(2, 97, 130), (1, 33, 47), (3, 4, 90)]
        for b, h, w in sizes:
            x = torch.randn(b, 3, h, w)
            with torch.no_grad():
                expected = model(x)
                # Wrong by as much as the largest logit, where sizes were opaque.
                assert (run(x) - expected).abs().max() < 1e-4 * expected.abs().max()


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
        with every_size():
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
