"""One block of the logits: its kernel arguments, and the gradient products of its weights.

Shapes:
    b: rows. m: columns of the shard. D: width. k: padded width. n, c: rows and columns of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_mp.contrastive._tiles.masks import Ids, Thresholds
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, RowsColumns, Vectors
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.device_functions import NO_DIAGONAL
from lightning_mp.contrastive._tiles.triton_tiles.operands import Operand, Precision, padded

__all__ = ["Block", "Weights", "Workspace", "add_product"]


@dataclass(frozen=True)
class Block:
    """One block: position, operands, masks, memory for its products; see `Logits`."""

    rows: slice  # of the shard
    columns: slice
    row_operand: Operand
    column_operand: Operand
    diagonal: int | None
    ids: Ids | None = None  # int32
    # Of the products, in fp32, multiplied by the units of the operands; guides in operand form.
    thresholds: Thresholds | None = None
    stored_nc: Tensor | None = None  # for its products, in fp32
    fresh: RowsColumns = RowsColumns(False, False)
    maxima: Vectors | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def arguments(self, config: TileConfig, *, multiplies: bool = True) -> dict[str, Any]:
        """Return the arguments that all sweeping kernels share; operands only if it multiplies."""
        (n, c), diagonal = self.shape, self.diagonal
        if diagonal is None or not -n < diagonal < c:
            diagonal = NO_DIAGONAL
        row_ids, column_ids = self.ids or (None, None)
        of_operands = dict.fromkeys(("rows", "columns", "width", "row_stride", "column_stride"))
        if multiplies:
            rows_nk, columns_ck = self.row_operand.tiles_nk, self.column_operand.tiles_nk
            rows, columns = _as_operands(rows_nk, columns_ck, config)
            of_operands = {
                "rows": rows, "columns": columns, "width": rows_nk.shape[1],
                "row_stride": rows_nk.stride(0), "column_stride": columns_ck.stride(0),
            }  # fmt: skip
        return {
            **of_operands, "row_ids": row_ids, "column_ids": column_ids, "num_rows": n,
            "num_columns": c, "diagonal": diagonal,
            "SPLIT_SCALE": self.row_operand.precision.is_split, **config.launch_options,
        }  # fmt: skip

    def threshold_arguments(self, config: TileConfig) -> dict[str, Any]:
        """Return the kernel arguments for thresholds and stored products."""
        row_thresholds, column_thresholds, guides = self.thresholds or (None, None, None)
        row_guides = column_guides = guide_width = None
        if guides is not None:
            row_guides, column_guides = _as_operands(*guides, config)
            guide_width = guides[0].shape[1]
        return {
            "row_thresholds": row_thresholds, "column_thresholds": column_thresholds,
            "row_guides": row_guides, "column_guides": column_guides, "guide_width": guide_width,
            "stored": self.stored_nc,
            "stored_stride": None if self.stored_nc is None else self.stored_nc.stride(0),
        }  # fmt: skip


def _as_operands(rows_nk: Tensor, columns_ck: Tensor, config: TileConfig) -> tuple[Any, Any]:
    """Return tensor descriptors for Hopper's copy engine, or the operands themselves."""
    if not config.tma:
        return rows_nk, columns_ck
    tile_m, tile_n, tile_k = config.tile
    return (
        TensorDescriptor.from_tensor(rows_nk, [tile_m, tile_k]),
        TensorDescriptor.from_tensor(columns_ck, [tile_n, tile_k]),
    )


@dataclass(frozen=True)
class Weights:
    """The gradients of one block's logits, times `2^exponent`, in one tensor or in two halves."""

    high_nc: Tensor  # rounded to 16 bits, or fp32
    low_nc: Tensor | None  # the rounding errors, in the same layout; `None` without a low half
    exponent: int  # keeps small weights in the normal range of fp16

    def arguments(self, config: TileConfig) -> dict[str, Any]:
        weights: list[Any] = [self.high_nc, self.low_nc]
        if config.tma:
            tile = list(config.tile[:2])
            weights = [x if x is None else TensorDescriptor.from_tensor(x, tile) for x in weights]
        return {
            "weights": weights[0],
            "weights_low": weights[1],
            "weights_stride": self.high_nc.stride(0),
        }

    def add_products(self, block: Block, gradients: Derivatives) -> None:
        """Add `weights @ columns` and `weights.T @ rows` to the gradients that are not `None`."""
        # The product applies the factor, which saves a pass over the gradients.
        factor = 2.0**-self.exponent
        for total, place, operand, is_fresh, is_turned in (
            (gradients.rows_bD, block.rows, block.column_operand, block.fresh.rows, False),
            (gradients.columns_mD, block.columns, block.row_operand, block.fresh.columns, True),
        ):
            if total is None:
                continue
            for weights_nc, part_D in self._products(operand):
                left = weights_nc.T if is_turned else weights_nc
                add_product(total[place], left, part_D, factor, not is_fresh)
                is_fresh = False

    def _products(self, operand: Operand) -> Iterator[tuple[Tensor, Tensor]]:
        # Without low times low, which for bf16 halves is at most 2^-16 of the product.
        for part in operand.parts_nD:
            yield self.high_nc, part
        if self.low_nc is not None:
            yield self.low_nc, operand.parts_nD[0]


class Workspace:
    """Memory for the weights of one block of at most a given shape, reused by all blocks."""

    def __init__(self, shape: tuple[int, int], precision: Precision, device: torch.device) -> None:
        rows, columns = shape
        self._precision = precision
        self._halves = torch.empty(
            1 + precision.keeps_low, rows * padded(columns), dtype=precision.softmax, device=device
        )

    def weights(self, block: Block) -> Weights:
        rows, columns = block.shape
        size = rows * padded(columns)
        high, *low = (half[:size].view(rows, -1)[:, :columns] for half in self._halves)
        return Weights(high, low[0] if low else None, self._precision.softmax_exponent)


def add_product(
    total_mn: Tensor, left_mk: Tensor, right_kn: Tensor, factor: float = 1.0, adds: bool = True
) -> None:
    """Add `factor * left @ right` to an fp32 total in place, or overwrite it if `adds` is False.

    On CUDA, cuBLAS takes 16-bit operands. On other devices they are widened, with the same result:
    products of two 16-bit values are exact in fp32.
    """
    if left_mk.dtype != total_mn.dtype and not left_mk.is_cuda:
        left_mk, right_kn = left_mk.to(total_mn.dtype), right_kn.to(total_mn.dtype)
    # With beta = 0, cuBLAS does not read the total, which may hold NaN.
    beta = 1.0 if adds else 0.0
    if left_mk.dtype == total_mn.dtype:
        total_mn.addmm_(left_mk, right_kn, beta=beta, alpha=factor)
    else:
        # `addmm_` has one dtype for all tensors, so the sum would be in 16 bits.
        torch.addmm(
            total_mn, left_mk, right_kn, beta=beta, alpha=factor, out_dtype=total_mn.dtype,
            out=total_mn,
        )  # fmt: skip
