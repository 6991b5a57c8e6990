"""Functions that kernels share: products and masks of tiles, and maxima over all programs.

Shapes:
    M, N, K: rows, columns and the slice of the width of one tile.
    n, m: rows and columns of the block that a launch covers. k: width, a multiple of K.

Arguments that sweeping kernels share:
    rows, columns: (n, k) and (m, k), with row strides `row_stride` and `column_stride`; tensor
        descriptors with `TMA`.
    num_rows, num_columns, width: n, m and k.
    diagonal: The positive of row `i` is column `i + diagonal`; `NO_DIAGONAL` without positives.
    log2_scale: Two fp32 values whose sum is the scale times log2(e).
    row_ids: (n,) int32, or `None`; column_ids: (m,). Pairs with equal ids are masked.
    row_thresholds: (n,) in fp32, or `None`: a row masks the products above its threshold.
        column_thresholds: (m,), likewise for columns.
    row_guides: Operands whose products are compared with the thresholds, see
        `threshold_similarities`; `None` compares the products of `rows` and `columns`.
        column_guides: Likewise. guide_width: Width of the guides.
    weights: (n, m) with row stride `weights_stride`; a tensor descriptor with `TMA`. weights_low:
        The same for the rounding errors, or `None`.
    TILE_M, TILE_N, TILE_K: M, N and K. GROUP: How many rows of tiles share columns, see `tile_at`.
    TMA: Whether Hopper's copy engine moves operands and weights.
    SPLIT_SCALE: Use both values of `log2_scale`. One alone has a relative error of up to 3e-8 in
        all logits, but not in the positives: 3e-6 in a log-sum-exp near 100.

Triton infers the types of kernel parameters at the launch; `Block.arguments` returns the shared
ones.

A maximum over programs is stored as an integer of the same order and raised by an atomic maximum of
integers, so that it does not depend on the order of programs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "NO_DIAGONAL",
    "TileIndex",
    "above_thresholds",
    "differ",
    "finite_or_zero",
    "indices",
    "is_last",
    "threshold_similarities",
    "negative_mask",
    "stored_at",
    "load_some",
    "make_peaks",
    "negatives",
    "peak_of",
    "raise_peak",
    "shifted",
    "store_log2_scale",
    "store_of_columns",
    "store_of_rows",
    "store_weights",
    "tile_at",
    "tile_dots",
]

# The sum with a row index, which is below 2^30, fits 32 bits.
NO_DIAGONAL = 2**30
"""The offset of a diagonal outside of every block, for blocks without positives."""

_NONE = tl.constexpr(-(2**31))
_LOG2_E = tl.constexpr(1.4426950408889634)


class TileIndex(NamedTuple):
    """Position of a tile in a block, in tiles, and the size of the block."""

    row: Any
    column: Any
    num_rows: Any
    num_columns: Any


@triton.jit
def tile_at(
    program, num_rows, num_columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr
):
    """Return the tile of a program: `GROUP` rows of tiles downwards, then the next column.

    Concurrent programs then share operands in L2: `running` tiles read about
    `2 sqrt(GROUP * running)` slabs instead of `running + 1`.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    in_band = GROUP * column_tiles
    first = program // in_band * GROUP
    band = min(row_tiles - first, GROUP)  # the last band may have fewer rows
    row = first + program % in_band % band
    return TileIndex(row, program % in_band // band, num_rows, num_columns)


@triton.jit
def indices(tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return the row and column indices of a tile in its block, (M,) and (N,)."""
    row = tile.row * TILE_M + tl.arange(0, TILE_M)
    return row, tile.column * TILE_N + tl.arange(0, TILE_N)


@triton.jit
def tile_dots(
    rows, columns, tile, width, row_stride, column_stride, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return `rows @ columns.T` of one tile in fp32 (M, N).

    With `TMA` the operands are tensor descriptors, otherwise pointers to rows that are aligned to
    16 bytes. Rows past the end are zeros or copies of the last row; the caller masks them.
    """
    # "tf32" applies to fp32 operands only.
    dots = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if TMA:
        for k in range(0, width, TILE_K):
            left = rows.load([tile.row * TILE_M, k])
            right = columns.load([tile.column * TILE_N, k])
            dots = tl.dot(left, right.T, dots, input_precision="tf32")
    else:
        # Rows past the end read the last row, so that loads need no mask.
        row, column = indices(tile, TILE_M, TILE_N)
        row, column = tl.minimum(row, tile.num_rows - 1), tl.minimum(column, tile.num_columns - 1)
        inner = tl.arange(0, TILE_K)
        # 64 bits, because 2^22 rows of width 512 have 2^31 values.
        left_at = rows + row.to(tl.int64)[:, None] * row_stride + inner[None, :]
        right_at = columns + column.to(tl.int64)[None, :] * column_stride + inner[:, None]
        for _ in range(0, width, TILE_K):
            dots = tl.dot(tl.load(left_at), tl.load(right_at), dots, input_precision="tf32")
            left_at += TILE_K
            right_at += TILE_K
    return dots


@triton.jit
def shifted(dots, log2_scale, shift, SPLIT_SCALE: tl.constexpr):
    """Return logits in powers of two, minus a shift."""
    logits = dots * tl.load(log2_scale) - shift
    if SPLIT_SCALE:  # last, because the largest terms are near 0 after the shift
        logits += dots * tl.load(log2_scale + 1)
    return logits


@triton.jit
def stored_at(stored, stride, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return pointers to the stored products of one tile (M, N), and a mask of valid ones.

    Rows are padded to a multiple of 16 values, which allows wide loads and stores.
    """
    row, column = indices(tile, TILE_M, TILE_N)
    last = tl.cdiv(tile.num_columns, 16) * 16
    here = (row < tile.num_rows)[:, None] & (column < last)[None, :]
    return stored + row.to(tl.int64)[:, None] * stride + column[None, :], here


@triton.jit
def load_some(vector, index, length):
    """Return values of a vector, 0 past its end."""
    return tl.load(vector + index, mask=index < length, other=0)


@triton.jit
def negative_mask(tile, row, column, diagonal):
    """Return which values of a tile are negatives (M, N)."""
    inside = (row < tile.num_rows)[:, None] & (column < tile.num_columns)[None, :]
    return inside & (row[:, None] + diagonal != column[None, :])


@triton.jit
def differ(row_ids, column_ids, tile, row, column):
    """Return which values of a tile have different ids for row and column (M, N)."""
    row_id = load_some(row_ids, row, tile.num_rows)
    return row_id[:, None] != load_some(column_ids, column, tile.num_columns)[None, :]


@triton.jit
def negatives(
    values, other, tile, row, column, row_ids, column_ids, diagonal, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Return the values of a tile's negatives, and `other` for all other pairs (M, N)."""
    # Positives are at column = row + diagonal.
    top, left = tile.row * TILE_M, tile.column * TILE_N
    is_cut = (top + TILE_M > tile.num_rows) | (left + TILE_N > tile.num_columns)
    is_cut |= (top + diagonal < left + TILE_N) & (left < top + diagonal + TILE_M)
    if is_cut:  # most tiles need no mask
        values = tl.where(negative_mask(tile, row, column, diagonal), values, other)
    if row_ids is not None:
        values = tl.where(differ(row_ids, column_ids, tile, row, column), values, other)
    return values


@triton.jit
def above_thresholds(dots, row_thresholds, column_thresholds, tile, row, column):
    """Return which products of a tile exceed thresholds of rows, and of columns (M, N)."""
    row_threshold = load_some(row_thresholds, row, tile.num_rows)
    column_threshold = load_some(column_thresholds, column, tile.num_columns)
    return dots > row_threshold[:, None], dots > column_threshold[None, :]


@triton.jit
def threshold_similarities(
    dots, row_guides, column_guides, tile, width, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the products that are compared with thresholds: of guides, or the tile's own `dots`.

    Guides are contiguous operands or `None`.
    """
    similarities = dots
    if row_guides is not None:  # noqa: SIM102  # one is known to the compiler, one is not
        # Always true. On 10.0, Triton 3.7 cannot compile the one-dimensional reductions that follow
        # if it knows that they use a product directly from tensor memory.
        if width > 0:
            similarities = tile_dots(
                row_guides, column_guides, tile, width, width, width, TILE_M, TILE_N, TILE_K, TMA
            )
    return similarities


@triton.jit
def store_of_rows(to, values, tile, row):
    """Store the values of a tile's rows, (tiles in a row, n)."""
    at = to + tile.column.to(tl.int64) * tile.num_rows + row
    tl.store(at, values, mask=row < tile.num_rows)


@triton.jit
def store_of_columns(to, values, tile, column):
    """Store the values of a tile's columns, (tiles in a column, m)."""
    at = to + tile.row.to(tl.int64) * tile.num_columns + column
    tl.store(at, values, mask=column < tile.num_columns)


@triton.jit
def store_weights(
    weights, weights_low, values, tile, row, column, stride, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store a tile inside the edges of the block, and its rounding errors."""
    rounding_error = _store_half(weights, values, tile, row, column, stride, TILE_M, TILE_N, TMA)
    if weights_low is not None:
        _store_half(weights_low, rounding_error, tile, row, column, stride, TILE_M, TILE_N, TMA)


@triton.jit
def _store_half(
    to, values, tile, row, column, stride, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Store a tile; return its rounding errors in fp32."""
    if TMA:
        rounded = values.to(to.dtype)
        to.store([tile.row * TILE_M, tile.column * TILE_N], rounded)
    else:
        rounded = values.to(to.dtype.element_ty)
        mask = (row < tile.num_rows)[:, None] & (column < tile.num_columns)[None, :]
        at = to + row.to(tl.int64)[:, None] * stride + column[None, :]
        tl.store(at, rounded, mask=mask)
    return values - rounded.to(tl.float32)


@triton.jit
def finite_or_zero(values):
    """Return values with 0 in place of infinities, whose differences would be NaN."""
    return tl.where(tl.abs(values) == float("inf"), 0.0, values)


def make_peaks(like: Tensor) -> Tensor:
    """Return three initial peaks and a counter of programs."""
    # The counter starts at the same value, so that one fill initializes all four.
    return like.new_full((4,), _NONE.value, dtype=torch.int32)


@triton.jit
def _order(bits):
    """Map the bits of fp32 numbers to integers of the same order, and back."""
    # As integers, the bits of negative numbers have the reverse order.
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def raise_peak(peak, values):
    """Raise a peak to the largest of the values (1-D, fp32)."""
    # One relaxed atomic per program: `is_last` orders memory.
    bits = tl.max(values, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(peak, _order(bits), sem="relaxed")


@triton.jit
def peak_of(peak):
    """Return the final value of a peak."""
    # An atomic that changes nothing, because a load could return an older value from a cache.
    return _order(tl.atomic_max(peak, _NONE, sem="relaxed")).to(tl.float32, bitcast=True)


@triton.jit
def is_last(peaks):
    """Return whether this is the last program; the peaks of the others are then visible."""
    return tl.atomic_add(peaks + 3, 1, sem="acq_rel") == _NONE + tl.num_programs(0) - 1


@triton.jit
def store_log2_scale(log2_scale, scale):
    """Store a scale times log2(e) as the sum of two fp32 values, which has 48 bits."""
    exact = tl.load(scale).to(tl.float64) * _LOG2_E
    high = exact.to(tl.float32)
    tl.store(log2_scale, high)
    tl.store(log2_scale + 1, (exact - high.to(tl.float64)).to(tl.float32))
