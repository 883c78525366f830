"""What the page "Works with" calls unsupported is an error, and the way out it names works."""

from __future__ import annotations

import pytest
import torch
from interop.models import build, client_warnings, difference, images
from torch.nn.attention import SDPBackend, sdpa_kernel


@client_warnings
def test_torchscript_compilation_is_an_error_and_tracing_is_the_way_out() -> None:
    model, x = build("pale"), images(1)
    with pytest.raises(RuntimeError):
        torch.jit.script(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        assert difference(traced(x), model(x)) < 1e-5


@pytest.mark.parametrize("decoder", ["DeepLabV3", "DeepLabV3Plus", "PAN"])
def test_decoders_that_need_a_dilated_encoder_are_an_error(decoder: str) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch", reason="smp is not installed")
    with pytest.raises((TypeError, ValueError), match="output_stride"):
        getattr(smp, decoder)("tu-pale_nano", encoder_weights=None, classes=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoder",
    ["Unet", "UnetPlusPlus", "FPN", "Linknet", "MAnet", "PSPNet", "UPerNet", "Segformer"],
)
def test_the_other_decoders_train_the_encoder(decoder: str) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch", reason="smp is not installed")
    model = getattr(smp, decoder)("tu-pale_nano", encoder_weights=None, classes=2)
    y = model(images(2))
    assert y.shape == (2, 2, 64, 96)
    y.square().mean().backward()
    used = [
        p.grad for n, p in model.encoder.named_parameters() if "stages_0" in n or "stages.0" in n
    ]
    assert used
    assert all(g is not None and g.isfinite().all() and g.abs().sum() > 0 for g in used)


def test_double_backward_is_an_error_but_for_the_math_kernel() -> None:
    model, x = build("pale"), images(1).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0, 3], x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        gradient.square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(model(x)[0, 3], x, create_graph=True)
        gradient.square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
