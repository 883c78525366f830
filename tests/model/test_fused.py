"""The decision for the fused path: a block is fused only if calling its layers would do nothing else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pale
from pale.model import fused
from pale.model.pale_transformer import PaleBlock
from pale.ops import shortcuts
from pale.train.drop_path import SampledDropPath

CONFIG = {"channels": (32, 64), "heads": (2, 2), "depths": (1, 1), "mlp_ratio": (2, 2)}
X = torch.zeros(1, 4, 5, 32)


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> PaleBlock:
    """A block that is fused, on any device."""
    monkeypatch.setattr(fused.pieces, "unsupported", lambda *_: None)
    made = pale.create_model("pale_nano", **CONFIG, num_classes=2, drop_path_rate=0.1)
    first = made.stages[0].blocks[0]
    first.drop_path1 = DropPath(0.1)
    assert fused.can_fuse(first, X)
    assert fused.can_fuse(first, X)
    return first


class Sub(Tensor):
    """A tensor subclass."""


def set_attribute(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


def hook_by_dict(module: nn.Module) -> None:
    module._forward_hooks[10**6] = print  # without a call of register_forward_hook


def forward_by_dict(module: nn.Module) -> None:
    module.__dict__["forward"] = type(module).forward.__get__(module)


def remove_bias(module: nn.Module) -> None:
    module.bias = None


def subclass_weight(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Sub))


def swap_weight(module: nn.Module) -> None:
    # The parameter stays the same object, its class does not.
    weight = nn.Parameter(module.weight.detach().as_subclass(Sub))
    torch.utils.swap_tensors(module.weight, weight)


def attribute_weight(module: nn.Module) -> None:
    weight = module.weight.detach()
    del module.weight
    module.weight = weight


def move(module: nn.Module) -> None:
    module.to("meta")


class Other(nn.Linear):
    pass


def other_class(module: nn.Module) -> None:
    module.__class__ = Other


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "forward hook": ("mlp.fc1", lambda m: m.register_forward_hook(print)),
    "forward pre-hook": ("attn.proj", lambda m: m.register_forward_pre_hook(print)),
    "backward hook": ("norm1", lambda m: m.register_full_backward_hook(print)),
    "backward pre-hook": ("cpe", lambda m: m.register_full_backward_pre_hook(print)),
    "hook of a container": ("attn.phi_k", lambda m: m.register_forward_hook(print)),
    "hook without registration": ("attn.phi_v.depthwise", hook_by_dict),
    "hook of the activation": ("mlp.act", lambda m: m.register_forward_hook(print)),
    "hook of drop path": ("drop_path1", lambda m: m.register_forward_hook(print)),
    "forward of an instance": ("mlp.fc2", set_attribute("forward", print)),
    "forward of a container": ("attn", forward_by_dict),
    "parametrization": ("attn.phi_q.pointwise", parametrizations.spectral_norm),
    "other class": ("mlp.fc1", other_class),
    "tensor subclass": ("mlp.fc1", subclass_weight),
    "swapped tensor": ("norm2", swap_weight),
    "weight as an attribute": ("mlp.fc1", attribute_weight),
    "no bias": ("attn.proj", remove_bias),
    "weight on another device": ("norm2", move),
    "compiled layer": ("mlp.fc1", lambda m: m.compile(backend="eager")),
    "stride": ("cpe", set_attribute("stride", (2, 2))),
    "padding mode": ("attn.phi_q.depthwise", set_attribute("padding_mode", "reflect")),
    "approximation": ("mlp.act", set_attribute("approximate", "tanh")),
    "back-end": ("attn", set_attribute("backend", "sdpa")),
    "other layer": ("mlp", set_attribute("act", nn.ReLU())),
    "removed layer": ("mlp", set_attribute("act", None)),
    "head dim": ("attn", set_attribute("heads", 4)),
    "hidden channels": ("mlp", set_attribute("fc1", nn.Linear(32, 60))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_at_the_next_call(block: PaleBlock, change: str) -> None:
    part, apply = CHANGES[change]
    apply(block.get_submodule(part))
    assert not fused.can_fuse(block, X)


def test_a_removed_hook_is_noticed(block: PaleBlock) -> None:
    handle = block.mlp.fc1.register_forward_hook(print)
    assert not fused.can_fuse(block, X)
    handle.remove()
    assert fused.can_fuse(block, X)


def test_a_replaced_forward_of_a_class_is_noticed(
    block: PaleBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    assert not fused.can_fuse(block, X)


def test_global_hooks_and_a_replaced_call_are_noticed(
    block: PaleBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not fused.can_fuse(block, X)
    handle.remove()
    assert fused.can_fuse(block, X)
    monkeypatch.setattr(nn.Module, "__call__", lambda self, x: self.forward(x))
    assert not fused.can_fuse(block, X)


def test_subclasses_and_transforms_of_the_input_are_noticed(block: PaleBlock) -> None:
    found = []

    def ask(x: Tensor) -> Tensor:
        found.append(fused.can_fuse(block, x))
        return x.sum()

    torch.func.grad(ask)(X)
    torch.func.vmap(ask)(X[None])
    ask(X.as_subclass(Sub))
    assert found == [False, False, False]


def test_dtype_and_gradients_of_parameters_do_not_matter(block: PaleBlock) -> None:
    block.requires_grad_(False)
    assert fused.can_fuse(block, X)
    assert fused.can_fuse(block.half(), X.half())


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_judged_by_itself(block: PaleBlock, clone: Callable[[Any], PaleBlock]) -> None:
    copied = clone(block)
    block.mlp.fc1.register_forward_hook(print)
    assert fused.can_fuse(copied, X)
    assert not fused.can_fuse(block, X)


def test_an_unchanged_block_is_judged_by_its_signature_only(
    block: PaleBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise AssertionError("a layer was checked")

    monkeypatch.setattr(fused, "is_plain", fail)
    assert fused.can_fuse(block, X)
    block.drop_path1 = DropPath(0.3)  # another probability
    assert fused.can_fuse(block, X)


def test_drop_path_of_the_training_loop_is_fused_by_signature(block: PaleBlock) -> None:
    block.drop_path1 = SampledDropPath(torch.ones(1))
    assert shortcuts.signature(block, X.device) is not None
    assert fused.can_fuse(block, X)


def test_the_cache_of_signatures_is_bounded(
    block: PaleBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MAX_SIGNATURES", 2)
    for mlp in (16, 32, 48, 64):
        block.mlp.fc1 = nn.Linear(32, mlp)
        assert fused.can_fuse(block, X)
    assert len(fused._fusible) <= 2
