"""The tile product that all sweeps share: which tile, its logits, and where its positives lie.

Shapes:
    M, N, K: rows, columns and the slice of the width of one tile.
    n, m: rows and columns of the block that a launch covers. k: width, a multiple of K.

Arguments that all sweeping kernels share:
    rows, columns: (n, k) and (m, k), of rows `row_stride` and `column_stride` values apart; tensor
        descriptors of them with `TMA`.
    num_rows, num_columns, width: n, m and k.
    diagonal: The positive of row `i` is column `i + diagonal`; `NO_DIAGONAL` for none.
    TILE_M, TILE_N, TILE_K: M, N and K. GROUP: How many rows of tiles share columns, see `tile_at`.

Kernel parameters are typed by Triton at the launch; the launchers type and validate them.
"""

import triton
import triton.language as tl

__all__ = [
    "NO_DIAGONAL",
    "above",
    "differ",
    "judged",
    "keep_mask",
    "kept_at",
    "tile_at",
    "tile_dots",
    "tile_is_cut",
]

NO_DIAGONAL = 2**30
"""The offset that puts the diagonal outside every block: no positives here."""


@triton.jit
def tile_at(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return the tile of a program: down `GROUP` rows of tiles, then to the next column.

    Programs that run at the same time then share operands in L2: about `2 sqrt(GROUP * running)`
    slabs for `running` tiles, not `running + 1`.
    """
    in_band = GROUP * column_tiles
    first = program // in_band * GROUP
    band = min(row_tiles - first, GROUP)
    row = first + program % in_band % band
    return row, program % in_band // band


@triton.jit
def tile_dots(
    rows,
    columns,
    row_tile,
    column_tile,
    num_rows,
    num_columns,
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
    dots = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if TMA:
        for k in range(0, width, TILE_K):
            left = rows.load([row_tile * TILE_M, k])
            right = columns.load([column_tile * TILE_N, k])
            dots = tl.dot(left, right.T, dots, input_precision="tf32")
    else:
        row = tl.minimum(row_tile * TILE_M + tl.arange(0, TILE_M), num_rows - 1)
        column = tl.minimum(column_tile * TILE_N + tl.arange(0, TILE_N), num_columns - 1)
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
def kept_at(
    kept, stride, row_tile, column_tile, num_rows, num_columns, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Return where the products of one tile are kept (M, N), and which of them there are.

    Rows have room for a multiple of 16 values, which keeps loads and stores wide.
    """
    row = row_tile * TILE_M + tl.arange(0, TILE_M)
    column = column_tile * TILE_N + tl.arange(0, TILE_N)
    here = (row < num_rows)[:, None] & (column < tl.cdiv(num_columns, 16) * 16)[None, :]
    return kept + row.to(tl.int64)[:, None] * stride + column[None, :], here


@triton.jit
def tile_is_cut(
    row_tile, column_tile, num_rows, num_columns, diagonal, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Return whether some of the tile's values are no negatives: positives, or past the edges."""
    top, left = row_tile * TILE_M, column_tile * TILE_N
    over_edge = (top + TILE_M > num_rows) | (left + TILE_N > num_columns)
    # Positives are at column = row + diagonal.
    return over_edge | ((top + diagonal < left + TILE_N) & (left < top + diagonal + TILE_M))


@triton.jit
def keep_mask(row, column, num_rows, num_columns, diagonal):
    """Return which values of a tile are negatives (M, N)."""
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    return inside & (row[:, None] + diagonal != column[None, :])


@triton.jit
def differ(row_ids, column_ids, row, column, num_rows, num_columns):
    """Return which values of a tile are of two different ids (M, N)."""
    row_id = tl.load(row_ids + row, mask=row < num_rows, other=0)
    column_id = tl.load(column_ids + column, mask=column < num_columns, other=0)
    return row_id[:, None] != column_id[None, :]


@triton.jit
def above(dots, row_limits, column_limits, row, column, num_rows, num_columns):
    """Return which products of a tile are above their row's limit, and their column's (M, N)."""
    row_limit = tl.load(row_limits + row, mask=row < num_rows, other=0.0)
    column_limit = tl.load(column_limits + column, mask=column < num_columns, other=0.0)
    return dots > row_limit[:, None], dots > column_limit[None, :]


@triton.jit
def judged(
    dots, row_guides, column_guides, row_tile, column_tile, num_rows, num_columns, width,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, TMA: tl.constexpr,
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
                row_guides, column_guides, row_tile, column_tile, num_rows, num_columns, width,
                width, width, TILE_M, TILE_N, TILE_K, TMA,
            )  # fmt: skip
    return similarities
