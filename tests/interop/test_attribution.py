"""captum and hooks: what is attributed to each module must be what each module computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interop.models import build, client_warnings, difference, each_model, images
from torch import Tensor, nn

pytestmark = pytest.mark.slow
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    return {
        n: m
        for n, m in model.named_modules()
        if not list(m.children()) and any(True for _ in m.parameters())
    }


class TestHooks:
    client = "torch"

    @each_model
    @each_device
    @pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
    def test_a_hook_sees_every_layer_once(self, name: str, grad: bool, device: str) -> None:
        """Forward hooks on every layer that has weights: each is called once, with its output"""
        model = build(name).to(device)
        calls: dict[str, int] = {}

        def seen(path: str) -> object:
            def hook(module: nn.Module, inputs: object, output: object) -> None:
                assert isinstance(output, Tensor)
                calls[path] = calls.get(path, 0) + 1

            return hook

        for path, module in leaves(model).items():
            module.register_forward_hook(seen(path))
        with torch.set_grad_enabled(grad):
            model(images().to(device))
        assert calls == dict.fromkeys(leaves(model), 1)

    @each_device
    @pytest.mark.parametrize("kind", ["hook", "global", "forward", "parametrize"])
    def test_a_layer_changed_from_outside_changes_the_logits(self, kind: str, device: str) -> None:
        """Each layer's output changed by a hook, a global hook, a replaced `forward`, a parametrisation"""
        model, x = build("pale", depths=(1, 1, 1, 1)).to(device), images(1).to(device)
        with torch.no_grad():
            before = model(x)
            for path, module in leaves(model).items():
                undo = change(module, kind)
                assert difference(model(x), before) > 1e-4, f"{path} was not called"
                undo()
            assert torch.equal(model(x), before)


def change(module: nn.Module, kind: str) -> Callable[[], object]:
    """Negate a module's output, or shift its weight; return a function that undoes it."""
    if kind == "hook":
        return module.register_forward_hook(lambda m, args, y: -y).remove
    if kind == "global":
        hook = nn.modules.module.register_module_forward_hook(
            lambda m, args, y: -y if m is module else y
        )
        return hook.remove
    if kind == "forward":
        plain = module.forward
        module.forward = lambda *args: -plain(*args)  # as accelerate's add_hook_to_module does
        return lambda: delattr(module, "forward")

    class Shifted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.roll(1, 0)

    nn.utils.parametrize.register_parametrization(module, "weight", Shifted())
    return lambda: nn.utils.parametrize.remove_parametrizations(
        module, "weight", leave_parametrized=False
    )


@client_warnings
class TestCaptum:
    client = "captum"

    @pytest.fixture(autouse=True)
    def _captum(self) -> None:
        self.attr = pytest.importorskip("captum.attr", reason="captum is not installed")

    @each_model
    def test_integrated_gradients_add_up_to_the_logit(self, name: str, measured) -> None:
        """`IntegratedGradients`: attributions add up to the change of the logit"""
        model, x = build(name), images(1)
        explained = self.attr.IntegratedGradients(model)
        base = torch.zeros_like(x)
        values = explained.attribute(x, base, target=3, n_steps=64, internal_batch_size=16)
        with torch.no_grad():
            change = (model(x) - model(base))[:, 3]
        measured(difference(values.sum((1, 2, 3)), change), 0.02, "of the change")

    # Swin's maps are NHWC, which LayerGradCam does not take.
    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_grad_cam_of_the_last_stage_is_autograds(self, name: str, measured) -> None:
        """`LayerGradCam` of the last stage: against the same by hand with autograd"""
        model, x = build(name), images(1)
        values = self.attr.LayerGradCam(model, model.stages[-1]).attribute(x, target=3)
        expected = grad_cam(model, model.stages[-1], x, 3)
        measured(difference(values, expected), 1e-5, "of the largest value")

    @pytest.mark.parametrize(
        "layer",
        ["stages.2.blocks.1.attn.phi_q.depthwise", "stages.0.blocks.0.cpe"],
        ids=["phi_q", "cpe"],
    )
    def test_activations_of_a_depthwise_convolution_are_seen(self, layer: str, measured) -> None:
        """`LayerActivation`, `LayerGradientXActivation` of depthwise convolutions: against the layer"""
        model, x = build("pale"), images(1)
        module = model.get_submodule(layer)
        kept: list[Tensor] = []
        handle = module.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
        values = self.attr.LayerActivation(model, module).attribute(x)
        handle.remove()
        with torch.no_grad():
            measured(difference(values, module(kept[0])), 1e-5, "of the largest value")
        weighted = self.attr.LayerGradientXActivation(model, module).attribute(x, target=3)
        assert weighted.shape == values.shape
        assert weighted.abs().sum() > 0

    # Swin has softmax modules, for which DeepLift has a rule.
    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_deep_lift_is_gradient_times_input_without_rules(self, name: str, measured) -> None:
        """`DeepLift`, which has no rules for GELU and SDPA: against gradient times input"""
        model, x = build(name), images(1)
        values = self.attr.DeepLift(model).attribute(x, torch.zeros_like(x), target=3)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf)[0, 3], leaf)
        measured(difference(values, gradient * x), 1e-4, "of the largest value")

    @each_model
    def test_occlusion_is_the_drop_of_the_logit(self, name: str, measured) -> None:
        """`Occlusion` of squares of 32 pixels: against images with the square blanked"""
        model, x = build(name), images(1)
        window = (3, 32, 32)
        explained = self.attr.Occlusion(model)
        values = explained.attribute(x, window, strides=window, target=3)
        blank = x.clone()
        blank[:, :, 32:, :32] = 0
        with torch.no_grad():
            drop = (model(x) - model(blank))[0, 3]
        measured(difference(values[0, 0, 40, 8], drop), 1e-4, "of the drop")


def grad_cam(model: nn.Module, layer: nn.Module, x: Tensor, target: int) -> Tensor:
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda m, args, y: kept.append(y))
    logits = model(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[0, target], kept[0])
    weights = gradient.mean((2, 3), keepdim=True)
    return (weights * kept[0]).sum(1, keepdim=True)
