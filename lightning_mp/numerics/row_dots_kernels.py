"""Inner products of rows in one read of both matrices.

Shapes:
    n: rows. D: width. ROWS, COLUMNS: what a program holds at a time.

A program has `ROWS` rows to itself and walks over their columns, so sums are made in one order and
need no atomics. Values are widened to float64 one by one, in registers.
"""

import triton
import triton.language as tl

__all__ = ["COLUMNS", "NUM_WARPS", "ROWS", "row_dots_kernel"]

NUM_WARPS = 4
# A warp a row, 8 values a thread: 16 bytes of what is half, 32 of fp32.
ROWS = tl.constexpr(NUM_WARPS)
COLUMNS = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_rows"])
def row_dots_kernel(left, right, dots, num_rows, width, left_stride, right_stride):
    """Store `sum_k left[i, k] right[i, k]` of some rows.

    Args:
        left: (n, D), of rows `left_stride` values apart.
        right: (n, D), of another dtype perhaps, of rows `right_stride` apart.
        dots: (n,) in float64.
        num_rows: n.
        width: D.
        left_stride: Distance of two rows of `left`, in values.
        right_stride: That of `right`.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row = (rows < num_rows)[:, None]
    left_at = left + rows[:, None] * left_stride + columns[None, :]
    right_at = right + rows[:, None] * right_stride + columns[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    for first in range(0, width, COLUMNS):
        is_there = is_row & (first + columns < width)[None, :]
        x = tl.load(left_at + first, is_there, 0.0).to(tl.float64)
        y = tl.load(right_at + first, is_there, 0.0).to(tl.float64)
        sums += x * y
    tl.store(dots + rows, tl.sum(sums, 1), rows < num_rows)
