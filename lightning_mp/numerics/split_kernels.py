"""Joins half weights and residuals to fp32, and splits fp32 into them, in one pass each.

Torch's own operations read and write whole tensors about twenty times for both. The results equal
those of `split_weights`, without a tolerance.

Every thread holds four elements of a block, so that fp32 and half vectors have one layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.numerics.triton_support import launching_on

__all__ = ["BLOCK", "fused_join", "fused_split", "join_block", "residual_of_block"]

_NUM_WARPS = 8
BLOCK = tl.constexpr(4 * 32 * _NUM_WARPS)
_INF = tl.constexpr(float("inf"))


def fused_join(weight: Tensor, residual: Tensor, unit: float) -> Tensor:
    """Return `join_weight` of contiguous tensors, by one launch of 8 bytes per element."""
    value = torch.empty_like(weight, dtype=torch.float32)
    _launch(join_kernel, weight, residual, value, unit)
    return value


def fused_split(value: Tensor, half: torch.dtype, unit: float) -> tuple[Tensor, Tensor]:
    """Return `split_weight` of a contiguous fp32 tensor, by one launch of 8 bytes per element."""
    weight, residual = (torch.empty_like(value, dtype=half) for _ in range(2))
    _launch(split_kernel, weight, residual, value, unit)
    return weight, residual


def _launch(
    kernel: triton.JITFunction, weight: Tensor, residual: Tensor, value: Tensor, unit: float
) -> None:
    size = value.numel()
    if size > 0:
        with launching_on(value.device):
            # Products with the unit are exact, so fused multiply-adds change no bits.
            kernel[(triton.cdiv(size, BLOCK.value),)](
                weight, residual, value, size, unit, num_warps=_NUM_WARPS, enable_fp_fusion=True
            )


@triton.jit
def join_kernel(weight_ptr, residual_ptr, value_ptr, size, UNIT: tl.constexpr):
    """Store the fp32 values of a block.

    Args:
        weight_ptr: Half weights, read.
        residual_ptr: Residuals in the dtype of the weights, read.
        value_ptr: fp32 values, written.
        size: Number of elements.
        UNIT: Unit of the residuals.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < size
    weight = tl.load(weight_ptr + lane, mask)
    rest = tl.load(residual_ptr + lane, mask).to(tl.float32)
    tl.store(value_ptr + lane, join_block(weight.to(tl.float32), rest, weight.dtype, UNIT), mask)


@triton.jit
def split_kernel(weight_ptr, residual_ptr, value_ptr, size, UNIT: tl.constexpr):
    """Store the half weights and residuals of a block; the arguments are those of `join_kernel`."""
    HALF: tl.constexpr = weight_ptr.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < size
    value = tl.load(value_ptr + lane, mask)
    weight = value.to(HALF)
    tl.store(weight_ptr + lane, weight, mask)
    rest = residual_of_block(value, weight.to(tl.float32), HALF, UNIT)
    tl.store(residual_ptr + lane, rest, mask)


@triton.jit
def join_block(plain, rest, HALF: tl.constexpr, UNIT: tl.constexpr):
    """Return `join_weight` of a block, of which both arguments are in fp32."""
    both = plain + rest * UNIT
    return tl.where(both.to(HALF).to(tl.float32) == plain, both, plain)


@triton.jit
def residual_of_block(value, plain, HALF: tl.constexpr, UNIT: tl.constexpr):
    """Return the residuals of `split_weight`; `plain` holds the half weights in fp32."""
    # One in 8000 residuals is rounded up to half a step, and is then reduced.
    BELOW: tl.constexpr = 1 - 0.6 / (1 << HALF.fp_mantissa_width)
    rest = ((value - plain) * (1 / UNIT)).to(HALF).to(tl.float32)
    is_own = (plain + rest * UNIT).to(HALF).to(tl.float32) == plain
    rest = tl.where(is_own, rest, rest * BELOW)
    return tl.where(tl.abs(plain) < _INF, rest, 0.0).to(HALF)
