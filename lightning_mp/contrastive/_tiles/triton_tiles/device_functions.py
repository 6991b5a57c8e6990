"""What kernels share: tiles, what is no negative in them, and the largest numbers of all programs.

Shapes:
    M, N, K: rows, columns and the slice of the width of one tile.
    n, m: rows and columns of the block that a launch covers. k: width, a multiple of K.

Arguments that sweeping kernels share:
    rows, columns: (n, k) and (m, k), of rows `row_stride` and `column_stride` values apart; tensor
        descriptors of them with `TMA`.
    num_rows, num_columns, width: n, m and k.
    diagonal: The positive of row `i` is column `i + diagonal`; `NO_DIAGONAL` for none.
    log2_scale: Two fp32 values whose sum is the scale times log2(e).
    row_ids: (n,) int32, or `None`; column_ids: (m,). Pairs of equal ones are left out.
    row_thresholds: (n,) in fp32, or `None`: a row leaves out the products above its threshold.
        column_thresholds: (m,), likewise for columns.
    row_guides: Operands whose products are compared with the thresholds, see
        `threshold_similarities`; `None`: those of `rows` and `columns` are. column_guides:
        Likewise. guide_width: Width of the guides.
    weights: (n, m) with rows `weights_stride` apart; a tensor descriptor with `TMA`. weights_low:
        The same for what rounding left over, or `None`.
    TILE_M, TILE_N, TILE_K: M, N and K. GROUP: How many rows of tiles share columns, see `tile_at`.
    TMA: Whether Hopper's copy engine moves operands and weights.
    SPLIT_SCALE: Use both values of `log2_scale`. One alone is off by up to 3e-8, all logits alike,
        which does not cancel against the positives: 3e-6 of a log-sum-exp near 100.

Kernel parameters are typed by Triton at the launch; `Block.arguments` has those of all sweeps.

A peak of fp32 numbers is kept as the integer of its order, and raised by the device's maximum of
integers: which program comes first does not show in it.
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

# With a row, which is below 2^30, it is still a number of 32 bits.
NO_DIAGONAL = 2**30
"""The offset that puts the diagonal outside every block: no positives here."""

_NONE = tl.constexpr(-(2**31))
_LOG2_E = tl.constexpr(1.4426950408889634)


class TileIndex(NamedTuple):
    """Which tile of a block, by rows and columns of tiles, and how large the block is."""

    row: Any
    column: Any
    num_rows: Any
    num_columns: Any


@triton.jit
def tile_at(
    program, num_rows, num_columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr
):
    """Return the tile of a program: down `GROUP` rows of tiles, then to the next column.

    Programs that run at the same time then share operands in L2: about `2 sqrt(GROUP * running)`
    slabs for `running` tiles, not `running + 1`.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    in_band = GROUP * column_tiles
    first = program // in_band * GROUP
    band = min(row_tiles - first, GROUP)  # the last one may be lower
    row = first + program % in_band % band
    return TileIndex(row, program % in_band // band, num_rows, num_columns)


@triton.jit
def indices(tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return which rows and columns of its block a tile has, (M,) and (N,)."""
    row = tile.row * TILE_M + tl.arange(0, TILE_M)
    return row, tile.column * TILE_N + tl.arange(0, TILE_N)


@triton.jit
def tile_dots(
    rows,
    columns,
    tile,
    width,
    row_stride,
    column_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return `rows @ columns.T` of one tile in fp32 (M, N).

    With `TMA` the operands are tensor descriptors, otherwise pointers to rows of 16-byte aligned
    values. Rows past the end come out as zero or as the last row once more; the caller masks.
    """
    # "tf32" is for fp32 operands: all others are multiplied as they are.
    dots = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if TMA:
        for k in range(0, width, TILE_K):
            left = rows.load([tile.row * TILE_M, k])
            right = columns.load([tile.column * TILE_N, k])
            dots = tl.dot(left, right.T, dots, input_precision="tf32")
    else:
        # Rows past the end read the last one again, so that no load needs a mask.
        row, column = indices(tile, TILE_M, TILE_N)
        row, column = tl.minimum(row, tile.num_rows - 1), tl.minimum(column, tile.num_columns - 1)
        inner = tl.arange(0, TILE_K)
        # 64 bits: a batch of 2^22 rows of width 512 is already past 2^31 values.
        left_at = rows + row.to(tl.int64)[:, None] * row_stride + inner[None, :]
        right_at = columns + column.to(tl.int64)[None, :] * column_stride + inner[:, None]
        for _ in range(0, width, TILE_K):
            dots = tl.dot(tl.load(left_at), tl.load(right_at), dots, input_precision="tf32")
            left_at += TILE_K
            right_at += TILE_K
    return dots


@triton.jit
def shifted(dots, log2_scale, shift, SPLIT_SCALE: tl.constexpr):
    """Return logits in powers of two, less a shift."""
    logits = dots * tl.load(log2_scale) - shift
    if SPLIT_SCALE:  # last, because what matters most is near 0 by now
        logits += dots * tl.load(log2_scale + 1)
    return logits


@triton.jit
def stored_at(stored, stride, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return where the products of one tile are kept (M, N), and which of them there are.

    Rows have room for a multiple of 16 values, which keeps loads and stores wide.
    """
    row, column = indices(tile, TILE_M, TILE_N)
    last = tl.cdiv(tile.num_columns, 16) * 16
    here = (row < tile.num_rows)[:, None] & (column < last)[None, :]
    return stored + row.to(tl.int64)[:, None] * stride + column[None, :], here


@triton.jit
def load_some(vector, index, length):
    """Return some values of a vector, 0 past its end."""
    return tl.load(vector + index, mask=index < length, other=0)


@triton.jit
def negative_mask(tile, row, column, diagonal):
    """Return which values of a tile are negatives (M, N)."""
    inside = (row < tile.num_rows)[:, None] & (column < tile.num_columns)[None, :]
    return inside & (row[:, None] + diagonal != column[None, :])


@triton.jit
def differ(row_ids, column_ids, tile, row, column):
    """Return which values of a tile are of two different ids (M, N)."""
    row_id = load_some(row_ids, row, tile.num_rows)
    return row_id[:, None] != load_some(column_ids, column, tile.num_columns)[None, :]


@triton.jit
def negatives(
    values, other, tile, row, column, row_ids, column_ids, diagonal, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Return the values of a tile's negatives, and `other` in place of what is none (M, N)."""
    # Positives lie at column = row + diagonal.
    top, left = tile.row * TILE_M, tile.column * TILE_N
    is_cut = (top + TILE_M > tile.num_rows) | (left + TILE_N > tile.num_columns)
    is_cut |= (top + diagonal < left + TILE_N) & (left < top + diagonal + TILE_M)
    if is_cut:  # few tiles are: the others save what the masks take
        values = tl.where(negative_mask(tile, row, column, diagonal), values, other)
    if row_ids is not None:
        values = tl.where(differ(row_ids, column_ids, tile, row, column), values, other)
    return values


@triton.jit
def above_thresholds(dots, row_thresholds, column_thresholds, tile, row, column):
    """Return which products of a tile are above their row's limit, and their column's (M, N)."""
    row_threshold = load_some(row_thresholds, row, tile.num_rows)
    column_threshold = load_some(column_thresholds, column, tile.num_columns)
    return dots > row_threshold[:, None], dots > column_threshold[None, :]


@triton.jit
def threshold_similarities(
    dots, row_guides, column_guides, tile, width, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the products that limits are for: the guides' of the tile, or else its own `dots`.

    Guides are operands as rows and columns are, with no gap between their rows, or `None`.
    """
    similarities = dots
    if row_guides is not None:  # noqa: SIM102  # one is known to the compiler, one is not
        # Always so. On 10.0, Triton 3.7 cannot compile the reductions to come (of one dimension, as
        # those of flags are) where it sees that they use a product straight from tensor memory.
        if width > 0:
            similarities = tile_dots(
                row_guides, column_guides, tile, width, width, width, TILE_M, TILE_N, TILE_K, TMA
            )
    return similarities


@triton.jit
def store_of_rows(to, values, tile, row):
    """Store what a tile has for its rows, (tiles in a row, n)."""
    at = to + tile.column.to(tl.int64) * tile.num_rows + row
    tl.store(at, values, mask=row < tile.num_rows)


@triton.jit
def store_of_columns(to, values, tile, column):
    """Store what a tile has for its columns, (tiles in a column, m)."""
    at = to + tile.row.to(tl.int64) * tile.num_columns + column
    tl.store(at, values, mask=column < tile.num_columns)


@triton.jit
def store_weights(
    weights, weights_low, values, tile, row, column, stride, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store a tile, but for what lies past the edges, and what rounding left over of it."""
    left_over = _store_half(weights, values, tile, row, column, stride, TILE_M, TILE_N, TMA)
    if weights_low is not None:
        _store_half(weights_low, left_over, tile, row, column, stride, TILE_M, TILE_N, TMA)


@triton.jit
def _store_half(
    to, values, tile, row, column, stride, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Store a tile; return what rounding left over, in fp32."""
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
    """Return values with 0 for infinities, whose difference would be NaN."""
    return tl.where(tl.abs(values) == float("inf"), 0.0, values)


def make_peaks(like: Tensor) -> Tensor:
    """Return three peaks that nothing has raised, and a count of programs."""
    # The count starts there too, so that one fill makes all four.
    return like.new_full((4,), _NONE.value, dtype=torch.int32)


@triton.jit
def _order(bits):
    """Return bits of fp32 numbers as integers of their order, or the bits of such integers."""
    # As integers, negative numbers stand the other way round.
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def raise_peak(peak, values):
    """Raise a peak to the largest of some values (1-D, fp32)."""
    # One atomic a program. It need not order other memory: `is_last` does that.
    bits = tl.max(values, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(peak, _order(bits), sem="relaxed")


@triton.jit
def peak_of(peak):
    """Return a peak that all programs have raised."""
    # An atomic that raises nothing: a load might find an older value in its own cache.
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
