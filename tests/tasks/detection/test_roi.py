"""The deterministic gradient of RoIAlign equals that of torchvision."""

import pytest
import torch
from torchvision.ops import roi_align as theirs

from pale.tasks.detection import roi


def regions(count: int, images: int, h: int, w: int) -> torch.Tensor:
    """Return boxes of many sizes: some outside the image, some empty, one image with a single box."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(count, 2, generator=generator).sort(1).values * (w * 1.3) - 0.15 * w
    y = torch.rand(count, 2, generator=generator).sort(1).values * (h * 1.3) - 0.15 * h
    number = torch.randint(images, (count, 1), generator=generator).float()
    boxes = torch.cat([number, torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1)], 1)
    boxes[0, 1:] = torch.tensor([5.0, 5.0, 5.0, 5.0])
    boxes[1, 1:] = torch.tensor([-3.0, -3.0, w + 9.0, h + 9.0])
    boxes[2, 1:] = torch.tensor([8.0, 2.0, 4.0, 1.0])  # end before start
    return boxes


@pytest.mark.parametrize("side", [7, 14])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("numbers", [roi.MAX_NUMBERS, 5000], ids=["whole", "pieces"])
def test_the_gradient_by_matrix_products_equals_torchvision(side, scale, numbers, monkeypatch):
    monkeypatch.setattr(roi, "MAX_NUMBERS", numbers)
    b, c, h, w = 3, 4, 21, 34
    boxes = regions(40, b, round(h / scale), round(w / scale))
    x = torch.randn(b, c, h, w, requires_grad=True)
    out = theirs(x, boxes, side, scale, 0, aligned=True)
    gradient = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, gradient)
    found = roi.map_gradient(gradient, boxes, tuple(x.shape), scale)
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    own = roi._RoIAlign.apply(x, boxes, side, scale)
    assert torch.equal(own, out)
    (through,) = torch.autograd.grad(own, x, gradient)
    assert torch.equal(through, found)


def test_no_region_has_a_gradient_of_zero():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    out = roi._RoIAlign.apply(x, torch.zeros(0, 5), 7, 0.5)
    assert out.shape == (0, 3, 7, 7)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
