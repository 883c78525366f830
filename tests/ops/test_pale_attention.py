"""`pale_attention` against its definition: results, regions, precision, cost, errors, tracing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.cases import (
    LAYOUTS,
    SCOPES,
    LargestTensor,
    assert_same,
    attended,
    brute_force,
    cases,
    every_backend,
    every_grouping,
    every_scope,
    every_size,
    gradients,
    opcheck_warning,
    plain_attention,
    quick,
    scope_of_head,
    softmax_attention,
    tensors,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pale.ops.pale_attention import BACKENDS, attention_weights, choose, pale_attention, sdpa
from pale.ops.pale_attention.region import Region


def run(qkv: list[Tensor], grad: Tensor, **options) -> list[Tensor]:
    """The output and the gradients with respect to q, k, v."""
    out = pale_attention(*qkv, **options)
    return [out, *gradients(out, qkv, grad)]


@every_scope
@every_grouping
@every_size
def test_reference_equals_brute_force_over_token_pairs(h, w, pale_size, scope, grouping):
    rule = {"pale_size": pale_size, "scope": scope, "grouping": grouping}
    *qkv, grad = tensors(4, (2, h, w, 2, 3))
    out = brute_force(*qkv, **rule)
    assert_same(run(qkv, grad, backend="reference", **rule), [out, *gradients(out, qkv, grad)])


@every_scope
@every_grouping
@every_size
def test_sdpa_equals_reference_at_sizes_of_all_kinds(h, w, pale_size, scope, grouping):
    rule = {"pale_size": pale_size, "scope": scope, "grouping": grouping}
    for b in 1, 3:
        *qkv, grad = tensors(4, (b, h, w, 4, 3))
        assert_same(
            run(qkv, grad, backend="sdpa", **rule), run(qkv, grad, backend="reference", **rule)
        )


@every_scope
@every_grouping
@settings(quick, max_examples=40)
@given(case=cases())
def test_sdpa_equals_reference_in_output_and_gradients(scope, grouping, case):
    rule = {"pale_size": case.pale_size, "scope": scope, "grouping": grouping}
    *qkv, grad = case.tensors()
    assert_same(run(qkv, grad, backend="sdpa", **rule), run(qkv, grad, backend="reference", **rule))


@every_scope
@every_backend
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_memory_layout_of_the_inputs_changes_nothing(layout, backend, scope):
    rule = {"pale_size": (3, 4), "scope": scope, "backend": backend}
    laid_out = [LAYOUTS[layout](x.detach()).detach() for x in tensors(4, (2, 7, 9, 2, 3))]
    assert not any(x.is_contiguous() for x in laid_out)
    *qkv, grad = (x.requires_grad_() for x in laid_out)
    *plain, plain_grad = (x.detach().clone(memory_format=torch.contiguous_format) for x in laid_out)
    expected = run([x.requires_grad_() for x in plain], plain_grad, **rule)
    assert_same(run(qkv, grad, **rule), expected)


@every_backend
@pytest.mark.parametrize("scope", ["row", "column", "pale"])
@pytest.mark.parametrize("heads", [1, 3])
def test_odd_head_counts_work_wherever_heads_are_not_split(heads, scope, backend):
    qkv = tensors(3, (1, 4, 5, heads, 2))
    rule = {"pale_size": (2, 3), "scope": scope}
    actual = pale_attention(*qkv, backend=backend, **rule)
    assert_same([actual], [brute_force(*qkv, grouping="interlaced", **rule)], names=("output",))


@every_backend
@every_scope
@every_grouping
def test_an_empty_batch_gives_an_empty_result(grouping, scope, backend):
    *qkv, grad = tensors(4, (0, 5, 7, 2, 3))
    rule = {"pale_size": (3, 4), "scope": scope, "grouping": grouping}
    for x in run(qkv, grad, backend=backend, **rule):
        assert x.shape == (0, 5, 7, 2, 3)


@every_backend
@every_scope
@every_grouping
@pytest.mark.parametrize(
    ("h", "w", "pale_size"),
    [(6, 4, (3, 2)), (5, 7, (2, 3)), (7, 3, (3, 2))],
    ids=["dividing", "ragged", "more row groups"],
)
def test_receptive_field_is_the_union_of_the_groups_of_a_token(
    h, w, pale_size, grouping, scope, backend
):
    heads = 4
    q, k, v = tensors(3, (1, h, w, heads, 1))
    # (h, w, heads, h, w, heads): how the result of each token and head depends on each value.
    reach = torch.autograd.functional.jacobian(
        lambda v: pale_attention(
            q, k, v, pale_size=pale_size, scope=scope, grouping=grouping, backend=backend
        )[0, ..., 0],
        v,
    )[..., 0, :, :, :, 0]
    for head, other in product(range(heads), range(heads)):
        found = reach[:, :, head, :, :, other].reshape(h * w, h * w) != 0
        if head == other:
            kind = scope_of_head(scope, head, heads)
            assert found.equal(attended(h, w, pale_size, kind, grouping)), f"{head=}"
        else:
            assert not found.any(), f"{head=} reads the values of head {other}"


@every_backend
@every_scope
def test_a_query_changes_the_result_of_its_own_token_alone(scope, backend):
    q, k, v = tensors(3, (1, 5, 4, 2, 1))
    found = torch.autograd.functional.jacobian(
        lambda q: pale_attention(q, k, v, pale_size=(2, 3), scope=scope, backend=backend), q
    ).reshape(40, 40)
    assert (found != 0).equal(torch.eye(40, dtype=torch.bool))


@every_scope
@every_grouping
def test_attention_weights_sum_up_the_values_of_the_region_to_the_result(grouping, scope):
    h, w, heads, pale_size = 5, 7, 4, (2, 3)
    q, k, v = (x.detach() for x in tensors(3, (2, h, w, heads, 3)))
    rule = {"pale_size": pale_size, "scope": scope, "grouping": grouping}
    out = pale_attention(q, k, v, **rule)
    fields = [
        attended(h, w, pale_size, scope_of_head(scope, head, heads), grouping)
        for head in range(heads)
    ]
    for t, (i, j) in enumerate(product(range(h), range(w))):
        weights = attention_weights(q, k, at=(i, j), **rule)
        assert weights.shape == (2, heads, h, w)
        field = torch.stack([x[t].view(h, w) for x in fields])
        assert (weights > 0).equal(field.expand(2, -1, -1, -1)), f"region of {(i, j)}"
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum((2, 3)), torch.ones(2, heads, dtype=q.dtype))
        summed = torch.einsum("bnhw,bhwnd->bnd", weights, v)
        torch.testing.assert_close(summed, out[:, i, j], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at", [(4, 0), (0, 6), (-1, 0), (0, -1)], ids=str)
def test_attention_weights_outside_the_map_are_an_error(at):
    q, k = tensors(2, (1, 4, 6, 2, 3))
    message = r"at must be a row in 0\.\.3 and a column in 0\.\.5 of the 4x6 map, got \("
    with pytest.raises(ValueError, match=message):
        attention_weights(q, k, at=at, pale_size=(2, 2))


def test_attention_weights_check_their_inputs_as_the_operator_does():
    q, k = tensors(2, (1, 4, 6, 3, 3))
    with pytest.raises(ValueError, match=r"needs an even head count, got heads=3"):
        attention_weights(q, k, at=(0, 0), pale_size=(2, 2))
    with pytest.raises(ValueError, match=r"must have one shape"):
        attention_weights(q, k[:, :2], at=(0, 0), pale_size=(2, 2), scope="row")


def changed(**changes) -> list[Tensor]:
    """Valid q, k, v, some of them changed."""
    valid = dict(zip("qkv", tensors(3, (1, 4, 6, 2, 3), dtype=torch.float32), strict=True))
    return [changes.get(name, lambda x: x)(x.detach()) for name, x in valid.items()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": lambda x: x[0]},
            r"^q, k and v must be \(b, h, w, heads, d\), five dimensions, "
            r"got q of shape \(4, 6, 2, 3\)$",
        ),
        (
            {"k": lambda x: x[:, :2]},
            r"^q, k and v must have one shape \(b, h, w, heads, d\), got "
            r"q \(1, 4, 6, 2, 3\), k \(1, 2, 6, 2, 3\), v \(1, 4, 6, 2, 3\)$",
        ),
        ({"v": lambda x: x[..., :2]}, r"^q, k and v must have one shape .* v \(1, 4, 6, 2, 2\)$"),
        ({"v": lambda x: x[0]}, r"^q, k and v must have one shape .* v \(4, 6, 2, 3\)$"),
        (
            {"k": lambda x: x.to("meta")},
            r"^q, k and v must be on one device, got cpu, meta, cpu; move them first$",
        ),
    ],
    ids=["q of four dimensions", "k of fewer rows", "v of smaller d", "v unbatched", "k elsewhere"],
)
@every_backend
def test_shapes_and_devices_that_do_not_fit_are_errors(changes, message, backend):
    with pytest.raises(ValueError, match=message):
        pale_attention(*changed(**changes), pale_size=(2, 2), backend=backend)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"k": Tensor.double}, "torch.float32, torch.float64, torch.float32"),
        ({"v": Tensor.half}, "torch.float32, torch.float32, torch.float16"),
        (dict.fromkeys("qkv", Tensor.int), "torch.int32, torch.int32, torch.int32"),
        (dict.fromkeys("qkv", Tensor.cfloat), "torch.complex64, torch.complex64, torch.complex64"),
    ],
    ids=["k float64", "v float16", "integers", "complex"],
)
@every_backend
def test_dtypes_that_do_not_fit_are_errors(changes, names, backend):
    message = rf"^q, k and v must have one floating-point dtype, got {names}; cast them first$"
    with pytest.raises(TypeError, match=message):
        pale_attention(*changed(**changes), pale_size=(2, 2), backend=backend)


def test_odd_head_counts_cannot_be_split():
    qkv = tensors(3, (1, 4, 6, 3, 2))
    message = (
        r"^scope='parallel' splits the heads in two and needs an even head count, got heads=3; "
        r"use scope='row' or 'column' for one direction$"
    )
    with pytest.raises(ValueError, match=message):
        pale_attention(*qkv, pale_size=(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "rows"}, r"^scope must be one of .* got 'rows'; did you mean 'row'\?$"),
        (
            {"grouping": "interlace"},
            r"^grouping must be one of .* got 'interlace'; did you mean 'interlaced'\?$",
        ),
        (
            {"backend": "spda"},
            r"^backend must be one of auto, .*sdpa.*, got 'spda'; did you mean 'sdpa'\?$",
        ),
        ({"backend": "cudnn"}, r"^backend must be one of auto, .*, got 'cudnn'$"),
        ({"pale_size": [7, 7]}, r"^pale_size must be \(s_r, s_c\), .* got \[7, 7\];"),
    ],
    ids=lambda x: "=".join(map(str, *x.items())) if isinstance(x, dict) else "",
)
def test_unknown_words_and_bad_pale_sizes_are_errors(options, message):
    qkv = tensors(3, (1, 4, 6, 2, 3))
    with pytest.raises(ValueError, match=message):
        pale_attention(*qkv, **{"pale_size": (2, 2)} | options)


@pytest.mark.parametrize(("backend", "calls"), [("auto", 1), ("sdpa", 1), ("reference", 0)])
def test_the_back_end_that_is_named_is_the_one_that_runs(backend, calls, monkeypatch):
    seen = []
    genuine = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args: seen.append(args) or genuine(*args),
    )
    pale_attention(*tensors(3, (1, 4, 6, 2, 3)), pale_size=(2, 2), scope="row", backend=backend)
    assert len(seen) == calls


def test_auto_passes_over_a_back_end_that_cannot_run_but_a_named_one_raises(monkeypatch):
    qkv = tensors(3, (1, 4, 6, 2, 3))
    region = Region((2, 2))
    assert choose(qkv[0], region) == "sdpa"
    expected = pale_attention(*qkv, pale_size=(2, 2), backend="reference")
    monkeypatch.setattr(sdpa, "unsupported", lambda q, region: f"it is no good for {q.dtype}")
    assert choose(qkv[0], region) == "reference"
    assert pale_attention(*qkv, pale_size=(2, 2)).equal(expected)
    message = r"^backend 'sdpa' cannot run this call: it is no good for torch\.float64$"
    with pytest.raises(ValueError, match=message):
        pale_attention(*qkv, pale_size=(2, 2), backend="sdpa")


# Each back-end is compared with the attention that it is based on: in bfloat16 and float16 PyTorch's
# kernel is more exact than a plain softmax, in float32 on a CPU less.
@pytest.mark.parametrize(
    ("backend", "attend"),
    [("reference", softmax_attention), ("sdpa", torch.nn.functional.scaled_dot_product_attention)],
    ids=["reference", "sdpa"],
)
@every_scope
@every_grouping
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_plain_attention_in_the_same_dtype(
    dtype, grouping, scope, backend, attend
):
    rule = {"pale_size": (3, 4), "scope": scope, "grouping": grouping}
    *qkv, grad = tensors(4, (2, 10, 13, 2, 24), dtype=dtype)
    out = plain_attention(*qkv, attend, **rule)
    plain = [out, *gradients(out, qkv, grad)]
    actual = run(qkv, grad, backend=backend, **rule)
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    exact = run(doubles, grad.double(), backend="reference", **rule)
    names = ("output", "grad q", "grad k", "grad v")
    for name, x, y, z in zip(names, actual, plain, exact, strict=True):
        assert x.dtype == dtype
        # The floor is one unit in the last place of the largest value.
        floor = torch.finfo(dtype).eps * z.abs().max()
        error, allowed = (x.double() - z).abs().max(), 2 * (y.double() - z).abs().max() + floor
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


@every_backend
def test_autocast_computes_in_bfloat16_and_gives_float32_gradients(backend):
    qkv = tensors(3, (1, 7, 9, 2, 8), dtype=torch.float32)
    rule = {"pale_size": (3, 4), "backend": backend}
    with torch.autocast("cpu", torch.bfloat16):
        out = pale_attention(*qkv, **rule)
    assert out.dtype == torch.bfloat16
    assert out.equal(pale_attention(*(x.bfloat16() for x in qkv), **rule))
    assert {x.dtype for x in gradients(out, qkv, torch.ones_like(out))} == {torch.float32}


@every_scope
def test_with_gradients_a_cpu_computes_bfloat16_as_float32(scope):
    *qkv, grad = tensors(4, (2, 7, 9, 2, 8), dtype=torch.bfloat16)
    rule = {"pale_size": (3, 4), "scope": scope, "backend": "sdpa"}
    actual = run(qkv, grad, **rule)
    floats = [x.detach().float().requires_grad_() for x in qkv]
    expected = [x.bfloat16() for x in run(floats, grad.float(), **rule)]
    for x, y in zip(actual, expected, strict=True):
        assert x.equal(y)
    with torch.no_grad():
        fast = pale_attention(*qkv, **rule)
    assert not fast.equal(actual[0])  # PyTorch's own kernel for bfloat16
    torch.testing.assert_close(fast, actual[0], rtol=0.02, atol=0.02)


@every_backend
@every_scope
def test_autocast_leaves_float64_alone(scope, backend):
    *qkv, grad = tensors(4, (1, 7, 9, 2, 3))
    rule = {"pale_size": (3, 4), "scope": scope, "backend": backend}
    expected = run(qkv, grad, **rule)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(qkv, grad, **rule)
    assert actual[0].dtype == torch.float64
    assert_same(actual, expected)


@every_scope
@every_grouping
@quick
@given(
    h=st.integers(1, 40),
    w=st.integers(1, 40),
    pale_size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_grouping_then_ungrouping_is_identity(scope, grouping, h, w, pale_size):
    x = torch.arange(2 * h * w * 2.0).view(2, h, w, 2, 1)
    for groups in sdpa.layout(h, w, Region(pale_size, scope, grouping)):
        assert groups.unpack(groups.pack(x), x).equal(x)


@every_scope
@every_grouping
@every_size
def test_each_group_is_packed_with_its_own_tokens_and_zeros(h, w, pale_size, grouping, scope):
    region = Region(pale_size, scope, grouping)
    rows, columns = sdpa.layout(h, w, region)
    row, column = region.groups(h, w)
    tokens = torch.arange(1, h * w + 1).view(h, w)  # no token has number zero
    for groups, group, lines in (rows, row, tokens), (columns, column, tokens.T):
        packed = groups.pack(tokens[None, :, :, None, None]).flatten(1)
        assert packed.shape == (groups.n, groups.size * lines.shape[1])
        for p in range(groups.n):
            found, expected = packed[p][packed[p] != 0], lines[group == p].flatten()
            assert found.sort().values.equal(expected.sort().values), f"group {p}"
            # As documented: no group is padded by more than one row or column.
            assert grouping == "contiguous" or len(packed[p]) - len(found) <= lines.shape[1]


@every_scope
@every_grouping
@every_size
def test_executed_pairs_are_those_that_pytorch_counts(h, w, pale_size, grouping, scope):
    b, heads, d = 3, 4, 5
    region = Region(pale_size, scope, grouping)
    qkv = [x.detach() for x in tensors(3, (b, h, w, heads, d))]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        pale_attention(*qkv, pale_size=pale_size, scope=scope, grouping=grouping, backend="sdpa")
    # Two products, q k and p v, of d multiply-adds per pair; a multiply-add is two operations.
    pairs = sdpa.executed_pairs(h, w, heads, region)
    assert counter.get_total_flops() == b * 2 * 2 * d * pairs


@every_grouping
@pytest.mark.parametrize("scope", ["parallel", "row", "column"])
def test_nothing_but_the_asked_pairs_is_executed_where_sizes_divide(scope, grouping):
    region = Region((7, 4), scope, grouping)
    assert sdpa.executed_pairs(28, 12, 2, region) == region.pairs(28, 12, 2)
    assert sdpa.executed_pairs(29, 13, 2, region) > region.pairs(29, 13, 2)


def largest_tensor(*, size: int, **options) -> float:
    """Elements of the largest tensor in forward and backward on a square map, in multiples of q."""
    *qkv, grad = tensors(4, (1, size, size, 2, 8), dtype=torch.float32)
    grad = grad.detach()
    with LargestTensor() as mode:
        run(qkv, grad, pale_size=(7, 7), **options)
    return mode.elements / qkv[0].numel()


@every_scope
@every_grouping
@pytest.mark.parametrize("size", [63, 64], ids=["dividing", "ragged"])
def test_sdpa_makes_no_score_matrix(size, grouping, scope):
    # A pale is its rows and its columns, so q, k and v occur twice; the tenth is padding.
    limit = 2.2 if scope == "pale" else 1.1
    assert largest_tensor(size=size, scope=scope, grouping=grouping, backend="sdpa") <= limit


def test_the_largest_tensor_is_a_score_matrix_where_there_are_some():
    # 10 groups of 448 tokens, 2 heads, against 64 * 64 tokens of 2 heads and d = 8.
    with sdpa_kernel(SDPBackend.MATH):
        found = largest_tensor(size=64, scope="row", backend="sdpa")
    assert found == pytest.approx(10 * 448**2 / (64 * 64 * 8))


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@every_scope
@every_grouping
def test_compiled_for_any_size_it_is_one_or_two_graphs_equal_to_eager(grouping, scope):
    counter = CompileCounterWithBackend("aot_eager")

    def operator(q, k, v):
        return pale_attention(q, k, v, pale_size=(3, 4), scope=scope, grouping=grouping)

    compiled = torch.compile(operator, backend=counter, fullgraph=True, dynamic=True)
    for b, h, w in [(2, 6, 8), (2, 7, 9), (3, 3, 4), (2, 2, 20), (4, 13, 5), (2, 12, 16)]:
        *qkv, grad = tensors(4, (b, h, w, 2, 3))
        out, eager = compiled(*qkv), operator(*qkv)
        assert_same([out, *gradients(out, qkv, grad)], [eager, *gradients(eager, qkv, grad)])
    assert 1 <= counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("scope", "size"),
    [*((scope, (7, 9)) for scope in SCOPES), *(("parallel", s) for s in [(1, 9), (5, 1), (1, 1)])],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_compiled_for_one_size_it_equals_eager(backend, scope, size):
    compiled = torch.compile(pale_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    *qkv, grad = tensors(4, (1, *size, 2, 3))
    rule = {"pale_size": (3, 4), "scope": scope, "backend": backend}
    out = compiled(*qkv, **rule)
    assert_same([out, *gradients(out, qkv, grad)], run(qkv, grad, **rule))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_defaults_it_is_one_graph_for_the_first_size_and_one_for_all_others():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(pale_attention, backend=counter, fullgraph=True)
    for h, w in [(6, 8), (7, 9), (3, 4), (13, 5), (2, 20)]:
        qkv = tensors(3, (2, h, w, 2, 3))
        out = compiled(*qkv, pale_size=(3, 4))
        assert_same([out], [pale_attention(*qkv, pale_size=(3, 4))], names=("output",))
    assert counter.frame_count == 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["one size", "any size"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled_under_autocast_it_equals_eager_under_autocast(dtype, dynamic):
    *qkv, grad = tensors(4, (2, 7, 9, 2, 3), dtype=dtype)
    compiled = torch.compile(pale_attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.autocast("cpu", torch.bfloat16):
        out, eager = compiled(*qkv, pale_size=(3, 4)), pale_attention(*qkv, pale_size=(3, 4))
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    grad = grad.to(eager.dtype)
    assert_same([out, *gradients(out, qkv, grad)], [eager, *gradients(eager, qkv, grad)])


class Operator(torch.nn.Module):
    """`pale_attention` with some options, for export."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pale_attention(q, k, v, **self.options)


def assert_exports(operator: Operator, sizes: list[tuple[int, int, int]], dynamic: dict) -> None:
    """Fail unless the program exported at the first size is plain PyTorch and correct at all sizes."""
    inputs = [tuple(x.detach() for x in tensors(3, (*size, 2, 3))) for size in sizes]
    exported = torch.export.export(operator, inputs[0], dynamic_shapes=(dynamic,) * 3)
    operators = [
        x.target for x in exported.graph.nodes if isinstance(x.target, torch._ops.OpOverload)
    ]
    assert {x.namespace for x in operators} == {"aten"}
    for qkv in inputs:
        assert_same([exported.module()(*qkv)], [operator(*qkv)], names=("output",))


@every_scope
@every_grouping
def test_exported_it_is_plain_pytorch_for_any_batch(grouping, scope):
    operator = Operator(pale_size=(3, 4), scope=scope, grouping=grouping)
    assert_exports(operator, [(2, 7, 9), (5, 7, 9)], {0: torch.export.Dim("b")})


def test_exported_with_dynamic_sizes_it_is_plain_pytorch():
    operator = Operator(pale_size=(3, 4), scope="row")
    dynamic = dict.fromkeys([1, 2], torch.export.Dim.DYNAMIC)
    # Sizes at which the row groups are equal, as at the first one.
    assert_exports(operator, [(2, 9, 10), (2, 6, 8), (2, 4, 13)], dynamic)


def test_exported_from_a_cpu_bfloat16_stays_bfloat16():
    qkv = tuple(x.requires_grad_() for x in tensors(3, (2, 6, 6, 2, 8), dtype=torch.bfloat16))
    exported = torch.export.export(Operator(pale_size=(3, 4)), qkv)
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert not any("autocast" in str(node.target) for node in calls)
    assert {node.meta["val"].dtype for node in calls} == {torch.bfloat16}


every_opaque = pytest.mark.parametrize("name", ["sdpa", "reference"])


@opcheck_warning
@every_scope
@every_grouping
@pytest.mark.parametrize("size", [(6, 8), (7, 9)], ids=["dividing", "ragged"])
@every_opaque
def test_the_opaque_operator_is_registered_as_pytorch_demands(name, size, grouping, scope):
    qkv = tensors(3, (2, *size, 2, 3))
    operator = getattr(torch.ops.pale, f"{name}_attention").default
    torch.library.opcheck(operator, (*qkv, 3, 4, scope, grouping))


@opcheck_warning
@pytest.mark.parametrize("layout", ["heads first", "slice of qkv"])
def test_the_opaque_operator_is_registered_for_every_memory_layout(layout):
    qkv = [LAYOUTS[layout](x.detach()).detach() for x in tensors(3, (2, 7, 9, 2, 3))]
    for requires_grad in False, True:
        args = [x.requires_grad_(requires_grad) for x in qkv]
        operator = torch.ops.pale.sdpa_attention.default
        torch.library.opcheck(operator, (*args, 3, 4, "parallel", "interlaced"))


@every_scope
@every_grouping
@every_opaque
def test_the_opaque_operator_equals_eager_and_its_gradients_are_true(name, grouping, scope):
    *qkv, grad = tensors(4, (1, 3, 4, 2, 2))

    def opaque(q, k, v):
        return BACKENDS[name].opaque(q, k, v, Region((2, 3), scope, grouping))

    rule = {"pale_size": (2, 3), "scope": scope, "grouping": grouping}
    out = opaque(*qkv)
    assert_same([out, *gradients(out, qkv, grad)], run(qkv, grad, backend="reference", **rule))
    assert torch.autograd.gradcheck(opaque, qkv)


@opcheck_warning
@every_scope
@every_opaque
def test_the_opaque_backward_is_registered_as_pytorch_demands(name, scope):
    grad, q, k, v = (x.detach() for x in tensors(4, (2, 7, 9, 2, 3)))
    backward = getattr(torch.ops.pale, f"{name}_attention_backward").default
    torch.library.opcheck(backward, (grad, q, k, v, 3, 4, scope, "interlaced"))


@every_scope
def test_on_meta_tensors_it_gives_the_shape_of_its_result(scope):
    qkv = [x.detach().to("meta") for x in tensors(3, (2, 7, 9, 2, 3), dtype=torch.float32)]
    out = pale_attention(*qkv, pale_size=(3, 4), scope=scope)
    assert out.is_meta
    assert out.shape == qkv[0].shape


@every_scope
@every_grouping
def test_a_region_is_the_same_as_its_parts(scope, grouping):
    q, k, v = torch.randn(3, 2, 9, 8, 2, 4)
    parts = {"pale_size": (3, 2), "scope": scope, "grouping": grouping}
    region = Region(**parts)
    found = pale_attention(q, k, v, region=region)
    assert torch.equal(found, pale_attention(q, k, v, **parts))
    weights = attention_weights(q, k, at=(1, 2), region=region)
    assert torch.equal(weights, attention_weights(q, k, at=(1, 2), **parts))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"^give pale_size=\(s_r, s_c\) or region=Region\(...\), got neither$"),
        (
            {"region": (7, 7)},
            r"^region must be a Region, got \(7, 7\); or give pale_size=\(7, 7\)$",
        ),
        ({"region": Region((7, 7)), "scope": "row"}, r"^give either .* scope='row', .*; leave out"),
        ({"region": Region((7, 7)), "pale_size": (7, 7)}, r"^give either .* pale_size=\(7, 7\), "),
    ],
    ids=["neither", "tuple", "scope", "pale_size"],
)
def test_a_region_or_its_parts_must_be_given(given, message):
    q = torch.randn(1, 8, 8, 2, 4)
    with pytest.raises(TypeError, match=message):
        pale_attention(q, q, q, **given)
