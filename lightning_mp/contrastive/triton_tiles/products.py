"""Matrix products of 16-bit operands that are summed in fp32, by the library of the device."""

import torch
from torch import Tensor

__all__ = ["add_product"]


def add_product(total_mn: Tensor, left_mk: Tensor, right_kn: Tensor, factor: float = 1.0) -> None:
    """Add `factor * left @ right` to a total in fp32, in place.

    On CUDA 16-bit operands go to cuBLAS as they are. Elsewhere they are widened, which gives the
    same products: those of two 16-bit values are exact in fp32.
    """
    if left_mk.dtype == total_mn.dtype:
        total_mn.addmm_(left_mk, right_kn, alpha=factor)
    elif not left_mk.is_cuda:
        total_mn.addmm_(left_mk.to(total_mn.dtype), right_kn.to(total_mn.dtype), alpha=factor)
    else:
        torch.addmm(
            total_mn, left_mk, right_kn, alpha=factor, out_dtype=total_mn.dtype, out=total_mn
        )
