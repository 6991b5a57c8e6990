"""The Triton path of `tensor_stats`: addresses in a table, a launch a format, and a merge.

Legend: `N` tensors, `C` chunks of all of them, `K` columns of `StatField`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lightning_mp.numerics.stat_fields import StatField
from lightning_mp.numerics.stats_kernels import (
    CHUNK,
    COLUMNS,
    MERGE_WARPS,
    NUM_WARPS,
    merge_stats_kernel,
    stats_kernel,
)
from lightning_mp.numerics.triton_support import launching_on

__all__ = ["fused_stats"]

_FORMATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_VECTOR_BYTES = 16


def fused_stats(values: Sequence[Tensor], small: tuple[Tensor, Tensor]) -> Tensor:
    """Return the statistics of flat tensors of one device, every value read once.

    As `row_stats` computes them, but for sums, which are kept in float64. The host looks at
    addresses and sizes, and copies a table of them to the device without waiting.

    Args:
        values: Contiguous vectors of fp16, bf16 or fp32, of any length.
        small: Below the first, magnitudes are subnormal; up to the second they are flushed. fp32
            of no dimension, on the device of the values.

    Returns:
        stats_NK: float64.

    Raises:
        ValueError: A tensor has another dtype, another device, or gaps.
    """
    device = small[0].device
    for tensor in values:
        if (
            tensor.dtype not in _FORMATS
            or tensor.device != device
            or tensor.ndim != 1
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"Passed a tensor of {tensor.dtype} on {tensor.device}, of shape "
                f"{list(tensor.shape)} and strides {tensor.stride()}. Tensors must be contiguous "
                f"vectors of fp16, bf16 or fp32 on {device}. Go through `tensor_stats`."
            )
    formats = [dtype for dtype in _FORMATS if any(dtype == tensor.dtype for tensor in values)]
    order = [i for dtype in formats for i, tensor in enumerate(values) if tensor.dtype == dtype]
    table_NT, tensor_of_chunk_C = _table(values, order)
    options: dict[str, Any] = {"enable_fp_fusion": True}
    with launching_on(device):
        table, tensor_of_chunk = _to_device((table_NT, tensor_of_chunk_C), device)
        partials_CK = small[0].new_empty(
            len(tensor_of_chunk_C), len(StatField), dtype=torch.float64
        )
        stats_NK = small[0].new_empty(len(values), len(StatField), dtype=torch.float64)
        first = 0
        counts_N = table_NT[:, COLUMNS.index("num_chunks")]
        for dtype in formats:
            chunks = sum(int(n) for n, t in zip(counts_N, values, strict=True) if t.dtype == dtype)
            if chunks:
                stats_kernel[(chunks,)](
                    table, tensor_of_chunk, *small, partials_CK, first, _FORMATS[dtype],
                    num_warps=NUM_WARPS, **options,
                )  # fmt: skip
            first += chunks
        merge_stats_kernel[(len(values),)](
            table, partials_CK, stats_NK, num_warps=MERGE_WARPS, **options
        )
    return stats_NK


def _table(values: Sequence[Tensor], order: Sequence[int]) -> tuple[Any, Any]:
    """Return what `COLUMNS` says, and the tensor of each chunk, with tensors taken in `order`."""
    table_NT = np.empty((len(values), len(COLUMNS)), dtype=np.int64)
    address_N, size_N, is_aligned_N, first_N, count_N = table_NT.T
    address_N[:] = [tensor.data_ptr() for tensor in values]
    size_N[:] = [tensor.numel() for tensor in values]
    is_aligned_N[:] = address_N % _VECTOR_BYTES == 0
    count_N[:] = -(-size_N // CHUNK.value)
    ends = np.cumsum(count_N[order])
    first_N[order] = ends - count_N[order]
    return table_NT, np.repeat(np.asarray(order, dtype=np.int64), count_N[order])


def _to_device(arrays: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Copy arrays of int64 in one go, without waiting for the device."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(packed.split([array.size for array in arrays]))
