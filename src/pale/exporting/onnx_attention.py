"""Pale attention in ONNX: one Gather per tensor instead of slices, paddings and transpositions.

Queries, keys and values of all tokens are rows of `d` numbers, one for each head of each token. A group of one head is
a list of such rows, so a single Gather cuts the heads apart, collects the interlaced rows and columns, and pads
ragged groups (with a token that is masked). Another Gather returns the results to their places. The indices are
constants in a file of one size; in a file of every size they are computed once for all blocks of a stage.

`attention`, `tokens` and `token_map` are operators that `torch.export` keeps as they are; `translations` gives their
ONNX graphs. They exist only while an ONNX file is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnxscript import opset18 as op
from torch import Tensor

from ..ops.pale_attention.region import Region
from . import onnx_arrays as arrays
from .onnx_arrays import Array, are_known, join, known, value

_library = torch.library.Library("pale", "FRAGMENT")
_library.define("onnx_tokens(Tensor x) -> Tensor")
_library.define("onnx_token_map(Tensor x, Tensor like) -> Tensor")
_library.define(
    "onnx_attention(Tensor q, Tensor k, Tensor v, Tensor like, int heads, int s_r, int s_c, "
    "str scope, str grouping) -> Tensor"
)


def tokens(x: Tensor) -> Tensor:
    """(b, h, w, c) -> (b * h * w, c)."""
    return torch.ops.pale.onnx_tokens(x)


def token_map(x: Tensor, like: Tensor) -> Tensor:
    """(b * h * w, c) -> (b, h, w, c), with the size of `like`."""
    return torch.ops.pale.onnx_token_map(x, like)


def attention(q: Tensor, k: Tensor, v: Tensor, like: Tensor, heads: int, region: Region) -> Tensor:
    """Return attention without scaling, all (b * h * w, c); `like` is a map, (b, h, w, c)."""
    return torch.ops.pale.onnx_attention(
        q, k, v, like, heads, *region.pale_size, region.scope, region.grouping
    )


@torch.library.register_fake("pale::onnx_tokens", lib=_library)
def _(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    return x.new_empty(b * h * w, c)


@torch.library.register_fake("pale::onnx_token_map", lib=_library)
def _(x: Tensor, like: Tensor) -> Tensor:
    return x.new_empty(*like.shape[:3], x.shape[1])


@torch.library.register_fake("pale::onnx_attention", lib=_library)
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@dataclass(frozen=True)
class Lines:
    """The rows (or columns) of a map as `n` groups of `size` slots.

    Attributes:
        length: number of rows.
        n: number of groups.
        size: rows of a group; the last may be empty.
        interlaced: row i is in group i mod n, otherwise in group i // size.
    """

    length: Array
    n: Array
    size: Array
    interlaced: bool

    def slots(self) -> Array:
        """Return the row in each slot, (n, size); of an empty slot, a number of at least `length`."""
        group, slot = (arrays.count(x) for x in (self.n, self.size))
        group = arrays.reshape(group, -1, 1)
        if self.interlaced:
            return arrays.add(arrays.multiply(slot, self.n), group)
        return arrays.add(arrays.multiply(group, self.size), slot)

    def places(self) -> tuple[Array, Array]:
        """Return the group and the slot of each row, (length,) both."""
        row = arrays.count(self.length)
        parts = arrays.divide, arrays.remainder
        if self.interlaced:
            slot, group = (part(row, self.n) for part in parts)
        else:
            group, slot = (part(row, self.size) for part in parts)
        return group, slot

    def rows(self) -> Array:
        """Return the row in each slot; the last row in an empty one."""
        return arrays.smaller(self.slots(), arrays.add(self.length, known(-1)))


@dataclass(frozen=True)
class Part:
    """Groups of equal size that are computed together.

    Attributes:
        index: the token and head of each entry as one number, (groups, heads, tokens of a group).
        mask: 0, or minus infinity for keys to ignore, (groups, 1, 1, tokens of a group); None without them.
    """

    index: Array
    mask: Array | None


@dataclass(frozen=True)
class Plan:
    """How the attention of one region is computed on a map.

    Attributes:
        entries: shape (b, tokens x heads, d).
        parts: what is computed.
        results: the places of all tokens and heads in the results of all parts; the mean is taken over several.
    """

    entries: Array
    parts: list[Part]
    results: list[Array]


def layout(h: Array, w: Array, region: Region) -> tuple[Lines, Lines]:
    """Return the groups of rows and columns of a map; as in `ops.pale_attention.sdpa`."""
    s_r, s_c = (known(s) for s in region.pale_size)
    n_r, n_c = arrays.ceil_divide(h, s_r), arrays.ceil_divide(w, s_c)
    if region.scope == "pale":
        n_r = n_c = arrays.larger(n_r, n_c)
    if region.grouping == "interlaced":
        size_r, size_c = arrays.ceil_divide(h, n_r), arrays.ceil_divide(w, n_c)
    else:
        size_r, size_c = arrays.smaller(s_r, h), arrays.smaller(s_c, w)
    interlaced = region.grouping == "interlaced"
    return Lines(h, n_r, size_r, interlaced), Lines(w, n_c, size_c, interlaced)


def plan(h: Array, w: Array, heads: int, d: int, region: Region) -> Plan:
    """Return the plan for a map; `h` and `w` are vectors of one number."""
    entries = join(known(-1), arrays.multiply(arrays.multiply(h, w), known(heads)), known(d))
    rows, columns = layout(h, w, region)
    if region.scope == "pale":
        return Plan(entries, *_pales(rows, columns, heads))
    first = heads // 2 if region.scope == "parallel" else heads
    sides = []
    if region.scope != "column":
        sides.append(_side(rows, columns.length, True, heads, 0, first))
    if region.scope != "row":
        sides.append(_side(columns, rows.length, False, heads, heads - first, first))
    parts, results, before = [], [], known(0)
    for part, places, computed in sides:
        parts.append(part)
        results.append(arrays.add(places, before))
        before = arrays.add(before, computed)
    index = arrays.reshape(join(*results, axis=2), -1)
    return Plan(entries, _merged(parts), [index])


def _side(
    lines: Lines, across: Array, is_row: bool, heads: int, first: int, some: int
) -> tuple[Part, Array, Array]:
    """Return groups of rows (or columns) for `some` heads, the places (h, w, some) in its results, and their number."""
    token, valid = _members(lines, across, is_row)
    n_tokens = arrays.multiply(lines.size, across)
    part = Part(_entries(token, heads, first, some), _mask(valid))
    places = _places(lines, across, is_row, known(some), n_tokens, known(0))
    return part, places, arrays.multiply(arrays.multiply(lines.n, n_tokens), known(some))


def _pales(rows: Lines, columns: Lines, heads: int) -> tuple[list[Part], list[Array]]:
    """Return whole pales: their rows, then their columns; where they cross, the column's key is ignored."""
    h, w = rows.length, columns.length
    by_row, valid_row = _members(rows, w, True)
    by_column, valid_column = _members(columns, h, False)
    group = arrays.reshape(rows.places()[0], 1, -1, 1)  # of row i
    pale = arrays.reshape(arrays.count(rows.n), -1, 1, 1)
    crosses = arrays.add(
        group, arrays.multiply(arrays.reshape(columns.slots(), 0, 1, -1), known(0))
    )
    elsewhere = arrays.reshape(arrays.differ(crosses, pale), 0, -1)
    valid = join(valid_row, arrays.both(valid_column, elsewhere), axis=1)
    part = Part(_entries(join(by_row, by_column, axis=1), heads, 0, heads), _mask(valid))
    n_row, n_column = arrays.multiply(rows.size, w), arrays.multiply(columns.size, h)
    n_tokens = arrays.add(n_row, n_column)
    places = [
        _places(rows, w, True, known(heads), n_tokens, known(0)),
        _places(columns, h, False, known(heads), n_tokens, n_row),
    ]
    return [part], [arrays.reshape(x, -1) for x in places]


def _members(lines: Lines, across: Array, is_row: bool) -> tuple[Array, Array]:
    """Return the tokens of each group and which of them are valid, (n, tokens of a group)."""
    other = arrays.count(across)
    slots, real = lines.rows(), lines.slots()
    if is_row:
        slots, real = (arrays.reshape(x, 0, -1, 1) for x in (slots, real))
        token = arrays.add(arrays.multiply(slots, across), other)
    else:
        slots, real = (arrays.reshape(x, 0, 1, -1) for x in (slots, real))
        other = arrays.reshape(other, -1, 1)
        token = arrays.add(arrays.multiply(other, lines.length), slots)
    valid = arrays.less(arrays.add(real, arrays.multiply(other, known(0))), lines.length)
    return arrays.reshape(token, 0, -1), arrays.reshape(valid, 0, -1)


def _entries(token: Array, heads: int, first: int, some: int) -> Array:
    """Return the entries of tokens (n, t) for some heads, (n, some, t)."""
    return arrays.add(
        arrays.multiply(arrays.reshape(token, 0, 1, -1), known(heads)), _heads(first, some)
    )


def _heads(first: int, some: int) -> Array:
    """Return consecutive heads, (some, 1)."""
    return arrays.reshape(arrays.add(arrays.count(known(some)), known(first)), -1, 1)


def _places(
    lines: Lines, across: Array, is_row: bool, heads: Array, n_tokens: Array, before: Array
) -> Array:
    """Return the place of each token and head in results (n, heads, n_tokens), as (h, w, heads)."""
    group, slot = lines.places()
    start = arrays.multiply(arrays.multiply(group, heads), n_tokens)
    other = arrays.count(across)
    if is_row:
        line = arrays.add(start, arrays.multiply(slot, across))
        place = arrays.add(arrays.reshape(line, -1, 1), other)
    else:
        line = arrays.add(start, slot)
        place = arrays.add(arrays.reshape(arrays.multiply(other, lines.size), -1, 1), line)
    head = arrays.multiply(arrays.count(heads), n_tokens)
    return arrays.add(arrays.reshape(arrays.add(place, before), 0, -1, 1), head)


def _mask(valid: Array) -> Array | None:
    if are_known(valid) and valid.all():
        return None
    return arrays.reshape(arrays.additive_mask(valid), 0, 1, 1, -1)


def _merged(parts: list[Part]) -> list[Part]:
    """Return the parts; several with groups of equal size, if known, as one."""
    first, *others = parts
    if not others or not are_known(*(part.index for part in parts)):
        return parts
    (other,) = others
    if first.index.shape[1:] != other.index.shape[1:] or (first.mask is None) != (
        other.mask is None
    ):
        return parts
    mask = None if first.mask is None else join(first.mask, other.mask)
    return [Part(join(first.index, other.index), mask)]


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX graphs of the operators, for one file: what depends on the size of a map is computed once."""
    shared: dict[Any, Any] = {}

    def size(like: Any, axis: int) -> Array:
        n = like.shape[axis]
        if isinstance(n, int):
            return known(n)
        key = str(n)  # equal expressions of the tracer are equal sizes
        if key not in shared:
            shared[key] = op.Shape(like, start=axis, end=axis + 1)
        return shared[key]

    def plan_for(like: Any, heads: int, d: int, region: Region) -> Plan:
        key = str(like.shape[1]), str(like.shape[2]), heads, d, region
        if key not in shared:
            found = plan(size(like, 1), size(like, 2), heads, d, region)
            parts = [
                Part(value(p.index), None if p.mask is None else value(p.mask)) for p in found.parts
            ]
            results = [value(x) for x in found.results]
            shared[key] = Plan(value(found.entries), parts, results)
        return shared[key]

    def onnx_tokens(x):  # type: ignore[no-untyped-def]
        return op.Reshape(x, value(known(-1, x.shape[3])))

    def onnx_token_map(x, like):  # type: ignore[no-untyped-def]
        key = "map", str(like.shape[1]), str(like.shape[2]), x.shape[1]
        if key not in shared:
            shared[key] = value(join(known(-1), size(like, 1), size(like, 2), known(x.shape[1])))
        return op.Reshape(x, shared[key])

    def onnx_attention(  # type: ignore[no-untyped-def]
        q, k, v, like, heads: int, s_r: int, s_c: int, scope: str, grouping: str
    ):
        c = q.shape[1]
        found = plan_for(like, heads, c // heads, Region((s_r, s_c), scope, grouping))  # type: ignore[arg-type]
        q, k, v = (op.Reshape(x, found.entries) for x in (q, k, v))
        outputs = []
        for part in found.parts:
            some_q, some_k, some_v = (op.Gather(x, part.index, axis=1) for x in (q, k, v))
            scores = op.MatMul(some_q, op.Transpose(some_k, perm=[0, 1, 2, 4, 3]))
            if part.mask is not None:
                scores = op.Add(scores, part.mask)
            y = op.MatMul(op.Softmax(scores, axis=-1), some_v)
            outputs.append(op.Reshape(y, value(known(0, -1, c // heads))))
        y = outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=1)
        y, *others = (op.Gather(y, places, axis=1) for places in found.results)
        for other in others:  # the rows and the columns of whole pales
            y = op.Mul(op.Add(y, other), value(np.array([0.5], np.float32)))
        return op.Reshape(y, value(known(-1, c)))

    ops = torch.ops.pale
    return {
        ops.onnx_tokens.default: onnx_tokens,
        ops.onnx_token_map.default: onnx_token_map,
        ops.onnx_attention.default: onnx_attention,
    }
