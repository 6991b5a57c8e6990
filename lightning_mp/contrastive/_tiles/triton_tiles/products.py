"""Matrix products of 16-bit operands that are summed in fp32, by the library of the device."""

import torch
from torch import Tensor

__all__ = ["add_product"]


def add_product(
    total_mn: Tensor, left_mk: Tensor, right_kn: Tensor, factor: float = 1.0, adds: bool = True
) -> None:
    """Add `factor * left @ right` to a total in fp32, in place; or put it there, if it adds not.

    On CUDA 16-bit operands go to cuBLAS as they are. Elsewhere they are widened, which gives the
    same products: those of two 16-bit values are exact in fp32.
    """
    if left_mk.dtype != total_mn.dtype and not left_mk.is_cuda:
        left_mk, right_kn = left_mk.to(total_mn.dtype), right_kn.to(total_mn.dtype)
    beta = 1.0 if adds else 0.0
    if left_mk.dtype == total_mn.dtype:
        total_mn.addmm_(left_mk, right_kn, beta=beta, alpha=factor)
    else:
        torch.addmm(
            total_mn, left_mk, right_kn, beta=beta, alpha=factor, out_dtype=total_mn.dtype,
            out=total_mn,
        )  # fmt: skip
