"""The Triton back-end against the float64 reference: on a GPU, and on the CPU in Triton's interpreter.

The interpreter has to be chosen before the kernels are defined, so `test_everything_in_the_interpreter` runs this
module once more in a process of its own. There in float32 and float16 only: the interpreter has no bfloat16 products.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from support.processes import DEVICE, in_the_interpreter, kernels, needs_triton
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from pale.ops.pale_attention import reference, sdpa, triton_op
from pale.ops.pale_attention.region import Region

INTERPRETED = triton_op.INTERPRETED

# Beside twice the error of PyTorch's own attention: about one step between neighbouring numbers of the size of the
# largest result (eight in float32, where sums have other orders).
FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SCOPES, GROUPINGS = ("parallel", "row", "column", "pale"), ("interlaced", "contiguous")


@dataclass(frozen=True)
class Case:
    """A map and a pale; `large` ones need more than one block in 16-bit types and run only on a GPU."""

    h: int
    w: int
    pale_size: tuple[int, int]
    d: int = 16
    b: int = 1
    heads: int = 2
    large: bool = False


CASES = {
    "one token": Case(1, 1, (7, 5)),
    "h smaller than the pale": Case(2, 9, (7, 5)),
    "h equal to s_r, d 32": Case(4, 6, (4, 5), d=32),
    "ragged, two images": Case(5, 4, (2, 3), b=2),
    "several blocks of float32, d 48": Case(7, 9, (6, 4), d=48),
    "stage 4": Case(7, 7, (7, 7), d=32, heads=16, b=3, large=True),
    "stage 3": Case(14, 14, (7, 7), d=32, heads=8, b=2, large=True),
    "stage 1": Case(56, 56, (7, 7), d=32, large=True),
    "stage 2 of Pale-S": Case(28, 28, (7, 7), d=48, heads=4, large=True),
    "ragged, d 64": Case(25, 38, (7, 7), d=64, large=True),
    "ragged, d 16": Case(40, 33, (7, 9), heads=4, large=True),
    "long": Case(12, 150, (7, 7), d=32, large=True),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The interpreter needs about 20 ms per program: small maps, and float16 for one of them.
RUNS = [
    pytest.param(case, dtype, id=f"{name}, {dtype}")
    for name, case in CASES.items()
    for dtype in DTYPES
    if not INTERPRETED or not (case.large or dtype == torch.bfloat16)
    if not INTERPRETED or dtype == torch.float32 or name == "ragged, two images"
]


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Tensors q, k, v and a gradient of the output, exact in `dtype`, in float64."""
    shape = case.b, case.h, case.w, case.heads, case.d
    return [torch.randn(shape).to(DEVICE, dtype).double() for _ in range(4)]


def results(forward, tensors: list[Tensor], region: Region, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v, g = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = forward(*leaves, region)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def poisoned(forward, *args) -> list[Tensor]:
    """`results`, with memory that starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        return results(forward, *args)
    finally:
        torch.use_deterministic_algorithms(False)


def check(ours: list[Tensor], tensors: list[Tensor], region: Region, dtype: torch.dtype) -> None:
    """At most twice the error of PyTorch's scaled dot product in the same dtype, plus the floor."""
    expected = results(reference.forward, tensors, region, torch.float64)
    plain = results(sdpa.attend, tensors, region, dtype)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, plain, expected, strict=True):
        assert a.dtype == dtype
        error, bound = (a - c).abs().max().item(), (b - c).abs().max().item()
        limit = 2 * bound + FLOOR[dtype] * max(1, c.abs().max().item())
        assert error <= limit, f"{name} errs by {error:.2g}, SDPA by {bound:.2g}"


def expected_launches(case: Case, region: Region, dtype: torch.dtype) -> Counter[str]:
    """Kernels that a forward and a backward run, by the size of the largest group."""
    if region.scope == "pale":
        names = {"attention_forward": 2, "attention_backward_q": 2, "attention_backward_kv": 4}
        return Counter(names)
    members = [region.members(kind, case.h, case.w) for kind in region.kinds]
    tokens = max(int(x.flatten(1).sum(1).max()) for x in members)
    limit = 32 if dtype == torch.float32 else 128
    forward = limit if case.d <= 32 else min(limit, 64)
    names = {f"attention_forward{'_group' * (tokens <= forward)}": 1}
    if tokens <= limit:
        return Counter(names | {"attention_backward_group": 1})
    return Counter(names | {"attention_backward_q": 1, "attention_backward_kv": 1})


@kernels
@needs_triton
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_output_and_gradients_err_at_most_twice_as_much_as_sdpa(case, scope, grouping, dtype):
    if scope != "parallel":
        case = replace(case, heads=case.heads // 2)
    region = Region(case.pale_size, scope, grouping)
    tensors = inputs(case, dtype)
    triton_op.launches.clear()
    ours = poisoned(triton_op.forward, tensors, region, dtype)
    assert triton_op.launches == expected_launches(case, region, dtype)
    check(ours, tensors, region, dtype)


def sliced(x: Tensor) -> Tensor:
    """The same numbers as a slice of heads in a larger tensor."""
    whole = torch.cat([x.detach() * torch.nan, x.detach(), x.detach() * torch.nan], dim=3)
    return whole[:, :, :, x.shape[3] : 2 * x.shape[3]]


def transposed(x: Tensor) -> Tensor:
    """The same numbers with columns outside rows, and images innermost of the outer dimensions."""
    return x.detach().permute(2, 1, 0, 3, 4).contiguous().permute(2, 1, 0, 3, 4)


def unaligned(x: Tensor) -> Tensor:
    """The same numbers where no kernel can read them in place: shifted by one, and d is not innermost."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    return flat.view_as(x.mT).copy_(x.detach().mT).mT


@kernels
@needs_triton
@pytest.mark.parametrize("layout", [sliced, transposed, unaligned])
@pytest.mark.parametrize("scope", ["parallel", "pale"])
def test_inputs_need_not_be_contiguous(scope, layout):
    case, region = Case(3, 4, (2, 3), b=2), Region((2, 3), scope)
    tensors = inputs(case, torch.float16)
    q, k, v, g = (x.half() for x in tensors)
    leaves = [layout(q).requires_grad_(), k.requires_grad_(), layout(v).requires_grad_()]
    out = triton_op.forward(*leaves, region)
    ours = [out.detach(), *torch.autograd.grad(out, leaves, layout(g))]
    check(ours, tensors, region, torch.float16)


@kernels
@needs_triton
def test_gradient_may_be_an_expanded_scalar():
    case, region = Case(4, 6, (4, 5)), Region((4, 5))
    tensors = inputs(case, torch.float32)
    tensors[3] = torch.ones((), device=DEVICE, dtype=torch.float64).expand(tensors[0].shape)
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out = triton_op.forward(*leaves, region)
    check([out.detach(), *torch.autograd.grad(out.sum(), leaves)], tensors, region, torch.float32)


@kernels
@needs_triton
def test_large_scores_neither_overflow_nor_lose_rows():
    case, region = Case(4, 6, (4, 5)), Region((4, 5))
    tensors = inputs(case, torch.float32)
    tensors[0] *= 300
    q, k, v, _ = (x.float() for x in tensors)
    expected = reference.forward(*tensors[:3], region)
    torch.testing.assert_close(
        triton_op.forward(q, k, v, region).double(), expected, atol=1e-3, rtol=0
    )


@kernels
@needs_triton
@pytest.mark.parametrize("scope", ["parallel", "pale"])
def test_a_second_run_gives_the_same_bits(scope):
    case = Case(3, 4, (2, 3)) if INTERPRETED else Case(40, 33, (7, 9), b=8, heads=4)
    region = Region(case.pale_size, scope)
    tensors = inputs(case, torch.float16)
    first, second = (results(triton_op.forward, tensors, region, torch.float16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kernels
@needs_triton
def test_no_images_and_many_images(monkeypatch):
    region = Region((2, 3))
    q = torch.randn(0, 5, 7, 2, 16, device=DEVICE, requires_grad=True)
    assert torch.autograd.grad(triton_op.forward(q, q, q, region).sum(), q)[0].shape == q.shape
    monkeypatch.setattr(triton_op, "GRID", 2)
    case = Case(2, 3, (2, 3), b=5)
    tensors = inputs(case, torch.float32)
    check(
        results(triton_op.forward, tensors, region, torch.float32), tensors, region, torch.float32
    )


@kernels
@needs_triton
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("scope", ["parallel", "pale_column"])
def test_operator_passes_opcheck(scope):
    q, k, v = (torch.randn(1, 2, 3, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    torch.library.opcheck(triton_op.attention, (q, k, v, 2, 2, scope, "interlaced"))
    out, lse = triton_op.attention(q, k, v, 2, 2, scope, "interlaced")
    saved = [x.detach() for x in (out, q, k, v, out, lse)]
    arguments = *saved, 2, 2, scope, "interlaced"
    torch.library.opcheck(triton_op.attention_backward, arguments)


@kernels
@needs_triton
@pytest.mark.parametrize("scope", ["parallel"] if INTERPRETED else ["parallel", "pale"])
def test_one_graph_serves_several_sizes(scope):
    region = Region((2, 3), scope)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: triton_op.forward(q, k, v, region),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    # The first has no two equal sizes, which the compiler would treat as one symbol.
    for b, h, w in ((3, 4, 5), (3, 5, 3), (2, 6, 7), (4, 3, 2)):
        tensors = inputs(Case(h, w, (2, 3), b=b), torch.float32)
        ours = results(lambda q, k, v, _: compiled(q, k, v), tensors, region, torch.float32)
        expected = results(triton_op.forward, tensors, region, torch.float32)
        for a, e in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


@kernels
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
def test_ten_sizes_compile_no_kernel_again():
    from pale.ops.pale_attention import triton_kernels

    def compiled() -> int:
        every = [getattr(triton_kernels, name) for name in dir(triton_kernels)]
        caches = [x.device_caches for x in every if hasattr(x, "device_caches")]
        return sum(len(cache[0]) for device in caches for cache in device.values())

    region = Region((7, 7))
    sizes = [(40 + 3 * i, 60 - 2 * i) for i in range(10)]
    counts = []
    for h, w in sizes:
        tensors = inputs(Case(h, w, (7, 7), d=32, b=i_batch(h)), torch.float16)
        results(triton_op.forward, tensors, region, torch.float16)
        counts.append(compiled())
    assert counts[0] > 0
    # The last tokens of a group get 16 places or a whole block: two versions of each kernel at most.
    assert counts[-1] - counts[0] <= 3


def i_batch(h: int) -> int:
    """Batch sizes 1, 2, 3, ..., among them those that Triton would specialise."""
    return (h - 40) // 3 + 1


@needs_triton
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("scope", SCOPES)
def test_flops_are_those_of_the_region(scope, grouping):
    region = Region((2, 3), scope, grouping)
    q = torch.randn(3, 5, 7, 4, 16, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        triton_op.forward(q, q, q, region).sum().backward()
    ours = counter.get_flop_counts()["Global"]
    forward = ours[torch.ops.pale.triton_attention]
    if scope == "pale":
        members = region.members("pale", 5, 7).flatten(1).sum(1)
        kinds = [region.members(kind, 5, 7).flatten(1).sum(1) for kind in ("row", "column")]
        pairs = 4 * sum(int((x * members[: len(x)]).sum()) for x in kinds)
    else:
        pairs = region.pairs(5, 7, 4)
    assert forward == 3 * 4 * 16 * pairs
    assert ours[torch.ops.pale.triton_attention_backward] == 3 * 10 * 16 * pairs


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "d", "device", "reason"),
    [
        (torch.float64, 32, "cpu", "float16, bfloat16 or float32, got torch.float64"),
        (torch.float32, 40, "cpu", "head dims 16, 32, 48, 64, got d=40"),
        (torch.float32, 32, "meta", "needs a CUDA device, got 'meta'"),
        (torch.float32, 32, "cpu", None),
    ],
)
def test_what_cannot_run_is_said(dtype, d, device, reason, monkeypatch):
    monkeypatch.setattr(triton_op, "INTERPRETED", device == "cpu")
    q = torch.empty(1, 2, 2, 2, d, dtype=dtype, device=device)
    found = triton_op.unsupported(q, Region((7, 7)))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_importing_the_back_end_does_not_import_the_kernels():
    code = (
        "import sys; from pale.ops.pale_attention import triton_op as op;"
        "sys.exit(op.__package__ + '.triton_kernels' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the second process")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)
