"""The softmax of the negatives by rows plus that by columns, for one block of the logits.

Shapes:
    M, N: rows and columns of one tile. n, m: rows and columns of the block that a launch covers.

With `x_ij = log2_scale * dot_ij`, row and column log-sum-exps `r_i`, `c_j` in powers of two, and a
power of two `2^s` that keeps small values among fp16's normal numbers,

    P_ij = 2^s (2^(x_ij - r_i) + 2^(x_ij - c_j)),    0 at positives.

One exponential an element is enough while the log-sum-exps lie close together:

    P_ij = 2^(x_ij - p_i) (g_i + u_i v_j),    g_i = 2^(p_i - (r_i - s)), u_i = g_i 2^(r_i - t),
                                              v_j = 2^(t - c_j), any t.

`p_i` is `r_i - s` rounded to fp32, which near 100 is off by up to 4e-6, for a whole row alike; the
gain `g_i` puts that right at no cost.

Where `r_i - c_j` reached 90, the exponential could vanish below 2^-126 while the column's softmax
is still 2^-36, and the factors could overflow. A flag on the device then sends the work to a twin
with two exponentials: both are launched, one returns at once, and the host never waits for it.
Small shards, whose time is the host's, take the twin with two at once: a launch less.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import Ids
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
from lightning_mp.contrastive._tiles.triton_tiles.gradient_kernels import SoftmaxFactors
from lightning_mp.contrastive._tiles.triton_tiles.launch import (
    BlockLimits,
    as_kept,
    as_limits,
    as_operands,
    as_targets,
    diagonal_offset,
)

__all__ = ["softmax_kernel", "store_tile", "write_softmax"]


@triton.jit
def store_tile(
    to, values, row, column, row_tile, column_tile, num_rows, num_columns, stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store a tile, but for what lies past the edges; return what rounding left over, in fp32."""
    if TMA:
        rounded = values.to(to.dtype)
        to.store([row_tile * TILE_M, column_tile * TILE_N], rounded)
    else:
        rounded = values.to(to.dtype.element_ty)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        at = to + row.to(tl.int64)[:, None] * stride + column[None, :]
        tl.store(at, rounded, mask=mask)
    return values - rounded.to(tl.float32)


# `num_columns` is left to be specialised: a mask that ends at a multiple of 16 keeps stores wide.
@triton.jit(do_not_specialize=["num_rows", "diagonal"])
def softmax_kernel(
    rows,
    columns,
    log2_scale,
    row_power,
    row_gain,
    row_factor,
    column_power,
    column_gain,
    column_factor,
    is_wide,
    softmax,
    softmax_low,
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
    softmax_stride,
    diagonal,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    LOW: tl.constexpr,
):
    """Store P of one tile, in one value or in two halves `softmax + softmax_low`.

    Args:
        log2_scale: Two fp32 values whose sum is the scale times log2(e).
        row_power: `p_i`; row_gain: `g_i`; row_factor: `u_i`; all (n,) in fp32.
        column_power: `c_j - s` rounded; column_gain: its gain; column_factor: `v_j`; all (m,).
        is_wide: One int32; a launch with another `WIDE` returns at once, but for what is kept.
        softmax: (n, m) with rows `softmax_stride` apart; a tensor descriptor with `TMA`.
        softmax_low: The same for what rounding left over; not touched without `LOW`.
        row_ids: (n,) int32, or `None`; column_ids: (m,). Pairs of equal ones are left out.
        row_limits: (n,) in fp32, or `None`: the products that rows leave out are above.
            column_limits: (m,): those that columns leave out.
        row_guides: What makes the products that limits are for, see `judged`; `None`: `rows` do.
            column_guides: Likewise. guide_width: Theirs.
        kept: (n, m) in fp32 with rows `kept_stride` apart: the products, as `lse_kernel` left them.
            `None`: they are made here, of `rows` and `columns`, which are `None` otherwise.
        SPLIT_SCALE: Use both values of `log2_scale`. WIDE: Take two exponentials a value.
        LOW: Store two halves.
        Others: As in `dot`.
    """
    if kept is None:  # noqa: SIM102  # one is known to the compiler, one is not
        if (tl.load(is_wide) != 0) != WIDE:
            return
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP)
    if kept is None:
        dots = tile_dots(
            rows, columns, row_tile, column_tile, num_rows, num_columns, width,
            row_stride, column_stride, TILE_M, TILE_N, TILE_K, TMA,
        )  # fmt: skip
    else:
        at, here = kept_at(
            kept, kept_stride, row_tile, column_tile, num_rows, num_columns, TILE_M, TILE_N
        )
        dots = tl.load(at, mask=here, other=0.0)
    # Before anything is made of the first product: a third tile would not fit into registers.
    similarities = judged(
        dots, row_guides, column_guides, row_tile, column_tile, num_rows, num_columns,
        guide_width, TILE_M, TILE_N, TILE_K, TMA,
    )  # fmt: skip
    row = row_tile * TILE_M + tl.arange(0, TILE_M)
    column = column_tile * TILE_N + tl.arange(0, TILE_N)
    row_here, column_here = row < num_rows, column < num_columns
    high = tl.load(log2_scale)
    by_row = dots * high - tl.load(row_power + row, mask=row_here, other=0.0)[:, None]
    if SPLIT_SCALE:  # last, because what matters most is near 0 by now
        by_row += dots * tl.load(log2_scale + 1)
    values = tl.exp2(by_row)
    gain = tl.load(row_gain + row, mask=row_here, other=0.0)[:, None]
    if WIDE:
        by_column = (
            dots * high - tl.load(column_power + column, mask=column_here, other=0.0)[None, :]
        )
        if SPLIT_SCALE:
            by_column += dots * tl.load(log2_scale + 1)
        column_gains = tl.load(column_gain + column, mask=column_here, other=0.0)[None, :]
        if row_limits is not None:
            row_out, column_out = above(
                similarities, row_limits, column_limits, row, column, num_rows, num_columns
            )
            # Not by a gain of 0: what is left out may be infinite.
            values = tl.where(row_out, 0.0, values)
            by_column = tl.where(column_out, float("-inf"), by_column)
        values = values * gain + tl.exp2(by_column) * column_gains
    else:
        u = tl.load(row_factor + row, mask=row_here, other=0.0)[:, None]
        v = tl.load(column_factor + column, mask=column_here, other=0.0)[None, :]
        values *= gain + u * v
    if tile_is_cut(row_tile, column_tile, num_rows, num_columns, diagonal, TILE_M, TILE_N):
        keep = keep_mask(row, column, num_rows, num_columns, diagonal)
        values = tl.where(keep, values, 0.0)
    if row_ids is not None:
        differs = differ(row_ids, column_ids, row, column, num_rows, num_columns)
        values = tl.where(differs, values, 0.0)
    left_over = store_tile(
        softmax, values, row, column, row_tile, column_tile, num_rows, num_columns,
        softmax_stride, TILE_M, TILE_N, TMA,
    )  # fmt: skip
    if LOW:
        store_tile(
            softmax_low, left_over, row, column, row_tile, column_tile, num_rows, num_columns,
            softmax_stride, TILE_M, TILE_N, TMA,
        )  # fmt: skip


def write_softmax(
    rows_nk: Tensor | None,
    columns_mk: Tensor | None,
    log2_scale: Tensor,
    factors: SoftmaxFactors,
    softmax_nm: Tensor,
    low_nm: Tensor | None,
    diagonal: int | None,
    configs: Sequence[TileConfig],
    *,
    split_scale: bool,
    ids: Ids | None = None,
    limits: BlockLimits | None = None,
    kept_nm: Tensor | None = None,
) -> None:
    """Write the softmax of one block; the twin that is not needed returns at once.

    Args:
        rows_nk: Rows, padded and aligned as `make_operand` does it; `None` with `kept_nm`.
        columns_mk: Columns, likewise.
        log2_scale: Scale times log2(e) as the sum of two fp32 values.
        factors: The vectors of the block's rows and columns.
        softmax_nm: Where to write; rows 16-byte aligned.
        low_nm: Where to write what rounding to `softmax_nm` leaves over, laid out alike.
        diagonal: The positive of row `i` is column `i + diagonal`; `None` for no positives.
        configs: Rows of the table for the kernels `"softmax"` and `"softmax_wide"`, or for the
            second alone, if `factors` are always wide.
        split_scale: Use both values of `log2_scale`.
        ids: Of the block's rows and columns, int32; pairs of equal ones are left out.
        limits: Similarities above which rows and columns leave a pair out.
        kept_nm: The products of rows and columns, as `add_lse` left them; any twin will do.

    Raises:
        ValueError: Operands, softmax or `kept_nm` have another layout.
    """
    n, m = softmax_nm.shape
    width = row_stride = column_stride = None
    if rows_nk is not None and columns_mk is not None:
        (n, width), m = rows_nk.shape, len(columns_mk)
        row_stride, column_stride = rows_nk.stride(0), columns_mk.stride(0)
    kept = as_kept(kept_nm, (n, m))
    offset = diagonal_offset(diagonal, n, m)
    for config in configs:
        targets = as_targets(softmax_nm, low_nm, (n, m), config)
        tile_m, tile_n, _ = config.tile
        softmax_kernel[(triton.cdiv(n, tile_m) * triton.cdiv(m, tile_n),)](
            *as_operands(rows_nk, columns_mk, config), log2_scale, *factors.rows_3n,
            *factors.columns_3m, factors.is_wide, *targets, *(ids or (None, None)),
            *as_limits(limits, config), *kept, n, m, width, row_stride, column_stride,
            softmax_nm.stride(0), offset,
            GROUP=config.group, SPLIT_SCALE=split_scale,
            WIDE=config.kernel == "softmax_wide", LOW=low_nm is not None, **config.shape,
            **config.options,
        )  # fmt: skip
