"""The fused pixel loss against PyTorch in float64: on a GPU, and in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from support.processes import DEVICE, compiling, in_the_interpreter, kernels, needs_triton

from pale.data.sources.class_list import IGNORED
from pale.ops.launching import INTERPRETED, launches
from pale.tasks.segmentation import fused_loss
from pale.tasks.segmentation.fused_loss import pixel_losses

# (b, classes, h', w', h, w)
CASES = {
    "by four": (2, 5, 4, 6, 16, 24),
    "ragged": (2, 19, 5, 3, 17, 13),
    "smaller": (1, 3, 9, 8, 4, 5),
    "one place": (2, 4, 1, 1, 7, 3),
    "one row": (1, 2, 1, 6, 3, 24),
    "as it is": (1, 150, 6, 5, 6, 5),
    "one class": (1, 1, 2, 3, 5, 6),
    "many classes": (1, 512, 2, 1, 3, 2),
}


def case(shape, dtype=torch.float32):
    b, n, h, w, rows, columns = shape
    logits = 3 * torch.randn(b, n, h, w, device=DEVICE)
    masks = torch.randint(0, n, (b, rows, columns), device=DEVICE).to(torch.uint8)
    masks[torch.rand(masks.shape, device=DEVICE) < 0.2] = IGNORED
    gradient = torch.randn(b, rows, columns, device=DEVICE)
    return logits.to(dtype), masks, gradient


def expected(logits, masks, gradient, weights):
    x = logits.double().requires_grad_()
    large = F.interpolate(x, masks.shape[-2:], mode="bilinear")
    weights = None if weights is None else weights.double()
    each = F.cross_entropy(large, masks.long(), weights, ignore_index=IGNORED, reduction="none")
    each.backward(gradient.double())
    return each.detach(), x.grad


@kernels
@needs_triton
@pytest.mark.parametrize(
    ("dtype", "weighted", "kind"),
    [
        (torch.float32, False, torch.uint8),
        (torch.float16, True, torch.uint8),
        (torch.bfloat16, False, torch.int64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_losses_and_gradients_equal_pytorch(shape, weighted, dtype, kind):
    logits, masks, gradient = case(shape, dtype)
    masks = masks.to(kind)
    if dtype is torch.bfloat16:
        logits = logits.contiguous(memory_format=torch.channels_last)
    weights = torch.rand(shape[1], device=DEVICE) + 0.5 if weighted else None
    x = logits.clone().requires_grad_()
    launches.clear()
    each = pixel_losses(x, masks, weights)
    each.backward(gradient)
    assert launches == {"loss_forward": 1, "loss_backward": 1, "loss_gather": 1}
    loss, grad = expected(logits, masks, gradient, weights)
    torch.testing.assert_close(each.double(), loss, rtol=1e-4, atol=1e-4)
    bound = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(x.grad.double(), grad, rtol=bound, atol=bound)


@kernels
@needs_triton
def test_masks_without_labels_have_loss_and_gradient_zero():
    logits, masks, gradient = case(CASES["by four"])
    x = logits.clone().requires_grad_()
    each = pixel_losses(x, torch.full_like(masks, IGNORED), None)
    each.backward(gradient)
    assert not each.any()
    assert not x.grad.any()


@kernels
@needs_triton
@pytest.mark.parametrize("weighted", [False, True])
def test_an_invalid_label_makes_the_loss_nan(weighted):
    logits, masks, _ = case(CASES["by four"])
    masks[0, 3, 5] = 77
    each = pixel_losses(logits, masks, torch.ones(5, device=DEVICE) if weighted else None)
    assert each.isnan().nonzero().tolist() == [[0, 3, 5]]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [75, 90])
def test_kernels_compile(monkeypatch, capability):
    compiled: list[str] = []
    monkeypatch.setattr(fused_loss, "launch", compiling(capability, compiled))
    logits = torch.zeros(1, 150, 4, 4, dtype=torch.float16, requires_grad=True)
    pixel_losses(
        logits, torch.zeros(1, 16, 16, dtype=torch.uint8), torch.ones(150)
    ).sum().backward()
    assert compiled == ["loss_forward", "loss_backward", "loss_gather"]


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter already")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)
