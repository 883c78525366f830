"""What all Triton kernels here begin with."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from .launching import dependent_launch

DEPENDENT = tl.constexpr(dependent_launch())


@triton.jit
def begin():
    """Let the next kernel be set up already, and wait until all that was launched before this one is done."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
