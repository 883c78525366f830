"""`pale_attention`: check, choose a back-end, call it.

The definition is `reference.py`, the index maps are `region.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from . import reference, sdpa, triton_op
from .region import Grouping, Region, Scope, check_word

Backend = Literal["auto", "reference", "sdpa", "triton"]

# In the order in which "auto" tries them.
BACKENDS: dict[str, ModuleType] = {"triton": triton_op, "sdpa": sdpa, "reference": reference}


def pale_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pale_size: tuple[int, int] | None = None,
    scope: Scope = "parallel",
    grouping: Grouping = "interlaced",
    region: Region | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return self-attention inside the groups of rows and columns of a map; all tensors are (b, h, w, heads, d).

    Args:
        q: queries; the scale d^-0.5 is applied inside.
        k: keys.
        v: values.
        pale_size: (s_r, s_c), the interlaced rows and columns of one pale.
        scope: "parallel": the first half of the heads attends in row groups, the second half in
            column groups; "row", "column": all heads; "pale": rows and columns of a pale together,
            a token of two pales gets the mean.
        grouping: row i of h belongs to group `i mod ceil(h / s_r)` ("interlaced") or `i // s_r`
            ("contiguous"); columns in the same way.
        region: pale_size, scope and grouping in one object, in place of these three.
        backend: "auto" uses the first that can run the call; a named one runs or raises.
    """
    region = Region.of(region, pale_size, scope, grouping)
    _check(q, k, v, region)
    q, k, v = _autocast(q, k, v)
    name = choose(q, region) if backend == "auto" else backend
    check_word("backend", name, get_args(Backend))
    if (reason := BACKENDS[name].unsupported(q, region)) is not None:
        raise ValueError(f"backend {name!r} cannot run this call: {reason}")
    return BACKENDS[name].forward(q, k, v, region)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    at: tuple[int, int],
    pale_size: tuple[int, int] | None = None,
    scope: Scope = "parallel",
    grouping: Grouping = "interlaced",
    region: Region | None = None,
) -> Tensor:
    """Return the attention weights, (b, heads, h, w), of the query at row and column `at`.

    Zero outside the token's region; under scope "pale" the mean of its one or two pales, as in
    `pale_attention`, whose arguments these are.
    """
    region = Region.of(region, pale_size, scope, grouping)
    _check(q, k, k, region)
    _, h, w, heads, _ = q.shape
    i, j = at if len(at) == 2 else (-1, -1)
    if not (0 <= i < h and 0 <= j < w):
        raise ValueError(
            f"at must be a row in 0..{h - 1} and a column in 0..{w - 1} of the {h}x{w} map, got {at}"
        )
    members = [region.members(kind, h, w, q.device) for kind in region.kinds]
    if region.scope != "parallel":
        return reference.weights_at(q, k, at, members[0])
    half = heads // 2
    x_r = reference.weights_at(q[..., :half, :], k[..., :half, :], at, members[0])
    x_c = reference.weights_at(q[..., half:, :], k[..., half:, :], at, members[1])
    return torch.cat([x_r, x_c], dim=1)


def choose(q: Tensor, region: Region) -> str:
    """Return the back-end for "auto": the first that supports the call."""
    return next(
        name for name, backend in BACKENDS.items() if backend.unsupported(q, region) is None
    )


def _check(q: Tensor, k: Tensor, v: Tensor, region: Region) -> None:
    if q.dim() != 5:
        raise ValueError(
            f"q, k and v must be (b, h, w, heads, d), five dimensions, got q of shape {tuple(q.shape)}"
        )
    if 0 in q.shape[1:]:
        raise ValueError(
            f"the map, its heads and their d must not be empty, got q of shape {tuple(q.shape)}"
        )
    if q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must have one shape (b, h, w, heads, d), got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype or not q.dtype.is_floating_point:
        raise TypeError(
            f"q, k and v must have one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them first"
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}; move them first"
        )
    heads = q.shape[3]
    if region.scope == "parallel" and heads % 2:
        raise ValueError(
            f"scope='parallel' splits the heads in two and needs an even head count, got {heads=}; "
            "use scope='row' or 'column' for one direction"
        )


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast does for PyTorch's own attention, for every back-end; float64 stays."""
    device = tensors[0].device.type
    # PyTorch has no autocast for meta tensors and raises an error.
    if (
        tensors[0].dtype == torch.float64
        or device == "meta"
        or not torch.is_autocast_enabled(device)
    ):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]
