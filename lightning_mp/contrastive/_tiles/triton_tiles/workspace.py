"""Memory for the weights of one block, and the products that are made of them.

Shapes:
    b: rows. m: columns of the shard. D: width. n, c: rows and columns of one block.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.triton_tiles.blocks import Block
from lightning_mp.contrastive._tiles.triton_tiles.operands import WIDTH_MULTIPLE, Operand, Precision

__all__ = ["Softmax", "Workspace", "add_product"]


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The softmax of one block, times `2^exponent`, in one value or in two halves."""

    high_nc: Tensor
    low_nc: Tensor | None
    exponent: int

    def add_products(
        self,
        block: Block,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
    ) -> None:
        """Add both products of the block to the gradients that are wanted.

        Args:
            block: Of a sweep over all blocks of these gradients.
            d_rows_bD: Gets `softmax @ columns`.
            d_columns_mD: Gets `softmax.T @ rows`.
            fresh: Whether the first products for rows and for columns overwrite what is there.
        """
        factor = 2.0**-self.exponent
        if d_rows_bD is not None:
            is_first = fresh[0] and block.columns.start == 0
            for softmax_nc, part_cD in self._products(block.column_operand):
                add_product(d_rows_bD[block.rows], softmax_nc, part_cD, factor, not is_first)
                is_first = False
        if d_columns_mD is not None:
            is_first = fresh[1] and block.rows.start == 0
            for softmax_nc, part_nD in self._products(block.row_operand):
                columns_cD = d_columns_mD[block.columns]
                add_product(columns_cD, softmax_nc.T, part_nD, factor, not is_first)
                is_first = False

    def _products(self, operand: Operand) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is to be multiplied, but for low times low."""
        for part in operand.parts_nD:
            yield self.high_nc, part
        if self.low_nc is not None:
            yield self.low_nc, operand.parts_nD[0]


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Memory for the softmax of one block, reused by all."""

    halves: tuple[Tensor, ...]
    exponent: int

    @classmethod
    def make(
        cls, shape: tuple[int, int], precision: Precision, device: torch.device
    ) -> "Workspace":
        """Return memory for blocks of a shape at most."""
        rows, columns = shape
        count = 2 if precision.keeps_low else 1
        size = rows * _padded(columns)
        halves = torch.empty(count, size, dtype=precision.softmax, device=device)
        return cls(tuple(halves), precision.softmax_exponent)

    def block(self, block: Block) -> Softmax:
        """Return views of the block's shape whose rows are aligned."""
        rows = block.rows.stop - block.rows.start
        columns = block.columns.stop - block.columns.start
        size = rows * _padded(columns)
        views = [half[:size].view(rows, -1)[:, :columns] for half in self.halves]
        low = views[1] if len(views) == 2 else None
        return Softmax(views[0], low, self.exponent)


def _padded(columns: int) -> int:
    return -(-columns // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def add_product(
    total_mn: Tensor, left_mk: Tensor, right_kn: Tensor, factor: float = 1.0, adds: bool = True
) -> None:
    """Add `factor * left @ right` to a total in fp32, in place; put it there if `adds` is False.

    On CUDA 16-bit operands go to cuBLAS as they are. Elsewhere they are widened, which gives the
    same products: those of two 16-bit values are exact in fp32.
    """
    if left_mk.dtype != total_mn.dtype and not left_mk.is_cuda:
        left_mk, right_kn = left_mk.to(total_mn.dtype), right_kn.to(total_mn.dtype)
    beta = 1.0 if adds else 0.0
    if left_mk.dtype == total_mn.dtype:
        total_mn.addmm_(left_mk, right_kn, beta=beta, alpha=factor)
    else:
        torch.addmm(
            total_mn, left_mk, right_kn, beta=beta, alpha=factor, out_dtype=total_mn.dtype,
            out=total_mn,
        )  # fmt: skip
