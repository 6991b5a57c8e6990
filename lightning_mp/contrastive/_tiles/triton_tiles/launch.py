"""What the launchers of all sweeps share: checks, tensor descriptors, facts of the device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.dot import NO_DIAGONAL, tile_dots
from lightning_mp.contrastive._tiles.triton_tiles.operands import ROW_MULTIPLE

__all__ = [
    "BlockLimits",
    "as_kept",
    "as_limits",
    "as_operands",
    "as_targets",
    "diagonal_offset",
    "is_interpreted",
    "multiprocessors",
]

_LARGEST_BLOCK = 2**30  # rows and columns are 32-bit numbers, sums of two included


class BlockLimits(NamedTuple):
    """What a block leaves out of the sums, as `Limits` has it, ready for the kernels.

    Args:
        rows_n: The similarities above which rows leave a pair out, fp32.
        columns_m: Those of columns.
        row_guides_nk: Operands whose products are the similarities, padded as `make_operand` does
            it, with no gaps between rows. `None`: the features' are.
        column_guides_mk: Those of columns.
    """

    rows_n: Tensor
    columns_m: Tensor
    row_guides_nk: Tensor | None = None
    column_guides_mk: Tensor | None = None


def as_limits(limits: BlockLimits | None, config: TileConfig) -> tuple[Any, ...]:
    """Return limits and guides as the kernels want them, and the guides' width.

    Raises:
        ValueError: Guides are not laid out in aligned rows without gaps.
    """
    if limits is None:
        return (None,) * 5
    rows_nk, columns_mk = limits[2:]
    if rows_nk is None or columns_mk is None:
        return (*limits[:2], None, None, None)
    if not (rows_nk.is_contiguous() and columns_mk.is_contiguous()):
        raise ValueError(
            f"Passed guides of strides {rows_nk.stride()} and {columns_mk.stride()}. They must be "
            "contiguous. Prepare them by `make_operand` from contiguous ones."
        )
    dtypes = ("bfloat16", "float16")  # which fit the memory of rows for any
    guides = as_operands(rows_nk, columns_mk, dataclasses.replace(config, dtypes=dtypes))
    return (*limits[:2], *guides, rows_nk.shape[1])


def _check(rows_nk: Tensor, columns_mk: Tensor, config: TileConfig) -> None:
    """Refuse operands that a kernel would misread."""
    name = str(rows_nk.dtype).removeprefix("torch.")
    formats = [(list(x.shape), x.dtype, x.device) for x in (rows_nk, columns_mk)]
    if rows_nk.shape[1] != columns_mk.shape[1] or formats[0][1:] != formats[1][1:]:
        raise ValueError(
            f"Passed rows and columns of (shape, dtype, device) {formats}. They must have one "
            "width, dtype and device. Prepare both by `make_operand` with one precision."
        )
    if name not in config.dtypes:
        raise ValueError(
            f"Passed operands of {name} with a tile shape for {', '.join(config.dtypes)}. Take "
            "one from `find_configs` for their dtype."
        )
    for operand in (rows_nk, columns_mk):
        if (
            operand.stride(1) != 1
            or operand.shape[1] % config.tile[2]
            or operand.stride(0) % ROW_MULTIPLE
            or operand.data_ptr() % 16
            or operand.shape[0] > _LARGEST_BLOCK
        ):
            raise ValueError(
                f"Passed an operand of shape {list(operand.shape)} and strides "
                f"{operand.stride()}. Rows must be contiguous, aligned to 16 bytes, a multiple of "
                f"{config.tile[2]} wide, a multiple of {ROW_MULTIPLE} values apart, and at most "
                "2^30 in number. Prepare it by `make_operand`."
            )


def as_operands(
    rows_nk: Tensor | None, columns_mk: Tensor | None, config: TileConfig
) -> tuple[Any, Any]:
    """Return the operands as the kernel wants them: tensor descriptors, or the tensors, or `None`.

    Raises:
        ValueError: They differ in width, dtype or device, or are not laid out in aligned rows.
    """
    if rows_nk is None or columns_mk is None:
        return None, None
    _check(rows_nk, columns_mk, config)
    if not config.tma:
        return rows_nk, columns_mk
    tile_m, tile_n, tile_k = config.tile
    return _as_descriptor(rows_nk, tile_m, tile_k), _as_descriptor(columns_mk, tile_n, tile_k)


def _as_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor by which the copy engine moves tiles of `rows` x `columns`."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def as_targets(
    values_nm: Tensor, low_nm: Tensor | None, shape: tuple[int, int], config: TileConfig
) -> list[Any]:
    """Return where a kernel writes a block's values, and what rounding leaves over of them.

    Raises:
        ValueError: They have another shape than the block.
    """
    for target in (values_nm, low_nm):
        if target is not None and target.shape != shape:
            raise ValueError(
                f"Passed memory of shape {list(target.shape)} for the values of a block. It must "
                f"be {list(shape)}, rows by columns. Pass a view of the workspace."
            )
    tile_m, tile_n, _ = config.tile
    return [
        _as_descriptor(target, tile_m, tile_n) if config.tma and target is not None else target
        for target in (values_nm, low_nm)
    ]


def as_kept(kept_nm: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor | None, int | None]:
    """Return memory for a block's products as the kernels want it, and how far rows lie apart.

    Raises:
        ValueError: It has another shape than the block, or no room for whole groups of 16.
    """
    if kept_nm is None:
        return None, None
    row, column = kept_nm.stride()
    if kept_nm.shape != shape or column != 1 or row % ROW_MULTIPLE or kept_nm.data_ptr() % 16:
        raise ValueError(
            f"Passed `kept_nm` of shape {list(kept_nm.shape)} and strides {kept_nm.stride()}. It "
            f"must be of shape {list(shape)}, contiguous in rows that are aligned to 16 bytes and "
            f"a multiple of {ROW_MULTIPLE} values apart. Take it from `Kept.take_rows`."
        )
    return kept_nm, row


def diagonal_offset(diagonal: int | None, rows: int, columns: int) -> int:
    """Return the offset of the positives as the kernels take it."""
    if diagonal is None or not -rows < diagonal < columns:
        return NO_DIAGONAL
    return diagonal


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run at a time at least."""
    if device.type != "cuda":
        return 4  # Triton's interpreter runs one after another; this exercises the sharing
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which is settled at their import."""
    return not isinstance(tile_dots, JITFunction)
