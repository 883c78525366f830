"""Integer arrays that are either known now (numpy) or computed by the ONNX file (values of its graph).

Each function computes with numpy if all its arguments are known, and adds a node to the graph that is being built
otherwise. Index maps are written once with them, for files of one size and of every size.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir
from onnxscript import opset18 as op

Known = npt.NDArray[Any]
Array = Any  # Known, or a value of the graph


def known(*numbers: int) -> Known:
    """Return a vector of numbers."""
    return np.array(numbers, np.int64)


def are_known(*arrays: Array) -> bool:
    """Return whether all arrays are known now."""
    return all(isinstance(x, np.ndarray) for x in arrays)


def value(x: Array) -> Any:
    """Return an array as a value of the graph."""
    return op.Constant(value=cast("Any", onnx_ir.tensor(x))) if isinstance(x, np.ndarray) else x


def add(a: Array, b: Array) -> Array:
    """Return `a + b`."""
    return a + b if are_known(a, b) else op.Add(value(a), value(b))


def multiply(a: Array, b: Array) -> Array:
    """Return `a * b`."""
    return a * b if are_known(a, b) else op.Mul(value(a), value(b))


def divide(a: Array, b: Array) -> Array:
    """Return `a / b` rounded down, for numbers that are not negative."""
    return a // b if are_known(a, b) else op.Div(value(a), value(b))


def remainder(a: Array, b: Array) -> Array:
    """Return the remainder of `a / b`, for numbers that are not negative."""
    return a % b if are_known(a, b) else op.Mod(value(a), value(b))


def smaller(a: Array, b: Array) -> Array:
    """Return the smaller of two numbers."""
    return np.minimum(a, b) if are_known(a, b) else op.Min(value(a), value(b))


def larger(a: Array, b: Array) -> Array:
    """Return the larger of two numbers."""
    return np.maximum(a, b) if are_known(a, b) else op.Max(value(a), value(b))


def less(a: Array, b: Array) -> Array:
    """Return whether `a < b`."""
    return a < b if are_known(a, b) else op.Less(value(a), value(b))


def differ(a: Array, b: Array) -> Array:
    """Return whether `a != b`."""
    return a != b if are_known(a, b) else op.Not(op.Equal(value(a), value(b)))


def both(a: Array, b: Array) -> Array:
    """Return whether both are true."""
    return a & b if are_known(a, b) else op.And(value(a), value(b))


def ceil_divide(a: Array, b: Array) -> Array:
    """Return `a / b` rounded up, for positive numbers."""
    return divide(add(add(a, b), known(-1)), b)


def count(n: Array) -> Array:
    """Return 0, 1, ..., n - 1 for a vector of one number."""
    if are_known(n):
        return np.arange(n[0], dtype=np.int64)
    zero, one = (value(np.array(i, np.int64)) for i in (0, 1))
    return op.Range(zero, op.Squeeze(n), one)


def reshape(x: Array, *shape: int) -> Array:
    """Return `x` in another shape; as in ONNX, 0 keeps a dimension and -1 is what remains."""
    if not are_known(x):
        return op.Reshape(x, value(known(*shape)))
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)])


def join(*arrays: Array, axis: int = 0) -> Array:
    """Return the arrays one after the other."""
    if are_known(*arrays):
        return np.concatenate(arrays, axis)
    return op.Concat(*map(value, arrays), axis=axis)


def additive_mask(valid: Array) -> Array:
    """Return 0 where `valid`, minus infinity elsewhere, in float32."""
    zero, minus_infinity = (np.array([x], np.float32) for x in (0, -np.inf))
    if are_known(valid):
        return np.where(valid, zero, minus_infinity)
    return op.Where(valid, value(zero), value(minus_infinity))
