"""`depthwise_conv` against a loop: in eager mode, as the opaque operator, and compiled."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from ops.cases import assert_same, gradients, opcheck_warning, tensors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from pale.ops.depthwise_conv import depthwise_conv, opaque

SIZES = [(1, 1), (1, 5), (4, 1), (2, 2), (5, 7)]
NAMES = ("output", "grad x", "grad weight", "grad bias")

every_form = pytest.mark.parametrize("conv", [depthwise_conv, opaque], ids=["eager", "opaque"])
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
every_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def arguments(
    size: tuple[int, int], *, bias: bool, b: int = 2, c: int = 3, dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    """x, weight and bias, or None in its place."""
    (x,) = tensors(1, (b, *size, c), dtype=dtype)
    (weight,) = tensors(1, (c, 1, 3, 3), dtype=dtype, seed=1)
    return [x, weight, *tensors(1, (c,), dtype=dtype, seed=2)] if bias else [x, weight, None]


def naive(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum over the 3x3 neighbours of each token that are inside the map."""
    _, h, w, c = x.shape
    out = []
    for i, j in product(range(h), range(w)):
        out.append(torch.zeros_like(x[:, 0, 0]) if bias is None else bias.expand(len(x), c))
        for y, z in product(range(3), range(3)):
            if 0 <= i + y - 1 < h and 0 <= j + z - 1 < w:
                out[-1] = out[-1] + x[:, i + y - 1, j + z - 1] * weight[:, 0, y, z]
    return torch.stack(out, 1).view(x.shape)


def run(conv, args: list[Tensor | None]) -> list[Tensor]:
    """The output and the gradients with respect to each tensor."""
    out = conv(*args)
    (grad,) = tensors(1, tuple(out.shape), dtype=out.dtype, seed=3)
    return [out, *gradients(out, [x for x in args if x is not None], grad.detach())]


@every_form
@every_size
@every_bias
def test_output_and_gradients_equal_a_naive_loop(bias, size, conv):
    args = arguments(size, bias=bias)
    actual, expected = run(conv, args), run(naive, args)
    assert_same(actual, expected, names=NAMES[: len(actual)])


@every_form
@every_size
@every_bias
def test_gradients_are_true(bias, size, conv):
    x, weight, shift = arguments(size, bias=bias)
    if bias:
        assert torch.autograd.gradcheck(conv, (x, weight, shift))
    else:
        assert torch.autograd.gradcheck(lambda x, weight: conv(x, weight, None), (x, weight))


LAYOUTS = {
    "channels first": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "half of the channels": lambda x: torch.cat([x, x * torch.nan], 3)[..., : x.shape[3]],
    "expanded": lambda x: x[:1].expand_as(x),
}


@every_form
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_of_the_input_changes_nothing(layout, conv):
    x, weight, bias = arguments((5, 7), bias=True)
    x = LAYOUTS[layout](x.detach()).detach().requires_grad_()
    assert not x.is_contiguous()
    plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    assert_same(run(conv, [x, weight, bias]), run(conv, [plain, weight, bias]), names=NAMES)


@every_form
def test_an_empty_batch_gives_an_empty_result(conv):
    out, grad_x, grad_weight, grad_bias = run(conv, arguments((5, 7), bias=True, b=0))
    assert out.shape == grad_x.shape == (0, 5, 7, 3)
    assert not grad_weight.any()
    assert not grad_bias.any()


def test_only_what_requires_a_gradient_gets_one():
    x, weight, bias = arguments((5, 7), bias=True)
    expected = run(depthwise_conv, [x, weight, bias])
    out = opaque(x.detach(), weight, bias)
    (grad,) = tensors(1, tuple(out.shape), seed=3)
    actual = gradients(out, [weight, bias], grad.detach())
    assert_same(actual, expected[2:], names=NAMES[2:])


@opcheck_warning
@every_size
@every_bias
def test_the_opaque_operator_is_registered_as_pytorch_demands(bias, size):
    torch.library.opcheck(opaque, arguments(size, bias=bias))


@opcheck_warning
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_opaque_operator_is_registered_for_every_memory_layout(layout):
    x, weight, bias = arguments((5, 7), bias=True)
    x = LAYOUTS[layout](x.detach()).detach()
    torch.library.opcheck(opaque, (x.requires_grad_(), weight, bias))


@opcheck_warning
@every_bias
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_the_opaque_backward_is_registered_as_pytorch_demands(layout, bias):
    x, weight, _ = (None if x is None else x.detach() for x in arguments((5, 7), bias=bias))
    x = LAYOUTS[layout](x) if layout else x
    backward = torch.ops.pale.depthwise_conv_backward.default
    torch.library.opcheck(backward, (torch.ones_like(x), x, weight, bias))


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@every_bias
def test_compiled_for_any_size_it_is_one_opaque_call_equal_to_eager(bias):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(depthwise_conv, backend=counter, fullgraph=True, dynamic=True)
    for b, h, w in [(2, 5, 7), (3, 8, 4), (2, 2, 11)]:
        args = arguments((h, w), bias=bias, b=b)
        actual, expected = run(compiled, args), run(depthwise_conv, args)
        assert_same(actual, expected, names=NAMES[: len(actual)])
    assert counter.frame_count == 1
    calls = [x.target for x in counter.graphs[0].graph.nodes if x.op == "call_function"]
    assert torch.ops.pale.depthwise_conv.default in calls
    assert not any("conv2d" in str(x) for x in calls)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
    ],
    ids=str,
)
@every_bias
def test_compiled_under_autocast_it_equals_eager_under_autocast(bias, dtype):
    args = arguments((5, 7), bias=bias, dtype=dtype)
    compiled = torch.compile(depthwise_conv, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = compiled(*args), depthwise_conv(*args)
    assert expected.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    assert_same([actual], [expected], names=NAMES[:1])
