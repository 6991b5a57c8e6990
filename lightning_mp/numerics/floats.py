"""Facts of the floating-point formats in one place, and the dtypes that sums are kept in."""

import torch

__all__ = ["FLOAT_DTYPES", "accumulation_dtype", "state_dtype"]

FLOAT_DTYPES: tuple[torch.dtype, ...] = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""The floating-point formats that this package computes with."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products of `dtype` values are summed in: fp32, or float64 for float64.

    A bf16 sum of logits near 100 is off by up to 0.25, a factor of 1.28 in the softmax.
    """
    return torch.promote_types(dtype, torch.float32)


def state_dtype(device: torch.device) -> torch.dtype:
    """Return the widest dtype that `device` offers for O(batch) running sums.

    Log-sum-exps near 100 have a spacing of 7.6e-6 in fp32, which is the relative error of every
    softmax value made from them; in float64 it is 1.4e-14. MPS has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64
