"""The Triton path of `tensor_stats`: one launch per dtype, and one launch that merges chunks.

Shapes:
    N: tensors. C: chunks of all tensors. K: columns of `StatField`. BLOCK: elements that a program
    holds at a time.

Each program reads one chunk of one tensor and stores its partial statistics; a second kernel merges
the chunks of each tensor in order. So there are no atomics, and results are bitwise reproducible.
Zeros, subnormals and non-finite values are detected by their bits: fp32 magnitudes are ordered like
the integers of their bits, even if a GPU flushes subnormals to zero. Squares are summed in float64,
where squares of fp32 values neither overflow nor underflow.

Addresses are passed as integers, about which Triton knows nothing. Full blocks of tensors with
16-byte aligned addresses are read in vectors; other blocks are read element by element with a mask.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.stats_view import StatField
from lightning_mp.numerics.triton_support import launching_on

__all__ = ["CHUNK", "COLUMNS", "fused_stats", "merge_stats_kernel", "stats_kernel"]

COLUMNS = ("address", "size", "is_aligned", "first_chunk", "num_chunks")
"""Columns of `table`, int64 of shape (N, len(COLUMNS)), with one row per tensor."""
_FORMATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_VECTOR_BYTES = 16
_NUM_WARPS = 4
# 8 elements per thread: 32 bytes in fp32, 16 bytes in half precision.
BLOCK = tl.constexpr(8 * 32 * _NUM_WARPS)
# A different size for masked blocks, or Triton would use one layout for both kinds of blocks.
MASKED_BLOCK = tl.constexpr(BLOCK.value // 2)
# A count has 8 bits, up to 255, and each element of a masked block counts at most 32 times.
CHUNK = tl.constexpr(16 * BLOCK.value)

_WIDTH = tl.constexpr(len(COLUMNS))
_SIZE, _IS_ALIGNED, _FIRST, _COUNT = (tl.constexpr(column) for column in range(1, 5))
_K = tl.constexpr(len(StatField))
_PADDED_K = tl.constexpr(triton.next_power_of_2(len(StatField)))  # `tl.arange` needs a power of 2
_AMAX = tl.constexpr(int(StatField.AMAX))
_ZEROS = tl.constexpr(int(StatField.ZEROS))
_SUBNORMALS = tl.constexpr(int(StatField.SUBNORMALS))
_NON_FINITE = tl.constexpr(int(StatField.NON_FINITE))
_SUM_OF_SQUARES = tl.constexpr(int(StatField.SUM_OF_SQUARES))
_INF_BITS = tl.constexpr(0x7F800000)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_MERGE_BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["first_chunk"])
def stats_kernel(table, tensor_of_chunk, subnormal, partials, first_chunk, FORMAT: tl.constexpr):
    """Store the statistics of one chunk of one tensor.

    Args:
        table: See `COLUMNS`.
        tensor_of_chunk: int64 of shape (C,).
        subnormal: One fp32 element; smaller magnitudes are subnormal.
        partials: float64 of shape (C, K).
        first_chunk: Index of the first chunk of this dtype.
        FORMAT: dtype of the tensors.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    of_tensor = table + tl.load(tensor_of_chunk + chunk) * _WIDTH
    start = (chunk - tl.load(of_tensor + _FIRST)) * CHUNK
    count = tl.minimum(tl.load(of_tensor + _SIZE) - start, CHUNK).to(tl.int32)
    is_aligned = tl.load(of_tensor + _IS_ALIGNED) != 0
    whole = tl.where(is_aligned, count // BLOCK * BLOCK, 0)
    address = tl.load(of_tensor)
    below = _bits_of_bound(subnormal)
    # Two pointers, because an alignment hint applies to all uses of a pointer.
    aligned = tl.multiple_of(_at(address, FORMAT) + start, 16)
    amax, marks, squares = _initial_values(BLOCK)
    for at in range(0, whole, BLOCK):
        x = _widened(tl.load(aligned + at + tl.arange(0, BLOCK)), FORMAT)
        amax, marks, squares = _add(x, True, below, amax, marks, squares)
    rest = _at(address, FORMAT) + start
    amax_2, marks_2, squares_2 = _initial_values(MASKED_BLOCK)
    for at in range(whole, count, MASKED_BLOCK):
        lane = at + tl.arange(0, MASKED_BLOCK)
        x = _widened(tl.load(rest + lane, mask=lane < count, other=0), FORMAT)
        amax_2, marks_2, squares_2 = _add(x, lane < count, below, amax_2, marks_2, squares_2)
    into = partials + chunk * _K
    largest = tl.maximum(tl.max(amax, axis=0), tl.max(amax_2, axis=0))
    tl.store(into + _AMAX, largest.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(into + _ZEROS, _count(marks, 0) + _count(marks_2, 0))
    tl.store(into + _SUBNORMALS, _count(marks, 8) + _count(marks_2, 8))
    tl.store(into + _NON_FINITE, _count(marks, 16) + _count(marks_2, 16))
    tl.store(into + _SUM_OF_SQUARES, tl.sum(squares, axis=0) + tl.sum(squares_2, axis=0))


@triton.jit
def merge_stats_kernel(table, partials, stats):
    """Merge the chunks of one tensor; an empty tensor has no chunks.

    Args:
        table: See `COLUMNS`.
        partials: float64 of shape (C, K).
        stats: float64 of shape (N, K).
    """
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(table + tensor * _WIDTH + _FIRST)
    count = tl.load(table + tensor * _WIDTH + _COUNT).to(tl.int32)
    column_K = tl.arange(0, _PADDED_K)
    column = column_K[None, :]
    merged = tl.zeros([_MERGE_BLOCK, _PADDED_K], tl.float64)
    for at in range(0, count, _MERGE_BLOCK):
        part = at + tl.arange(0, _MERGE_BLOCK)[:, None]
        is_there = (part < count) & (column < _K)
        found = tl.load(partials + (first + part) * _K + column, mask=is_there, other=0.0)
        merged = tl.where(column == _AMAX, tl.maximum(merged, found), merged + found)
    stat_K = tl.where(column_K == _AMAX, tl.max(merged, axis=0), tl.sum(merged, axis=0))
    tl.store(stats + tensor * _K + column_K, stat_K, mask=column_K < _K)


@triton.jit
def _at(address, FORMAT: tl.constexpr):
    """Return a pointer; bf16 is loaded as int16, without any conversion."""
    LOADED: tl.constexpr = tl.int16 if FORMAT.is_bf16() else FORMAT
    return address.to(tl.pointer_type(LOADED))


@triton.jit
def _widened(x, FORMAT: tl.constexpr):
    """Return fp32 values; bf16 is their upper half, and a shift keeps subnormals."""
    if FORMAT.is_bf16():
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _initial_values(SIZE: tl.constexpr):
    """Return initial values for `_add`: magnitude bits, three counts in one word, and sums."""
    return tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.uint32), tl.zeros([SIZE], tl.float64)


@triton.jit
def _add(x, mask, below, amax, marks, squares):
    """Add a block, element by element."""
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    is_finite = bits < _INF_BITS
    amax = tl.maximum(amax, tl.where(is_finite, bits, 0))
    is_zero = (bits == 0) & mask  # masked elements were loaded as 0
    marks += is_zero.to(tl.uint32)
    marks += ((bits > 0) & (bits < below)).to(tl.uint32) << 8
    marks += (bits >= _INF_BITS).to(tl.uint32) << 16
    wide = tl.where(is_finite, x, 0.0).to(tl.float64)
    return amax, marks, squares + wide * wide


@triton.jit
def _count(marks, SHIFT: tl.constexpr):
    return tl.sum(((marks >> SHIFT) & 0xFF).to(tl.int32), axis=0).to(tl.float64)


@triton.jit
def _bits_of_bound(bound):
    """Return the bits of a positive bound, 0 for NaN, so that no value is below."""
    value = tl.load(bound)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits > _INF_BITS, 0, bits)


def fused_stats(values: Sequence[Tensor], subnormal: Tensor) -> Tensor:
    """Compute the same as `row_stats`, reading every value once and summing squares in float64."""
    device = subnormal.device
    for tensor in values:
        is_vector = tensor.ndim == 1 and tensor.is_contiguous()
        if tensor.dtype not in _FORMATS or tensor.device != device or not is_vector:
            raise ValueError(
                f"Passed a tensor of {tensor.dtype} on {tensor.device}, of shape "
                f"{list(tensor.shape)} and strides {tensor.stride()}. Tensors must be contiguous "
                f"vectors of fp16, bf16 or fp32 on {device}. Call `tensor_stats` instead."
            )
    # One launch per dtype, so the chunks of a dtype must be consecutive.
    order = [i for dtype in _FORMATS for i, tensor in enumerate(values) if tensor.dtype == dtype]
    table_NT, tensor_of_chunk_C = _table(values, order)
    counts_N = table_NT[:, COLUMNS.index("num_chunks")]
    options: dict[str, Any] = {"num_warps": _NUM_WARPS, "enable_fp_fusion": True}
    with launching_on(device):
        # One copy for both.
        packed = torch.from_numpy(np.concatenate([table_NT.ravel(), tensor_of_chunk_C]))
        table, tensor_of_chunk = send(packed, device).split([table_NT.size, len(tensor_of_chunk_C)])
        partials_CK = subnormal.new_empty(
            len(tensor_of_chunk_C), len(StatField), dtype=torch.float64
        )
        stats_NK = subnormal.new_empty(len(values), len(StatField), dtype=torch.float64)
        first = 0
        for dtype, format_ in _FORMATS.items():
            chunks = sum(int(n) for n, t in zip(counts_N, values, strict=True) if t.dtype == dtype)
            if chunks:
                stats_kernel[(chunks,)](
                    table, tensor_of_chunk, subnormal, partials_CK, first, format_, **options
                )
            first += chunks
        merge_stats_kernel[(len(values),)](table, partials_CK, stats_NK, **options)
    return stats_NK


def _table(values: Sequence[Tensor], order: Sequence[int]) -> tuple[Any, Any]:
    """Return the table of `COLUMNS` and the tensor of each chunk, with tensors in `order`."""
    table_NT = np.empty((len(values), len(COLUMNS)), dtype=np.int64)
    address_N, size_N, is_aligned_N, first_N, count_N = table_NT.T
    # A table of integers, because a kernel cannot take a list of pointers.
    address_N[:] = [tensor.data_ptr() for tensor in values]
    size_N[:] = [tensor.numel() for tensor in values]
    is_aligned_N[:] = address_N % _VECTOR_BYTES == 0
    count_N[:] = -(-size_N // CHUNK.value)
    ends = np.cumsum(count_N[order])
    first_N[order] = ends - count_N[order]
    return table_NT, np.repeat(np.asarray(order, dtype=np.int64), count_N[order])
