"""Models for the tests of third-party clients: ours, and small ones of timm as peers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import timm
import torch
from torch import Tensor, nn

import pale  # noqa: F401  registers our models with timm

SIZE = (64, 96)  # maps of 16x24 down to 2x3: rows and columns do not divide by the pale size 7
CLASSES = 10

# Name and options of each model; the peers are cut down so that a test takes seconds.
MODELS = {
    "pale": ("pale_nano", {}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "embed_dim": 32,
            "depths": (1, 1, 2, 1),
            "num_heads": (2, 2, 4, 4),
            "window_size": 2,
            "img_size": SIZE,
        },
    ),
    "convnext": ("convnext_atto", {"depths": (1, 1, 2, 1)}),
}
each_model = pytest.mark.parametrize("name", MODELS)
# Warnings of a client are its own; ours stay errors. Those of vmap and of the tracer are raised where an operator is
# called, hence in our files too.
client_warnings = pytest.mark.filterwarnings(
    "ignore",
    r"error:::pale(\..*)?",
    "ignore:There is a performance drop",
    "ignore::torch.jit.TracerWarning",
)


def build(name: str, **options: object) -> nn.Module:
    """Return a model in eval mode whose parameters are all drawn at random, norms and biases too.

    A layer that a client drops, or calls with other weights, changes the logits.
    """
    timm_name, own = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(timm_name, **{"num_classes": CLASSES, **own, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def images(batch: int = 2, size: Sequence[int] = SIZE, seed: int = 1) -> Tensor:
    """Return normalised images, (batch, 3, h, w)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, *size, generator=generator)


def difference(y: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN and Inf are infinite."""
    assert y.shape == expected.shape, (y.shape, expected.shape)
    y, expected = y.detach().double(), expected.detach().double()
    if not y.isfinite().all():
        return float("inf")
    return float((y - expected).abs().max() / expected.abs().max())


def eager(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of a copy, so that what a client did to the model, or will do, does not matter."""
    with torch.no_grad():
        return copy.deepcopy(model)(x)
