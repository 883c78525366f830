"""Gradients of each sample alone (torch.func, opacus), and weights with masks (nn.utils.prune)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from interop.models import CLASSES, build, client_warnings, difference, each_model, eager, images
from torch import Tensor, nn
from torch.nn.utils import prune

pytestmark = pytest.mark.slow
SAMPLES = 3


def one_by_one(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each sample's loss, (samples, ...) for each parameter."""
    parameters = dict(model.named_parameters())
    rows = []
    for image, label in zip(x, labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        rows.append(torch.autograd.grad(loss, list(parameters.values())))
    return {n: torch.stack(g) for n, g in zip(parameters, zip(*rows, strict=True), strict=True)}


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    gaps = [float((found[n] - g).abs().max()) for n, g in expected.items()]
    assert all(map(math.isfinite, gaps))  # `max` ignores a NaN that is not the first
    return max(gaps) / largest


@client_warnings
class TestFunc:
    client = "torch"

    @each_model
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_vmap_gives_the_gradient_of_each_sample(self, layout: str, name: str, measured) -> None:
        """`torch.func.vmap(grad(...))`: against one backward pass for each sample"""
        model, x, labels = build(name), images(SAMPLES), torch.arange(SAMPLES)
        expected = one_by_one(model, x, labels)
        if layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)

        def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = torch.func.functional_call(model, parameters, (image[None],))
            return F.cross_entropy(logits, label[None])

        parameters = {n: p.detach() for n, p in model.named_parameters()}
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, labels)
        measured(farthest(gradients, expected), 1e-4, "of the largest gradient")

    @each_model
    def test_vmap_over_models_is_each_model(self, name: str, measured) -> None:
        """`torch.func.stack_module_state` and `vmap`: an ensemble against each member"""
        members, x = [build(name) for _ in range(2)], images()
        with torch.no_grad():
            for parameter in members[1].parameters():
                parameter.mul_(1.1)
        parameters, buffers = torch.func.stack_module_state(members)
        base = copy.deepcopy(members[0]).to("meta")

        def call(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(base, (p, b), (x,))

        with torch.no_grad():
            logits = torch.func.vmap(call)(parameters, buffers)
        measured(difference(logits, torch.stack([eager(m, x) for m in members])), 1e-5)

    @each_model
    def test_jvp_is_the_directional_derivative(self, name: str, measured) -> None:
        """`torch.func.jvp` (forward mode): against reverse mode"""
        model, x = build(name).double(), images(1).double()
        direction = torch.randn_like(x)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            _, change = torch.func.jvp(model, (x,), (direction,))
        leaf = x.clone().requires_grad_()
        logits = model(leaf)
        expected = torch.stack(
            [
                (torch.autograd.grad(logits[0, c], leaf, retain_graph=True)[0] * direction).sum()
                for c in range(CLASSES)
            ]
        )
        measured(difference(change[0], expected), 1e-6, "of the largest derivative")

    @each_model
    def test_double_backward_works_with_the_math_kernel(self, name: str, measured) -> None:
        """Double backward (gradient penalty) under `SDPBackend.MATH`: against finite differences"""
        model, x = build(name).double(), images(1).double()
        direction = torch.randn_like(x)

        def penalty(x: Tensor) -> Tensor:
            x = x.requires_grad_() if not x.requires_grad else x
            (g,) = torch.autograd.grad(model(x)[0, 3], x, create_graph=True)
            return g.square().sum()

        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(penalty(leaf), leaf)
            eps = 1e-5
            up, down = penalty(x + eps * direction), penalty(x - eps * direction)
        slope = ((up - down) / (2 * eps)).detach()
        measured(difference((gradient * direction).sum(), slope), 1e-4, "of the slope")


@client_warnings
class TestOpacus:
    client = "opacus"

    @pytest.fixture(autouse=True)
    def _opacus(self) -> None:
        self.opacus = pytest.importorskip("opacus", reason="opacus is not installed")

    # The peers have buffers (Swin) or parameters beside their layers (ConvNeXt), which opacus does not take.
    def test_gradients_of_samples_are_those_of_backward(self, measured) -> None:
        """`GradSampleModule` with `force_functorch`: against one backward pass for each sample"""
        model, x, labels = build("pale"), images(SAMPLES), torch.arange(SAMPLES)
        expected = one_by_one(model, x, labels)
        wrapped = self.opacus.GradSampleModule(
            model.train(), loss_reduction="sum", force_functorch=True
        )
        F.cross_entropy(wrapped(x), labels, reduction="sum").backward()
        found = {n: p.grad_sample for n, p in model.named_parameters()}
        measured(farthest(found, expected), 1e-4, "of the largest gradient")

    def test_private_training_takes_a_step(self, measured) -> None:
        """`PrivacyEngine` in functorch mode, no noise, no clipping: a step against plain SGD"""
        model, x, labels = build("pale"), images(4), torch.arange(4)
        plain = copy.deepcopy(model)
        data = torch.utils.data.TensorDataset(x, labels)
        private, optimizer, loader = self.opacus.PrivacyEngine().make_private(
            module=model.train(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=1e6,
            poisson_sampling=False,
            grad_sample_mode="functorch",
        )
        for batch, target in loader:
            F.cross_entropy(private(batch), target).backward()
            optimizer.step()
        F.cross_entropy(plain(x), labels).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        measured(max(difference(p, q) for p, q in pairs), 1e-4, "of a parameter's largest entry")

    def test_its_own_rule_for_convolutions_errs_on_channels_last(self) -> None:
        """A plain `nn.Conv2d` on channels-last maps without functorch: wrong, so the page says not to"""
        x = images(2, (8, 8)).contiguous(memory_format=torch.channels_last)
        for functorch in (True, False):
            conv = nn.Conv2d(3, 4, 3, padding=1)
            expected = [torch.autograd.grad(conv(i[None]).square().sum(), conv.weight) for i in x]
            wrapped = self.opacus.GradSampleModule(
                conv, loss_reduction="sum", force_functorch=functorch
            )
            wrapped(x).square().sum().backward()
            gap = difference(conv.weight.grad_sample, torch.stack([g for (g,) in expected]))
            assert gap < 1e-5 if functorch else gap > 0.1


class TestPrune:
    client = "torch"

    @each_model
    def test_pruned_weights_do_not_count(self, name: str, measured) -> None:
        """`nn.utils.prune` of half of every convolution and linear layer: against weights set to zero"""
        model, x = build(name), images()
        zeroed = copy.deepcopy(model)
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for path in layers:
            pruned = model.get_submodule(path)
            prune.random_unstructured(pruned, "weight", amount=0.5)
            with torch.no_grad():
                zeroed.get_submodule(path).weight.mul_(pruned.weight_mask)
        expected = eager(zeroed, x)
        with torch.no_grad():
            assert difference(model(x), expected) < 1e-5
            for path in layers:
                prune.remove(model.get_submodule(path), "weight")
            measured(difference(model(x), expected), 1e-5)

    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_a_mask_changed_later_counts(self, name: str) -> None:
        """`nn.utils.prune`: a mask changed after the first call is used in the next, by every layer"""
        model, x = build(name, depths=(1, 1, 1, 1)), images(1)
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for path in layers:
            prune.identity(model.get_submodule(path), "weight")
        with torch.no_grad():
            before = model(x)
            for path in layers:
                mask = model.get_submodule(path).weight_mask
                mask.zero_()
                assert difference(model(x), before) > 1e-5, f"{path} ignores its mask"
                mask.fill_(1)
