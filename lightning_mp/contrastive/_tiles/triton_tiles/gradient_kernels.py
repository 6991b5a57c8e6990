"""What the gradients need besides products: factors of the softmax before them, the pairs after.

Shapes:
    n, b: rows of a shard or of one rank. m: columns of the shard. D: width.
    ROWS, COLUMNS: rows and the slice of the width that a program holds at a time.

The formulas of the factors are those of `softmax_kernels`, those of the pairs of `infonce`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.triton_tiles.scalars import (
    is_last,
    make_peaks,
    peak_of,
    raise_peak,
    store_log2_scale,
)
from lightning_mp.numerics.triton_support import launching_on

__all__ = ["SoftmaxFactors", "factors_kernel", "finish", "finish_kernel"]

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 128
_ALIGNMENT = 4  # values of fp32
_NUM_WARPS = 4
_ROWS, _COLUMNS = 4, 256  # a warp a row, 8 values a thread


@triton.jit
def _store_rounded(power, gain, values, index, here):
    """Store values in fp32, and what puts their rounding right; return that in float64."""
    rounded = values.to(tl.float32)
    lost = rounded.to(tl.float64) - values
    # What is infinite is off by nothing.
    gains = tl.where(lost == lost, tl.exp2(lost), 1.0)
    tl.store(power + index, rounded, here)
    tl.store(gain + index, gains.to(tl.float32), here)
    return gains


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def factors_kernel(
    row_lse,
    column_lse,
    scale,
    row_power,
    row_gain,
    row_factor,
    column_power,
    column_gain,
    column_factor,
    is_wide,
    log2_scale,
    peaks,
    num_rows,
    num_columns,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the vectors of `SoftmaxFactors`; the program that comes last says if they will do.

    Args:
        row_lse: (n,) natural log-sum-exps in float64. column_lse: (m,). scale: One value.
        row_power: `p_i`; row_gain: `g_i`; row_factor: `u_i`; as `softmax_kernel` takes them.
        column_power: `c_j - s` rounded; column_gain: its gain; column_factor: `v_j`.
        is_wide: Gets 1 if only the twin with two exponentials will do, else 0.
        log2_scale: Gets scale times log2(e) as the sum of two fp32 values.
        peaks: How far the largest row lies above `t`, and the lowest column below it.
            `None`: the wide twin has the work in any case.
        num_rows: n. num_columns: m.
        EXPONENT: `s`. BLOCK: Rows, and columns, of a program.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_here, column_here = index < num_rows, index < num_columns
    rows = tl.load(row_lse + index, row_here, 0.0) * _LOG2_E
    columns = tl.load(column_lse + index, column_here, 0.0) * _LOG2_E
    middle = tl.load(row_lse) * _LOG2_E
    gains = _store_rounded(row_power, row_gain, rows - EXPONENT, index, row_here)
    _store_rounded(column_power, column_gain, columns - EXPONENT, index, column_here)
    above, below = rows - middle, middle - columns
    tl.store(row_factor + index, (gains * tl.exp2(above)).to(tl.float32), row_here)
    tl.store(column_factor + index, tl.exp2(below).to(tl.float32), column_here)
    if tl.program_id(0) == 0:
        store_log2_scale(log2_scale, scale)
        if peaks is None:
            tl.store(is_wide, 1)
    if peaks is not None:
        # Factors have to be normal numbers. NaN and infinities fail this: the wide twin has them.
        above = tl.where(tl.abs(above) < 120.0, above, float("inf")).to(tl.float32)
        below = tl.where(tl.abs(below) < 120.0, below, float("inf")).to(tl.float32)
        raise_peak(peaks, tl.where(row_here, above, float("-inf")))
        raise_peak(peaks + 1, tl.where(column_here, below, float("-inf")))
        if is_last(peaks):
            tl.store(is_wide, 1 - (peak_of(peaks) + peak_of(peaks + 1) < 90.0).to(tl.int32))


@dataclass(frozen=True)
class SoftmaxFactors:
    """The vectors from which the softmax values of a whole shard are made, in fp32.

    Args:
        rows_3n: `p_i`, `g_i` and `u_i`.
        columns_3m: `c_j - s` rounded, what puts that right, and `v_j`.
        is_wide: One int32 on the device: not 0 if one exponential an element is not enough.
        log2_scale: Scale times log2(e) as the sum of two values.
    """

    rows_3n: Tensor
    columns_3m: Tensor
    is_wide: Tensor
    log2_scale: Tensor

    @classmethod
    def of(
        cls,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        scale: Tensor,
        exponent: int,
        *,
        always_wide: bool = False,
    ) -> "SoftmaxFactors":
        """Work the vectors out from natural log-sum-exps in float64; no value leaves the device.

        Args:
            row_lse_b: Log-sum-exps of the rows, positives included.
            column_lse_m: Those of the columns.
            scale: One value.
            exponent: `s`.
            always_wide: Send the work to the twin with two exponentials, wherever they lie.
        """
        b, m = len(row_lse_b), len(column_lse_m)
        rows_3n, columns_3m = (
            row_lse_b.new_empty(3, -(-n // _ALIGNMENT) * _ALIGNMENT, dtype=torch.float32)[:, :n]
            for n in (b, m)
        )
        is_wide = row_lse_b.new_empty(1, dtype=torch.int32)
        log2_scale = row_lse_b.new_empty(2, dtype=torch.float32)
        factors_kernel[(triton.cdiv(max(b, m), _BLOCK),)](
            row_lse_b, column_lse_m, scale, *rows_3n, *columns_3m, is_wide, log2_scale,
            None if always_wide else make_peaks(is_wide), b, m, EXPONENT=exponent, BLOCK=_BLOCK,
            num_warps=_NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        return cls(rows_3n, columns_3m, is_wide, log2_scale)

    def block(self, rows: slice, columns: slice) -> "SoftmaxFactors":
        """Return the vectors of some rows and columns."""
        return replace(self, rows_3n=self.rows_3n[:, rows], columns_3m=self.columns_3m[:, columns])


@triton.jit(do_not_specialize=["terms", "ranks", "num_pairs", "num_columns"])
def finish_kernel(
    rows,
    columns,
    d_rows,
    d_columns,
    weight,
    scale,
    d_scale_parts,
    terms,
    ranks,
    num_pairs,
    num_columns,
    width,
    row_stride,
    column_stride,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the positives to the gradients, scale them; and parts of the scale's.

    In one read of features and gradients: as torch's own operations it is four.

    Args:
        rows: (b, D), of rows `row_stride` values apart. columns: (n, D), n >= b, likewise.
        d_rows: (b, D) in fp32: `P columns`. d_columns: (n, D): `P.T rows`. Both contiguous.
        weight: (b,) in float64: what the positives weigh.
        scale: One value.
        d_scale_parts: (programs,) in float64.
        terms: What the loss is the mean of.
        ranks: W, which a mean over ranks divides by.
        num_pairs: b. num_columns: n. width: D.
        BY_ROW: There are gradients of rows. BY_COLUMN: And of columns.
        ROWS: Rows of a program. COLUMNS: The slice of the width that it holds at a time.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, COLUMNS)
    is_pair, is_column = (row < num_pairs)[:, None], (row < num_columns)[:, None]
    factor = (tl.load(scale).to(tl.float64) * ranks / terms).to(tl.float32)
    weights = tl.load(weight + row, row < num_pairs, 0.0).to(tl.float32)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    for first in range(0, width, COLUMNS):
        is_there = (first + inner < width)[None, :]
        row_here, column_here = is_pair & is_there, is_column & is_there
        x = tl.load(rows + row[:, None] * row_stride + first + inner[None, :], row_here, 0.0)
        y = tl.load(
            columns + row[:, None] * column_stride + first + inner[None, :], column_here, 0.0
        )
        at = row[:, None] * width + first + inner[None, :]
        if BY_ROW:
            gradient = tl.load(d_rows + at, row_here, 0.0) - weights * y.to(tl.float32)
            sums += x.to(tl.float64) * gradient.to(tl.float64)
            tl.store(d_rows + at, gradient * factor, row_here)
        if BY_COLUMN:
            gradient = tl.load(d_columns + at, column_here, 0.0) - weights * x.to(tl.float32)
            if not BY_ROW:  # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway
                sums += y.to(tl.float64) * gradient.to(tl.float64)
            tl.store(d_columns + at, gradient * factor, column_here)
    tl.store(d_scale_parts + tl.program_id(0), tl.sum(tl.sum(sums, 1), 0) / terms)


def finish(
    rows_bD: Tensor,
    columns_nD: Tensor,
    d_rows_bD: Tensor | None,
    d_columns_nD: Tensor | None,
    weight_b: Tensor,
    scale: Tensor,
    terms: int,
    ranks: int,
    d_scale: Tensor | None,
) -> None:
    """Add the positives to the gradients and scale them, see `TileBackend.finish`.

    It takes one launch and a sum; parts of the scale's gradient cost nothing.
    """
    rows_bD, columns_nD = (x if x.stride(1) == 1 else x.contiguous() for x in (rows_bD, columns_nD))
    (b, width), n = rows_bD.shape, len(columns_nD)
    programs = triton.cdiv(n if d_columns_nD is not None else b, _ROWS)
    parts = weight_b.new_empty(programs)
    with launching_on(rows_bD.device):
        finish_kernel[(programs,)](
            rows_bD, columns_nD, d_rows_bD, d_columns_nD, weight_b, scale, parts, terms, ranks, b,
            n, width, rows_bD.stride(0), columns_nD.stride(0), BY_ROW=d_rows_bD is not None,
            BY_COLUMN=d_columns_nD is not None, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=_NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    if d_scale is not None:
        torch.sum(parts, 0, out=d_scale)
