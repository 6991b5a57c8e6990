"""The sigmoid of the negatives of one block of the logits, and their part of the loss.

Shapes:
    M, N: rows and columns of one tile. n, m: rows and columns of the block that a launch covers.

With `x_ij = log2_scale * dot_ij + log2_bias` and `u = 2^-|x|`, which is at most 1,

    sigmoid = (1 if x >= 0 else u) / (1 + u),    softplus = ln(2) (max(x, 0) + log2(1 + u)),

with one exponential per element, and `log2(1 + u)` as `u` times a polynomial. Nothing overflows,
and both keep their digits for small `u`. Triton's logarithm is a subroutine that spills registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.triton_tiles.block import Block, Weights
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.device_functions import (
    indices,
    negatives,
    shifted,
    store_of_columns,
    store_of_rows,
    store_weights,
    tile_at,
    tile_dots,
)

__all__ = ["add_sigmoid", "sigmoid_kernel"]

_LN_2 = 0.6931471805599453


@triton.jit
def _log2_1p(u):
    """Return `log2(1 + u)` for `u` in [0, 1], with a relative error of 2e-7."""
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


# `num_columns` is specialized, because a mask that ends at a multiple of 16 allows wide stores.
@triton.jit(do_not_specialize=["num_rows", "diagonal"])
def sigmoid_kernel(
    rows, columns, log2_scale, log2_bias, factor,
    sums, row_maxima, column_maxima,
    weights, weights_low,
    row_ids, column_ids,
    num_rows, num_columns, width, row_stride, column_stride, weights_stride, diagonal,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, SPLIT_SCALE: tl.constexpr,
):  # fmt: skip
    """Store the sigmoids of one tile times `factor`, and the sums of losses and sigmoids.

    Args:
        log2_bias: The bias times log2(e), one fp32 value.
        factor: A power of two that keeps small values in the normal range of fp16.
        sums: (2, tiles) in fp32: `softplus / ln(2)` and the sigmoids of a tile's negatives.
        row_maxima: (tiles in a row, n) in fp32, the largest `x`, or `None`; column_maxima: (tiles
            in a column, m).
        Others: As in `device_functions`.
    """
    tile = tile_at(tl.program_id(0), num_rows, num_columns, TILE_M, TILE_N, GROUP)
    dots = tile_dots(
        rows, columns, tile, width, row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA
    )
    row, column = indices(tile, TILE_M, TILE_N)
    x = shifted(dots, log2_scale, -tl.load(log2_bias), SPLIT_SCALE)
    x = negatives(
        x, float("-inf"), tile, row, column, row_ids, column_ids, diagonal, TILE_M, TILE_N
    )
    if row_maxima is not None:
        store_of_rows(row_maxima, tl.max(x, 1), tile, row)
        store_of_columns(column_maxima, tl.max(x, 0), tile, column)
    # Masked pairs are -inf, and add 0 to both sums.
    u = tl.exp2(-tl.abs(x))
    losses = tl.maximum(x, 0.0) + _log2_1p(u)
    values = tl.where(x >= 0.0, 1.0, u) / (1.0 + u)
    at = sums + tile.row * tl.cdiv(num_columns, TILE_N) + tile.column
    tl.store(at, tl.sum(tl.sum(losses, 1), 0))
    tl.store(at + tl.num_programs(0), tl.sum(tl.sum(values, 1), 0))
    values *= factor
    store_weights(
        weights, weights_low, values, tile, row, column, weights_stride, TILE_M, TILE_N, TMA
    )


def add_sigmoid(
    block: Block,
    log2_scale: Tensor,
    log2_bias: Tensor,
    totals_2: Tensor,
    weights: Weights,
    config: TileConfig,
) -> None:
    """Write the sigmoids of one block, and add its `softplus` and sigmoids to `totals_2`.

    `config` is a row of the table for `"softmax_wide"`, which needs as many registers.
    """
    (n, m), (row_tiles, column_tiles) = block.shape, config.tiles(*block.shape)
    sums = log2_scale.new_empty(2, row_tiles * column_tiles, dtype=torch.float32)
    shapes = ((column_tiles, n), (row_tiles, m))
    peaks = [None if block.maxima is None else sums.new_empty(shape) for shape in shapes]
    sigmoid_kernel[(row_tiles * column_tiles,)](
        **block.arguments(config), **weights.arguments(config), log2_scale=log2_scale,
        log2_bias=log2_bias, factor=2.0**weights.exponent, sums=sums, row_maxima=peaks[0],
        column_maxima=peaks[1],
    )  # fmt: skip
    if block.maxima is not None:
        # The kernel's maxima are those of `x`, which includes the bias.
        row_n, column_m = (peak.amax(0).double() - log2_bias for peak in peaks if peak is not None)
        block.maxima.raise_to(row_n, column_m, _LN_2)
    # Summed in a fixed order, unlike atomics.
    parts_2 = sums.sum(1, dtype=totals_2.dtype)
    parts_2[0] *= _LN_2
    totals_2.add_(parts_2)
