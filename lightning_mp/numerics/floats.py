"""Properties of floating-point dtypes, and the dtypes of sums."""

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
    "ulps",
]

FLOAT_DTYPES: tuple[torch.dtype, ...] = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""The floating-point dtypes that this package computes with."""

VALUE_DTYPES: tuple[torch.dtype, ...] = (
    *FLOAT_DTYPES,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
"""Dtypes whose values can overflow or be NaN; a complex number is two values."""

HALF_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The half-precision dtypes."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return a number as `dtype` stores it: 1e-8 is 0 in fp16, and 1e-7 is 1.19e-7."""
    # From float64, like Python's floats: torch's default fp32 would round twice.
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def largest_flushed(dtype: torch.dtype) -> float:
    """Return the largest number that rounds to zero: half the smallest subnormal, 2^-25 in fp16.

    The tie between zero and the smallest subnormal rounds to even, zero. For float64 the result is
    0, because no Python number can hold it.
    """
    info = torch.finfo(dtype)
    return info.tiny * info.eps / 2


def smallest_overflowing(dtype: torch.dtype) -> float:
    """Return the smallest number that rounds to inf: 65520 in fp16, whose largest is 65504.

    It is half a ULP above the largest number. For float64 the result is inf, because no Python
    number can hold it.
    """
    info = torch.finfo(dtype)
    # max is (2 - eps) 2^e, and its ULP is eps 2^e.
    return info.max + info.max * info.eps / (2 * (2 - info.eps))


def ulps(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unit in the last place of each value of a half-precision tensor, in fp32."""
    info = torch.finfo(tensor.dtype)
    sizes = tensor.detach().float().abs().clamp(min=info.smallest_normal)
    return info.eps * torch.exp2(torch.frexp(sizes).exponent - 1.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of products of `dtype` values: fp32, or float64 for float64.

    A bf16 sum of logits near 100 is off by up to 0.25, a factor of 1.28 in the softmax.
    """
    return torch.promote_types(dtype, torch.float32)


ACCUMULATION_DTYPES = {dtype: accumulation_dtype(dtype) for dtype in FLOAT_DTYPES}
"""`accumulation_dtype` as a table, for hot code."""


@functools.cache
def state_dtype(device: torch.device) -> torch.dtype:
    """Return the widest dtype that `device` supports, for running sums of O(batch) elements.

    In fp32, log-sum-exps near 100 have a ULP of 7.6e-6, which becomes the relative error of every
    softmax value computed from them; in float64 the ULP is 1.4e-14. MPS has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def sum_rounding(width: int, dtype: torch.dtype) -> float:
    """Return a bound of the rounding error of a dot product of unit vectors: 1.6e-6 for 512 fp32.

    The error grows with the square root of the width (doi:10.1137/18M1226312); the summand 2
    accounts for the rounding of the vectors themselves.
    """
    return (2 + math.sqrt(width) / 2) * torch.finfo(dtype).eps
