"""Blocks rewritten for ONNX: the same results for every kind of group, and only blocks that nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops.cases import every_grouping, every_scope
from torch import nn

import pale
from pale.ops.pale_attention import reference
from pale.ops.pale_attention.region import Region

WHY = "ONNX needs the extra export"
onnxruntime = pytest.importorskip("onnxruntime", reason=WHY)
onnx = pytest.importorskip("onnx", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)

from pale.exporting import onnx_attention, onnx_blocks  # noqa: E402

SMALL: dict[str, Any] = {"depths": [2], "channels": [8], "heads": [2], "mlp_ratio": [2]}
SIZES = [(7, 7), (14, 14), (5, 12), (12, 5), (1, 1), (1, 30), (16, 9)]


def small(**options: Any) -> nn.Module:
    """Return a model whose biases and norms are not those of the initialisation."""
    torch.manual_seed(0)
    model = pale.create_model("pale_nano", num_classes=3, **SMALL, **options).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.requires_grad_(False)


@every_scope
@every_grouping
@pytest.mark.parametrize(("h", "w"), SIZES, ids=lambda n: str(n))
def test_the_plan_computes_the_attention_of_the_reference(
    scope: Any, grouping: Any, h: int, w: int
) -> None:
    """With numpy, as the file of one size does with onnxruntime."""
    heads, d, region = 4, 3, Region((3, 4), scope, grouping)
    generator = np.random.default_rng(0)
    q, k, v = generator.standard_normal((3, 2, h, w, heads, d))
    found = onnx_attention.plan(np.array([h]), np.array([w]), heads, d, region)
    assert list(found.entries) == [-1, h * w * heads, d]
    outputs = []
    for part in found.parts:
        some_q, some_k, some_v = (x.reshape(2, h * w * heads, d)[:, part.index] for x in (q, k, v))
        scores = some_q @ some_k.swapaxes(-1, -2) * d**-0.5
        weights = torch.from_numpy(scores if part.mask is None else scores + part.mask).softmax(-1)
        outputs.append((weights.numpy() @ some_v).reshape(2, -1, d))
    y = np.mean([np.concatenate(outputs, 1)[:, places] for places in found.results], axis=0)
    wanted = reference.forward(*map(torch.from_numpy, (q, k, v)), region)
    np.testing.assert_allclose(y.reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"attention": a} for a in ("parallel", "vanilla", "cross")]
    + [{"position": p} for p in ("ape", "none")],
    ids=str,
)
def test_files_compute_every_mode_at_every_size(options: Any, tmp_path: Path) -> None:
    model = small(**options)
    pale.export(model, tmp_path / "a.onnx")
    run = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    for size in [(1, 1, 1), (2, 33, 47), (3, 5, 120), (1, 64, 64), (2, 28, 28)]:
        images = torch.randn(size[0], 3, *size[1:])
        (found,) = run.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(images), rtol=1e-4, atol=1e-4)


def test_a_file_has_standard_operators_only_and_few_nodes(tmp_path: Path) -> None:
    pale.export(small(), tmp_path / "a.onnx", fixed=True, sizes=[(1, 56, 56)])
    nodes = onnx.load(tmp_path / "a.onnx").graph.node
    assert {node.domain for node in nodes} <= {"", "ai.onnx"}
    kinds = [node.op_type for node in nodes]
    # Two blocks: rows and columns in one attention, the residual connection of CPE in its convolution.
    assert (kinds.count("Softmax"), kinds.count("Gather"), kinds.count("Add")) == (2, 8, 6)
    assert (kinds.count("LayerNormalization"), kinds.count("Gelu")) == (6, 2)


def test_the_runtime_adds_the_bias_of_the_mlp_as_part_of_gelu(tmp_path: Path) -> None:
    """Otherwise it writes that bias to the whole result of the layer before it multiplies."""
    pale.export(small(), tmp_path / "a.onnx", fixed=True, sizes=[(1, 56, 56)])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # an optimised file is only for this processor
    onnxruntime.InferenceSession(tmp_path / "a.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert (kinds.count("BiasGelu"), kinds.count("Gelu")) == (2, 0)


def test_pointwise_layers_are_convolutions_unless_they_are_quantized(tmp_path: Path) -> None:
    size = {"fixed": True, "sizes": [(1, 56, 56)]}
    pale.export(small(), tmp_path / "a.onnx", **size)
    kinds = [node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node]
    # Two blocks: depthwise and pointwise layers of q, k and v, and CPE; the stem.
    assert kinds.count("Conv") == 2 * (3 + 3 + 1) + 1
    pale.export(small(), tmp_path / "b.onnx", "int8", **size)
    kinds = [node.op_type for node in onnx.load(tmp_path / "b.onnx").graph.node]
    assert kinds.count("Conv") == 2 * (3 + 1) + 1
    # q, k, v, projection and the two layers of the MLP; the classifier.
    assert kinds.count("MatMulInteger") == 2 * 6 + 1


def test_exporting_does_not_change_the_model() -> None:
    model = small()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert onnx_blocks.rewrite(model) is not None
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_blocks_with_hooks_or_other_layers_are_not_rewritten() -> None:
    model = small()
    block = model.stages[0].blocks[1]
    hook = block.attn.proj.register_forward_hook(lambda *_: None)
    assert onnx_blocks.rewrite(model) is None
    hook.remove()
    assert onnx_blocks.rewrite(model) is not None
    block.mlp.act = nn.ReLU()
    assert onnx_blocks.rewrite(model) is None


def test_models_without_blocks_are_not_rewritten() -> None:
    assert onnx_blocks.rewrite(nn.Linear(3, 3)) is None
