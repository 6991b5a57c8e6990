"""Log-sum-exps of the negatives of rows and columns in one sweep over the logits.

Shapes:
    M, N: rows and columns of one tile. n, m: rows and columns of the block that a launch covers.

A logit in powers of two is `x_ij = log2_scale * dot_ij`. One exponential per element serves rows
and columns, because both refer to the same scalar `t`:

    row_sums[tile column, i] = sum_{j in tile} 2^(x_ij - t),    the same over i for column_sums.

This is exact to rounding if the sum is in [2^-90, 2^119]: terms that underflow below 2^-126 are at
most 2^-36 of it, and nothing overflows. A program with a sum outside of this range (or a NaN)
recomputes its tile with a reference for each row and column, and stores logarithms instead of sums.
It multiplies again, so that the first pass holds no registers for this rare case. A second kernel
adds the tiles in float64 and in a fixed order.

The maxima of the powers give the largest logits: a sum in range has a term of at least 2^-98.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import Vectors
from lightning_mp.contrastive._tiles.triton_tiles.block import Block
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.device_functions import (
    TileIndex,
    above_thresholds,
    differ,
    finite_or_zero,
    indices,
    load_some,
    negative_mask,
    negatives,
    shifted,
    store_of_columns,
    store_of_rows,
    stored_at,
    threshold_similarities,
    tile_at,
    tile_dots,
)

__all__ = ["HIGHEST_SUM_EXPONENT", "add_lse", "lse_bytes_per_value", "lse_kernel", "merge_kernel"]

HIGHEST_SUM_EXPONENT = 119
_HIGHEST_SUM = tl.constexpr(2.0**HIGHEST_SUM_EXPONENT)
_LOWEST_SUM = tl.constexpr(2.0**-90)
_LN_2 = tl.constexpr(0.6931471805599453)
_MERGE_BLOCK = 32  # divides every tile, so the rows of a program belong to one tile
_MERGE_PARTS = 32


@triton.jit
def _log2_sum_exp2(logits, axis: tl.constexpr):
    """Return `log2(sum(2^logits))` along an axis and the largest logit.

    The sum is -inf where all are -inf, and inf where one is inf.
    """
    peak = tl.max(logits, axis)
    reference = finite_or_zero(peak)
    total = tl.sum(tl.exp2(logits - tl.expand_dims(reference, axis)), axis)
    return reference + tl.log2(total), peak


@triton.jit
def _is_outside(sums):
    """Return which sums are out of range for one reference; includes NaN."""
    return ~((sums >= _LOWEST_SUM) & (sums <= _HIGHEST_SUM))


# Not specialized for multiples of 16, because the last batch of an epoch would compile another
# kernel in the middle of training.
@triton.jit(do_not_specialize=["num_rows", "num_columns", "diagonal"])
def lse_kernel(
    rows, columns, log2_scale, reference,
    row_sums, column_sums, is_redone, row_maxima, column_maxima,
    row_ids, column_ids,
    row_thresholds, column_thresholds, row_guides, column_guides, guide_width,
    stored, stored_stride,
    num_rows, num_columns, width, row_stride, column_stride, diagonal,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, SPLIT_SCALE: tl.constexpr,
):  # fmt: skip
    """Store the sums of one tile against the scalar reference, or logarithms if one is outside.

    Args:
        reference: `t`, one fp32 value.
        row_sums: (tiles in a row, n) in fp32. column_sums: (tiles in a column, m) in fp32.
        is_redone: 1 for tiles whose sums are `log2(sum(2^x))`, otherwise 0; row by row of tiles.
        row_maxima: The largest powers, laid out as `row_sums`, or `None`; column_maxima: as
            `column_sums`. Not supported with thresholds.
        stored: (n, m) in fp32 with rows `stored_stride` apart, gets the products; or `None`.
        Others: As in `device_functions`.
    """
    tile = tile_at(tl.program_id(0), num_rows, num_columns, TILE_M, TILE_N, GROUP)
    dots = tile_dots(
        rows, columns, tile, width, row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA
    )
    if stored is not None:
        at, here = stored_at(stored, stored_stride, tile, TILE_M, TILE_N)
        tl.store(at, dots, mask=here)
    similarities = threshold_similarities(
        dots, row_guides, column_guides, tile, guide_width, TILE_M, TILE_N, TILE_K, TMA
    )
    row, column = indices(tile, TILE_M, TILE_N)
    high, low = tl.load(log2_scale), tl.load(log2_scale + 1)
    powers = tl.exp2(shifted(dots, log2_scale, tl.load(reference), SPLIT_SCALE))
    powers = negatives(
        powers, 0.0, tile, row, column, row_ids, column_ids, diagonal, TILE_M, TILE_N
    )
    row_powers, column_powers = powers, powers
    if row_guides is not None:
        by_row, by_column = above_thresholds(
            similarities, row_thresholds, column_thresholds, tile, row, column
        )
    elif row_thresholds is not None:
        # Compared as powers, because products would be a second tile in registers.
        row_threshold = load_some(row_thresholds, row, num_rows) * high
        column_threshold = load_some(column_thresholds, column, num_columns) * high
        row_threshold = tl.exp2(row_threshold - tl.load(reference))
        column_threshold = tl.exp2(column_threshold - tl.load(reference))
        # A negative scale reverses the order. NaN exceeds no threshold and remains.
        row_threshold, column_threshold = row_threshold[:, None], column_threshold[None, :]
        by_row = tl.where(high < 0, powers < row_threshold, powers > row_threshold)
        by_column = tl.where(high < 0, powers < column_threshold, powers > column_threshold)
    if row_thresholds is not None:
        row_powers = tl.where(by_row, 0.0, powers)
        column_powers = tl.where(by_column, 0.0, powers)
    row_sum, column_sum = tl.sum(row_powers, 1), tl.sum(column_powers, 0)
    store_of_rows(row_sums, row_sum, tile, row)
    store_of_columns(column_sums, column_sum, tile, column)
    if row_maxima is not None:
        store_of_rows(row_maxima, tl.max(powers, 1), tile, row)
        store_of_columns(column_maxima, tl.max(powers, 0), tile, column)
    # Past the edges sums are 0, which is not a failure.
    row_fails = _is_outside(row_sum) & (row < num_rows)
    column_fails = _is_outside(column_sum) & (column < num_columns)
    fails = tl.maximum(tl.max(row_fails.to(tl.int32), 0), tl.max(column_fails.to(tl.int32), 0))
    tl.store(is_redone + tile.row * tl.cdiv(num_columns, TILE_N) + tile.column, fails)
    if fails != 0:
        # A zero that the compiler cannot infer, so that it keeps no ids and, without the copy
        # engine, no addresses of the first pass in registers for the second.
        zero = fails - 1
        again = 0
        if not TMA:
            again = zero
        tile = TileIndex(tile.row + again, tile.column + again, num_rows, num_columns)
        dots = tile_dots(
            rows, columns, tile, width, row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA
        )
        row += again
        column += again
        keep = negative_mask(tile, row, column, diagonal)
        if row_ids is not None:
            keep &= differ(row_ids + zero, column_ids + zero, tile, row, column)
        logits = tl.where(keep, dots * high + dots * low, float("-inf"))
        row_logits, column_logits = logits, logits
        if row_thresholds is not None:
            similarities = threshold_similarities(
                dots, row_guides, column_guides, tile, guide_width, TILE_M, TILE_N, TILE_K, TMA
            )
            by_row, by_column = above_thresholds(
                similarities, row_thresholds + zero, column_thresholds + zero, tile, row, column
            )
            row_logits = tl.where(by_row, float("-inf"), logits)
            column_logits = tl.where(by_column, float("-inf"), logits)
        # Rows before columns: storing both together takes up to eight more registers.
        lse, peak = _log2_sum_exp2(row_logits, 1)
        store_of_rows(row_sums, lse, tile, row)
        if row_maxima is not None:
            store_of_rows(row_maxima, peak, tile, row)
        lse, peak = _log2_sum_exp2(column_logits, 0)
        store_of_columns(column_sums, lse, tile, column)
        if row_maxima is not None:
            store_of_columns(column_maxima, peak, tile, column)


@triton.jit(do_not_specialize=["num_rows", "num_columns", "row_fresh", "column_fresh"])
def merge_kernel(
    row_sums, column_sums, is_redone, reference,
    row_lse, column_lse,
    row_part_maxima, column_part_maxima, row_maxima, column_maxima,
    num_rows, num_columns, row_fresh, column_fresh,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the tiles' sums to the log-sum-exps of rows and columns.

    Args:
        row_sums: Output of `lse_kernel`, like column_sums, is_redone and reference.
        row_lse: (n,) natural logarithms in float64, added to in place. column_lse: (m,), likewise.
        row_part_maxima: Output of `lse_kernel`, or `None`; column_part_maxima: likewise.
        row_maxima: (n,) in float64, raised to the largest logits. column_maxima: (m,), likewise.
        num_rows: n. num_columns: m.
        row_fresh: Whether `row_lse` is uninitialized. column_fresh: Whether `column_lse` is.
        TILE_M: Rows of a tile. TILE_N: Columns. BLOCK: Rows or columns of a program.
        PARTS: Tiles that are added at a time.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    row_programs, program = tl.cdiv(num_rows, BLOCK), tl.program_id(0)
    if program < row_programs:
        first = program * BLOCK
        flags = is_redone + first // TILE_M * column_tiles
        _merge(
            row_sums, flags, reference, row_lse, row_part_maxima, row_maxima, first, num_rows,
            column_tiles, 1, row_fresh, BLOCK, PARTS,
        )  # fmt: skip
    else:
        first = (program - row_programs) * BLOCK
        flags = is_redone + first // TILE_N
        _merge(
            column_sums, flags, reference, column_lse, column_part_maxima, column_maxima, first,
            num_columns, row_tiles, column_tiles, column_fresh, BLOCK, PARTS,
        )  # fmt: skip


@triton.jit
def _merge(
    sums, flags, reference, lse, part_maxima, maxima, start, length, parts, part_step, fresh,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute `lse <- ln(e^lse + 2^t sum_p sums_p + ...)` for `BLOCK` rows or columns from `start`.

    Recomputed tiles enter as `2^value`. `sums` is (parts, length), and the flag of part `p` is at
    `p * part_step`.
    """
    index = start + tl.arange(0, BLOCK)
    here = index < length
    total = tl.zeros((BLOCK,), tl.float64)
    peak = tl.full((BLOCK,), float("-inf"), tl.float64)
    rest = tl.zeros((BLOCK,), tl.float64)  # sum over recomputed tiles, in units of 2^peak
    largest = tl.full((BLOCK,), float("-inf"), tl.float64)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        redone = tl.load(flags + part * part_step, mask=part < parts, other=0) != 0
        mask = (part < parts)[:, None] & here[None, :]
        at = part.to(tl.int64)[:, None] * length + index[None, :]
        value = tl.load(sums + at, mask=mask, other=0.0).to(tl.float64)
        # Recomputed tiles have logarithms.
        total += tl.sum(tl.where(redone[:, None], 0.0, value), 0)
        if tl.max(redone.to(tl.int32), 0) != 0:
            power = tl.where(redone[:, None] & mask, value, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(power, 0))
            base = finite_or_zero(new_peak)
            rest = rest * tl.exp2(peak - base) + tl.sum(tl.exp2(power - base[None, :]), 0)
            peak = new_peak
        if maxima is not None:
            power = tl.load(part_maxima + at, mask=mask, other=0.0).to(tl.float64)
            power = tl.where(redone[:, None], power, tl.log2(power) + tl.load(reference))
            largest = tl.maximum(largest, tl.max(tl.where(mask, power, float("-inf")), 0))
    base = finite_or_zero(peak)
    # Uninitialized values are not read, as they may be NaN.
    old = tl.load(lse + index, mask=here & (fresh == 0), other=float("-inf"))
    new = tl.log2(total) + tl.load(reference).to(tl.float64)
    both = _log2_add_exp2(new, base + tl.log2(rest))
    tl.store(lse + index, _log2_add_exp2(old / _LN_2, both) * _LN_2, mask=here)
    if maxima is not None:
        old = tl.load(maxima + index, mask=here, other=0.0)
        tl.store(maxima + index, tl.maximum(old, largest * _LN_2), mask=here)


@triton.jit
def _log2_add_exp2(left, right):
    """Return `log2(2^left + 2^right)`."""
    peak = tl.maximum(left, right)
    base = finite_or_zero(peak)
    return base + tl.log2(tl.exp2(left - base) + tl.exp2(right - base))


def lse_bytes_per_value(config: TileConfig, *, with_maxima: bool = False) -> float:
    # A sum per row and per column of a tile, as many maxima, and a flag.
    rows, columns, _ = config.tile
    return (1 + with_maxima) * (4 / rows + 4 / columns) + 4 / (rows * columns)


def add_lse(
    block: Block,
    log2_scale: Tensor,
    reference: Tensor,
    lses: Vectors,
    config: TileConfig,
) -> None:
    """Add one block to natural log-sum-exps of its negatives, in place, and store its products.

    Tiles with sums outside of `reference - 90` to `reference + 119` are computed twice.
    """
    n, m = block.shape
    # Kernels assume contiguous float64 vectors, and would silently misread others.
    for name, lse, length in zip(("rows", "columns"), lses, block.shape, strict=True):
        if lse.dtype != torch.float64 or lse.shape != (length,) or not lse.is_contiguous():
            raise ValueError(
                f"Passed the log-sum-exps of {name} of {lse.dtype}, shape {list(lse.shape)} and "
                f"strides {lse.stride()}. It must be contiguous, of float64 and of shape "
                f"[{length}]. Pass a slice of a contiguous vector."
            )
    row_tiles, column_tiles = config.tiles(n, m)
    sums = [
        log2_scale.new_empty(shape, dtype=torch.float32)
        for shape in ((column_tiles, n), (row_tiles, m))
    ]
    peaks = [None if block.maxima is None else torch.empty_like(part) for part in sums]
    is_redone = log2_scale.new_empty(row_tiles * column_tiles, dtype=torch.int32)
    lse_kernel[(row_tiles * column_tiles,)](
        **block.arguments(config), **block.threshold_arguments(config), log2_scale=log2_scale,
        reference=reference, row_sums=sums[0], column_sums=sums[1], is_redone=is_redone,
        row_maxima=peaks[0], column_maxima=peaks[1],
    )  # fmt: skip
    merge_kernel[(triton.cdiv(n, _MERGE_BLOCK) + triton.cdiv(m, _MERGE_BLOCK),)](
        *sums, is_redone, reference, *lses, *peaks, *(block.maxima or (None, None)),
        n, m, *map(int, block.fresh), TILE_M=config.tile[0], TILE_N=config.tile[1],
        BLOCK=_MERGE_BLOCK, PARTS=_MERGE_PARTS, enable_fp_fusion=True,
        # By default, the compiler aims at 64 registers and spills 8 bytes on sm_80, 86 and 89.
        maxnreg=128,
    )  # fmt: skip
