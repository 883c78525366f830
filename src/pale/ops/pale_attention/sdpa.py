"""Pale attention through PyTorch's scaled dot product: no score matrix, no loop over groups.

Rows are laid out as (groups, rows of a group), which is a reshape of the map, and each group
becomes one entry of the batch. If `h` is not groups x rows, the last rows are padding: masked as
keys, dropped as queries. With `ceil(h / n)` rows per group (not `s_r`) an interlaced group never
holds more than one padded row.

Eager, exported and compiled programs of a fixed size run `attend` directly. Compiled for dynamic
sizes it is one opaque operator, because a compiler that traces it specialises on the number of
groups and recompiles at every size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..sizes import any_size, ceil_div, exporting, larger, opaque_size, smaller
from .opaque import operator
from .region import Region

# Without cuDNN: with it, a compiled model did not learn (accuracy of chance; torch 2.11, H200).
CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# torch 2.11 to 2.13 branch on whether a mask of four dimensions has a single key, which is unknown in a program for all
# sizes; torch 2.15 never does. With those versions attention is computed in plain operations.
BRANCHES_ON_KEYS = torch.__version__ < "2.15"


def unsupported(q: Tensor, region: Region) -> str | None:
    """Return None: PyTorch has scaled dot product attention on every device."""
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """Return attention inside each group of `region`; q, k, v and the result are (b, h, w, heads, d)."""
    if _has_slow_backward(q):
        with torch.autocast("cpu", enabled=False):
            return forward(q.float(), k.float(), v.float(), region).to(q.dtype)
    if torch.compiler.is_compiling() and not exporting() and not _traceable(q):
        return opaque(q, k, v, region)
    return attend(q, k, v, region)


def _has_slow_backward(q: Tensor) -> bool:
    """Return whether to compute in float32, in which PyTorch's backward pass takes a quarter of the time on a CPU.

    Measured with bfloat16 and groups of up to 150 tokens (torch 2.15). The forward pass alone is faster in bfloat16.
    """
    low = q.dtype in (torch.bfloat16, torch.float16)
    has_backward = q.requires_grad and torch.is_grad_enabled() and not exporting()
    return low and q.device.type == "cpu" and has_backward


def _traceable(q: Tensor) -> bool:
    """Return whether a compiler may trace `attend`: the sizes are fixed, and there is no choice of CUDA kernels."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not q.is_cuda and has_static_value(q.shape[1]) and has_static_value(q.shape[2])


@dataclass(frozen=True)
class Groups:
    """Layout of rows (axis 1) or columns (axis 2) of a map as `n` groups of `size`; the last ones are padded."""

    axis: int
    n: int
    size: int
    length: int
    interlaced: bool

    def pack(self, x: Tensor) -> Tensor:
        """(b, h, w, heads, d) -> (b*n, heads, tokens of a group, d); a view if the memory layout allows it."""
        if any_size(self.length):
            # Repeat the last row instead of padding with zeros; it is masked in both cases.
            slots = torch.arange(self.size * self.n, device=x.device)
            x = x.index_select(self.axis, slots.clamp(max=self.length - 1))
        elif self.padding:
            x = F.pad(x, (0, 0, 0, 0) + (0, 0) * (2 - self.axis) + (0, self.padding))
        b, h, w, heads, d = x.shape
        if self.axis == 1:
            x = x.reshape(b, *self.split, w, heads, d)
            order = (0, 2, 4, 1, 3, 5) if self.interlaced else (0, 1, 4, 2, 3, 5)
            tokens = self.size * w
        else:
            x = x.reshape(b, h, *self.split, heads, d)
            order = (0, 3, 4, 1, 2, 5) if self.interlaced else (0, 2, 4, 1, 3, 5)
            tokens = self.size * h
        return x.permute(order).reshape(b * self.n, heads, tokens, d)

    def unpack(self, y: Tensor, like: Tensor) -> Tensor:
        """Invert `pack`; `like` is a map before it."""
        b, h, w, heads, d = like.shape
        slots = self.n * self.size
        if self.axis == 1:
            y = y.reshape(b, self.n, heads, self.size, w, d)
            order = (0, 3, 1, 4, 2, 5) if self.interlaced else (0, 1, 3, 4, 2, 5)
            y = y.permute(order).reshape(b, slots, w, heads, d)
        else:
            y = y.reshape(b, self.n, heads, h, self.size, d)
            order = (0, 3, 4, 1, 2, 5) if self.interlaced else (0, 3, 1, 4, 2, 5)
            y = y.permute(order).reshape(b, h, slots, heads, d)
        if any_size(self.length):
            return y.index_select(self.axis, torch.arange(self.length, device=y.device))
        return y.narrow(self.axis, 0, self.length)

    @property
    def split(self) -> tuple[int, int]:
        """Number of groups and of slots, in their order on the map."""
        return (self.size, self.n) if self.interlaced else (self.n, self.size)

    def tokens(self, slots: Tensor, across: Tensor) -> Tensor:
        """Combine masks of the slots, (n, size), and across, (n, w) for rows or (n, h) for columns, to (n, tokens)."""
        if self.axis == 1:
            return torch.logical_and(slots[:, :, None], across[:, None, :]).flatten(1)
        return torch.logical_and(across[:, :, None], slots[:, None, :]).flatten(1)

    @property
    def padding(self) -> int:
        """Slots without a row (or column)."""
        return self.n * self.size - self.length

    def valid(self, device: torch.device) -> Tensor:
        """Return which slots hold a row (or column) of the map, (n, size)."""
        group = torch.arange(self.n, device=device)[:, None]
        slot = torch.arange(self.size, device=device)
        return (
            slot * self.n + group if self.interlaced else group * self.size + slot
        ) < self.length


def layout(h: int, w: int, region: Region) -> tuple[Groups, Groups]:
    """Return the row and column groups of an `h` x `w` map as they are executed."""
    n_r, n_c = region.counts(h, w)
    if region.scope == "pale":
        n_r = n_c = opaque_size(larger(n_r, n_c))
    else:
        n_r, n_c = opaque_size(n_r), opaque_size(n_c)
    if region.grouping == "interlaced":
        size_r, size_c = opaque_size(ceil_div(h, n_r)), opaque_size(ceil_div(w, n_c))
        return Groups(1, n_r, size_r, h, True), Groups(2, n_c, size_c, w, True)
    s_r, s_c = (opaque_size(smaller(s, x)) for s, x in zip(region.pale_size, (h, w), strict=True))
    return Groups(1, n_r, s_r, h, False), Groups(2, n_c, s_c, w, False)


def executed_pairs(h: int, w: int, heads: int, region: Region) -> int:
    """Return the number of query-key pairs that this back-end computes, with padding and repeated tokens."""
    rows, columns = layout(h, w, region)
    by_row, by_column = rows.n * (rows.size * w) ** 2, columns.n * (columns.size * h) ** 2
    return {
        "row": heads * by_row,
        "column": heads * by_column,
        "parallel": heads // 2 * (by_row + by_column),
        "pale": heads * rows.n * (rows.size * w + columns.size * h) ** 2,
    }[region.scope]


def attend(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """Compute attention in plain PyTorch."""
    h, w, heads = q.shape[1:4]
    rows, columns = layout(h, w, region)
    if region.scope == "row":
        return attend_groups(q, k, v, rows)
    if region.scope == "column":
        return attend_groups(q, k, v, columns)
    if region.scope == "pale":
        return attend_pales(q, k, v, rows, columns, region.groups(h, w, q.device)[0])
    half = heads // 2
    x_r = attend_groups(q[..., :half, :], k[..., :half, :], v[..., :half, :], rows)
    x_c = attend_groups(q[..., half:, :], k[..., half:, :], v[..., half:, :], columns)
    return torch.cat([x_r, x_c], dim=3)


def attend_groups(q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
    """Return attention inside row groups or column groups."""
    mask = None
    if any_size(groups.length) or groups.padding:
        across = torch.ones(1, q.shape[3 - groups.axis], dtype=torch.bool, device=q.device)
        mask = _keys(groups.tokens(groups.valid(q.device), across), q.shape[0])
    return groups.unpack(_sdpa(groups.pack(q), groups.pack(k), groups.pack(v), mask), q)


def attend_pales(
    q: Tensor, k: Tensor, v: Tensor, rows: Groups, columns: Groups, row_group: Tensor
) -> Tensor:
    """Return attention inside whole pales; `row_group` is the group of each row, (h,).

    A pale is its rows followed by its columns. A token where they cross occurs twice: the second
    time it is masked as a key, and as a query it gives the same result again. The part computed in
    the rows and the part computed in the columns therefore each cover the map once, and their mean
    is the mean over the one or two pales of a token.
    """
    b, h, w = q.shape[:3]
    p = torch.arange(rows.n, device=q.device)[:, None]
    in_rows = rows.tokens(rows.valid(q.device), torch.ones(1, w, dtype=torch.bool, device=q.device))
    in_columns = columns.tokens(columns.valid(q.device), row_group != p)
    mask = _keys(torch.cat([in_rows, in_columns], 1), b)
    qkv = [torch.cat([rows.pack(x), columns.pack(x)], 2) for x in (q, k, v)]
    y = _sdpa(qkv[0], qkv[1], qkv[2], mask)
    y_r, y_c = y.split([rows.size * w, columns.size * h], 2)
    return (rows.unpack(y_r, q) + columns.unpack(y_c, q)) / 2


def _keys(valid: Tensor, b: int) -> Tensor:
    """Return the mask of keys, (b*n, 1, 1, tokens), from the valid tokens of each group, (n, tokens)."""
    return valid.expand(b, -1, -1).flatten(0, 1)[:, None, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if (
        BRANCHES_ON_KEYS
        and mask is not None
        and exporting()
        and isinstance(mask.shape[-1], torch.SymInt)
    ):
        # With five dimensions PyTorch would not branch either, but the ONNX exporter takes only four.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel(CUDA_KERNELS):
        return F.scaled_dot_product_attention(q, k, v, mask)


opaque = operator("sdpa", attend)
