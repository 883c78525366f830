"""Which tokens attend to which: rows and columns are grouped here and nowhere else.

Row `i` of `h` belongs to row group `i mod n_r` (interlaced, the paper's) or `i // s_r` (contiguous,
CSWin's), with `n_r = ceil(h / s_r)` groups; columns in the same way with `s_c`, `n_c`. Sizes need not divide:
groups are ragged, never padded. The scope `pale` joins row group `p` and column group `p` into pale
`p`; interlaced, both directions then share `n = max(n_r, n_c)`, and for some `p` one of the two may
be empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from torch import Tensor

from ..sizes import ceil_div, larger

Scope = Literal["parallel", "row", "column", "pale"]
Grouping = Literal["interlaced", "contiguous"]
Kind = Literal["row", "column", "pale"]


def check_word(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the `allowed` words."""
    if value not in allowed:
        close = get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")


@dataclass(frozen=True)
class Region:
    """The rule that gives for each token the tokens that it attends to."""

    pale_size: tuple[int, int]
    scope: Scope = "parallel"
    grouping: Grouping = "interlaced"

    def __post_init__(self) -> None:
        """Check words and numbers: every Region is valid."""
        size = self.pale_size
        if not (
            isinstance(size, tuple)
            and len(size) == 2
            and all(type(s) is int and s >= 1 for s in size)
        ):
            raise ValueError(
                f"pale_size must be (s_r, s_c), two whole numbers of at least 1, got {size!r}; "
                "use (7, 7) as the paper does"
            )
        check_word("scope", self.scope, get_args(Scope))
        check_word("grouping", self.grouping, get_args(Grouping))

    @classmethod
    def of(
        cls,
        region: Region | None,
        pale_size: tuple[int, int] | None,
        scope: Scope = "parallel",
        grouping: Grouping = "interlaced",
    ) -> Region:
        """Return `region`, or the Region of the other arguments if it is None; raise unless one of the two is given."""
        if region is None:
            if pale_size is None:
                raise TypeError("give pale_size=(s_r, s_c) or region=Region(...), got neither")
            return cls(pale_size, scope, grouping)
        if not isinstance(region, cls):
            raise TypeError(
                f"region must be a Region, got {region!r}; or give pale_size={region!r}"
            )
        if pale_size is not None or (scope, grouping) != ("parallel", "interlaced"):
            raise TypeError(
                f"give either a region or pale_size, scope and grouping, got {region=} and {pale_size=}, {scope=}, "
                f"{grouping=}; leave out the latter"
            )
        return region

    def counts(self, h: int, w: int) -> tuple[int, int]:
        """Return the number of row groups and of column groups on an `h` x `w` map."""
        n_r, n_c = ceil_div(h, self.pale_size[0]), ceil_div(w, self.pale_size[1])
        if self.scope == "pale" and self.grouping == "interlaced":
            n_r = n_c = larger(n_r, n_c)
        return n_r, n_c

    def groups(self, h: int, w: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the group of each row, (h,), and of each column, (w,)."""
        i, j = torch.arange(h, device=device), torch.arange(w, device=device)
        if self.grouping == "contiguous":
            return i // self.pale_size[0], j // self.pale_size[1]
        n_r, n_c = self.counts(h, w)
        # By a tensor: the ONNX exporter has no remainder by a size.
        return i % torch.full_like(i, n_r), j % torch.full_like(j, n_c)

    def members(self, kind: Kind, h: int, w: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the tokens of each row group, column group or pale: boolean maps (groups, h, w)."""
        row, column = self.groups(h, w, device)
        n_r, n_c = self.counts(h, w)
        n = {"row": n_r, "column": n_c, "pale": max(n_r, n_c)}[kind]
        p = torch.arange(n, device=device)[:, None, None]
        rows, columns = row[:, None] == p, column[None, :] == p  # (n, h, 1), (n, 1, w)
        return {"row": rows, "column": columns, "pale": rows | columns}[kind].expand(n, h, w)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of groups that heads attend in."""
        return ("row", "column") if self.scope == "parallel" else (self.scope,)

    def pairs(self, h: int, w: int, heads: int) -> int:
        """Return the number of query-key pairs over all heads; each costs 2 `d` multiply-adds."""
        n_r, n_c = self.counts(h, w)
        rows = _sizes(h, n_r, self.pale_size[0], self.grouping)
        columns = _sizes(w, n_c, self.pale_size[1], self.grouping)
        by_row = sum((r * w) ** 2 for r in rows)
        by_column = sum((c * h) ** 2 for c in columns)
        if self.scope == "row":
            return heads * by_row
        if self.scope == "column":
            return heads * by_column
        if self.scope == "parallel":
            return heads // 2 * (by_row + by_column)
        n = max(n_r, n_c)
        rows, columns = rows + [0] * (n - n_r), columns + [0] * (n - n_c)
        return heads * sum((r * w + c * h - r * c) ** 2 for r, c in zip(rows, columns, strict=True))


def _sizes(length: int, n: int, s: int, grouping: Grouping) -> list[int]:
    """Return the number of rows (or columns), `length` in all, in each of `n` groups."""
    if grouping == "contiguous":
        return [min(s, length - p * s) for p in range(n)]
    return [len(range(p, length, n)) for p in range(n)]
