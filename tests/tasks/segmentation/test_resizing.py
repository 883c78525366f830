"""Bilinear resizing by matrix products against PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pale.tasks.segmentation.resizing import bilinear, resize_by_products

SIDE = st.integers(1, 23)


@given(SIDE, SIDE, SIDE, SIDE, st.booleans())
def test_values_and_gradients_equal_pytorch(h, w, rows, columns, last):
    torch.manual_seed(h * w + rows)
    x = torch.randn(2, 3, h, w, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    gradient = torch.randn(2, 3, rows, columns, dtype=torch.float64)
    found = []
    for function in (resize_by_products, lambda x, s: F.interpolate(x, s, mode="bilinear")):
        leaf = x.clone().requires_grad_()
        y = function(leaf, (rows, columns))
        y.backward(gradient)
        found.append((y.detach(), leaf.grad))
    # The places are float32 numbers.
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=3e-5)


def test_the_result_keeps_its_type_and_is_channels_last():
    x = torch.randn(2, 8, 5, 7, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        y = resize_by_products(x, (10, 14))
    assert y.dtype is torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    expected = F.interpolate(x.float(), (10, 14), mode="bilinear")
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_a_gpu_gives_the_same_bits_again(dtype):
    x = torch.randn(4, 16, 32, 24, device="cuda", dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(4, 16, 128, 100, device="cuda", dtype=dtype)
    found = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        y = bilinear(leaf, (128, 100))
        y.backward(gradient)
        found.append((y.detach(), leaf.grad))
    exact = x.float().requires_grad_()
    expected = F.interpolate(exact, (128, 100), mode="bilinear")
    expected.backward(gradient.float())
    for y, grad in found:
        assert torch.equal(grad, found[0][1])
        assert (y.float() - expected).norm() < 0.01 * expected.norm()
        assert (grad.float() - exact.grad).norm() < 0.01 * exact.grad.norm()
