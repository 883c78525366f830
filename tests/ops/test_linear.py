"""`linear` against PyTorch's own layers, where oneDNN may run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pale.model.layers import Mlp
from pale.ops.linear import linear


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 12), (1, 3, 4, 12), (2, 1, 7, 12), (0, 3, 3, 12)])
@pytest.mark.parametrize("grad", [False, True])
def test_equals_pytorch(shape, bias, gelu, grad):
    x, weight = torch.randn(shape), torch.randn(20, 12)
    b = torch.randn(20) if bias else None
    expected = F.linear(x, weight, b)
    expected = F.gelu(expected) if gelu else expected
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(linear(x, weight, b, gelu=gelu), expected)


def test_takes_a_strided_map():
    x, weight = torch.randn(2, 12, 3, 5).permute(0, 2, 3, 1), torch.randn(20, 12)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast_are_pytorchs(dtype):
    x, weight = torch.randn(4, 12), torch.randn(20, 12)
    with torch.no_grad():
        assert linear(x.to(dtype), weight.to(dtype), None).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight, None).dtype == torch.bfloat16


def test_compiled_for_inference():
    layer = Mlp(12, 48).eval()
    x = torch.randn(2, 3, 5, 12)
    with torch.no_grad():
        expected = layer.fc2(F.gelu(F.linear(x, layer.fc1.weight, layer.fc1.bias)))
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), expected)


@pytest.mark.parametrize("gelu", [False, True])
def test_flops_are_counted(gelu):
    x, weight = torch.randn(2, 3, 12), torch.randn(20, 12)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear(x, weight, None, gelu=gelu)
    assert counter.get_total_flops() == 2 * 6 * 12 * 20


def test_hooks_and_replaced_layers_are_honoured():
    x, mlp = torch.randn(2, 12), Mlp(12, 48).eval()
    seen = []
    mlp.fc1.register_forward_hook(lambda *args: seen.append(args[2].shape))
    with torch.no_grad():
        mlp(x)
    assert seen == [(2, 48)]
    mlp = Mlp(12, 48).eval()
    mlp.act = nn.ReLU()
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), mlp.fc2(F.relu(mlp.fc1(x))))
    mlp = Mlp(12, 48).eval()
    nn.utils.parametrizations.weight_norm(mlp.fc1)
    assert type(mlp.fc1) is not nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), mlp.fc2(F.gelu(mlp.fc1(x))))
