"""torch.export without our exporter, and AOTInductor on what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interop.models import build, client_warnings, difference, each_model, eager, images

pytestmark = pytest.mark.slow
ODD = (61, 75)
SHALLOW = {"depths": (1, 1, 1, 1)}  # AOTInductor takes its time for each block
Dim = torch.export.Dim
# Every way in which a user may call the sizes dynamic; below 33 px a map has one pixel, which export refuses.
DYNAMIC = {
    "auto": {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},
    "dynamic": {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC},
    "named": {
        0: Dim("batch", min=1, max=64),
        2: Dim("height", min=33, max=1024),
        3: Dim("width", min=33, max=1024),
    },
}


def compiled(program: torch.export.ExportedProgram, path: Path) -> object:
    """Return the program as AOTInductor has compiled it, read back from its package."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(str(path))


@client_warnings
class TestExport:
    client = "torch"

    @each_model
    @pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
    def test_a_static_program_gives_the_logits(self, strict: bool, name: str, measured) -> None:
        """`torch.export.export`, one size: other images of that size"""
        model = build(name)
        program = torch.export.export(model, (images(seed=1),), strict=strict).module()
        x = images(seed=2)
        with torch.no_grad():
            measured(difference(program(x), eager(model, x)), 1e-5)

    def test_a_static_program_knows_its_sizes(self) -> None:
        """`torch.export.export`, one size: no node reads a size from a tensor"""
        program = torch.export.export(build("pale"), (images(),))
        targets = {str(node.target) for node in program.graph.nodes}
        assert not {t for t in targets if "item" in t or "local_scalar" in t or "sym_size" in t}
        outputs = [n.meta["val"] for n in program.graph.nodes if "val" in n.meta]
        sizes = [s for v in outputs if isinstance(v, torch.Tensor) for s in v.shape]
        assert all(type(size) is int for size in sizes)

    @pytest.mark.parametrize("how", DYNAMIC)
    def test_a_dynamic_program_gives_the_logits(self, how: str, measured) -> None:
        """`torch.export.export`, dynamic batch, height and width: at 64x96, 61x75, 160x128"""
        model = build("pale")
        program = torch.export.export(model, (images(2, ODD),), dynamic_shapes=(DYNAMIC[how],))
        run = program.module()
        gaps = []
        with torch.no_grad():
            for batch, size in ((1, (64, 96)), (2, ODD), (3, (160, 128))):
                x = images(batch, size, seed=2)
                gaps.append(difference(run(x), eager(model, x)))
        measured(max(gaps), 1e-5)


@client_warnings
class TestAotInductor:
    client = "torch"

    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_a_static_package_gives_the_logits(self, name: str, measured, tmp_path: Path) -> None:
        """`torch.export` and `aoti_compile_and_package`, one size"""
        model = build(name, **SHALLOW)
        run = compiled(torch.export.export(model, (images(seed=1),)), tmp_path / "model.pt2")
        x = images(seed=2)
        with torch.no_grad():
            measured(difference(run(x), eager(model, x)), 1e-5)

    @pytest.mark.parametrize("how", ["auto", "named"])
    def test_a_dynamic_package_is_right_or_refused(
        self, how: str, measured, tmp_path: Path
    ) -> None:
        """`torch.export` with dynamic sizes and `aoti_compile_and_package`: right at every size, or an error"""
        model = build("pale", **SHALLOW)
        refusal, gaps = "", []
        try:
            program = torch.export.export(model, (images(2, ODD),), dynamic_shapes=(DYNAMIC[how],))
            run = compiled(program, tmp_path / "model.pt2")
            for batch, size in ((1, (64, 96)), (2, ODD), (3, (128, 96))):
                x = images(batch, size, seed=2)
                gaps.append(difference(run(x), eager(model, x)))
        except (RuntimeError, ValueError) as error:
            refusal = str(error)
        if not refusal:
            measured(max(gaps), 1e-5)
        # What is refused is refused by us, with the way out.
        assert not refusal or "pale export" in refusal, refusal
