"""Sizes in exported programs.

Sizes that are fixed when `torch.export` traces are plain numbers, which gives the fastest program. With dynamic sizes
the tracer must not tie the program to facts about the example: that there are several groups, or that nothing needs
padding. The number and size of groups are therefore opaque: written to a tensor and read back, so that the tracer knows
only that they are positive. Height and width of the maps are symbols of the tracer. It distinguishes maps of one pixel
from others, so the image must be larger than the model's stride (33 px for a stride of 32); it raises an error if the
given range allows less.

`every_size` removes this restriction: the sizes of the image are opaque too. Such a program is correct in PyTorch and
ONNX, but Inductor (torch 2.15) computes wrong results from convolutions of opaque sizes: it expects their results to be
contiguous and runs them channels-last.

`symbolic_sizes` makes nothing opaque; it is for AOTInductor, traced with a large image. `fixed_sizes` uses height and
width of the example, even if other sizes are dynamic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, cast

import torch
from torch import Tensor

from ..compat import check_fact, is_exporting

exporting = is_exporting

Known = Literal["maps", "nothing", "symbols", "numbers"]
_known: Known = "maps"


def any_size(*sizes: int) -> bool:
    """Return whether a program is traced in which one of these sizes is not fixed."""
    return exporting() and _known != "numbers" and not all(map(_fixed, sizes))


def _fixed(n: int) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(n)


def larger(a: int, b: int) -> int:
    """Return the larger of two sizes; torch 2.11 cannot trace `sym_max` of two plain numbers."""
    plain = isinstance(a, int) and isinstance(b, int)
    return max(a, b) if plain else cast("int", torch.sym_max(a, b))


def smaller(a: int, b: int) -> int:
    """Return the smaller of two sizes, as `larger`."""
    plain = isinstance(a, int) and isinstance(b, int)
    return min(a, b) if plain else cast("int", torch.sym_min(a, b))


def every_size() -> AbstractContextManager[None]:
    """Export for images of every size, including one pixel; not for AOTInductor."""
    return _knowing("nothing")


def symbolic_sizes() -> AbstractContextManager[None]:
    """Export with symbols of the tracer for all sizes."""
    return _knowing("symbols")


def fixed_sizes() -> AbstractContextManager[None]:
    """Export for images of the example's height and width."""
    return _knowing("numbers")


@contextmanager
def _knowing(what: Known) -> Iterator[None]:
    global _known
    before, _known = _known, what
    try:
        yield
    finally:
        _known = before


def opaque_size(n: int) -> int:
    """Return `n`; when exporting with dynamic sizes, a number of which only `n >= 1` is known."""
    if not exporting() or _known in ("symbols", "numbers"):
        return n
    return n if _known == "maps" and _fixed(n) else _opaque(n)


def _opaque(n: int) -> int:
    size = torch.full((), n, dtype=torch.int64).item()
    check_fact(size >= 1)
    return size  # type: ignore[return-value]


def opaque_sizes(x: Tensor) -> Tensor:
    """Return images (b, c, h, w); when exporting for `every_size`, with opaque b, h and w."""
    if exporting() and _known == "nothing":
        for axis in (0, 2, 3):
            x = x.index_select(axis, torch.arange(_opaque(x.shape[axis]), device=x.device))
    return x


def ceil_div(a: int, b: int) -> int:
    """Return `a / b` rounded up, for positive numbers. Not `-(-a // b)`: ONNX divides towards zero."""
    return (a + b - 1) // b
