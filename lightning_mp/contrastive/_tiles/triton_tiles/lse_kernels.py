"""Log-sum-exps of the negatives of rows and columns in one sweep over the logits.

Shapes:
    M, N: rows and columns of one tile. n, m: rows and columns of the block that a launch covers.

A logit in powers of two is `x_ij = log2_scale * dot_ij`. One exponential an element serves rows and
columns alike because both refer to the same scalar `t`:

    row_sums[tile column, i] = sum_{j in tile} 2^(x_ij - t),    the same over i for column_sums.

That is exact to rounding while the sum lies in [2^-90, 2^119]: terms that are lost below 2^-126 are
2^-36 of it, and nothing overflows. A program that finds a sum outside (or a NaN) does its tile once
more, with a reference for each row and each column, and stores finished logarithms in the place of
sums. It multiplies again, so that the first pass keeps nothing in registers for a second that is
rare. `merge_kernels` adds the tiles.

The largest logits, where they are wanted, are those of the same powers: a sum in range has a term
of 2^-98 at least.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import Ids, Maxima
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.dot import (
    above,
    differ,
    judged,
    keep_mask,
    kept_at,
    tile_at,
    tile_dots,
    tile_is_cut,
)
from lightning_mp.contrastive._tiles.triton_tiles.launch import (
    BlockLimits,
    as_kept,
    as_limits,
    as_operands,
    diagonal_offset,
)
from lightning_mp.contrastive._tiles.triton_tiles.merge_kernels import merge_kernel

__all__ = ["HIGHEST_SUM_EXPONENT", "add_lse", "lse_bytes_per_value", "lse_kernel"]

HIGHEST_SUM_EXPONENT = 119
_HIGHEST_SUM = tl.constexpr(2.0**HIGHEST_SUM_EXPONENT)
_LOWEST_SUM = tl.constexpr(2.0**-90)
_MERGE_BLOCK = 32
_MERGE_PARTS = 32


@triton.jit
def _log2_sum_exp2(logits, axis: tl.constexpr):
    """Return `log2(sum(2^logits))` along an axis and the largest logit.

    The sum is -inf where all are -inf, and inf where one is inf.
    """
    peak = tl.max(logits, axis)
    reference = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    total = tl.sum(tl.exp2(logits - tl.expand_dims(reference, axis)), axis)
    return reference + tl.log2(total), peak


@triton.jit(do_not_specialize=["num_rows", "num_columns", "diagonal"])
def lse_kernel(
    rows,
    columns,
    log2_scale,
    reference,
    row_sums,
    column_sums,
    is_redone,
    row_maxima,
    column_maxima,
    row_ids,
    column_ids,
    row_limits,
    column_limits,
    row_guides,
    column_guides,
    guide_width,
    kept,
    kept_stride,
    num_rows,
    num_columns,
    width,
    row_stride,
    column_stride,
    diagonal,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT_SCALE: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Store the sums of one tile against the scalar reference, or logarithms if one is outside.

    Args:
        log2_scale: Two fp32 values whose sum is the scale times log2(e).
        reference: `t`, one fp32 value.
        row_sums: (tiles in a row, n) in fp32. column_sums: (tiles in a column, m) in fp32.
        is_redone: 0 or 1 for each tile, row by row of tiles: 1 has `log2(sum(2^x))` for sums.
        row_maxima: The largest powers, laid out as `row_sums`; column_maxima: as `column_sums`.
            Not touched without `MAXIMA`.
        row_ids: (n,) int32, or `None`; column_ids: (m,). Pairs of equal ones are left out.
        row_limits: (n,) in fp32, or `None`: the products that rows leave out are above; they are
            not with `MAXIMA`. column_limits: (m,): those that columns leave out.
        row_guides: What makes the products that limits are for, see `judged`; `None`: `rows` do.
            column_guides: Likewise. guide_width: Theirs.
        kept: (n, m) in fp32 with rows `kept_stride` apart, gets the products; or `None`.
        SPLIT_SCALE: Use both values of `log2_scale`. One alone is off by up to 3e-8, all logits
            alike, which does not cancel against the positives: 3e-6 of a log-sum-exp near 100.
        MAXIMA: The largest powers are wanted, too.
        Others: As in `dot`.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP)
    dots = tile_dots(
        rows, columns, row_tile, column_tile, num_rows, num_columns, width,
        row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA,
    )  # fmt: skip
    if kept is not None:
        at, here = kept_at(
            kept, kept_stride, row_tile, column_tile, num_rows, num_columns, TILE_M, TILE_N
        )
        tl.store(at, dots, mask=here)
    similarities = judged(
        dots, row_guides, column_guides, row_tile, column_tile, num_rows, num_columns,
        guide_width, TILE_M, TILE_N, TILE_K, TMA,
    )  # fmt: skip
    row = row_tile * TILE_M + tl.arange(0, TILE_M)
    column = column_tile * TILE_N + tl.arange(0, TILE_N)
    high, low = tl.load(log2_scale), tl.load(log2_scale + 1)
    powers = dots * high - tl.load(reference)
    if SPLIT_SCALE:
        powers += dots * low
    powers = tl.exp2(powers)
    if tile_is_cut(row_tile, column_tile, num_rows, num_columns, diagonal, TILE_M, TILE_N):
        powers = tl.where(keep_mask(row, column, num_rows, num_columns, diagonal), powers, 0.0)
    if row_ids is not None:
        differs = differ(row_ids, column_ids, row, column, num_rows, num_columns)
        powers = tl.where(differs, powers, 0.0)
    row_here, column_here = row < num_rows, column < num_columns
    if row_guides is not None:
        by_row, by_column = above(
            similarities, row_limits, column_limits, row, column, num_rows, num_columns
        )
        row_sum = tl.sum(tl.where(by_row, 0.0, powers), 1)
        column_sum = tl.sum(tl.where(by_column, 0.0, powers), 0)
    elif row_limits is not None:
        # Limits as powers: products held until here would be a second tile in registers.
        row_limit = tl.load(row_limits + row, mask=row_here, other=0.0) * high
        column_limit = tl.load(column_limits + column, mask=column_here, other=0.0) * high
        row_limit = tl.exp2(row_limit - tl.load(reference))
        column_limit = tl.exp2(column_limit - tl.load(reference))
        # Powers of a negative scale have the other order.
        by_row = (powers > row_limit[:, None]) != (high < 0)
        by_column = (powers > column_limit[None, :]) != (high < 0)
        row_sum = tl.sum(tl.where(by_row, 0.0, powers), 1)
        column_sum = tl.sum(tl.where(by_column, 0.0, powers), 0)
    else:
        row_sum, column_sum = tl.sum(powers, 1), tl.sum(powers, 0)
    tl.store(row_sums + column_tile.to(tl.int64) * num_rows + row, row_sum, mask=row_here)
    tl.store(
        column_sums + row_tile.to(tl.int64) * num_columns + column, column_sum, mask=column_here
    )
    if MAXIMA:
        row_at = row_maxima + column_tile.to(tl.int64) * num_rows + row
        tl.store(row_at, tl.max(powers, 1), mask=row_here)
        column_at = column_maxima + row_tile.to(tl.int64) * num_columns + column
        tl.store(column_at, tl.max(powers, 0), mask=column_here)
    # Comparisons with NaN are false.
    row_fails = row_here & ~((row_sum >= _LOWEST_SUM) & (row_sum <= _HIGHEST_SUM))
    column_fails = column_here & ~((column_sum >= _LOWEST_SUM) & (column_sum <= _HIGHEST_SUM))
    fails = tl.maximum(tl.max(row_fails.to(tl.int32), 0), tl.max(column_fails.to(tl.int32), 0))
    tile = row_tile * column_tiles + column_tile
    tl.store(is_redone + tile, fails)
    if fails != 0:
        # A zero that no compiler knows of: so it keeps no ids and, without the copy engine, no
        # addresses of the first pass in registers for the second.
        zero = fails - 1
        again = 0
        if not TMA:
            again = zero
        dots = tile_dots(
            rows, columns, row_tile + again, column_tile + again, num_rows, num_columns, width,
            row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA,
        )  # fmt: skip
        row += again
        column += again
        keep = keep_mask(row, column, num_rows, num_columns, diagonal)
        if row_ids is not None:
            keep &= differ(row_ids + zero, column_ids + zero, row, column, num_rows, num_columns)
        logits = tl.where(keep, dots * high + dots * low, float("-inf"))
        row_place = column_tile.to(tl.int64) * num_rows + row
        row_logits, column_logits = logits, logits
        if row_limits is not None:
            similarities = judged(
                dots, row_guides, column_guides, row_tile + again, column_tile + again, num_rows,
                num_columns, guide_width, TILE_M, TILE_N, TILE_K, TMA,
            )  # fmt: skip
            by_row, by_column = above(
                similarities, row_limits + zero, column_limits + zero, row, column, num_rows,
                num_columns,
            )  # fmt: skip
            row_logits = tl.where(by_row, float("-inf"), logits)
            column_logits = tl.where(by_column, float("-inf"), logits)
        lse, peak = _log2_sum_exp2(row_logits, 1)
        tl.store(row_sums + row_place, lse, mask=row_here)
        if MAXIMA:
            tl.store(row_maxima + row_place, peak, mask=row_here)
        column_place = row_tile.to(tl.int64) * num_columns + column
        lse, peak = _log2_sum_exp2(column_logits, 0)
        tl.store(column_sums + column_place, lse, mask=column_here)
        if MAXIMA:
            tl.store(column_maxima + column_place, peak, mask=column_here)


def lse_bytes_per_value(config: TileConfig, *, with_maxima: bool = False) -> float:
    """Return the bytes of workspace that `add_lse` needs for each logit of its block."""
    rows, columns, _ = config.tile
    return (1 + with_maxima) * (4 / rows + 4 / columns) + 4 / (rows * columns)


def add_lse(
    rows_nk: Tensor,
    columns_mk: Tensor,
    log2_scale: Tensor,
    reference: Tensor,
    row_lse_n: Tensor,
    column_lse_m: Tensor,
    diagonal: int | None,
    config: TileConfig,
    *,
    split_scale: bool,
    maxima: Maxima | None = None,
    ids: Ids | None = None,
    limits: BlockLimits | None = None,
    fresh: tuple[bool, bool] = (False, False),
    kept_nm: Tensor | None = None,
) -> None:
    """Add one block to the log-sum-exps of its negatives, in place.

    Args:
        rows_nk: Rows, padded and aligned as `make_operand` does it.
        columns_mk: Columns, likewise.
        log2_scale: Scale times log2(e) as the sum of two fp32 values.
        reference: One fp32 value `t`; tiles outside `t - 90` to `t + 119` are done twice.
        row_lse_n: Natural log-sum-exps of the rows in float64; 1-D and contiguous.
        column_lse_m: Those of the columns.
        diagonal: The positive of row `i` is column `i + diagonal`; `None` for no positives.
        config: A row of the table for the kernel `"lse"`.
        split_scale: Use both values of `log2_scale`.
        maxima: Largest logits of the block's rows and columns to raise; `None` if not wanted.
        ids: Of the block's rows and columns, int32; pairs of equal ones are left out.
        limits: Similarities above which rows and columns leave a pair out; not with `maxima`.
        fresh: Whether the log-sum-exps of rows and of columns hold nothing yet.
        kept_nm: Gets the products of rows and columns, in fp32, for `write_softmax`.

    Raises:
        ValueError: Operands, log-sum-exps or `kept_nm` have another layout.
    """
    n, m = rows_nk.shape[0], columns_mk.shape[0]
    operands = as_operands(rows_nk, columns_mk, config)
    for name, lse, length in (("row_lse_n", row_lse_n, n), ("column_lse_m", column_lse_m, m)):
        if lse.dtype != torch.float64 or lse.shape != (length,) or not lse.is_contiguous():
            raise ValueError(
                f"Passed `{name}` of {lse.dtype}, shape {list(lse.shape)} and strides "
                f"{lse.stride()}. It must be contiguous, of float64 and of shape [{length}]. Pass "
                "a slice of a contiguous vector."
            )
    tile_m, tile_n, _ = config.tile
    row_tiles, column_tiles = triton.cdiv(n, tile_m), triton.cdiv(m, tile_n)
    tiles = row_tiles * column_tiles
    row_sums = rows_nk.new_empty(column_tiles, n, dtype=torch.float32)
    column_sums = rows_nk.new_empty(row_tiles, m, dtype=torch.float32)
    part_maxima: tuple[Tensor | None, ...] = (None, None)
    if maxima is not None:
        part_maxima = torch.empty_like(row_sums), torch.empty_like(column_sums)
    is_redone = rows_nk.new_empty(tiles, dtype=torch.int32)
    offset = diagonal_offset(diagonal, n, m)
    sizes = (
        *(ids or (None, None)), *as_limits(limits, config), *as_kept(kept_nm, (n, m)), n, m,
        rows_nk.shape[1], rows_nk.stride(0), columns_mk.stride(0), offset,
    )  # fmt: skip
    lse_kernel[(tiles,)](
        *operands, log2_scale, reference, row_sums, column_sums, is_redone, *part_maxima, *sizes,
        GROUP=config.group, SPLIT_SCALE=split_scale, MAXIMA=maxima is not None, **config.shape,
        **config.options,
    )  # fmt: skip
    totals: tuple[Tensor | None, ...] = (None, None) if maxima is None else maxima
    merge_kernel[(triton.cdiv(n, _MERGE_BLOCK) + triton.cdiv(m, _MERGE_BLOCK),)](
        row_sums, column_sums, is_redone, reference, row_lse_n, column_lse_m,
        *part_maxima, *totals, n, m, *map(int, fresh), TILE_M=tile_m, TILE_N=tile_n,
        BLOCK=_MERGE_BLOCK, PARTS=_MERGE_PARTS, MAXIMA=maxima is not None, enable_fp_fusion=True,
    )  # fmt: skip
