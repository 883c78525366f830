"""Cases and measures shared by the tests of the operators, and an independent definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pale.ops.pale_attention.region import Grouping, Scope

SCOPES: tuple[str, ...] = get_args(Scope)
GROUPINGS: tuple[str, ...] = get_args(Grouping)

every_scope = pytest.mark.parametrize("scope", SCOPES)
every_grouping = pytest.mark.parametrize("grouping", GROUPINGS)
every_backend = pytest.mark.parametrize("backend", ["reference", "sdpa"])

# The same examples in every run, so past failures need not be stored.
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)

# Caused by opcheck itself, which reads `.grad` of tensors that are not leaves.
opcheck_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

# Name -> (h, w, pale_size): sizes where an index map would go wrong first.
SIZES: dict[str, tuple[int, int, tuple[int, int]]] = {
    "one token": (1, 1, (1, 1)),
    "one token, large pale": (1, 1, (7, 5)),
    "one row": (1, 9, (3, 2)),
    "one column": (8, 1, (2, 3)),
    "map smaller than the pale": (2, 3, (5, 7)),
    "h smaller than s_r": (2, 9, (3, 4)),
    "h equal to s_r": (4, 6, (4, 5)),
    "axial": (5, 4, (1, 1)),
    "dividing": (6, 8, (3, 4)),
    "dividing, square": (6, 6, (3, 3)),
    "ragged": (7, 9, (3, 4)),
    "ragged by all but one row": (7, 7, (6, 2)),
    "more row groups": (9, 4, (2, 3)),
    "more column groups": (3, 10, (3, 2)),
}
every_size = pytest.mark.parametrize(("h", "w", "pale_size"), SIZES.values(), ids=SIZES.keys())


def groups_of(
    i: int, j: int, *, h: int, w: int, pale_size: tuple[int, int], scope: str, grouping: str
) -> tuple[int, ...]:
    """Groups of the token (i, j): one, or under scope "pale" that of its row and of its column."""
    s_r, s_c = pale_size
    n_r, n_c = (h + s_r - 1) // s_r, (w + s_c - 1) // s_c
    if scope == "pale":
        n_r = n_c = max(n_r, n_c)
    row, column = (i % n_r, j % n_c) if grouping == "interlaced" else (i // s_r, j // s_c)
    return {"row": (row,), "column": (column,), "pale": (row, column)}[scope]


def scope_of_head(scope: str, head: int, heads: int) -> str:
    """Return the scope of one head: under "parallel" rows for the first half, columns for the second."""
    if scope != "parallel":
        return scope
    return "row" if head < heads // 2 else "column"


def attended(h: int, w: int, pale_size: tuple[int, int], scope: str, grouping: str) -> Tensor:
    """Return whether two tokens share a group, (h*w, h*w)."""
    rule = {"h": h, "w": w, "pale_size": pale_size, "scope": scope, "grouping": grouping}
    groups = [set(groups_of(i, j, **rule)) for i, j in product(range(h), range(w))]
    return torch.tensor([[bool(a & b) for b in groups] for a in groups])


def brute_force(q: Tensor, k: Tensor, v: Tensor, *, pale_size, scope, grouping) -> Tensor:
    """Compute by token and head the softmax over the tokens of each of its groups, then their mean."""
    b, h, w, heads, d = q.shape
    out = []
    for i, j, head in product(range(h), range(w), range(heads)):
        rule = {"h": h, "w": w, "pale_size": pale_size, "grouping": grouping}
        rule["scope"] = scope_of_head(scope, head, heads)
        results = []
        for group in set(groups_of(i, j, **rule)):
            members = [u for u in product(range(h), range(w)) if group in groups_of(*u, **rule)]
            y, x = (list(t) for t in zip(*members, strict=True))
            scores = (q[:, i, j, None, head] * k[:, y, x, head]).sum(-1) / d**0.5  # (b, members)
            results.append((scores.softmax(-1)[..., None] * v[:, y, x, head]).sum(1))
        out.append(sum(results) / len(results))
    return torch.stack(out, 1).view(b, h, w, heads, d)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in three lines."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, attend, *, pale_size, scope, grouping
) -> Tensor:
    """`attend` over the whole map under a mask, in the dtype of the inputs."""
    b, h, w, heads, d = q.shape
    out = []
    for head in range(heads):
        rule = {"h": h, "w": w, "pale_size": pale_size, "grouping": grouping}
        rule["scope"] = scope_of_head(scope, head, heads)
        groups = [groups_of(i, j, **rule) for i, j in product(range(h), range(w))]
        qkv = [x[..., head, :].flatten(1, 2)[:, None] for x in (q, k, v)]  # (b, 1, h*w, d)
        results = []
        for way in range(len(groups[0])):
            mask = torch.tensor([[mine[way] in theirs for theirs in groups] for mine in groups])
            results.append(attend(*qkv, mask))
        out.append((sum(results) / len(results)).view(b, h, w, d))
    return torch.stack(out, 3)


def _inside(x: Tensor, *, around: tuple[int, ...], at: tuple) -> Tensor:
    """`x` as a part of a larger tensor, with NaN wherever `x` is not."""
    large = torch.full(around, torch.nan, dtype=x.dtype)
    large[at] = x
    return large[at]


# Name -> x, (b, h, w, heads, d), in another memory layout; all but "expanded" keep its values.
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "heads first": lambda x: x.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4),
    "channels first": lambda x: x.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "d first": lambda x: x.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0),
    "every second token": lambda x: _inside(
        x,
        around=(x.shape[0], 2 * x.shape[1], 2 * x.shape[2], *x.shape[3:]),
        at=(slice(None), slice(None, None, 2), slice(1, None, 2)),
    ),
    "slice of qkv": lambda x: _inside(
        x, around=(*x.shape[:3], 3, *x.shape[3:]), at=(..., 1, slice(None), slice(None))
    ),
    "expanded": lambda x: x[:1].expand_as(x),
}


def tensors(
    n: int, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """`n` leaves with normal values that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    # Drawn in float64 for every dtype, so that all dtypes get the same numbers, rounded.
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(n)]
    return [x.to(dtype).requires_grad_() for x in drawn]


@dataclass(frozen=True)
class Case:
    """One call of `pale_attention`, without scope and grouping."""

    b: int
    h: int
    w: int
    heads: int
    d: int
    pale_size: tuple[int, int]
    layouts: tuple[str, ...]  # of q, k, v and the gradient of the result
    seed: int

    def tensors(self) -> list[Tensor]:
        """The leaves q, k, v, and the gradient of the result."""
        drawn = tensors(4, (self.b, self.h, self.w, self.heads, self.d), seed=self.seed)
        laid_out = (LAYOUTS[name](x.detach()) for x, name in zip(drawn, self.layouts, strict=True))
        *qkv, grad = (x.detach() for x in laid_out)
        return [*(x.requires_grad_() for x in qkv), grad]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small calls on maps with h != w and pale sizes with s_r != s_c, in any memory layout."""
    sides, pales = range(1, 41), range(1, 10)
    h, w = draw(st.sampled_from([(h, w) for h in sides for w in sides if h != w]))
    pale_size = draw(st.sampled_from([(r, c) for r in pales for c in pales if r != c]))
    # One seed for values and layouts: drawn separately, hypothesis would vary the layouts of a few
    # sizes and hardly the sizes.
    seed = draw(st.integers(0, 2**32 - 1))
    return Case(
        b=draw(st.integers(1, 2)),
        h=h,
        w=w,
        heads=2,
        d=draw(st.sampled_from([1, 3, 4])),
        pale_size=pale_size,
        layouts=tuple(Random(seed).choices(list(LAYOUTS), k=4)),
        seed=seed,
    )


def gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Gradients of `out` with respect to `inputs`, the gradient of `out` being `grad`."""
    return list(torch.autograd.grad(out, inputs, grad))


def assert_same(
    actual: list[Tensor],
    expected: list[Tensor],
    *,
    names: tuple[str, ...] = ("output", "grad q", "grad k", "grad v"),
    tolerance: float = 1e-12,
) -> None:
    """Fail at the first tensor that differs; the default tolerance is for float64 near one."""
    for name, x, y in zip(names, actual, expected, strict=True):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                stored = x.untyped_storage().nbytes() // x.element_size()
                self.elements = max(self.elements, stored)
        return out
