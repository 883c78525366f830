"""Sizes in exported programs.

A tracer ties a program to facts about the sizes it was traced with: this map is larger than one
pixel, there are several groups, nothing needs padding. An exported program must run at every size,
so under `torch.export` sizes are made opaque: written into a tensor and read back, so that the
tracer knows nothing about them but that they are positive.

AOTInductor (torch 2.15) computes wrong numbers from such sizes. For it they stay the tracer's own
symbols: `symbolic_sizes`. The operations are the same, and none of them depends on a size being large.

A program for one size alone may know all about it, and is the faster for it: `fixed_sizes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch
from torch import Tensor


def exporting() -> bool:
    """Whether `torch.export` is tracing.

    Not `torch.compiler.is_exporting`, which torch 2.11 takes for true under `torch.compile` as well.
    """
    return torch.compiler._is_exporting_flag


_known: Literal["nothing", "symbols", "numbers"] = "nothing"


def any_size() -> bool:
    """Whether a program is traced that must run at every size."""
    return exporting() and _known != "numbers"


def symbolic_sizes() -> AbstractContextManager[None]:
    """Export with the tracer's symbols for sizes."""
    return _knowing("symbols")


def fixed_sizes() -> AbstractContextManager[None]:
    """Export for images of the example's height and width."""
    return _knowing("numbers")


@contextmanager
def _knowing(what: Literal["symbols", "numbers"]) -> Iterator[None]:
    global _known
    _known = what
    try:
        yield
    finally:
        _known = "nothing"


def opaque_size(n: int) -> int:
    """`n`; when exporting, a number of which only `n >= 1` is known."""
    if not exporting() or _known != "nothing":
        return n
    size = torch.full((), n, dtype=torch.int64).item()
    torch._check(size >= 1)
    return size  # type: ignore[return-value]


def opaque_sizes(x: Tensor) -> Tensor:
    """Images (b, c, h, w); when exporting, with opaque b, h and w."""
    if exporting() and _known == "nothing":
        for axis in (0, 2, 3):
            x = x.index_select(axis, torch.arange(opaque_size(x.shape[axis]), device=x.device))
    return x


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up, for positive numbers. Not `-(-a // b)`: ONNX divides towards zero."""
    return (a + b - 1) // b
