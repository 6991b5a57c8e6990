"""Blocks of the logits whose by-products fit the workspace, and their shapes.

Shapes:
    b: rows. m: columns. D: width. n, c: rows and columns of one block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lightning_mp.contrastive.triton_tiles.operands import Operand, Precision, make_operand

__all__ = ["Block", "block_shape", "blocks_of", "whole_waves"]

_ROW_MULTIPLE = 128
_COLUMN_MULTIPLE = 64


@dataclass(frozen=True)
class Block:
    """One block: its place, its operands, and the offset of its positives."""

    rows: slice
    columns: slice
    row_operand: Operand
    column_operand: Operand
    diagonal: int | None


def blocks_of(
    rows_bD: Tensor,
    columns_mD: Tensor,
    shape: tuple[int, int],
    precision: Precision,
    units: tuple[Tensor | None, Tensor | None],
    diagonal: int | None,
) -> Iterator[Block]:
    """Yield the blocks of a shard, each of at most `shape`, always in the same order.

    Columns are prepared once, rows once for each block of columns: a copy of `n D` values for
    `n c D` products.
    """
    b, m = len(rows_bD), len(columns_mD)
    for left in range(0, m, shape[1]):
        columns = slice(left, min(left + shape[1], m))
        column_operand = make_operand(columns_mD[columns], precision, units[1], is_columns=True)
        for top in range(0, b, shape[0]):
            rows = slice(top, min(top + shape[0], b))
            row_operand = make_operand(rows_bD[rows], precision, units[0], is_columns=False)
            offset = None if diagonal is None else diagonal + top - left
            yield Block(rows, columns, row_operand, column_operand, offset)


def block_shape(b: int, m: int, values: int) -> tuple[int, int]:
    """Return rows and columns of a block of at most `values`, as near to a square as it may be.

    Every block adds its part of the gradients to totals in memory. For `n` rows and `c` columns
    that costs about `1/n + 1/c` of the products, least for a square. Blocks of columns are of even
    size; no block is smaller than 128 x 64.
    """
    most = max(math.isqrt(values), values // b, _COLUMN_MULTIPLE)
    columns = m
    if most < m:
        limit = most // _COLUMN_MULTIPLE * _COLUMN_MULTIPLE
        # Even blocks, of whole multiples; the limit is one, so rounding up stays within it.
        even = -(-m // -(-m // limit))
        columns = -(-even // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    rows = max(values // columns, _ROW_MULTIPLE)
    return min(rows, b), columns


def whole_waves(rows: int, width: int, multiprocessors: int) -> int:
    """Return at most `rows` rows for which the product into (rows, width) fills the device evenly.

    cuBLAS cuts the result into tiles of 128 x 256, one a multiprocessor: with 132 of them, 133
    tiles take as long as 264. Looks for the fullest last wave down to half of `rows`.
    """
    in_a_row = -(-width // 256)

    def fullness(tiles: int) -> float:
        waves = -(-tiles * in_a_row // multiprocessors)
        return tiles * in_a_row / (waves * multiprocessors)

    most = rows // _ROW_MULTIPLE
    if most < 1:
        return rows
    return max(range(most, most // 2, -1), key=fullness) * _ROW_MULTIPLE
