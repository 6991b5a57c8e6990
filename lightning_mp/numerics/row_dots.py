"""Dot products of the rows of two matrices in float64, by one Triton kernel.

Shapes:
    n: rows. D: width.
"""

import torch
from torch import Tensor

from lightning_mp.numerics import triton_support

__all__ = ["fused_row_dots"]


def fused_row_dots(left_nD: Tensor, right_nD: Tensor) -> Tensor:
    """Return the row-wise dot products in float64, by one launch of a Triton kernel."""
    # Imported here, because Triton exists on Linux only.
    from lightning_mp.numerics import row_dots_kernels as kernels

    # Columns must be contiguous; rows may have any stride.
    left_nD, right_nD = (x if x.stride(1) == 1 else x.contiguous() for x in (left_nD, right_nD))
    n, width = left_nD.shape
    dots_n = left_nD.new_empty(n, dtype=torch.float64)
    if n == 0:
        return dots_n
    with triton_support.launching_on(left_nD.device):
        kernels.row_dots_kernel[(-(-n // kernels.ROWS.value),)](
            left_nD, right_nD, dots_n, n, width, left_nD.stride(0), right_nD.stride(0),
            num_warps=kernels.NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return dots_n
