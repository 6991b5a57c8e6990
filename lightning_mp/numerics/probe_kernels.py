"""A minimal kernel that writes a 1. A separate file, because Triton may not be installed."""

import triton
import triton.language as tl

__all__ = ["probe_kernel"]


@triton.jit
def probe_kernel(answer):
    """Write 1 to an int32 pointer."""
    tl.store(answer, 1)
