"""accelerate and peft: weights that are elsewhere, or that are added to, while the model is called."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interop.models import build, client_warnings, difference, each_model, eager, images
from torch import nn

pytestmark = pytest.mark.slow
# Linear layers but for the classifier, as peft finds them by name.
LAYERS = {
    "pale": ["pointwise", "proj", "fc1", "fc2"],
    "swin": ["qkv", "proj", "fc1", "fc2"],
    "convnext": ["fc1", "fc2"],
}


@client_warnings
class TestAccelerate:
    client = "accelerate"

    @pytest.fixture(autouse=True)
    def _accelerate(self) -> None:
        self.accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    @each_model
    def test_cpu_offload_keeps_the_logits(self, name: str, measured) -> None:
        """`cpu_offload`: weights on the meta device, brought by hooks"""
        model, x = build(name), images()
        expected = eager(model, x)
        self.accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in model.parameters())
        with torch.no_grad():
            measured(difference(model(x), expected), 1e-5)

    @each_model
    def test_disk_offload_keeps_the_logits(self, name: str, measured, tmp_path: Path) -> None:
        """`disk_offload`: weights in files, brought by hooks"""
        model, x = build(name), images()
        expected = eager(model, x)
        self.accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in model.parameters())
        with torch.no_grad():
            measured(difference(model(x), expected), 1e-5)

    # Swin keeps indices in buffers that are not saved, which a model on the meta device lacks.
    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_a_checkpoint_loads_straight_to_disk(self, name: str, measured, tmp_path: Path) -> None:
        """`init_empty_weights` and `load_checkpoint_and_dispatch`, the stages on disk"""
        model, x = build(name), images()
        expected = eager(model, x)
        self.accelerate.Accelerator().save_model(model, tmp_path / "weights")
        with self.accelerate.init_empty_weights():
            empty = build(name)
        children = [child for child, _ in empty.named_children()]
        places = {child: "disk" if child == "stages" else "cpu" for child in children}
        loaded = self.accelerate.load_checkpoint_and_dispatch(
            empty, tmp_path / "weights", device_map=places, offload_folder=tmp_path / "disk"
        ).eval()
        with torch.no_grad():
            measured(difference(loaded(x), expected), 1e-5)

    @each_model
    def test_a_prepared_step_is_the_plain_step(self, name: str, measured) -> None:
        """`Accelerator.prepare` and `backward`: every parameter after a step of SGD"""
        x, labels = images(4), torch.arange(4)
        plain = build(name)
        prepared = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        F.cross_entropy(plain(x), labels).backward()
        optimizer.step()

        accelerator = self.accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(
            prepared, torch.optim.SGD(prepared.parameters(), lr=0.1)
        )
        accelerator.backward(F.cross_entropy(model(x), labels))
        optimizer.step()
        assert_same_parameters(accelerator.unwrap_model(model), plain, measured)


def assert_same_parameters(model: nn.Module, expected: nn.Module, measured) -> None:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    measured(max(difference(p, q) for p, q in pairs), 1e-5, "of a parameter's largest entry")


@client_warnings
class TestPeft:
    client = "peft"

    @pytest.fixture(autouse=True)
    def _peft(self) -> None:
        self.peft = pytest.importorskip("peft", reason="peft is not installed")

    @each_model
    def test_lora_is_the_sum_of_its_weights(self, name: str, measured) -> None:
        """LoRA on all linear layers: equal to weights with the product added; merged too"""
        base, x = build(name), images()
        config = self.peft.LoraConfig(target_modules=LAYERS[name], r=4, lora_alpha=8)
        adapted = self.peft.get_peft_model(copy.deepcopy(base), config).eval()
        with torch.no_grad():
            assert difference(adapted(x), eager(base, x)) < 1e-6  # B is zero at first
            added = 0
            for path, module in adapted.base_model.model.named_modules():
                if not hasattr(module, "lora_B"):
                    continue
                module.lora_B["default"].weight.normal_(std=0.05)
                base.get_submodule(path).weight += module.get_delta_weight("default")
                added += 1
            linears = [m for m in base.modules() if isinstance(m, nn.Linear)]
            assert name != "pale" or added == len(linears) - 1 == 60  # all but the classifier
            expected = eager(base, x)
            assert difference(adapted(x), expected) < 1e-5
            measured(difference(adapted.merge_and_unload()(x), expected), 1e-5)

    @each_model
    def test_lora_trains_its_own_weights_alone(self, name: str) -> None:
        """LoRA, a training step: every adapter gets a gradient, no other parameter changes"""
        config = self.peft.LoraConfig(target_modules=LAYERS[name], r=4)
        model = self.peft.get_peft_model(build(name), config).train()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        F.cross_entropy(model(images(4)), torch.arange(4)).backward()
        optimizer.step()
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        # A is multiplied by B, which is zero at first.
        assert changed == {n for n in before if "lora_B" in n}
