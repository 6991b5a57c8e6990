"""The sums that `lse_kernels` left of its tiles, added in float64 and in order.

Shapes:
    n, m: rows and columns of the block that a launch covers.
"""

import triton
import triton.language as tl

__all__ = ["merge_kernel"]

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_rows", "num_columns", "row_fresh", "column_fresh"])
def merge_kernel(
    row_sums,
    column_sums,
    is_redone,
    reference,
    row_lse,
    column_lse,
    row_part_maxima,
    column_part_maxima,
    row_maxima,
    column_maxima,
    num_rows,
    num_columns,
    row_fresh,
    column_fresh,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Add the tiles' sums to the log-sum-exps of rows and columns.

    Args:
        row_sums: As `lse_kernel` has left them, and so are column_sums, is_redone and reference.
        row_lse: (n,) natural logarithms in float64, added to in place. column_lse: (m,), likewise.
        row_part_maxima: As both kernels left them, like column_part_maxima; not touched without
            `MAXIMA`.
        row_maxima: (n,) in float64, raised to the largest logits. column_maxima: (m,), likewise.
        num_rows: n. num_columns: m.
        row_fresh: Whether `row_lse` holds nothing yet. column_fresh: Whether `column_lse` does.
        TILE_M: Rows of a tile. TILE_N: Columns. BLOCK: Rows or columns of a program.
        PARTS: Tiles that are added up at a time. MAXIMA: The largest logits are wanted, too.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    row_programs, program = tl.cdiv(num_rows, BLOCK), tl.program_id(0)
    if program < row_programs:
        first = program * BLOCK
        flags = is_redone + first // TILE_M * column_tiles
        _merge(
            row_sums, flags, reference, row_lse, row_part_maxima, row_maxima, first, num_rows,
            column_tiles, 1, row_fresh, BLOCK, PARTS, MAXIMA,
        )  # fmt: skip
    else:
        first = (program - row_programs) * BLOCK
        flags = is_redone + first // TILE_N
        _merge(
            column_sums, flags, reference, column_lse, column_part_maxima, column_maxima, first,
            num_columns, row_tiles, column_tiles, column_fresh, BLOCK, PARTS, MAXIMA,
        )  # fmt: skip


@triton.jit
def _merge(
    sums, flags, reference, lse, part_maxima, maxima, start, length, parts, part_step, fresh,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Add up `lse <- ln(e^lse + 2^t sum_p sums_p + ...)` for `BLOCK` rows or columns of one tile.

    Tiles that were redone come in as `2^value`. All in float64 and in a fixed order.

    Args:
        sums: (parts, length) in fp32.
        flags: That of part `p` is at `p * part_step`.
        reference: `t`, one fp32 value.
        lse: (length,) natural logarithms in float64, added to in place.
        part_maxima: (parts, length), as `sums`; maxima: (length,) in float64, raised in place to
            the largest logits. Not touched without `MAXIMA`.
        start: The first of them.
        fresh: Whether `lse` holds nothing yet, which is as good as -inf.
    """
    index = start + tl.arange(0, BLOCK)
    here = index < length
    total = tl.zeros((BLOCK,), tl.float64)
    peak = tl.full((BLOCK,), float("-inf"), tl.float64)
    rest = tl.zeros((BLOCK,), tl.float64)  # of the redone tiles, in units of 2^peak
    largest = tl.full((BLOCK,), float("-inf"), tl.float64)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        redone = tl.load(flags + part * part_step, mask=part < parts, other=0) != 0
        mask = (part < parts)[:, None] & here[None, :]
        at = part.to(tl.int64)[:, None] * length + index[None, :]
        value = tl.load(sums + at, mask=mask, other=0.0).to(tl.float64)
        total += tl.sum(tl.where(redone[:, None], 0.0, value), 0)
        if tl.max(redone.to(tl.int32), 0) != 0:
            power = tl.where(redone[:, None] & mask, value, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(power, 0))
            # With infinities, their difference would be NaN.
            base = tl.where(tl.abs(new_peak) == float("inf"), 0.0, new_peak)
            rest = rest * tl.exp2(peak - base) + tl.sum(tl.exp2(power - base[None, :]), 0)
            peak = new_peak
        if MAXIMA:
            power = tl.load(part_maxima + at, mask=mask, other=0.0).to(tl.float64)
            power = tl.where(redone[:, None], power, tl.log2(power) + tl.load(reference))
            largest = tl.maximum(largest, tl.max(tl.where(mask, power, float("-inf")), 0))
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    old = tl.load(lse + index, mask=here & (fresh == 0), other=float("-inf"))
    new = tl.log2(total) + tl.load(reference).to(tl.float64)
    both = _log2_add_exp2(new, base + tl.log2(rest))
    tl.store(lse + index, _log2_add_exp2(old / _LN_2, both) * _LN_2, mask=here)
    if MAXIMA:
        old = tl.load(maxima + index, mask=here, other=0.0)
        tl.store(maxima + index, tl.maximum(old, largest * _LN_2), mask=here)


@triton.jit
def _log2_add_exp2(left, right):
    """Return `log2(2^left + 2^right)`."""
    peak = tl.maximum(left, right)
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    return base + tl.log2(tl.exp2(left - base) + tl.exp2(right - base))
