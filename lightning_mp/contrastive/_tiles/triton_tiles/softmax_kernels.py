"""The softmax of the negatives by rows plus that by columns, for one block of the logits.

Shapes:
    M, N: rows and columns of one tile. n, m: rows and columns of the block that a launch covers.

With `x_ij = log2_scale * dot_ij`, row and column log-sum-exps `r_i`, `c_j` in powers of two, and a
power of two `2^s` that keeps small values in the normal range of fp16,

    P_ij = 2^s (2^(x_ij - r_i) + 2^(x_ij - c_j)),    0 at positives.

One exponential per element is enough if the log-sum-exps are close together:

    P_ij = 2^(x_ij - p_i) (g_i + u_i v_j),    g_i = 2^(p_i - (r_i - s)), u_i = g_i 2^(r_i - t),
                                              v_j = 2^(t - c_j), any t.

`p_i` is `r_i - s` rounded to fp32. Near 100 the error is up to 4e-6, equal for a whole row; the
gain `g_i` corrects it at no cost.

If `r_i - c_j` reached 90, the exponential could underflow below 2^-126 while the column's softmax
is 2^-36, and the factors could overflow. A flag on the device then selects a variant with two
exponentials: both variants are launched, one returns at once, and the host does not wait. Small
shards, whose time is that of the host, launch only the variant with two exponentials.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import Vectors
from lightning_mp.contrastive._tiles.triton_tiles.block import Block, Weights
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.device_functions import (
    above_thresholds,
    indices,
    is_last,
    load_some,
    make_peaks,
    negatives,
    peak_of,
    raise_peak,
    shifted,
    store_log2_scale,
    store_weights,
    stored_at,
    threshold_similarities,
    tile_at,
    tile_dots,
)

__all__ = ["SoftmaxFactors", "factors_kernel", "softmax_kernel", "write_softmax"]

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 128
_ALIGNMENT = 4  # fp32 values: vectors are aligned to 16 bytes for wide loads


@triton.jit
def _store_rounded(power, gain, values, index, here):
    """Store values in fp32 and gains that correct their rounding; return the gains in float64."""
    rounded = values.to(tl.float32)
    lost = rounded.to(tl.float64) - values
    # Infinite values have no rounding error.
    gains = tl.where(lost == lost, tl.exp2(lost), 1.0)
    tl.store(power + index, rounded, here)
    tl.store(gain + index, gains.to(tl.float32), here)
    return gains


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def factors_kernel(
    row_lse, column_lse, scale,
    row_power, row_gain, row_factor, column_power, column_gain, column_factor,
    is_wide, log2_scale, peaks,
    num_rows, num_columns,
    EXPONENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the vectors of `SoftmaxFactors`; the last program decides whether they are accurate.

    Args:
        row_lse: (n,) natural log-sum-exps in float64. column_lse: (m,). scale: One value.
        row_power: `p_i`; row_gain: `g_i`; row_factor: `u_i`; see `softmax_kernel`.
        column_power: `c_j - s` rounded; column_gain: its gain; column_factor: `v_j`.
        is_wide: Output: 1 if two exponentials are needed, otherwise 0.
        log2_scale: Output: scale times log2(e) as the sum of two fp32 values.
        peaks: Distances from `t` up to the largest row and down to the smallest column. `None`:
            two exponentials in any case.
        num_rows: n. num_columns: m.
        EXPONENT: `s`. BLOCK: Rows, and columns, of a program.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_here, column_here = index < num_rows, index < num_columns
    rows = load_some(row_lse, index, num_rows) * _LOG2_E
    columns = load_some(column_lse, index, num_columns) * _LOG2_E
    # Any `t` is valid; the first row's needs no search.
    middle = tl.load(row_lse) * _LOG2_E
    gains = _store_rounded(row_power, row_gain, rows - EXPONENT, index, row_here)
    _store_rounded(column_power, column_gain, columns - EXPONENT, index, column_here)
    rise, fall = rows - middle, middle - columns
    tl.store(row_factor + index, (gains * tl.exp2(rise)).to(tl.float32), row_here)
    tl.store(column_factor + index, tl.exp2(fall).to(tl.float32), column_here)
    if tl.program_id(0) == 0:
        store_log2_scale(log2_scale, scale)
        if peaks is None:
            tl.store(is_wide, 1)
    if peaks is not None:
        # Factors must be normal numbers. NaN and infinities select the wide variant.
        rise = tl.where(tl.abs(rise) < 120.0, rise, float("inf")).to(tl.float32)
        fall = tl.where(tl.abs(fall) < 120.0, fall, float("inf")).to(tl.float32)
        raise_peak(peaks, tl.where(row_here, rise, float("-inf")))
        # Columns without a term have an infinite log-sum-exp and a factor of 0: accurate.
        has_term = column_here & (columns != float("inf"))
        raise_peak(peaks + 1, tl.where(has_term, fall, float("-inf")))
        if is_last(peaks):
            tl.store(is_wide, 1 - (peak_of(peaks) + peak_of(peaks + 1) < 90.0).to(tl.int32))


@dataclass(frozen=True)
class SoftmaxFactors:
    """The vectors that determine the softmax values of a whole shard, in fp32."""

    rows_3n: Tensor  # `p_i`, `g_i` and `u_i`
    columns_3m: Tensor  # `c_j - s` rounded, its gain, and `v_j`
    is_wide: Tensor  # one int32 on the device: 1 if two exponentials are needed
    log2_scale: Tensor  # scale times log2(e) as the sum of two values

    @classmethod
    def of(
        cls, lses: Vectors, scale: Tensor, exponent: int, *, always_wide: bool = False
    ) -> "SoftmaxFactors":
        """Compute the vectors from natural log-sum-exps in float64, including positives.

        `exponent` is `s`; `always_wide` selects the variant with two exponentials without a check.
        """
        b, m = map(len, lses)
        rows_3n, columns_3m = (
            lses.rows_b.new_empty(3, -(-n // _ALIGNMENT) * _ALIGNMENT, dtype=torch.float32)[:, :n]
            for n in (b, m)
        )
        is_wide = lses.rows_b.new_empty(1, dtype=torch.int32)
        log2_scale = lses.rows_b.new_empty(2, dtype=torch.float32)
        factors_kernel[(triton.cdiv(max(b, m), _BLOCK),)](
            *lses, scale, *rows_3n, *columns_3m, is_wide, log2_scale,
            None if always_wide else make_peaks(is_wide), b, m, EXPONENT=exponent, BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return cls(rows_3n, columns_3m, is_wide, log2_scale)

    def arguments(self, block: Block) -> dict[str, Any]:
        names = ("row_power", "row_gain", "row_factor")
        row_vectors = dict(zip(names, self.rows_3n[:, block.rows], strict=True))
        names = ("column_power", "column_gain", "column_factor")
        column_vectors = dict(zip(names, self.columns_3m[:, block.columns], strict=True))
        return {**row_vectors, **column_vectors, "is_wide": self.is_wide}


# `num_columns` is specialized, because a mask that ends at a multiple of 16 allows wide stores.
@triton.jit(do_not_specialize=["num_rows", "diagonal"])
def softmax_kernel(
    rows, columns, log2_scale,
    row_power, row_gain, row_factor, column_power, column_gain, column_factor, is_wide,
    weights, weights_low,
    row_ids, column_ids,
    row_thresholds, column_thresholds, row_guides, column_guides, guide_width,
    stored, stored_stride,
    num_rows, num_columns, width, row_stride, column_stride, weights_stride, diagonal,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, SPLIT_SCALE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store P of one tile, as one value or in two halves.

    Args:
        row_power: `p_i`; row_gain: `g_i`; row_factor: `u_i`; all (n,) in fp32.
        column_power: `c_j - s` rounded; column_gain: its gain; column_factor: `v_j`; all (m,).
        is_wide: One int32; without stored products, a launch with another `WIDE` returns at once.
        stored: (n, m) in fp32 with rows `stored_stride` apart: the products that `lse_kernel`
            stored. `None`: this kernel multiplies `rows` and `columns`, which are `None` otherwise.
        WIDE: Compute two exponentials per value.
        Others: As in `device_functions`.
    """
    if stored is None:  # noqa: SIM102  # one is known to the compiler, one is not
        if (tl.load(is_wide) != 0) != WIDE:
            return
    tile = tile_at(tl.program_id(0), num_rows, num_columns, TILE_M, TILE_N, GROUP)
    if stored is None:
        dots = tile_dots(
            rows, columns, tile, width, row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA
        )
    else:
        at, here = stored_at(stored, stored_stride, tile, TILE_M, TILE_N)
        dots = tl.load(at, mask=here, other=0.0)
    # Before the first product is used, because a third tile would not fit into registers.
    similarities = threshold_similarities(
        dots, row_guides, column_guides, tile, guide_width, TILE_M, TILE_N, TILE_K, TMA
    )
    row, column = indices(tile, TILE_M, TILE_N)
    power = load_some(row_power, row, num_rows)[:, None]
    values = tl.exp2(shifted(dots, log2_scale, power, SPLIT_SCALE))
    gain = load_some(row_gain, row, num_rows)[:, None]
    if WIDE:
        power = load_some(column_power, column, num_columns)[None, :]
        by_column = shifted(dots, log2_scale, power, SPLIT_SCALE)
        if row_thresholds is not None:
            row_masked, column_masked = above_thresholds(
                similarities, row_thresholds, column_thresholds, tile, row, column
            )
            # Not by a gain of 0, because masked values may be infinite.
            values = tl.where(row_masked, 0.0, values)
            by_column = tl.where(column_masked, float("-inf"), by_column)
        column_gains = load_some(column_gain, column, num_columns)[None, :]
        values = values * gain + tl.exp2(by_column) * column_gains
    else:
        u = load_some(row_factor, row, num_rows)[:, None]
        v = load_some(column_factor, column, num_columns)[None, :]
        values *= gain + u * v
    values = negatives(
        values, 0.0, tile, row, column, row_ids, column_ids, diagonal, TILE_M, TILE_N
    )
    store_weights(
        weights, weights_low, values, tile, row, column, weights_stride, TILE_M, TILE_N, TMA
    )


def write_softmax(
    block: Block,
    log2_scale: Tensor,
    factors: SoftmaxFactors,
    weights: Weights,
    configs: Sequence[TileConfig],
) -> None:
    """Write the softmax of one block, from stored products or from its operands.

    `configs` are rows of the table for `"softmax"` and `"softmax_wide"`; only the second if
    `factors` are always wide or products are stored.
    """
    # The host does not know which variant is needed; the other one returns at once.
    for config in configs:
        softmax_kernel[(math.prod(config.tiles(*block.shape)),)](
            **block.arguments(config, multiplies=block.stored_nc is None),
            **block.threshold_arguments(config), **weights.arguments(config),
            **factors.arguments(block), log2_scale=log2_scale,
            WIDE=config.kernel == "softmax_wide",
        )  # fmt: skip
