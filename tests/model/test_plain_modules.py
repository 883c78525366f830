"""Changes of modules and tensors by other libraries take effect: no shortcut bypasses them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

import pale
from pale.model.layers import Mlp
from pale.model.optimize import fold_norms
from pale.ops import linear as linear_op
from pale.ops.shortcuts import is_plain, is_plain_depthwise, is_watched

TINY = {"channels": (16, 32), "heads": (2, 2), "depths": (1, 1), "mlp_ratio": (2, 2)}


def tiny(**kwargs: Any) -> nn.Module:
    return pale.create_model("pale_nano", **{**TINY, "num_classes": 5, **kwargs}).eval()


def leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with weights, and GELU, all of which a forward pass must call."""
    return [
        (name, m)
        for name, m in model.named_modules()
        if not list(m.children()) and (list(m.parameters()) or isinstance(m, nn.GELU))
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of oneDNN's operator."""
    seen: list[int] = []
    original = linear_op.onednn_linear

    def count(*args: Any) -> Tensor:
        seen.append(1)
        return original(*args)

    monkeypatch.setattr(linear_op, "onednn_linear", count)
    return seen


def test_the_shortcut_is_taken_where_nothing_stands_against_it(calls: list[int]) -> None:
    model = tiny()
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert len(calls) == 2 * 6


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_forward_hooks_see_every_module(grad: bool) -> None:
    model, seen = tiny(), []
    names = [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.set_grad_enabled(grad):
        model(torch.randn(1, 3, 32, 32))
    assert sorted(seen) == sorted(names)


def test_backward_hooks_see_every_layer() -> None:
    model, seen = tiny(), []
    for name, module in leaves(model):
        module.register_full_backward_hook(lambda *_, name=name: seen.append(name))
    model(torch.randn(1, 3, 32, 32, requires_grad=True)).sum().backward()
    assert sorted(seen) == sorted(name for name, _ in leaves(model))


def test_global_hooks_see_every_layer(calls: list[int]) -> None:
    model, seen = tiny(), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        with torch.no_grad():
            model(torch.randn(1, 3, 32, 32))
    finally:
        handle.remove()
    assert {id(m) for m in seen} == {id(m) for m in model.modules()}
    assert not calls


def test_a_patched_call_sees_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny(), []
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert {id(m) for _, m in leaves(model)} <= {id(m) for m in seen}


def test_weights_that_an_instances_forward_brings_are_used() -> None:
    # As accelerate offloads: the weights are elsewhere until a layer is called.
    model = tiny()
    x = torch.randn(2, 3, 40, 56)
    with torch.no_grad():
        expected = model(x)
        for _, module in leaves(model):
            kept = {n: p.detach().clone() for n, p in module.named_parameters(recurse=False)}
            for n, p in list(module.named_parameters(recurse=False)):
                setattr(module, n, nn.Parameter(p.to("meta")))

            def forward(*args: Any, module: nn.Module = module, kept: dict = kept) -> Tensor:
                with swapped(module, kept):
                    return type(module).forward(module, *args)

            module.forward = forward
        assert torch.allclose(model(x), expected, atol=1e-6)


@contextmanager
def swapped(module: nn.Module, kept: dict[str, Tensor]) -> Iterator[None]:
    before = dict(module._parameters)
    module._parameters.update(kept)
    try:
        yield
    finally:
        module._parameters.update(before)


def doubled(module: nn.Module) -> None:
    """Replace the forward of an instance."""
    module.forward = lambda x: 2 * type(module).forward(module, x)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Double())


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda _m, _i, y: 2 * y)


def pruned(module: nn.Module) -> None:
    prune.random_unstructured(module, "weight", 0.9)


def spectral(module: nn.Module) -> None:
    parametrizations.spectral_norm(module)


def attribute(module: nn.Module) -> None:
    weight = 2 * module.weight.detach()
    del module.weight
    module.weight = weight


CHANGES = [doubled, parametrized, hooked, pruned, spectral, attribute]
LAYERS = ["cpe", "norm1", "attn.phi_k.depthwise", "attn.phi_v.pointwise", "attn.proj", "mlp.fc1"]


def reference(block: nn.Module, x: Tensor) -> Tensor:
    """Compute a block by calling its modules."""

    def conv(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    attn, mlp = block.attn, block.mlp
    x = x + conv(block.cpe, x)
    y = block.norm1(x)
    q, k, v = (
        phi.pointwise(conv(phi.depthwise, y)) for phi in (attn.phi_q, attn.phi_k, attn.phi_v)
    )
    x = x + attn.proj(attn.attend(q, k, v))
    return x + mlp.fc2(mlp.act(mlp.fc1(block.norm2(x))))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_changed_layer_is_what_runs(change: Callable[..., None], layer: str, grad: bool) -> None:
    if change is spectral and layer == "norm1":
        pytest.skip("a vector has no spectral norm")
    torch.manual_seed(0)
    block = tiny().stages[0].blocks[0]
    x = torch.randn(1, 5, 7, 16)
    with torch.set_grad_enabled(grad):
        before = block(x)  # fills any cache about the layers
        assert_close(before, reference(block, x))
        change(block.get_submodule(layer))
        after = block(x)
        assert_close(after, reference(block, x))
    assert not torch.equal(after, before)


REPLACED = {
    "act": lambda: nn.GELU("tanh"),
    "fc1": lambda: nn.Linear(16, 32, bias=False),
    "fc2": lambda: nn.Sequential(nn.Linear(32, 16)),
}


@pytest.mark.parametrize("part", REPLACED)
def test_a_replaced_part_of_the_mlp_is_what_runs(part: str) -> None:
    mlp, x = Mlp(16, 32).eval(), torch.randn(2, 16)
    setattr(mlp, part, REPLACED[part]())
    with torch.no_grad():
        assert_close(mlp(x), mlp.fc2(mlp.act(mlp.fc1(x))), rtol=1e-6, atol=1e-6)


class Marked(Tensor):
    """A tensor subclass, like those of torchao, that doubles linear layers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {})).as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_as_weight_is_asked(calls: list[int]) -> None:
    mlp = Mlp(16, 32).eval()
    x = torch.randn(2, 16)
    with torch.no_grad():
        mlp.fc1.bias.zero_()
        mlp.fc2.bias.zero_()
        expected = 2 * mlp.fc2(mlp.act(2 * mlp.fc1(x)))
        for layer in (mlp.fc1, mlp.fc2):
            weight = layer.weight.detach().as_subclass(Marked)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        calls.clear()
        assert_close(mlp(x).as_subclass(Tensor), expected)
    assert not calls


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:.torch.jit.trace:FutureWarning",
    "ignore::torch.jit.TracerWarning",
)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_jit_trace_needs_no_operator_of_ours(check: bool) -> None:
    model, x = tiny(), torch.randn(1, 3, 40, 56)
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=check)
        assert_close(traced(x), model(x))
    assert "mkldnn" not in str(traced.inlined_graph)
    assert "pale::" not in str(traced.inlined_graph)


def test_dispatch_modes_see_pytorchs_operators(calls: list[int]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = tiny(), torch.randn(1, 3, 32, 32)
    totals = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            model(x)
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0
    assert not calls


def test_layers_are_pytorchs_own() -> None:
    # Tools with tables of exact classes (thop, ptflops, quantize_dynamic, opacus) do not recognise subclasses.
    kinds = {nn.Linear: 0, nn.Conv2d: 0, nn.LayerNorm: 0}
    for module in tiny().modules():
        for kind in (nn.Linear, nn.Conv2d):
            if isinstance(module, kind):
                assert type(module) is kind
        if type(module) in kinds:
            kinds[type(module)] += 1
    assert kinds == {nn.Linear: 2 * 6 + 1, nn.Conv2d: 2 * (1 + 4), nn.LayerNorm: 2 * (1 + 2)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_dynamic_quantisation_finds_every_linear_layer() -> None:
    model, x = tiny(), torch.randn(1, 3, 40, 56)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    found = [m for m in quantised.modules() if "quantized.dynamic" in type(m).__module__]
    assert len(found) == 2 * 6 + 1
    with torch.no_grad():
        expected = model(x)
        assert (quantised(x) - expected).abs().max() < 0.1 * expected.abs().max()


# PyTorch has no batching rule for its own attention on a CPU and loops over the images.
looped = pytest.mark.filterwarnings("ignore:There is a performance drop")


@looped
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
def test_per_sample_gradients_are_those_of_single_images(channels_last: bool) -> None:
    model = tiny().double()
    x, y = torch.randn(3, 3, 33, 40, dtype=torch.float64), torch.tensor([0, 3, 4])
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (x[None],))
        return nn.functional.cross_entropy(logits, y[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    for i in range(3):
        expected = torch.func.grad(loss)(weights, x[i], y[i])
        for name, grad in expected.items():
            assert_close(found[name][i], grad)


@looped
def test_vmap_without_gradients_runs(calls: list[int]) -> None:
    model, x = tiny(), torch.randn(3, 2, 3, 32, 32)
    with torch.no_grad():
        found = torch.func.vmap(model)(x)
        assert not calls
        assert_close(found, torch.stack([model(y) for y in x]), rtol=1e-4, atol=1e-6)


def test_functional_call_uses_the_weights_it_is_given() -> None:
    model, x = tiny(), torch.randn(1, 3, 32, 32)
    other = tiny()
    with torch.no_grad():
        found = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
        assert torch.equal(found, other(x))


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_as_plain_as_its_original(clone: Callable[..., nn.Module]) -> None:
    model = tiny()
    for copied in (clone(model), clone(model).half(), clone(model).share_memory()):
        block = copied.stages[0].blocks[0]
        assert is_plain(block.mlp.fc1, nn.Linear)
        assert is_plain_depthwise(block.cpe)
    assert not is_watched()


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_code_runs_hooks_and_changed_layers(grad: bool) -> None:
    torch.compiler.reset()
    for layer in ("cpe", "attn.phi_q.depthwise", "attn.phi_q", "attn.proj", "mlp.act"):
        block = tiny().stages[0].blocks[0]
        doubled_or_hooked = hooked if layer in ("attn.phi_q", "cpe") else doubled
        doubled_or_hooked(block.get_submodule(layer))
        x = torch.randn(1, 5, 7, 16)
        with torch.set_grad_enabled(grad):
            compiled = torch.compile(block, backend="aot_eager")
            assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_torchvision_extracts_features_by_tracing() -> None:
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model, x = tiny(position="cpe"), torch.randn(2, 3, 40, 56)
    nodes = {"stages.0": "fine", "stages.1.blocks.0.mlp.fc1": "hidden", "head": "logits"}
    found = extraction.create_feature_extractor(model, return_nodes=nodes)(x)
    assert_close(found["fine"], model.stages[0](x))
    assert_close(found["logits"], model(x))
    assert found["hidden"].shape == (2, 5, 7, 64)


def test_optimize_folds_no_norm_that_is_hooked() -> None:
    conv, norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
    norm.register_forward_hook(lambda _m, _i, y: 2 * y)
    folded = fold_norms(nn.Sequential(conv, norm).eval())
    assert isinstance(folded[1], nn.BatchNorm2d)
    norm._forward_hooks.clear()
    assert isinstance(fold_norms(nn.Sequential(conv, norm).eval())[1], nn.Identity)


def test_compiled_inference_keeps_the_shortcuts_of_plain_layers() -> None:
    torch.compiler.reset()
    block, found = tiny().stages[0].blocks[0], []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        torch.compile(block, backend=backend, fullgraph=True)(torch.randn(1, 5, 7, 16))
    assert sum("onednn_linear" in name for name in found) == 6
    assert not any("conv2d" in name for name in found)
    torch.compiler.reset()
