"""Splits the arguments of a call into micro-batches and copies them to the device ahead of use."""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mp._nested import map_tensors
from lightning_mp.gradient_cache._served.roles import Role

__all__ = ["MicroBatches", "SharedWriteError"]


class SharedWriteError(Exception):
    """A function wrote in place to a leaf that micro-batches share; its argument is the index."""


class MicroBatches:
    """Splits leaves into micro-batches; can be iterated over any number of times.

    Tensors on another device are copied to `device` without a change of dtype; from the host to a
    GPU on a separate stream, `prefetch` micro-batches ahead.

    A function may write to its own rows in place, as `normalize(inplace=True)` does. The first
    iteration passes the caller's memory, as a call without micro-batches would. Later iterations
    pass the values from before the write; only rows that are written to are cloned for this.

    Leaves whose role has rows are split; every micro-batch gets the others. The leaves at the
    indices `with_grad` get gradients.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        roles: Sequence[Role],
        batch_size: int,
        device: torch.device | None,
        prefetch: int,
        with_grad: Sequence[int] = (),
    ) -> None:
        self.batch_size = batch_size
        self._slices = [slice(0, batch_size)]
        self._device = device
        self._prefetch = prefetch
        self._roles = roles
        self._with_grad = with_grad
        # Shared leaves are copied once, not once per micro-batch.
        self._leaves = [
            leaf.to(device) if isinstance(leaf, Tensor) and device and not role.has_rows else leaf
            for leaf, role in zip(leaves, roles, strict=True)
        ]
        self._versions = self._count_writes()
        tensors = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        split = {i: self._leaves[i].device.type for i in tensors if roles[i].has_rows}
        # The function writes to the caller's memory only if nothing is copied to another device.
        self._maybe_written = {i for i in split if device is None or device.type == split[i]}
        is_cuda = device is not None and device.type == "cuda"
        self._prefetched_leaves = {i for i in split if is_cuda and split[i] == "cpu"}
        # Clones of rows from before a write, by leaf and first row.
        self.unwritten: dict[tuple[int, int], Tensor] = {}
        self._row_lengths = _row_lengths(self._leaves, roles, batch_size)
        self.is_padded = bool(self._row_lengths)

    def split(self, rows: int, count: int | None = None) -> None:
        """Set micro-batches of `rows`, or `count` of nearly equal size; before, there is one."""
        # Ranks of a sharded tower need equally many micro-batches, whatever their number of rows.
        if count is None:
            bounds = [*range(0, self.batch_size, rows), self.batch_size]
        else:
            bounds = [self.batch_size * index // count for index in range(count + 1)]
        self._slices = [slice(start, stop) for start, stop in pairwise(bounds)]

    def __iter__(self) -> Iterator[tuple[slice, list[Any]]]:
        if self._prefetched_leaves:
            return self._prefetched()
        leaves = range(len(self._leaves))
        return ((rows, [self._micro_batch_leaf(i, rows) for i in leaves]) for rows in self._slices)

    def first_run(self) -> Iterator[tuple[slice, list[Any]]]:
        """Iterate for the first time, and clone the rows that the function writes to."""
        for rows, leaves in self:
            # Cloned before the function writes: a replay needs the original values.
            before = {i: self._rows(i, rows).clone() for i in self._maybe_written}
            yield rows, leaves
            # Autograd counts in-place writes, also those through views.
            now = self._count_writes()
            written = {i for i, version in enumerate(now) if version != self._versions[i]}
            self._versions = now
            # Shared leaves, and leaves the first micro-batch did not write to, have no clone.
            if not written <= self._maybe_written:
                raise SharedWriteError(min(written - self._maybe_written))
            # Later micro-batches clone only the leaves that the first micro-batch wrote to.
            self._maybe_written = written
            self.unwritten.update({(i, rows.start): before[i] for i in written})

    def for_grad(self, leaves: list[Any]) -> list[Tensor]:
        """Give inputs that require grad a graph of their own; return the leaves of that graph."""
        inputs = []
        for index in self._with_grad:
            # The gradient of a micro-batch ends in this leaf instead of the caller's graph.
            inputs.append(leaves[index].detach().requires_grad_())
            # A clone, because the tower may not write in place to a leaf that requires grad.
            leaves[index] = inputs[-1].clone()
        return inputs

    def samples(self, rows: int) -> list[list[Any]]:
        """Return copies of the first rows, as many as the device holds during an iteration."""
        # Copies, because a function may write to its rows and a probe must not change the batch.
        count = max(self._prefetch + 1, 2) if self._prefetched_leaves else 1
        leaves, first = range(len(self._leaves)), slice(0, rows)
        # At full length, because later rows may be longer.
        return [
            [_clone(self._micro_batch_leaf(i, first, False)) for i in leaves] for _ in range(count)
        ]

    def repeated(self, count: int) -> list[Any]:
        return [
            self._on_device(_clone(_first_row(leaf, role, count) if role.has_rows else leaf))
            for leaf, role in zip(self._leaves, self._roles, strict=True)
        ]

    def written_since(self) -> list[int]:
        """Return the indices of leaves that were written to since the first iteration ended."""
        now = self._count_writes()
        return [
            index
            for index, version in enumerate(self._versions)
            # Leaves that the function itself writes to are replayed from clones.
            if version != now[index] and (index, 0) not in self.unwritten
        ]

    def _count_writes(self) -> list[int]:
        # Not `version_of`: torch does not count writes to inference tensors.
        return [
            leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
            for leaf in self._leaves
        ]

    def cuts(self, rows: slice) -> dict[int, int]:
        """Map padded lengths of the batch to the lengths that a micro-batch is cut to."""
        cuts: dict[int, int] = {}
        for length, of in sorted(self._row_lengths.items()):
            cuts[length] = max(of[rows])
            # Unlike those of shorter masks, because the length of an output tells its mask.
            while list(cuts.values()).count(cuts[length]) > 1:
                cuts[length] += 1
        return cuts

    def _rows(self, index: int, rows: slice, cut_padding: bool = True) -> Any:
        """Return rows of a leaf; if `cut_padding`, padding beyond the longest row is cut off."""
        role = self._roles[index]
        part = self._leaves[index][rows if role.rows_per_sample == 1 else role.slice(rows)]
        is_padded = role.padding is not None and isinstance(part, Tensor) and part.ndim > 1
        if not cut_padding or not is_padded:
            return part
        return part[:, : self.cuts(rows).get(part.shape[1])]

    def _micro_batch_leaf(self, index: int, rows: slice, cut_padding: bool = True) -> Any:
        leaf = self._leaves[index]
        if (index, rows.start) in self.unwritten:
            # Cloned again, because the function will write to it again.
            return self.unwritten[index, rows.start].clone()
        if not self._roles[index].has_rows:
            return leaf
        return self._on_device(self._rows(index, rows, cut_padding))

    def _on_device(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(self._device)
        # A list with one item per row may contain tensors, such as images of different sizes. They
        # are copied, because writes are only counted for single tensors.
        return map_tensors(part, lambda tensor: tensor.to(self._device, copy=True))

    def _prefetched(self) -> Iterator[tuple[slice, list[Any]]]:
        """Copy micro-batches on a separate stream, ahead of the current stream.

        Before a copy starts, the copy stream waits for all work queued on the current stream. So
        memory that was freed by then can be reused without `record_stream`, which returns blocks
        only when the host polls; a host far ahead of the device would keep allocating new blocks.
        The wait ends with the micro-batch before the one that runs during the copy.
        """
        copying = _copying_stream(self._device)
        copied: deque[tuple[dict[int, Tensor], torch.cuda.Event]] = deque()
        started = 0
        for index, rows in enumerate(self._slices):
            # The consumer still holds the previous micro-batch.
            last = min(max(index, index - bool(index) + self._prefetch), len(self._slices) - 1)
            if started <= last:
                copying.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(copying):
                for following in self._slices[started : last + 1]:
                    leaves = self._prefetched_leaves
                    parts = {i: self._copy(self._rows(i, following)) for i in leaves}
                    # One event each, because waiting for the stream would include later copies.
                    copied.append((parts, copying.record_event()))
            started = last + 1
            yield rows, self._arrived(rows, *copied.popleft())

    def _copy(self, part: Tensor) -> Tensor:
        # A copy from pageable memory is synchronous despite `non_blocking`.
        if not part.is_pinned():
            # torch's host allocator keeps the pinned block until the copy has finished.
            part = part.pin_memory()
        return part.to(self._device, non_blocking=True)

    def _arrived(
        self, rows: slice, parts: dict[int, Tensor], copied: torch.cuda.Event
    ) -> list[Any]:
        # The stream waits, not the host, which goes on to queue the tower's kernels.
        torch.cuda.current_stream(self._device).wait_event(copied)
        return [
            parts[index] if index in parts else self._micro_batch_leaf(index, rows)
            for index in range(len(self._leaves))
        ]


def _row_lengths(leaves: Sequence[Any], roles: Sequence[Role], rows: int) -> dict[int, list[int]]:
    """Map the length L of masks, (B, L), to the number of unmasked positions of each row."""
    masks = [x for x, role in zip(leaves, roles, strict=True) if role.kind == "mask"]
    lengths: dict[int, Tensor] = {}
    for mask in masks:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise ValueError(
                "Passed a tower an argument that is declared as 'mask' but is not a tensor of "
                "shape (rows, length). Declare it as 'rows'."
            )
        length = mask.shape[1]
        ends = torch.arange(1, length + 1, device=mask.device)
        ends_B = ((mask != 0) * ends).view(rows, -1).amax(1).clamp(min=1)
        lengths[length] = torch.maximum(lengths.get(length, ends_B), ends_B)
    # Read once per call, because reading waits for the GPU.
    return {length: ends_B.tolist() for length, ends_B in lengths.items()}


def _first_row(leaf: Any, role: Role, count: int) -> Any:
    first = leaf[: role.rows_per_sample]
    if isinstance(leaf, Tensor):
        return torch.cat([first] * count)
    return np.concatenate([first] * count) if isinstance(leaf, np.ndarray) else first * count


def _clone(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.clone()
    return part.copy() if isinstance(part, np.ndarray) else part


@functools.cache
def _copying_stream(device: torch.device | None) -> torch.cuda.Stream:
    """Return the copy stream of a device; one per device, as each stream has a memory pool."""
    return torch.cuda.Stream(device)
