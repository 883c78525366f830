"""Names and places of the tensors of a whole block, which its two operators pass to each other in few tensors."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..sizes import ceil_div

# Tensors with gradients, in the order of the arguments of `block`.
NAMES = (
    *("x", "w_cpe", "b_cpe", "gamma_1", "beta_1", "t_q", "t_k", "t_v"),
    *("w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_proj", "b_proj"),
    *("gamma_2", "beta_2", "w_1", "b_1", "w_2", "b_2"),
)
# The matrices, in the order of their gradients.
MATRICES = ("w_q", "w_k", "w_v", "w_proj", "w_1", "w_2")
# Vectors and convolutions, in the order of their gradients: those of each matrix of `sum_parts`.
VECTORS = (
    *("b_1", "gamma_2", "beta_2", "b_proj", "b_2", "b_q", "b_k", "b_v"),
    *("t_q", "t_k", "t_v", "gamma_1", "beta_1", "b_cpe", "w_cpe"),
)
AT = {name: i for i, name in enumerate(NAMES)}
MATRICES_AT, VECTORS_AT = ([AT[name] for name in names] for names in (MATRICES, VECTORS))
# Maps in `kept` of every block: the first norm, three convolutions, q, k, v, the result of the attention, the sum
# before the MLP, its norm. The sum with the position encoding comes next, then both halves of a "pale" attention.
MAPS = 10


def count_maps(cpe: bool, scope: str) -> int:
    """Return the number of maps in `kept`."""
    return MAPS + cpe + 2 * (scope == "pale")


def attention_calls(scope: str) -> int:
    """Return how often the attention is called."""
    return 2 if scope == "pale" else 1


def aligned(n: int) -> int:
    """Return `n` rounded up to 16 bytes of float32: kernels are compiled for aligned pointers."""
    return ceil_div(n, 4) * 4


def attention_parts(scope: str) -> tuple[str, ...]:
    """Return the scopes of the calls of the attention."""
    return ("pale_row", "pale_column") if scope == "pale" else (scope,)


def attention_outs(kept: Tensor, scope: str) -> tuple[Tensor, ...]:
    """Return the maps for the results of the calls of the attention."""
    return kept[-2:].unbind() if scope == "pale" else (kept[7],)


def lse_of(sums: Tensor, b: int, heads: int, tokens: int) -> Tensor:
    """Return log2 of the sums of exponentials of one call of the attention."""
    return sums[: b * heads * tokens].view(b, heads, tokens)


Place = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset


@lru_cache(maxsize=256)
def _places(*shapes: tuple[int, ...]) -> list[Place]:
    """Return where contiguous tensors of these shapes are, one after the other."""
    found: list[Place] = []
    offset = 0
    for shape in shapes:
        strides = [1]
        for n in reversed(shape[1:]):
            strides.insert(0, n * strides[0])
        found.append((tuple(shape), tuple(strides), offset))
        offset += shape[0] * strides[0]
    return found


def matrix_places(n: int, c: int) -> list[Place]:
    """Return where the matrices are, or their gradients."""
    return _places((c, c), (c, c), (c, c), (c, c), (n, c), (c, n), (n,))


def vector_places(n: int, c: int) -> list[Place]:
    """Return where the gradients of `VECTORS` are."""
    taps = c, 1, 3, 3
    return _places((n,), *[(c,)] * 7, *[taps] * 3, *[(c,)] * 3, taps)
