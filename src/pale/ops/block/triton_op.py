"""Operators of a block as Triton kernels, with the names and arguments of `reference.py`.

To PyTorch each operator and each backward is opaque, with a fake, autograd and, if it multiplies matrices, a FLOP
formula. Kernels read and write float16, bfloat16 or float32 and compute in float32; matrix products are cuBLAS's where
no kernel is faster.
"""

from ..launching import AVAILABLE, INTERPRETED, launches
from .conv import conv_norm, conv_norm_backward, conv_three, conv_three_backward
from .grids import unsupported
from .linear import linear_three, linear_three_backward
from .mlp import finish, finish_backward
from .norm import norm, norm_backward
from .whole import block
from .whole_backward import block_backward

__all__ = [
    "AVAILABLE",
    "INTERPRETED",
    "block",
    "block_backward",
    "conv_norm",
    "conv_norm_backward",
    "conv_three",
    "conv_three_backward",
    "finish",
    "finish_backward",
    "launches",
    "linear_three",
    "linear_three_backward",
    "norm",
    "norm_backward",
    "unsupported",
]
