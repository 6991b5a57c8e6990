"""Inner products of the rows of two matrices, in a wide dtype.

Shapes:
    n: rows. D: width.
"""

import torch
from torch import Tensor

from lightning_mp.numerics import triton_support

__all__ = ["fused_row_dots", "row_dots"]

# Where torch makes float64 copies, rows are taken in chunks of about this many values: 512 KiB for
# a copy on a CPU, which fits its caches; 32 MiB on CUDA, where a chunk should outlast its launch.
_CHUNK_VALUES = {"cpu": 2**16, "cuda": 2**22}


def row_dots(left_nD: Tensor, right_nD: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return :math:`\sum_k l_{ik} r_{ik}` for every row, multiplied and summed in `dtype`.

    Where Triton runs, float64 sums read each value once: 8 bytes for a pair in fp32. torch's own
    operations write and read float64 copies and their product, 56 bytes a pair.
    """
    is_narrow = torch.float64 not in (left_nD.dtype, right_nD.dtype)
    if (
        dtype == torch.float64
        and is_narrow
        and left_nD.device.type == "cuda"
        and triton_support.triton_problem(left_nD.device) is None
    ):
        return fused_row_dots(left_nD, right_nD)
    values = _CHUNK_VALUES.get(left_nD.device.type, _CHUNK_VALUES["cpu"])
    rows = max(1, values // left_nD.shape[1])
    return torch.cat(
        [
            (left_cD.to(dtype) * right_cD.to(dtype)).sum(1)
            for left_cD, right_cD in zip(left_nD.split(rows), right_nD.split(rows), strict=True)
        ]
    )


def fused_row_dots(left_nD: Tensor, right_nD: Tensor) -> Tensor:
    """Return the sums of `row_dots` in float64, by one launch of a Triton kernel."""
    # Triton is there on Linux only.
    from lightning_mp.numerics import row_dots_kernels as kernels

    # Columns next to each other; rows may lie any distance apart.
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
