"""The smallest kernel: it writes a one. In a file of its own, since Triton need not be there."""

import triton
import triton.language as tl

__all__ = ["probe_kernel"]


@triton.jit
def probe_kernel(answer):
    """Write a one to a pointer to an int32."""
    tl.store(answer, 1)
