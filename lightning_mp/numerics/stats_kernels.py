"""Statistics of many tensors in one launch a format, and one more that merges their parts.

Shapes:
    N: tensors. C: chunks of all tensors together. K: columns of `StatField`. BLOCK: elements that a
    program holds at a time.

A program reads one chunk of one tensor and stores what it found in a place of its own; a second
kernel merges a tensor's chunks in their order. So there are no atomics, and the same input gives
the same bits. Zeros, subnormals and what is not finite are told by bit patterns: magnitudes of fp32
are ordered like the integers of their bits, whatever a GPU flushes to zero. Sums are kept in
float64, where squares of fp32 values neither overflow nor vanish.

Addresses come as integers, of which Triton knows nothing. Blocks are read in vectors where they are
whole and the tensor's address is aligned to 16 bytes; elsewhere element by element, under a mask.
"""

import triton
import triton.language as tl

from lightning_mp.numerics.stat_fields import StatField

__all__ = ["CHUNK", "COLUMNS", "MERGE_WARPS", "NUM_WARPS", "merge_stats_kernel", "stats_kernel"]

COLUMNS = ("address", "size", "is_aligned", "first_chunk", "num_chunks")
"""What `table`, int64 of shape (N, len(COLUMNS)), says of each tensor."""
NUM_WARPS = 4
MERGE_WARPS = 4
# Eight elements a thread: 32 bytes of fp32, 16 of what is half.
BLOCK = tl.constexpr(8 * 32 * NUM_WARPS)
# Masked ones have a size of their own, or Triton would lay both out alike, neighbours in a thread.
MASKED_BLOCK = tl.constexpr(BLOCK.value // 2)
# A byte counts up to 255, and an element of a masked block is met 32 times.
CHUNK = tl.constexpr(16 * BLOCK.value)

_WIDTH = tl.constexpr(len(COLUMNS))
_SIZE, _IS_ALIGNED, _FIRST, _COUNT = (tl.constexpr(column) for column in range(1, 5))
_K = tl.constexpr(len(StatField))
_AMAX = tl.constexpr(int(StatField.AMAX))
_SMALLEST = tl.constexpr(int(StatField.SMALLEST))
_ZEROS = tl.constexpr(int(StatField.ZEROS))
_SUBNORMALS = tl.constexpr(int(StatField.SUBNORMALS))
_FLUSHED = tl.constexpr(int(StatField.FLUSHED))
_NON_FINITE = tl.constexpr(int(StatField.NON_FINITE))
_SUM = tl.constexpr(int(StatField.SUM))
_SUM_OF_SQUARES = tl.constexpr(int(StatField.SUM_OF_SQUARES))
_INF_BITS = tl.constexpr(0x7F800000)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_MERGE_BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["first_chunk"])
def stats_kernel(
    table, tensor_of_chunk, subnormal, flushed, partials, first_chunk, FORMAT: tl.constexpr
):
    """Store the statistics of one chunk of one tensor.

    Args:
        table: As `COLUMNS` says.
        tensor_of_chunk: int64 of shape (C,).
        subnormal: One element of fp32: magnitudes below are subnormal.
        flushed: One element of fp32: magnitudes up to it are flushed.
        partials: float64 of shape (C, K).
        first_chunk: Number of the first chunk of this format.
        FORMAT: Of the tensors.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    of_tensor = table + tl.load(tensor_of_chunk + chunk) * _WIDTH
    start = (chunk - tl.load(of_tensor + _FIRST)) * CHUNK
    count = tl.minimum(tl.load(of_tensor + _SIZE) - start, CHUNK).to(tl.int32)
    is_aligned = tl.load(of_tensor + _IS_ALIGNED) != 0
    whole = tl.where(is_aligned, count // BLOCK * BLOCK, 0)
    address = tl.load(of_tensor)
    below, up_to = _bits_of_bound(subnormal), _bits_of_bound(flushed)
    # Pointers are made twice: a hint is one for all uses of what it is given to.
    aligned = tl.multiple_of(_at(address, FORMAT) + start, 16)
    amax, smallest, marks, total, squares = _none(BLOCK)
    for at in range(0, whole, BLOCK):
        x = _widened(tl.load(aligned + at + tl.arange(0, BLOCK)), FORMAT)
        amax, smallest, marks, total, squares = _add(
            x, True, below, up_to, amax, smallest, marks, total, squares
        )
    rest = _at(address, FORMAT) + start
    amax_2, smallest_2, marks_2, total_2, squares_2 = _none(MASKED_BLOCK)
    for at in range(whole, count, MASKED_BLOCK):
        lane = at + tl.arange(0, MASKED_BLOCK)
        x = _widened(tl.load(rest + lane, mask=lane < count, other=0), FORMAT)
        amax_2, smallest_2, marks_2, total_2, squares_2 = _add(
            x, lane < count, below, up_to, amax_2, smallest_2, marks_2, total_2, squares_2
        )
    into = partials + chunk * _K
    largest = tl.maximum(tl.max(amax, axis=0), tl.max(amax_2, axis=0))
    least = tl.minimum(tl.min(smallest, axis=0), tl.min(smallest_2, axis=0))
    tl.store(into + _AMAX, largest.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(into + _SMALLEST, least.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(into + _ZEROS, _count(marks, 0) + _count(marks_2, 0))
    tl.store(into + _SUBNORMALS, _count(marks, 8) + _count(marks_2, 8))
    tl.store(into + _FLUSHED, _count(marks, 16) + _count(marks_2, 16))
    tl.store(into + _NON_FINITE, _count(marks, 24) + _count(marks_2, 24))
    tl.store(into + _SUM, tl.sum(total, axis=0) + tl.sum(total_2, axis=0))
    tl.store(into + _SUM_OF_SQUARES, tl.sum(squares, axis=0) + tl.sum(squares_2, axis=0))


@triton.jit
def merge_stats_kernel(table, partials, stats):
    """Merge the chunks of one tensor, without any of which it has no values.

    Args:
        table: As `COLUMNS` says.
        partials: float64 of shape (C, K).
        stats: float64 of shape (N, K).
    """
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(table + tensor * _WIDTH + _FIRST)
    count = tl.load(table + tensor * _WIDTH + _COUNT).to(tl.int32)
    column = tl.arange(0, _K)[None, :]
    neutral = tl.where(column == _SMALLEST, float("inf"), 0.0).to(tl.float64)
    merged = neutral + tl.zeros([_MERGE_BLOCK, _K], tl.float64)
    for at in range(0, count, _MERGE_BLOCK):
        part = at + tl.arange(0, _MERGE_BLOCK)[:, None]
        found = tl.load(partials + (first + part) * _K + column, mask=part < count, other=0.0)
        found = tl.where(part < count, found, neutral)
        merged = tl.where(
            column == _AMAX,
            tl.maximum(merged, found),
            tl.where(column == _SMALLEST, tl.minimum(merged, found), merged + found),
        )
    column_K = tl.arange(0, _K)
    extreme = tl.where(
        column_K == _AMAX,
        tl.max(merged, axis=0),
        tl.where(column_K == _SMALLEST, tl.min(merged, axis=0), tl.sum(merged, axis=0)),
    )
    tl.store(stats + tensor * _K + column_K, extreme)


@triton.jit
def _at(address, FORMAT: tl.constexpr):
    """Return a pointer; to bf16 as to integers, which nothing takes for numbers."""
    LOADED: tl.constexpr = tl.int16 if FORMAT.is_bf16() else FORMAT
    return address.to(tl.pointer_type(LOADED))


@triton.jit
def _widened(x, FORMAT: tl.constexpr):
    """Return fp32 values. bf16 is the upper half of them: a shift keeps its subnormals."""
    if FORMAT.is_bf16():
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _none(SIZE: tl.constexpr):
    """Return what `_add` starts from: bits of magnitudes, four counts in a word, and sums."""
    amax = tl.zeros([SIZE], tl.int32)
    marks = tl.zeros([SIZE], tl.uint32)
    total = tl.zeros([SIZE], tl.float64)
    return amax, amax + _INF_BITS, marks, total, total


@triton.jit
def _add(x, mask, below, up_to, amax, smallest, marks, total, squares):
    """Add a block, element by element."""
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    is_finite = bits < _INF_BITS
    is_nonzero = bits > 0
    amax = tl.maximum(amax, tl.where(is_finite, bits, 0))
    smallest = tl.minimum(smallest, tl.where(is_nonzero, bits, _INF_BITS))  # inf, NaN are no less
    is_zero = (bits == 0) & mask
    marks += is_zero.to(tl.uint32)
    marks += (is_nonzero & (bits < below)).to(tl.uint32) << 8
    marks += (is_nonzero & (bits <= up_to)).to(tl.uint32) << 16
    marks += (bits >= _INF_BITS).to(tl.uint32) << 24
    wide = tl.where(is_finite, x, 0.0).to(tl.float64)
    return amax, smallest, marks, total + wide, squares + wide * wide


@triton.jit
def _count(marks, SHIFT: tl.constexpr):
    return tl.sum(((marks >> SHIFT) & 0xFF).to(tl.int32), axis=0).to(tl.float64)


@triton.jit
def _bits_of_bound(bound):
    """Return the bits of a positive bound, none of NaN: nothing is below it."""
    value = tl.load(bound)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits > _INF_BITS, 0, bits)
