"""Positives of a loss: logits before the sweeps, terms between them, gradients after them.

Shapes:
    b: rows, the images of one rank. n: its texts; text i belongs to image i for i < b. D: width.
    R: parts of a sum.
    ROWS, COLUMNS: rows and slice of the width that a program holds at a time.

With torch's operations this takes about sixty launches of a few microseconds of host time each,
which at 256 pairs per rank exceeds the products of all sweeps. Log-sum-exps, logits of positives
and terms are in float64; the formulas are those of `_sums/softmax.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import PairTerms, Prepared, RowsColumns
from lightning_mp.contrastive._tiles.triton_tiles.device_functions import (
    finite_or_zero,
    is_last,
    make_peaks,
    peak_of,
    raise_peak,
    store_log2_scale,
)
from lightning_mp.contrastive._tiles.triton_tiles.lse_kernels import HIGHEST_SUM_EXPONENT
from lightning_mp.numerics.triton_support import launching_on

__all__ = ["finish", "finish_kernel", "pair_terms", "prepare", "prepare_kernel", "terms_kernel"]

_LOG2_E = tl.constexpr(1.4426950408889634)
# A sum of a tile has at most 2^8 terms.
_SAFE_EXPONENT = tl.constexpr(HIGHEST_SUM_EXPONENT - 8.0)
# Up to this bound, no sum overflows and logits of 0 stay in range.
_FULL_RANGE_EXPONENT = tl.constexpr(160.0)
# The largest logit of the sample is 18 powers of two below the end of the range.
_SAMPLE_MARGIN = tl.constexpr(HIGHEST_SUM_EXPONENT - 18.0)
_ROWS, _COLUMNS = 16, 128  # `tl.dot` requires at least 16 rows
_TERMS, _PARTS = 128, 32
_FINISH_ROWS, _FINISH_COLUMNS = 4, 256  # one warp per row, 8 values per thread


@triton.jit(do_not_specialize=["num_pairs", "num_columns"])
def prepare_kernel(
    rows, columns, scale,
    pos, log2_scale, reference, peaks,
    num_pairs, num_columns, width, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the logits of the positives and, in the last program, the reference of the sweep.

    Any reference is valid; a good one avoids computing tiles twice. Logits are at most
    `|scale| max|row| max|column|`, so a reference 111 powers of two below this bound never
    overflows. If the bound is so large that ordinary logits would be below the range (unnormalized
    features), the reference comes from the largest logit of a sample instead: each program
    multiplies its rows by its columns. Columns of other ranks are assumed to be similar.

    Args:
        rows: (b, D), with row stride `row_stride`. columns: (n, D), n >= b, likewise.
        scale: One value.
        pos: Output: (b,) in float64.
        log2_scale: Output: scale times log2(e) as the sum of two fp32 values.
        reference: Output: one fp32 value.
        peaks: The largest squared norms of rows and of columns, and the largest sampled logit.
        num_pairs: b. num_columns: n. width: D.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, COLUMNS)
    is_pair, is_column = (row < num_pairs)[:, None], (row < num_columns)[:, None]
    row_at = rows + row[:, None] * row_stride + inner[None, :]
    column_at = columns + row[:, None] * column_stride + inner[None, :]
    products = tl.zeros([ROWS, COLUMNS], tl.float64)
    row_squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    column_squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    dots = tl.zeros([ROWS, ROWS], tl.float32)
    for first in range(0, width, COLUMNS):
        is_there = (first + inner < width)[None, :]
        x = tl.load(row_at + first, is_pair & is_there, 0.0)
        y = tl.load(column_at + first, is_column & is_there, 0.0)
        # tf32 is accurate enough for the sample. The positives' logits need float64.
        dots = tl.dot(x, y.T, dots, input_precision="tf32")
        products += x.to(tl.float64) * y.to(tl.float64)
        row_squares += x.to(tl.float32) * x.to(tl.float32)
        column_squares += y.to(tl.float32) * y.to(tl.float32)
    exact_scale = tl.load(scale).to(tl.float64)
    tl.store(pos + row, tl.sum(products, 1) * exact_scale, row < num_pairs)
    raise_peak(peaks, tl.sum(row_squares, 1))
    raise_peak(peaks + 1, tl.sum(column_squares, 1))
    high = (exact_scale * _LOG2_E).to(tl.float32)
    is_negative = is_pair & (row < num_columns)[None, :] & (row[:, None] != row[None, :])
    raise_peak(peaks + 2, tl.max(tl.where(is_negative, dots * high, float("-inf")), 1))
    if is_last(peaks):
        bound = tl.abs(high) * tl.sqrt(peak_of(peaks)) * tl.sqrt(peak_of(peaks + 1))
        value = bound - _SAFE_EXPONENT
        if bound > _FULL_RANGE_EXPONENT:
            value = tl.minimum(value, peak_of(peaks + 2) - _SAMPLE_MARGIN)
        # False for NaN.
        tl.store(reference, tl.where(tl.abs(value) < float("inf"), value, 0.0))
        store_log2_scale(log2_scale, scale)


def prepare(rows_bD: Tensor, columns_nD: Tensor, scale: Tensor) -> Prepared:
    """Return the values that a loss computes once, by one launch; see `TileBackend.prepare`."""
    rows_bD, columns_nD = _in_rows(rows_bD), _in_rows(columns_nD)
    (b, width), n = rows_bD.shape, len(columns_nD)
    pos_b = rows_bD.new_empty(b, dtype=torch.float64)
    numbers = rows_bD.new_empty(8, dtype=torch.float32)  # both parts are aligned to 16 bytes
    log2_scale, reference = numbers[:2], numbers[4:5]
    with launching_on(rows_bD.device):
        prepare_kernel[(triton.cdiv(max(b, n), _ROWS),)](
            rows_bD, columns_nD, scale, pos_b, log2_scale, reference, make_peaks(rows_bD),
            b, n, width, rows_bD.stride(0), columns_nD.stride(0), ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return Prepared(pos_b, (log2_scale, reference))


@triton.jit
def _log_add_exp(left, right):
    """Return `log(e^left + e^right)` in float64."""
    peak = tl.maximum(left, right)
    base = finite_or_zero(peak)
    return base + tl.log(tl.exp(left - base) + tl.exp(right - base))


@triton.jit
def _softplus(x):
    """Return `log(1 + e^x)` in float64, accurate also for small values."""
    u = tl.exp(-tl.abs(x))
    rounded = 1.0 + u
    # Corrects the rounding of `1 + u` by the slope of the logarithm.
    return tl.maximum(x, 0.0) + (tl.log(rounded) - ((rounded - 1.0) - u) / rounded)


@triton.jit
def _log_sum_exp(values, index, here, length, parts, PARTS: tl.constexpr):
    """Return log-sum-exps over the parts of `values`, (parts, length) in float64, at indices."""
    peak = tl.full(index.shape, float("-inf"), tl.float64)
    base = tl.zeros(index.shape, tl.float64)
    total = tl.zeros(index.shape, tl.float64)  # in units of e^base
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = values + part.to(tl.int64)[:, None] * length + index[None, :]
        value = tl.load(at, (part < parts)[:, None] & here[None, :], float("-inf"))
        old = base
        peak = tl.maximum(peak, tl.max(value, 0))
        base = finite_or_zero(peak)
        # Before the first term `old` is 0; with a base of -1000 the factor is inf, and 0 * inf NaN.
        total = tl.where(total == 0.0, 0.0, total * tl.exp(old - base))
        total += tl.sum(tl.exp(value - base[None, :]), 0)
    return base + tl.log(total)


@triton.jit(do_not_specialize=["terms", "num_pairs", "num_columns", "parts"])
def terms_kernel(
    row_neg, column_neg, pos,
    row_lse, column_lse, weight, sums,
    terms, num_pairs, num_columns, parts,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, TERMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store log-sum-exps with the positives, weights of the positives, and parts of the loss.

    Args:
        row_neg: (b,); all tensors are float64. column_neg: (parts, n). pos: (b,).
        row_lse: (b,). column_lse: (n,); infinite without a term in the loss.
        weight: (b,): `-2B` times the gradients of the positives' logits.
        sums: (programs,): parts of the loss.
        terms: Number of cross entropies; the loss is their mean.
        BY_ROW: Whether the loss has cross entropies of rows. BY_COLUMN: The same for columns.
        num_pairs: b. num_columns: n.
        TERMS: Pairs of a program. PARTS: Parts that are added at a time.
    """
    index = tl.program_id(0) * TERMS + tl.arange(0, TERMS)
    is_pair, is_column = index < num_pairs, index < num_columns
    positive = tl.load(pos + index, is_pair, 0.0)
    # A positive of +inf is an overflow, not a loss of 0.
    lost = tl.where(positive == float("inf"), float("nan"), 0.0)
    losses = tl.zeros([TERMS], tl.float64)
    weights = tl.zeros([TERMS], tl.float64)
    rows = tl.full([TERMS], float("inf"), tl.float64)
    columns = tl.full([TERMS], float("inf"), tl.float64)
    if BY_ROW:
        negative = tl.load(row_neg + index, is_pair, 0.0)
        margin = negative - positive + lost
        losses += _softplus(margin)
        # An infinite exponential correctly gives 0.
        weights += 1.0 / (1.0 + tl.exp(-margin))
        rows = _log_add_exp(negative, positive)
    if BY_COLUMN:
        negative = _log_sum_exp(column_neg, index, is_pair, num_columns, parts, PARTS)
        margin = negative - positive + lost
        losses += _softplus(margin)
        weights += 1.0 / (1.0 + tl.exp(-margin))
        columns = tl.where(is_pair, _log_add_exp(negative, positive), float("inf"))
    tl.store(row_lse + index, rows, is_pair)
    tl.store(column_lse + index, columns, is_column)
    tl.store(weight + index, weights, is_pair)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(is_pair, losses, 0.0), 0) / terms)


def pair_terms(
    row_neg_b: Tensor,
    column_neg_Rn: Tensor,
    pos_b: Tensor,
    has_terms: RowsColumns,
    terms: int,
    loss: Tensor,
) -> PairTerms:
    """Combine positives and negatives by one launch and a sum; see `TileBackend.pair_terms`."""
    b, (parts, n) = len(row_neg_b), column_neg_Rn.shape
    row_lse_b, weight_b = torch.empty_like(row_neg_b), torch.empty_like(row_neg_b)
    column_lse_n = column_neg_Rn.new_empty(n)
    programs = triton.cdiv(n, _TERMS)
    sums = column_lse_n.new_empty(programs)
    with launching_on(pos_b.device):
        terms_kernel[(programs,)](
            row_neg_b, column_neg_Rn, pos_b, row_lse_b, column_lse_n, weight_b, sums, terms, b,
            n, parts, BY_ROW=has_terms.rows, BY_COLUMN=has_terms.columns, TERMS=_TERMS,
            PARTS=min(triton.next_power_of_2(parts), _PARTS), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    # Not by atomics, whose order would change the last digits.
    torch.sum(sums, 0, out=loss)
    return PairTerms(row_lse_b, column_lse_n, weight_b)


@triton.jit(do_not_specialize=["terms", "ranks", "num_pairs", "num_rows", "num_columns"])
def finish_kernel(
    rows, columns, d_rows, d_columns,
    weight, scale, d_scale_parts, terms, ranks,
    num_pairs, num_rows, num_columns, width, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the positives to the gradients, scale them, and store parts of the scale's gradient.

    Reads features and gradients once; torch's operations would read them four times.

    Args:
        rows: (b, D), with row stride `row_stride`. columns: (n, D), likewise.
        d_rows: (b, D) in fp32: `P columns`. d_columns: (n, D): `P.T rows`. Both contiguous; one of
            them may be `None`.
        weight: (q,) in float64: weights of the positives; later rows and columns have none.
        scale: One value.
        d_scale_parts: (programs,) in float64.
        terms: Number of cross entropies; the loss is their mean.
        ranks: W, the divisor of a mean over ranks.
        num_pairs: q. num_rows: b. num_columns: n. width: D.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, COLUMNS)
    is_row, is_column = (row < num_rows)[:, None], (row < num_columns)[:, None]
    factor = (tl.load(scale).to(tl.float64) * ranks / terms).to(tl.float32)
    weights = tl.load(weight + row, row < num_pairs, 0.0).to(tl.float32)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    for first in range(0, width, COLUMNS):
        is_there = (first + inner < width)[None, :]
        row_here, column_here = is_row & is_there, is_column & is_there
        x = tl.load(rows + row[:, None] * row_stride + first + inner[None, :], row_here, 0.0)
        y = tl.load(
            columns + row[:, None] * column_stride + first + inner[None, :], column_here, 0.0
        )
        at = row[:, None] * width + first + inner[None, :]
        if d_rows is not None:
            gradient = tl.load(d_rows + at, row_here, 0.0) - weights * y.to(tl.float32)
            # Before the factor, which contains the scale and W; ranks sum their parts.
            sums += x.to(tl.float64) * gradient.to(tl.float64)
            tl.store(d_rows + at, gradient * factor, row_here)
        if d_columns is not None:
            gradient = tl.load(d_columns + at, column_here, 0.0) - weights * x.to(tl.float32)
            if d_rows is None:  # sum <I, dL/dS T> = sum <T, dL/dS^T I>
                sums += y.to(tl.float64) * gradient.to(tl.float64)
            tl.store(d_columns + at, gradient * factor, column_here)
    tl.store(d_scale_parts + tl.program_id(0), tl.sum(tl.sum(sums, 1), 0) / terms)


def finish(
    rows_bD: Tensor,
    columns_nD: Tensor,
    d_rows_bD: Tensor | None,
    d_columns_nD: Tensor | None,
    weight_q: Tensor,
    scale: Tensor,
    terms: int,
    ranks: int,
    d_scale: Tensor | None,
) -> None:
    """Add the positives to the gradients by one launch and a sum; see `TileBackend.finish`."""
    rows_bD, columns_nD = _in_rows(rows_bD), _in_rows(columns_nD)
    (b, width), n = rows_bD.shape, len(columns_nD)
    programs = triton.cdiv(max(b, n) if d_columns_nD is not None else b, _FINISH_ROWS)
    parts = weight_q.new_empty(programs)
    with launching_on(rows_bD.device):
        finish_kernel[(programs,)](
            rows_bD, columns_nD, d_rows_bD, d_columns_nD, weight_q, scale, parts, terms, ranks,
            len(weight_q), b, n, width, rows_bD.stride(0), columns_nD.stride(0), ROWS=_FINISH_ROWS,
            COLUMNS=_FINISH_COLUMNS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    if d_scale is not None:
        torch.sum(parts, 0, out=d_scale)


def _in_rows(features_nD: Tensor) -> Tensor:
    """Return features with contiguous rows, at any row stride."""
    return features_nD if features_nD.stride(1) == 1 else features_nD.contiguous()
