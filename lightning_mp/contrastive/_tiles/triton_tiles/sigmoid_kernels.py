"""The sigmoid of the negatives of one block of the logits, and what they add to the loss.

Shapes:
    M, N: rows and columns of one tile. n, m: rows and columns of the block that a launch covers.

With `x_ij = log2_scale * dot_ij + log2_bias` and `u = 2^-|x|`, which is at most 1,

    sigmoid = (1 if x >= 0 else u) / (1 + u),    softplus = ln(2) (max(x, 0) + log2(1 + u)),

one exponential an element, and `log2(1 + u)` as `u` times a polynomial: nothing overflows, and
where `u` is small both keep its digits. Triton's own logarithm is a subroutine that spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import Ids, Maxima
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.dot import (
    differ,
    keep_mask,
    tile_at,
    tile_dots,
    tile_is_cut,
)
from lightning_mp.contrastive._tiles.triton_tiles.launch import (
    as_operands,
    as_targets,
    diagonal_offset,
)
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import store_tile

__all__ = ["add_sigmoid", "sigmoid_kernel"]

_LN_2 = 0.6931471805599453


@triton.jit
def _log2_1p(u):
    """Return `log2(1 + u)` for `u` in [0, 1], to 2e-7 of itself."""
    # log2(1 + u) / u, interpolated at Chebyshev's nodes of degree 8.
    value = 0.00739540209 * u - 0.0419450087
    value = value * u + 0.111832074
    value = value * u - 0.196238952
    value = value * u + 0.275221212
    value = value * u - 0.35829907
    value = value * u + 0.48067889
    value = value * u - 0.721339513
    value = value * u + 1.44269499
    return value * u


# `num_columns` is left to be specialised: a mask that ends at a multiple of 16 keeps stores wide.
@triton.jit(do_not_specialize=["num_rows", "diagonal"])
def sigmoid_kernel(
    rows,
    columns,
    log2_scale,
    log2_bias,
    factor,
    sums,
    row_maxima,
    column_maxima,
    weights,
    weights_low,
    row_ids,
    column_ids,
    num_rows,
    num_columns,
    width,
    row_stride,
    column_stride,
    weights_stride,
    diagonal,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT_SCALE: tl.constexpr,
    LOW: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Store the sigmoids of one tile times `factor`, and the sums of losses and sigmoids.

    Args:
        log2_scale: Two fp32 values whose sum is the scale times log2(e).
        log2_bias: The bias times log2(e), one fp32 value.
        factor: A power of two that keeps small values among fp16's normal numbers.
        sums: (2, tiles) in fp32: `softplus / ln(2)` and the sigmoids of a tile's negatives.
        row_maxima: (tiles in a row, n) in fp32, the largest `x`; column_maxima: (tiles in a column,
            m). Not touched without `MAXIMA`.
        weights: (n, m) with rows `weights_stride` apart; a tensor descriptor with `TMA`.
        weights_low: The same for what rounding left over; not touched without `LOW`.
        row_ids: (n,) int32, or `None`; column_ids: (m,). Pairs of equal ones are left out.
        SPLIT_SCALE: Use both values of `log2_scale`. LOW: Store two halves.
        MAXIMA: The largest `x` are wanted, too.
        Others: As in `dot`.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP)
    dots = tile_dots(
        rows, columns, row_tile, column_tile, num_rows, num_columns, width,
        row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA,
    )  # fmt: skip
    row = row_tile * TILE_M + tl.arange(0, TILE_M)
    column = column_tile * TILE_N + tl.arange(0, TILE_N)
    x = dots * tl.load(log2_scale) + tl.load(log2_bias)
    if SPLIT_SCALE:  # last, because what matters most is near 0 by now
        x += dots * tl.load(log2_scale + 1)
    if tile_is_cut(row_tile, column_tile, num_rows, num_columns, diagonal, TILE_M, TILE_N):
        keep = keep_mask(row, column, num_rows, num_columns, diagonal)
        x = tl.where(keep, x, float("-inf"))
    if row_ids is not None:
        differs = differ(row_ids, column_ids, row, column, num_rows, num_columns)
        x = tl.where(differs, x, float("-inf"))
    if MAXIMA:
        row_at = row_maxima + column_tile.to(tl.int64) * num_rows + row
        tl.store(row_at, tl.max(x, 1), mask=row < num_rows)
        column_at = column_maxima + row_tile.to(tl.int64) * num_columns + column
        tl.store(column_at, tl.max(x, 0), mask=column < num_columns)
    u = tl.exp2(-tl.abs(x))
    tile = row_tile * column_tiles + column_tile
    losses = tl.maximum(x, 0.0) + _log2_1p(u)
    tl.store(sums + tile, tl.sum(tl.sum(losses, 1), 0))
    values = tl.where(x >= 0.0, 1.0, u) / (1.0 + u)
    tl.store(sums + row_tiles * column_tiles + tile, tl.sum(tl.sum(values, 1), 0))
    left_over = store_tile(
        weights, values * factor, row, column, row_tile, column_tile, num_rows, num_columns,
        weights_stride, TILE_M, TILE_N, TMA,
    )  # fmt: skip
    if LOW:
        store_tile(
            weights_low, left_over, row, column, row_tile, column_tile, num_rows, num_columns,
            weights_stride, TILE_M, TILE_N, TMA,
        )  # fmt: skip


def add_sigmoid(
    rows_nk: Tensor,
    columns_mk: Tensor,
    log2_scale: Tensor,
    log2_bias: Tensor,
    totals_2: Tensor,
    weights_nm: Tensor,
    low_nm: Tensor | None,
    diagonal: int | None,
    config: TileConfig,
    *,
    exponent: int,
    split_scale: bool,
    maxima: Maxima | None = None,
    ids: Ids | None = None,
) -> None:
    """Write the sigmoids of one block, and add its sums to the totals in a fixed order.

    Args:
        rows_nk: Rows, padded and aligned as `make_operand` does it.
        columns_mk: Columns, likewise.
        log2_scale: Scale times log2(e) as the sum of two fp32 values.
        log2_bias: Bias times log2(e), one fp32 value.
        totals_2: Gets the sums of `softplus` and of the sigmoids; in float64.
        weights_nm: Where to write the sigmoids times `2^exponent`; rows 16-byte aligned.
        low_nm: Where to write what rounding to `weights_nm` leaves over, laid out alike.
        diagonal: The positive of row `i` is column `i + diagonal`; `None` for no positives.
        config: A row of the table for the kernel `"softmax_wide"`.
        exponent: See `weights_nm`.
        split_scale: Use both values of `log2_scale`.
        maxima: Largest logits of the block's rows and columns to raise, without the bias.
        ids: Of the block's rows and columns, int32; pairs of equal ones are left out.

    Raises:
        ValueError: Operands or weights have another layout.
    """
    n, m = rows_nk.shape[0], columns_mk.shape[0]
    targets = as_targets(weights_nm, low_nm, (n, m), config)
    tile_m, tile_n, _ = config.tile
    row_tiles, column_tiles = triton.cdiv(n, tile_m), triton.cdiv(m, tile_n)
    tiles = row_tiles * column_tiles
    sums = rows_nk.new_empty(2, tiles, dtype=torch.float32)
    shapes = ((column_tiles, n), (row_tiles, m))
    peaks = [None if maxima is None else sums.new_empty(shape) for shape in shapes]
    row_ids, column_ids = (None, None) if ids is None else ids
    sigmoid_kernel[(tiles,)](
        *as_operands(rows_nk, columns_mk, config), log2_scale, log2_bias, 2.0**exponent, sums,
        *peaks, *targets, row_ids, column_ids, n, m, rows_nk.shape[1], rows_nk.stride(0),
        columns_mk.stride(0), weights_nm.stride(0), diagonal_offset(diagonal, n, m),
        GROUP=config.group, SPLIT_SCALE=split_scale, LOW=low_nm is not None,
        MAXIMA=maxima is not None, **config.shape, **config.options,
    )  # fmt: skip
    if maxima is not None:
        row_n, column_m = (peak.amax(0).double() - log2_bias for peak in peaks if peak is not None)
        maxima.raise_to(row_n, column_m, _LN_2)
    parts_2 = sums.sum(1, dtype=totals_2.dtype)
    parts_2[0] *= _LN_2
    totals_2.add_(parts_2)
