"""Limits of floating-point dtypes: rounding, flushing and overflow."""

import math

import pytest
import torch

from lightning_mp.numerics.floats import (
    FLOAT_DTYPES,
    accumulation_dtype,
    largest_flushed,
    rounded,
    smallest_overflowing,
    state_dtype,
)

NARROW = [dtype for dtype in FLOAT_DTYPES if dtype != torch.float64]


def test_fp16_limits_have_their_known_values() -> None:
    assert torch.finfo(torch.float16).max == 65504
    assert torch.finfo(torch.float16).tiny == 2.0**-14
    assert largest_flushed(torch.float16) == 2.0**-25
    assert smallest_overflowing(torch.float16) == 65520


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_flushing_and_overflow_begin_exactly_at_the_limits(dtype: torch.dtype) -> None:
    flushed, overflowing = largest_flushed(dtype), smallest_overflowing(dtype)
    step = (
        2.0**-50 if dtype == torch.float32 else 2.0**-12
    )  # torch rounds to half precision through fp32
    assert rounded(flushed, dtype) == 0
    assert rounded(flushed * (1 + step), dtype) == 2 * flushed  # the smallest subnormal
    assert rounded(overflowing, dtype) == math.inf
    assert rounded(overflowing * (1 - step), dtype) == torch.finfo(dtype).max


def test_float64_limits_are_zero_and_inf() -> None:
    assert largest_flushed(torch.float64) == 0
    assert smallest_overflowing(torch.float64) == math.inf


@pytest.mark.parametrize(
    ("eps", "stored"), [(1e-8, 0.0), (3e-8, 2.0**-24), (1e-7, 2.0**-23), (1e-6, 17 * 2.0**-24)]
)
def test_rounding_to_fp16_of_usual_epsilons_is_known(eps: float, stored: float) -> None:
    assert rounded(eps, torch.float16) == stored


def test_sums_use_wider_dtypes() -> None:
    wider = [accumulation_dtype(dtype) for dtype in FLOAT_DTYPES]
    assert wider == [torch.float32, torch.float32, torch.float32, torch.float64]
    assert state_dtype(torch.device("cpu")) == torch.float64
    assert state_dtype(torch.device("mps")) == torch.float32
