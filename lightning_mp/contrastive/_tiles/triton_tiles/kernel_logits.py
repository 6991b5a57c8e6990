"""Division of the logits into blocks whose intermediate results fit the workspace.

Shapes:
    b: rows. m: columns. D: width. n, c: rows and columns of one block.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.literals import TileDtype
from lightning_mp.contrastive._tiles.masks import Ids, Thresholds
from lightning_mp.contrastive._tiles.tile_backend import Logits, RowsColumns, StoredTiles
from lightning_mp.contrastive._tiles.triton_tiles.block import Block
from lightning_mp.contrastive._tiles.triton_tiles.operands import Precision, Products

__all__ = ["KernelLogits", "block_shape", "whole_waves"]

_ROW_MULTIPLE = 128  # granularity of stored rows and of cuBLAS tiles
_COLUMN_MULTIPLE = 64  # padding of rows of weights
_LARGEST = 2**30  # kernels use 32-bit indices and sums of two of them
_TUNED_ROWS = 8192  # fills any device several times
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class KernelLogits:
    """Logits with what all their blocks share: 32-bit ids, products, units of operands."""

    logits: Logits
    products: Products
    guides: Products | None
    stored_rm: Tensor  # memory for the products of the first rows, in fp32; may be empty

    @classmethod
    def of(cls, logits: Logits, tile_dtype: TileDtype) -> "KernelLogits":
        """Return the kernel logits of one sweep, which take their memory for stored products."""
        rows_bD, columns_mD = logits[:2]
        # `tile_dtype` rounds features only, not guides.
        ids, guides = logits.ids, None
        if logits.thresholds is not None and logits.thresholds.guides is not None:
            guides = Products.of(*logits.thresholds.guides, "auto")
        stored = logits.stored or StoredTiles(rows_bD.new_empty(0, dtype=torch.float32))
        return cls(
            logits._replace(ids=None if ids is None else _short_ids(ids)),
            Products.of(rows_bD, columns_mD, tile_dtype),
            guides,
            stored.take_rows(len(rows_bD), len(columns_mD)),
        )

    @property
    def precision(self) -> Precision:
        return self.products.precision

    @property
    def edge_bytes(self) -> int:
        """The largest number of bytes of the operands of a row or a column."""
        features = max(self.precision.operand_bytes(x) for x in self.logits[:2])
        thresholds = self.logits.thresholds
        if self.guides is None or thresholds is None or thresholds.guides is None:
            return features
        return features + self.guides.precision.operand_bytes(thresholds.guides[0])

    def log2_scale(self) -> Tensor:
        """Return `scale log2(e) / unit` as two fp32 values whose sum has 48 bits."""
        exact = self.logits.scale.double().reshape(()) * _LOG2_E
        if self.products.unit is not None:
            exact = exact / self.products.unit
        # One fp32 value would shift all logits alike, but not the positives.
        high = exact.float()
        return torch.stack([high, (exact - high.double()).float()])

    def blocks(self, shape: tuple[int, int]) -> Iterator[Block]:
        """Yield the blocks of a shard, each of at most `shape`, in a fixed order.

        Columns are prepared once, rows once per block of columns: a copy of `n D` values for
        `n c D` products. A block does not mix rows with and without positives, so that kernels have
        one diagonal, nor rows with and without stored products.
        """
        rows_bD, columns_mD, _, diagonal, positive_rows, ids, thresholds, _, fresh, *_ = self.logits
        maxima = self.logits.maxima
        most_stored = len(self.stored_rm)
        b, m = len(rows_bD), len(columns_mD)
        for left in range(0, m, shape[1]):
            columns = slice(left, min(left + shape[1], m))
            column_operand = self.products.columns(columns_mD[columns])
            for rows, has_positives in _row_steps(
                b, shape[0], most_stored, diagonal, positive_rows
            ):
                offset = None
                if diagonal is not None and has_positives:
                    offset = diagonal + rows.start - left
                limits = None if thresholds is None else thresholds.block(rows, columns)
                yield Block(
                    rows, columns, self.products.rows(rows_bD[rows]), column_operand, offset,
                    None if ids is None else ids.block(rows, columns),
                    None if limits is None else self._thresholds(limits),
                    self.stored_rm[rows, columns] if rows.start < most_stored else None,
                    # Each row is first visited with the first columns, and vice versa.
                    RowsColumns(fresh.rows and left == 0, fresh.columns and rows.start == 0),
                    None if maxima is None else maxima.block(rows, columns),
                )  # fmt: skip

    def trial_block(self, rows: int = _TUNED_ROWS, columns: int = _TUNED_ROWS) -> Block:
        """Return a block for timing tile shapes, without masks and stored products."""
        rows_bD, columns_mD, scale, *_ = self.logits
        rows, columns = min(rows, _TUNED_ROWS), min(columns, _TUNED_ROWS)
        some = Logits(rows_bD[:rows], columns_mD[:columns], scale, None)
        return next(
            replace(self, logits=some, stored_rm=self.stored_rm[:0]).blocks((rows, columns))
        )

    def _thresholds(self, thresholds: Thresholds) -> Thresholds:
        row_n, column_c = thresholds[:2]
        products = self.products
        guides = None
        if self.guides is not None and thresholds.guides is not None:
            products, (left, right) = self.guides, thresholds.guides
            left, right = products.rows(left).tiles_nk, products.columns(right).tiles_nk
            guides = left.contiguous(), right.contiguous()  # kernels use the width as the stride
        # Kernels compare thresholds with products, which contain the units of both operands.
        if products.unit is not None:
            row_n, column_c = row_n * products.unit, column_c * products.unit
        return Thresholds(row_n.float(), column_c.float(), guides)


def _short_ids(ids: Ids) -> Ids:
    """Return 32-bit numbers that are equal where ids are, to save registers."""
    # `unique` would wait for the device to know the size of its result.
    known = ids.rows_b.sort().values
    # The index of an id among the rows; ids that are not among them become -1.
    columns_m = torch.searchsorted(known, ids.columns_m, out_int32=True)
    is_known = known[columns_m.clamp(max=len(known) - 1)] == ids.columns_m
    rows_b = torch.searchsorted(known, ids.rows_b, out_int32=True)
    return Ids(rows_b, columns_m.where(is_known, -1))


def _row_steps(
    b: int, step: int, stored: int, diagonal: int | None, positive_rows: slice | None
) -> Iterator[tuple[slice, bool]]:
    """Yield slices of at most `step` rows, and whether they have their positives here.

    No slice contains rows from both sides of `stored`.
    """
    own = slice(0, b) if positive_rows is None else positive_rows
    if diagonal is None:
        own = slice(0, 0)
    for start, stop in itertools.pairwise(sorted({0, own.start, own.stop, stored, b})):
        for top in range(start, stop, step):
            yield slice(top, min(top + step, stop)), own.start <= top < own.stop


def block_shape(b: int, m: int, values: int, edge: int = 0) -> tuple[int, int]:
    """Return rows and columns of a block of at most `values`, as square as possible.

    Every block adds its part of the gradients to totals in memory. For `n` rows and `c` columns
    this costs about `1/n + 1/c` of the products, a minimum for a square. Blocks of columns have
    equal sizes; no block is smaller than 128 x 64. A row or column takes `edge` values in addition,
    so that `n c + edge (n + c)` values have to fit.
    """
    square = math.isqrt(edge**2 + values) - edge
    # If all rows fit with a wide block of columns, that is better than a square.
    most = max(square, (values - edge * b) // (b + edge), _COLUMN_MULTIPLE)
    most = min(most, _LARGEST)
    columns = m
    if most < m:
        limit = most // _COLUMN_MULTIPLE * _COLUMN_MULTIPLE
        # Equal blocks in whole multiples. `limit` is a multiple, so rounding up stays within it.
        even = -(-m // -(-m // limit))
        columns = -(-even // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    rows = max((values - edge * columns) // (columns + edge), _ROW_MULTIPLE)
    return min(rows, b, _LARGEST), columns


def whole_waves(rows: int, width: int, multiprocessors: int) -> int:
    """Return at most `rows` rows for which the product of shape (rows, width) fills whole waves.

    cuBLAS computes tiles of 128 x 256, one per multiprocessor: with 132 multiprocessors, 133 tiles
    take as long as 264. The search for the fullest last wave goes down to half of `rows`.
    """
    in_a_row = -(-width // 256)

    def fullness(tiles: int) -> float:
        waves = -(-tiles * in_a_row // multiprocessors)
        return tiles * in_a_row / (waves * multiprocessors)

    most = rows // _ROW_MULTIPLE
    if most < 1:
        return rows
    return max(range(most, most // 2, -1), key=fullness) * _ROW_MULTIPLE
