"""Facts of the floating-point formats in one place, and the dtypes that sums are kept in."""

import functools
import math

import torch

__all__ = [
    "ACCUMULATION_DTYPES",
    "FLOAT_DTYPES",
    "HALF_DTYPES",
    "VALUE_DTYPES",
    "accumulation_dtype",
    "largest_flushed",
    "rounded",
    "smallest_overflowing",
    "state_dtype",
    "sum_rounding",
]

FLOAT_DTYPES: tuple[torch.dtype, ...] = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""The floating-point formats that this package computes with."""

VALUE_DTYPES: tuple[torch.dtype, ...] = (
    *FLOAT_DTYPES,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
"""What can be NaN or too large: a complex number is two values."""

HALF_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The formats of two bytes."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return a number as `dtype` stores it: 1e-8 is 0 in fp16, and 1e-7 is 1.19e-7."""
    # From float64, which is Python's own: torch's default would round to fp32 first, and so twice.
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def largest_flushed(dtype: torch.dtype) -> float:
    """Return the largest number that rounds to zero: half the smallest subnormal, 2^-25 in fp16.

    It lies between zero and the smallest subnormal, and ties go to the even one of the two, zero.
    For float64 no Python number holds it, and 0 is returned.
    """
    info = torch.finfo(dtype)
    return info.tiny * info.eps / 2


def smallest_overflowing(dtype: torch.dtype) -> float:
    """Return the smallest number that rounds to inf: 65520 in fp16, whose largest is 65504.

    It is half a step above the largest number. For float64 no Python number holds it, and inf is
    returned.
    """
    info = torch.finfo(dtype)
    # max is (2 - eps) 2^e, and the step below it eps 2^e.
    return info.max + info.max * info.eps / (2 * (2 - info.eps))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products of `dtype` values are summed in: fp32, or float64 for float64.

    A bf16 sum of logits near 100 is off by up to 0.25, a factor of 1.28 in the softmax.
    """
    return torch.promote_types(dtype, torch.float32)


ACCUMULATION_DTYPES = {dtype: accumulation_dtype(dtype) for dtype in FLOAT_DTYPES}
"""The same as a table, for code that asks many times a step."""


@functools.cache
def state_dtype(device: torch.device) -> torch.dtype:
    """Return the widest dtype that `device` offers for O(batch) running sums.

    Log-sum-exps near 100 have a spacing of 7.6e-6 in fp32, which is the relative error of every
    softmax value made from them; in float64 it is 1.4e-14. MPS has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def sum_rounding(width: int, dtype: torch.dtype) -> float:
    """Return what rounding moves a product of unit vectors by at most: 1.6e-6 at 512 in fp32.

    Rounding grows like the root of the width (doi:10.1137/18M1226312); 2 is for the vectors' own.
    """
    return (2 + math.sqrt(width) / 2) * torch.finfo(dtype).eps
