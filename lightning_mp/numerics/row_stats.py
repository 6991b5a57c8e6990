"""The torch path of `tensor_stats`: rows of 1024 values in batches that fit the CPU cache.

Separate reductions would each read a tensor from memory. Here values are copied (and widened) in
batches that fit the second-level cache, where further passes are cheap, and small tensors share a
batch. Batches are padded with zeros, which changes only the count of zeros, by a known number.

Legend: `N` tensors, `K` columns of `StatField`, `R` rows, `W` = 1024 values a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.stats_view import StatField

__all__ = ["row_stats"]

_WIDTH = 1024
# 512 KiB of fp32, so that a batch and its temporaries fit a second-level cache of 1 MiB.
_HOST_ROWS = 128
# 32 MiB of fp32, so that an accelerator launches few kernels.
_DEVICE_ROWS = 8192
# If the largest magnitude of every row is in this interval, squares do not overflow in fp32, and
# squares below 2^-126 contribute at most 2^-36 of the sum.
_SAFE_SQUARES = (2.0**-40, 2.0**50)
# An additional column: the unit of each row's norm.
_UNIT = len(StatField)


@dataclass(frozen=True)
class _TensorSlice:
    """A slice of a tensor in one batch: full rows, or the unfinished last row."""

    tensor: int
    start: int
    stop: int
    row: int

    @property
    def rows(self) -> int:
        return -(-(self.stop - self.start) // _WIDTH)


@dataclass(frozen=True)
class _BatchLayout:
    """The layout of tensors in batches: first all full rows, then all unfinished last rows."""

    batches: tuple[tuple[_TensorSlice, ...], ...]
    segments: tuple[int, ...]  # full rows of each tensor, then unfinished rows: 2 N
    padding: tuple[int, ...]  # zeros after the end of each tensor


def row_stats(values: Sequence[Tensor], subnormal: Tensor, *, may_sync: bool) -> Tensor:
    """Return the statistics of flat tensors on one device: stats_NK, float64, or fp32 on MPS.

    Magnitudes below `subnormal` are subnormal: a 0-d tensor on the device of the values, in the
    dtype of the computation. If `may_sync`, as on a CPU, intermediate results are read in order to
    skip passes that cannot find anything.
    """
    device, dtype = subnormal.device, subnormal.dtype
    most = _HOST_ROWS if device.type == "cpu" else _DEVICE_ROWS
    layout = _layout_of(tuple(len(tensor) for tensor in values), most)
    rows = sum(layout.segments)
    batch = _Batch(min(most, rows), subnormal, may_sync)
    partials_KR = torch.zeros(len(StatField) + 1, rows, dtype=dtype, device=device)
    partials_KR[_UNIT].fill_(1)
    top = 0
    for slices in layout.batches:
        bottom = top + slices[-1].row + slices[-1].rows
        batch.reduce(batch.load(values, slices), partials_KR[:, top:bottom])
        top = bottom
    return _merge_rows(partials_KR.to(state_dtype(device)), layout)


@lru_cache(maxsize=64)
def _layout_of(lengths: tuple[int, ...], rows: int) -> _BatchLayout:
    """Distribute tensors of these lengths over batches of at most `rows` rows."""
    batches: list[list[_TensorSlice]] = [[]]
    free = rows
    full = [(i, 0, n - n % _WIDTH) for i, n in enumerate(lengths)]
    tails = [(i, n - n % _WIDTH, n) for i, n in enumerate(lengths)]
    for slices in (full, tails):
        if free < rows:  # batches of full rows contain no padding
            batches.append([])
            free = rows
        for tensor, start, end in slices:
            while start < end:
                if not free:
                    batches.append([])
                    free = rows
                stop = min(end, start + free * _WIDTH)
                tensor_slice = _TensorSlice(tensor, start, stop, rows - free)
                batches[-1].append(tensor_slice)
                free -= tensor_slice.rows
                start = stop
    return _BatchLayout(
        batches=tuple(tuple(slices) for slices in batches if slices),
        segments=tuple(n // _WIDTH for n in lengths) + tuple(n % _WIDTH > 0 for n in lengths),
        padding=tuple(-n % _WIDTH for n in lengths),
    )


class _Batch:
    """Memory for one batch of rows and its temporaries."""

    def __init__(self, rows: int, subnormal: Tensor, may_sync: bool) -> None:
        memory = subnormal.new_empty(4, rows, _WIDTH)
        self.values, self.finite, self.magnitudes, self.flags = memory.unbind()
        self.may_sync = may_sync
        self.subnormal = subnormal
        self.limit = float(subnormal.numpy()) if may_sync else math.inf

    def load(self, values: Sequence[Tensor], slices: Sequence[_TensorSlice]) -> Tensor:
        """Copy slices to rows, with zeros after the end of each slice; return the rows."""
        first = values[slices[0].tensor][slices[0].start : slices[0].stop]
        is_full = len(first) % _WIDTH == 0
        # Without padding or widening, no copy is needed.
        if len(slices) == 1 and is_full and first.dtype == self.values.dtype:
            return first.view(-1, _WIDTH)
        rows_RW = self.values[: slices[-1].row + slices[-1].rows]
        if not is_full:
            rows_RW.zero_()
        flat = rows_RW.view(-1)
        targets = [(each.row * _WIDTH, each.stop - each.start) for each in slices]
        torch._foreach_copy_(
            [flat[start : start + length] for start, length in targets],
            [values[each.tensor][each.start : each.stop] for each in slices],
        )
        return rows_RW

    def reduce(self, values: Tensor, out_KR: Tensor) -> None:
        """Reduce rows; norms are in units of the last column, zeros include padding and NaN/inf."""
        columns = out_KR.unbind()
        magnitudes, flags = self.magnitudes[: len(values)], self.flags[: len(values)]
        amax_R = columns[StatField.AMAX]
        torch.amax(torch.abs(values, out=magnitudes), 1, out=amax_R)
        if not self.may_sync or not amax_R.numpy().max() < math.inf:  # False for NaN
            finite = torch.nan_to_num(values, 0.0, 0.0, 0.0, out=self.finite[: len(values)])
            torch.ne(finite, values, out=flags)  # also True for NaN
            torch.sum(flags, 1, out=columns[StatField.NON_FINITE])
            values = finite
            torch.amax(torch.abs(values, out=magnitudes), 1, out=amax_R)
        # Passes that are skipped below would count nothing, and their columns are 0 already.
        least = float(magnitudes.amin().numpy()) if self.may_sync else 0.0
        if least == 0:
            torch.eq(magnitudes, 0, out=flags)
            torch.sum(flags, 1, out=columns[StatField.ZEROS])
        if least < self.limit:
            torch.lt(magnitudes, self.subnormal, out=flags)
            torch.sum(flags, 1, out=columns[StatField.SUBNORMALS])
            # Not negative: with a bound of 0 or NaN, zeros are not below the bound.
            columns[StatField.SUBNORMALS].sub_(columns[StatField.ZEROS]).clamp_min_(0)
        self._add_norms(values, columns)

    def _add_norms(self, values: Tensor, columns: Sequence[Tensor]) -> None:
        """Compute the norms of rows in units that keep squares in the range of fp32."""
        amax_R, unit_R = columns[StatField.AMAX], columns[_UNIT]
        if self.may_sync:
            amax = amax_R.numpy()
            is_safe = amax.min() > _SAFE_SQUARES[0] and amax.max() < _SAFE_SQUARES[1]
        if not self.may_sync or not is_safe:
            torch.clamp(amax_R, min=torch.finfo(amax_R.dtype).tiny, out=unit_R)  # not 0 / 0
            values = torch.div(values, unit_R[:, None], out=self.flags[: len(values)])
        torch.linalg.vector_norm(values, 2, 1, out=columns[StatField.SUM_OF_SQUARES])


def _merge_rows(partials_KR: Tensor, layout: _BatchLayout) -> Tensor:
    """Merge the rows of each tensor in a fixed order."""
    # Squared in float64, where squares do not overflow.
    norms_R = partials_KR[StatField.SUM_OF_SQUARES]
    norms_R.mul_(partials_KR[_UNIT]).square_()
    totals_2NK = _reduce_segments(partials_KR[:_UNIT].T, layout.segments, "sum").view(2, -1, _UNIT)
    stats_NK = totals_2NK.sum(0)
    amax_2N = _reduce_segments(partials_KR[StatField.AMAX], layout.segments, "max").view(2, -1)
    stats_NK[:, StatField.AMAX] = amax_2N.amax(0).clamp_min(0)  # -inf without rows
    stats_NK[:, StatField.ZEROS] -= send(
        torch.tensor(layout.padding, dtype=stats_NK.dtype), stats_NK.device
    )
    stats_NK[:, StatField.ZEROS] -= stats_NK[:, StatField.NON_FINITE]
    return stats_NK


def _reduce_segments(
    rows_RK: Tensor, lengths: tuple[int, ...], reduce: Literal["sum", "max"]
) -> Tensor:
    """Reduce consecutive rows per segment; empty segments give sums of 0 and maxima of -inf."""
    # In a fixed order, unlike `index_add_`, whose atomics are not deterministic.
    if rows_RK.device.type not in ("cpu", "cuda"):
        return _reduce_segments_one_by_one(rows_RK, lengths, reduce)
    counts = send(torch.tensor(lengths), rows_RK.device)
    reduced: Tensor = torch.segment_reduce(rows_RK, reduce, lengths=counts, axis=0, unsafe=True)
    return reduced


def _reduce_segments_one_by_one(
    rows_RK: Tensor, lengths: tuple[int, ...], reduce: Literal["sum", "max"]
) -> Tensor:
    """Reduce one segment at a time, for devices without `segment_reduce`, such as MPS."""
    segments = rows_RK.split(lengths)
    if reduce == "sum":
        return torch.stack([segment.sum(0) for segment in segments])
    empty_K = rows_RK.new_full(rows_RK.shape[1:], -math.inf)
    return torch.stack([rows.amax(0) if len(rows) else empty_K for rows in segments])
