"""Numbers that kernels share: the scale as they take it, and the largest of what programs have.

A peak of fp32 numbers is kept as the integer of its order, and raised by the device's maximum of
integers: which program comes first does not show in it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["is_last", "make_peaks", "peak_of", "raise_peak", "store_log2_scale"]

_NONE = tl.constexpr(-(2**31))
_LOG2_E = tl.constexpr(1.4426950408889634)


def make_peaks(like: Tensor) -> Tensor:
    """Return three peaks that nothing has raised, and a count of programs."""
    return like.new_full((4,), _NONE.value, dtype=torch.int32)


@triton.jit
def _order(bits):
    """Return bits of fp32 numbers as integers of their order, or the bits of such integers."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def raise_peak(peak, values):
    """Raise a peak to the largest of some values (1-D, fp32)."""
    bits = tl.max(values, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(peak, _order(bits), sem="relaxed")


@triton.jit
def peak_of(peak):
    """Return a peak that all programs have raised."""
    return _order(tl.atomic_max(peak, _NONE, sem="relaxed")).to(tl.float32, bitcast=True)


@triton.jit
def is_last(peaks):
    """Return whether all other programs have come before; what they have raised is then there."""
    return tl.atomic_add(peaks + 3, 1, sem="acq_rel") == _NONE + tl.num_programs(0) - 1


@triton.jit
def store_log2_scale(log2_scale, scale):
    """Store a scale times log2(e) as the sum of two fp32 values, which has 48 bits."""
    exact = tl.load(scale).to(tl.float64) * _LOG2_E
    high = exact.to(tl.float32)
    tl.store(log2_scale, high)
    tl.store(log2_scale + 1, (exact - high.to(tl.float64)).to(tl.float32))
