"""First statement of every Triton kernel."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from .launching import dependent_launch

DEPENDENT = tl.constexpr(dependent_launch())


@triton.jit
def begin():
    """Allow the next kernel to be set up, and wait until all kernels before this one are done."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
