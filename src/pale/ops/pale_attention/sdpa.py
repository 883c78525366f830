"""Pale attention through PyTorch's scaled dot product: fast wherever PyTorch runs, no score matrix, no loop over groups.

Rows are laid out as (groups, rows of a group), which is a reshape of the map, and each group becomes one entry of the
batch. Where `h` is not groups x rows, the last rows are padding: masked as keys, dropped as queries. With
`ceil(h / n)` rows a group (not `s_r`) an interlaced group never holds more than one padded row.

Eager and exported programs run `attend` as it stands. Under `torch.compile` it is one opaque operator, because a
compiler that looks inside specialises on the number of groups and recompiles at every size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .region import Grouping, Region, Scope

# Without cuDNN: a compiled model trained through it stayed at chance (torch 2.11, H200).
CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def unsupported(q: Tensor, region: Region) -> str | None:
    """Nothing: scaled dot product attention is part of PyTorch on every device."""
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """Attention inside each group of `region`; q, k, v and the result are (b, h, w, heads, d)."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        s_r, s_c = region.pale_size
        return opaque(q, k, v, s_r, s_c, region.scope, region.grouping)
    return attend(q, k, v, region)


@dataclass(frozen=True)
class Groups:
    """Rows (axis 1) or columns (axis 2) of a map, laid out as `n` groups of `size`, the last ones padded."""

    axis: int
    n: int
    size: int
    length: int
    interlaced: bool

    def pack(self, x: Tensor) -> Tensor:
        """(b, h, w, heads, d) -> (b*n, heads, size*w, d), for columns (b*n, heads, size*h, d)."""
        x = x.transpose(1, self.axis)
        if not _known(self.padding == 0):
            x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, self.padding))
        if self.interlaced:
            x = x.unflatten(1, (self.size, self.n)).permute(0, 2, 4, 1, 3, 5)
        else:
            x = x.unflatten(1, (self.n, self.size)).permute(0, 1, 4, 2, 3, 5)
        return x.flatten(3, 4).flatten(0, 1)

    def unpack(self, y: Tensor) -> Tensor:
        """The inverse of `pack`."""
        y = y.unflatten(2, (self.size, -1)).unflatten(0, (-1, self.n))  # (b, n, heads, size, w, d)
        y = y.permute(0, 3, 1, 4, 2, 5) if self.interlaced else y.permute(0, 1, 3, 4, 2, 5)
        return y.flatten(1, 2)[:, : self.length].transpose(1, self.axis)

    @property
    def padding(self) -> int:
        return self.n * self.size - self.length

    def index(self, device: torch.device) -> Tensor:
        """Row (or column) in each slot, (n, size); `length` and more is padding."""
        slots = torch.arange(self.n * self.size, device=device)
        if self.interlaced:
            return slots.unflatten(0, (self.size, self.n)).T
        return slots.unflatten(0, (self.n, self.size))


def layout(h: int, w: int, region: Region) -> tuple[Groups, Groups]:
    """Row and column groups of an `h` x `w` map as they are executed."""
    n_r, n_c = region.counts(h, w)
    if region.grouping == "interlaced":
        return Groups(1, n_r, -(-h // n_r), h, True), Groups(2, n_c, -(-w // n_c), w, True)
    s_r, s_c = torch.sym_min(region.pale_size[0], h), torch.sym_min(region.pale_size[1], w)
    if region.scope == "pale":
        n_r = n_c = torch.sym_max(n_r, n_c)
    return Groups(1, n_r, s_r, h, False), Groups(2, n_c, s_c, w, False)


def executed_pairs(h: int, w: int, heads: int, region: Region) -> int:
    """Query-key pairs over all heads that this back-end computes, padding and repeated tokens included."""
    rows, columns = layout(h, w, region)
    by_row, by_column = rows.n * (rows.size * w) ** 2, columns.n * (columns.size * h) ** 2
    return {
        "row": heads * by_row,
        "column": heads * by_column,
        "parallel": heads // 2 * (by_row + by_column),
        "pale": heads * rows.n * (rows.size * w + columns.size * h) ** 2,
    }[region.scope]


def attend(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
    """The computation itself, in plain PyTorch."""
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
    """Attention inside row groups or column groups."""
    mask = None
    if not _known(groups.padding == 0):
        valid = groups.index(q.device) < groups.length  # (n, size)
        mask = _keys(valid[:, :, None].expand(-1, -1, q.shape[3 - groups.axis]).flatten(1), q.shape[0])
    return groups.unpack(_sdpa(groups.pack(q), groups.pack(k), groups.pack(v), mask))


def attend_pales(
    q: Tensor, k: Tensor, v: Tensor, rows: Groups, columns: Groups, row_group: Tensor
) -> Tensor:
    """Attention inside whole pales; `row_group` is the group of each row, (h,).

    A pale is its rows followed by its columns. Where they cross a token stands twice: the second time it is
    masked as a key, and as a query it gives the same result again. So the part computed in the rows and the part
    computed in the columns each cover the map once, and their mean is the mean over the one or two pales of a token.
    """
    b, h, w = q.shape[:3]
    i, j = rows.index(q.device), columns.index(q.device)  # (n, size)
    p = torch.arange(rows.n, device=q.device)[:, None]
    in_rows = (i < h)[:, :, None].expand(-1, -1, w).flatten(1)
    in_columns = ((j < w)[:, :, None] & (row_group != p)[:, None, :]).flatten(1)
    mask = _keys(torch.cat([in_rows, in_columns], 1), b)
    y = _sdpa(*(torch.cat([rows.pack(x), columns.pack(x)], 2) for x in (q, k, v)), mask)
    split = rows.size * w
    return (rows.unpack(y[:, :, :split]) + columns.unpack(y[:, :, split:])) / 2


def _keys(valid: Tensor, b: int) -> Tensor:
    """Mask of keys (b*n, 1, 1, tokens) from the valid tokens of each group, (n, tokens)."""
    return valid.expand(b, -1, -1).flatten(0, 1)[:, None, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel(CUDA_KERNELS):
        return F.scaled_dot_product_attention(q, k, v, mask)


def _known(condition: bool | torch.SymBool) -> bool:
    """Whether a statement about sizes is true, without tying a traced program to the sizes it was traced with."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


@torch.library.custom_op("pale::sdpa_attention", mutates_args=())
def opaque(
    q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, scope: str, grouping: str
) -> Tensor:
    """`attend` as one operator."""
    return attend(q, k, v, _region(s_r, s_c, scope, grouping)).contiguous()


@opaque.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, scope: str, grouping: str) -> Tensor:
    return q.new_empty(q.shape)


_library = torch.library.Library("pale", "FRAGMENT")
_library.define(
    "sdpa_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, int s_r, int s_c, str scope, str grouping)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_library, "sdpa_attention_backward", "CompositeExplicitAutograd")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, scope: str, grouping: str
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, _region(s_r, s_c, scope, grouping))
    return tuple(x.contiguous() for x in torch.autograd.grad(out, inputs, grad))


@torch.library.register_fake("pale::sdpa_attention_backward", lib=_library)
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, scope: str, grouping: str
) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.region = inputs[3:]


def _backward(ctx, grad):
    return *torch.ops.pale.sdpa_attention_backward(grad, *ctx.saved_tensors, *ctx.region), None, None, None, None


opaque.register_autograd(_backward, setup_context=_save)


def _region(s_r: int, s_c: int, scope: Scope, grouping: Grouping) -> Region:
    return Region((s_r, s_c), scope, grouping)
