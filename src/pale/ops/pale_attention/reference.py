"""The definition of pale attention: one group after the other, in any floating-point dtype, not optimised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sizes import exporting
from .opaque import operator
from .region import Region


def unsupported(q: Tensor, region: Region) -> str | None:
    """Return None: the reference runs everywhere."""
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """Return attention inside each group of `region`; q, k, v and the result are (b, h, w, heads, d)."""
    if torch.compiler.is_compiling() and not exporting():
        return opaque(q, k, v, region)  # not traced in a compiled model either
    return compute(q, k, v, region)


def compute(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """Compute the definition."""
    h, w = q.shape[1:3]
    members = [region.members(kind, h, w, q.device) for kind in region.kinds]
    if region.scope != "parallel":
        return attend(q, k, v, members[0])
    half = q.shape[3] // 2
    x_r = attend(q[..., :half, :], k[..., :half, :], v[..., :half, :], members[0])
    x_c = attend(q[..., half:, :], k[..., half:, :], v[..., half:, :], members[1])
    return torch.cat([x_r, x_c], dim=3)


def attend(q: Tensor, k: Tensor, v: Tensor, members: Tensor) -> Tensor:
    """Return attention inside each group; a token of several groups gets the mean of their results."""
    q, k, v = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))  # (b, heads, h*w, d)
    out = torch.zeros_like(v)
    for group in members.flatten(1):  # (h*w,)
        t = group.nonzero().squeeze(1)
        weights = torch.softmax(q[:, :, t] @ k[:, :, t].mT * q.shape[-1] ** -0.5, dim=-1)
        out = out.index_add(2, t, weights @ v[:, :, t])
    out = out / members.flatten(1).sum(0)[:, None]
    return out.transpose(1, 2).unflatten(1, members.shape[1:])


def weights_at(q: Tensor, k: Tensor, at: tuple[int, int], members: Tensor) -> Tensor:
    """Return the weights (b, heads, h, w) of the query at row and column `at`: the mean over its groups, else zero."""
    i, j = at
    scores = torch.einsum("bnd,bhwnd->bnhw", q[:, i, j], k) * q.shape[-1] ** -0.5
    groups = members[members[:, i, j]]  # (1 or 2, h, w)
    maps = [
        scores.masked_fill(~group, -torch.inf).flatten(2).softmax(-1).view_as(scores)
        for group in groups
    ]
    return torch.stack(maps).mean(0)


opaque = operator("reference", compute)
