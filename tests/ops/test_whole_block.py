"""The operator of a whole block: against plain PyTorch in float64, and bit for bit against the operators of its pieces.

As in `test_block`, the interpreter has to be chosen before the kernels are defined, so
`test_everything_in_the_interpreter` runs this module once more in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import DEVICE, in_the_interpreter, kernels, needs_triton
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import pale
from pale.model import fused
from pale.model.pale_transformer import PaleBlock
from pale.ops.block import grids, layout, reference, triton_op
from pale.ops.launching import INTERPRETED, launches
from pale.ops.pale_attention import pale_attention
from pale.ops.pale_attention.region import Region

HALF = torch.float16 if INTERPRETED else torch.bfloat16
FLOOR = {torch.float32: 2e-6, HALF: 1e-3 if INTERPRETED else 8e-3}
DTYPES = [torch.float32, HALF]
EPS = 1e-5, 1e-6
KINDS = {
    "cpe": ((2, 3, 5, 32), {}),
    "no position encoding": ((1, 2, 3, 16), {"position": False, "heads": 1, "scope": "row"}),
    "no drop path": ((1, 3, 2, 48), {"drop": False, "heads": 3, "scope": "column"}),
    "one token": ((1, 1, 1, 32), {}),
    "vanilla": ((1, 3, 4, 16), {"heads": 1, "scope": "pale", "pale_size": (2, 2)}),
}
# Kind, dtype of maps, dtype of weights, and whether the MLP runs as for many channels.
CASES = [(kind, HALF, torch.float32, False) for kind in KINDS]
CASES += [("cpe", HALF, HALF, True), ("cpe", torch.float32, torch.float32, False)]


def arguments(
    shape: tuple[int, ...],
    position: bool = True,
    drop: bool = True,
    scope: str = "parallel",
    pale_size: tuple[int, int] = (2, 3),
    heads: int = 2,
    hidden: int = 80,
) -> list[Any]:
    """Arguments of `block`, in float64."""
    b, _, _, c = shape
    n = hidden

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, dtype=torch.float64)

    def taps() -> Tensor:
        return draw(c, 1, 3, 3, scale=0.3)

    def gamma() -> Tensor:
        return 1 + 0.1 * draw(c)

    cpe = [taps(), draw(c)] if position else [None, None]
    scales = [torch.rand(b).double() + 0.5 for _ in range(2)] if drop else [None, None]
    square = [draw(c, c, scale=c**-0.5) for _ in range(4)]
    return [
        *(2 * draw(*shape) + 0.5, *cpe, gamma(), draw(c), taps(), taps(), taps()),
        *(*square[:3], draw(c), draw(c), draw(c), square[3], draw(c), gamma(), draw(c)),
        *(draw(n, c, scale=c**-0.5), draw(n), draw(c, n, scale=n**-0.5), draw(c)),
        *(*scales, *EPS, heads, *pale_size, scope, "interlaced"),
    ]


def compose(module: Any, backend: str, linear: Callable[..., Tensor], given: list[Any]) -> Tensor:
    """A block of separate operators, with the arguments of `block`."""
    x, w_cpe, b_cpe, gamma_1, beta_1, t_q, t_k, t_v, *rest = given
    *matrices, b_q, b_k, b_v, w_proj, b_proj, gamma_2, beta_2, w_1, b_1, w_2, b_2 = rest[:14]
    scale, next_scale, eps_1, eps_2, heads, s_r, s_c, scope, grouping = rest[14:]
    weights = [w.to(x.dtype) for w in (*matrices, w_proj, w_1, w_2, b_1)]
    *matrices, w_proj, w_1, w_2, b_1 = weights
    if w_cpe is None:
        y = module.norm(x, None, gamma_1, beta_1, eps_1)
    else:
        x, y = module.conv_norm(x, w_cpe, b_cpe, gamma_1, beta_1, eps_1)
    maps = module.conv_three(y, t_q, t_k, t_v)
    q, k, v = (
        z.unflatten(-1, (heads, -1)) for z in module.linear_three(maps, *matrices, b_q, b_k, b_v)
    )
    region = Region((s_r, s_c), scope, grouping)
    y = linear(pale_attention(q, k, v, region=region, backend=backend).flatten(-2), w_proj)
    affine = gamma_2, beta_2, eps_2
    return module.finish(x, y, b_proj, scale, *affine, w_1, b_1, w_2, b_2, next_scale)


def plain(*given: Any) -> Tensor:
    return compose(reference, "reference", F.linear, list(given))


def pieces(*given: Any) -> Tensor:
    return compose(triton_op, "triton", F.linear, list(given))


def results(
    function: Callable[..., Tensor], given: list[Any], dtype: torch.dtype, weights: torch.dtype
) -> dict[str, Tensor]:
    """The output and all gradients by name; `dtype` is that of maps and scales."""
    values = [
        y.to(DEVICE, dtype if i in (0, 22, 23) else weights) if isinstance(y, Tensor) else y
        for i, y in enumerate(given)
    ]
    leaves = {
        name: values[i].requires_grad_()
        for i, name in enumerate(layout.NAMES)
        if values[i] is not None
    }
    out = function(*values)
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    found = torch.autograd.grad(out, list(leaves.values()), g)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


@pytest.fixture
def poisoned():
    """Memory starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@kernels
@needs_triton
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, HALF) for kind in KINDS), ("cpe", DTYPES[0])])
def test_output_and_gradients_err_at_most_twice_as_much_as_plain(kind, dtype, poisoned):
    shape, options = KINDS[kind]
    given = [
        y.to(dtype).double() if isinstance(y, Tensor) else y for y in arguments(shape, **options)
    ]
    ours = results(triton_op.block, given, dtype, dtype)
    torch.use_deterministic_algorithms(False)
    rough, exact = (results(plain, given, other, other) for other in (dtype, torch.float64))
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        assert ours[name].dtype == dtype
        assert ours[name].shape == expected.shape
        error = (ours[name] - expected).abs().max().item()
        bound = (rough[name] - expected).abs().max().item()
        limit = 2 * bound + FLOOR[dtype] * max(1, expected.abs().max().item())
        assert error <= limit, f"{name} errs by {error:.2g}, plain PyTorch by {bound:.2g}"


@kernels
@needs_triton
@pytest.mark.parametrize(("kind", "dtype", "weights", "many"), CASES)
def test_a_block_equals_its_pieces_bit_for_bit(kind, dtype, weights, many, poisoned, monkeypatch):
    monkeypatch.setattr(grids, "WHOLE", 0 if many else grids.WHOLE)
    shape, options = KINDS[kind]
    given = arguments(shape, **options)
    ours = results(triton_op.block, given, dtype, weights)
    theirs = results(pieces, given, dtype, weights)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype
        if name == "b_1" and weights != dtype:  # the separate operator rounds it to 16 bits
            assert torch.equal(ours[name].to(dtype), expected.to(dtype))
        elif name == "x" and not options.get("position", True):
            # Autograd adds two rounded maps; the kernel adds them before it rounds.
            torch.testing.assert_close(ours[name], expected, rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(ours[name], expected), name


def gradients_of_one(kind: str, needed: str) -> tuple[Tensor, Counter[str]]:
    """The gradient of one tensor, the only one that needs it, and the launches of its backward."""
    shape, options = KINDS[kind]
    torch.manual_seed(5)
    values = [
        y.to(DEVICE).float() if isinstance(y, Tensor) else y for y in arguments(shape, **options)
    ]
    leaf = values[layout.NAMES.index(needed)].requires_grad_()
    out = triton_op.block(*values)
    launches.clear()
    return torch.autograd.grad(out.square().sum(), leaf)[0], Counter(launches)


@pytest.fixture(scope="module")
def all_gradients() -> dict[str, dict[str, Tensor]]:
    """All gradients of two kinds of blocks, by name."""
    found: dict[str, dict[str, Tensor]] = {}
    for kind in ("cpe", "no position encoding"):
        shape, options = KINDS[kind]
        torch.manual_seed(5)
        values = [
            y.to(DEVICE).float() if isinstance(y, Tensor) else y
            for y in arguments(shape, **options)
        ]
        leaves = {
            name: y.requires_grad_()
            for name, y in zip(layout.NAMES, values, strict=False)
            if y is not None
        }
        out = triton_op.block(*values).square().sum()
        found[kind] = dict(
            zip(leaves, torch.autograd.grad(out, list(leaves.values())), strict=True)
        )
    return found


# What the backward of one tensor launches, apart from `gelu_backward` and `sum_parts`.
LATE = ["norm_backward"]
ATTENTION = [*LATE, "attention_backward_group"]
EARLY = [*ATTENTION, "conv_three_backward_x", "norm_backward"]
ALONE = {
    "x": [*EARLY, "conv_backward_x"],
    "w_cpe": [*EARLY, "conv_backward_w"],
    "b_cpe": EARLY,
    "gamma_1": EARLY,
    "t_k": [*ATTENTION, "conv_backward_w"],
    "w_v": ATTENTION,
    "b_q": [*ATTENTION, "sum_rows"],
    "w_proj": LATE,
    "b_proj": LATE,
    "beta_2": LATE,
    "w_1": [],
    "b_1": [],
    "w_2": [],
    "b_2": LATE,
}


@kernels
@needs_triton
@pytest.mark.parametrize("needed", ALONE)
def test_gradients_that_nothing_needs_are_not_computed(needed, all_gradients):
    found, launched = gradients_of_one("cpe", needed)
    assert torch.equal(found, all_gradients["cpe"][needed])
    assert launched == Counter([*ALONE[needed], "gelu_backward", "sum_parts"])


@kernels
@needs_triton
@pytest.mark.parametrize("needed", ["x", "gamma_1"])
def test_without_position_encoding_the_norm_has_the_last_gradient(needed, all_gradients):
    found, launched = gradients_of_one("no position encoding", needed)
    assert torch.equal(found, all_gradients["no position encoding"][needed])
    assert launched == Counter([*EARLY, "gelu_backward", "sum_parts"])


@kernels
@needs_triton
def test_a_block_without_gradients_has_no_node():
    values = [
        y.to(DEVICE).float() if isinstance(y, Tensor) else y for y in arguments(KINDS["cpe"][0])
    ]
    assert not triton_op.block(*values).requires_grad


@kernels
@needs_triton
def test_a_step_of_a_block_is_one_node_and_launches_each_kernel_once():
    """The bias gradients of q, k and v need one more sum, because they have a row per token."""
    shape, _ = KINDS["cpe"]
    values = [y.to(DEVICE).float() if isinstance(y, Tensor) else y for y in arguments(shape)]
    for i in range(len(layout.NAMES)):
        values[i].requires_grad_()
    launches.clear()
    out = triton_op.block(*values)
    names = ["conv_norm", "conv_three", "linear", "attention_forward_group", "add_norm", "linear"]
    assert launches == Counter(names)
    before = {type(node).__name__ for node, _ in out.grad_fn.next_functions if node is not None}
    assert before == {"AccumulateGrad"}
    launches.clear()
    out.sum().backward()
    names = [*EARLY, "conv_backward_x", "gelu_backward", "sum_rows", "sum_parts"]
    assert launches == Counter([*names, "conv_backward_w", "conv_backward_w"])


@kernels
@needs_triton
@pytest.mark.parametrize("rows", [(1, 5, 300, 257, 2, 513), (0, 700, 0, 1, 0, 0)])
@pytest.mark.parametrize("last", [True, False])
def test_partial_results_are_added_in_the_order_of_sum_rows(rows, last, poisoned):
    n, c = 48, 16
    widths = n, 4 * c, 3 * c, 27 * c, 3 * c, 9 * c
    parts = [
        torch.randn(r, w, device=DEVICE) if r else None for r, w in zip(rows, widths, strict=True)
    ]
    parts = parts if last else parts[:-1]
    found = grids.sum_parts(parts, torch.empty(0, device=DEVICE), n, c)
    expected = [
        torch.zeros(width, device=DEVICE)
        if part is None
        else grids.sum_rows(part, dtype=torch.float32, taps=c if i in (3, 5) else 0)
        for i, (part, width) in enumerate(zip(parts, widths, strict=False))
    ]
    assert torch.equal(found, torch.cat(expected))


@kernels
@needs_triton
def test_partial_results_with_many_rows_are_added_in_two_steps(monkeypatch):
    monkeypatch.setattr(grids, "PROGRAMS", 10)
    monkeypatch.setattr(grids, "FEW_ROWS", 40)
    n, c = 16, 16
    widths = n, 4 * c, 3 * c, 27 * c, 3 * c
    parts = [torch.randn(60, w, dtype=torch.float64, device=DEVICE) for w in widths]
    launches.clear()
    found = grids.sum_parts([part.float() for part in parts], parts[0].float(), n, c)
    assert launches == {"sum_rows": 5, "sum_parts": 1}
    sums = [part.sum(0) for part in parts]
    sums[3] = sums[3].view(3, 9, c).mT.flatten()
    torch.testing.assert_close(found.double(), torch.cat(sums), rtol=1e-5, atol=1e-5)


@kernels
@needs_triton
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", ["no position encoding", "vanilla", "cast"])
def test_operators_pass_opcheck(kind):
    shape, options = KINDS[kind if kind in KINDS else "one token"]
    dtype = HALF if kind == "cast" else torch.float32
    values = [
        y.to(DEVICE, dtype if i in (0, 22, 23) else torch.float32) if isinstance(y, Tensor) else y
        for i, y in enumerate(arguments(shape, **options))
    ]
    out, *kept, flat = torch.ops.pale.block(*values)
    for i in range(len(layout.NAMES)):
        if values[i] is not None:
            values[i].requires_grad_()
    torch.library.opcheck(torch.ops.pale.block.default, tuple(values))
    names = layout.MATRICES
    weights = [flat] if kind == "cast" else [values[layout.NAMES.index(n)].detach() for n in names]
    vectors = values[3].detach(), values[16].detach(), *values[22:24]
    given = torch.randn_like(out), values[0].detach(), *kept, weights, *vectors, *values[24:]
    torch.library.opcheck(torch.ops.pale.block_backward.default, (*given, [True] * 22))


@kernels
@needs_triton
@pytest.mark.parametrize("kind", ["cpe", "vanilla"])
def test_flops_are_those_of_the_pieces(kind):
    shape, options = KINDS[kind]
    counted = []
    for function in (triton_op.block, pieces):
        with FlopCounterMode(display=False) as counter:
            results(function, arguments(shape, **options), torch.float32, torch.float32)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def small_block(**options: Any) -> PaleBlock:
    made = pale.create_model("pale_nano", depths=(1, 1, 1, 1), num_classes=5, **options)
    return made.to(DEVICE).train().stages[0].blocks[0]


@kernels
@needs_triton
@pytest.mark.parametrize("options", [{}, {"position": "none"}])
def test_a_compiled_block_equals_the_eager_one_for_several_sizes(options):
    block = small_block(**options)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((2, 3, 2, 32), (3, 2, 4, 32)):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        leaves = [x, *block.parameters()]
        expected = torch.autograd.grad(block(x).square().sum(), leaves)
        launches.clear()
        found = torch.autograd.grad(compiled(x).square().sum(), leaves)
        assert launches["sum_parts"] == 1
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@kernels
@needs_triton
def test_a_second_backward_raises_an_error():
    block = small_block()
    x = torch.randn(1, 3, 4, 32, device=DEVICE, requires_grad=True)
    (g,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        g.square().sum().backward()


@kernels
@needs_triton
def test_a_changed_weight_is_noticed_and_a_map_without_rows_is_not_fused():
    block = small_block()
    x = torch.randn(1, 3, 4, 32, device=DEVICE)
    out = block(x).sum()
    with torch.no_grad():
        block.norm1.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    assert fused.can_fuse(block, x)
    assert not fused.can_fuse(block, x[:, :0])  # plain PyTorch raises its own error


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)
