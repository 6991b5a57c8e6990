"""Dot products of rows, reading both matrices once.

Shapes:
    n: rows. D: width. ROWS, COLUMNS: the block that a program holds at a time.

Each program loops over the columns of its own `ROWS` rows, so the order of sums is fixed and no
atomics are needed. Values are converted to float64 in registers.
"""

import triton
import triton.language as tl

__all__ = ["COLUMNS", "NUM_WARPS", "ROWS", "row_dots_kernel"]

NUM_WARPS = 4
# One warp per row and 8 values per thread: 16 bytes in half precision, 32 bytes in fp32.
ROWS = tl.constexpr(NUM_WARPS)
COLUMNS = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_rows"])
def row_dots_kernel(left, right, dots, num_rows, width, left_stride, right_stride):
    """Store `sum_k left[i, k] right[i, k]` for a block of rows.

    Args:
        left, right: (n, D), with row strides `left_stride` and `right_stride` in elements.
        dots: (n,), float64.
        num_rows, width: n, D.
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
