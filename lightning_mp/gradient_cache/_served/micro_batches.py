"""A call's arguments in micro-batches, copied to the device ahead of their use.

Shapes:
    B: the batch of one call. L: the length that rows of a padded batch have.
"""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mp.gradient_cache._served.roles import Role

__all__ = ["MicroBatches", "WrittenError"]


class WrittenError(Exception):
    """A function wrote to a leaf (its index is the argument) that all micro-batches share."""


class MicroBatches:
    """Cuts leaves into micro-batches; iterate over it as often as needed.

    Tensors elsewhere are brought to `device` in the dtype that they have. From host memory to a GPU
    they are copied by a stream of their own, `prefetch` micro-batches ahead, so that at most
    `prefetch + 1` of them, and never fewer than two, are on the device at a time. Copies run beside
    the towers from a `prefetch` of 2 on.

    A function may write to its own rows, as `normalize(inplace=True)` does. The first iteration
    gives it the caller's memory, as a call without micro-batches would; later ones give it the
    values of before, of which copies are kept where they are needed and nowhere else.

    Args:
        leaves: The leaves of the argument tree.
        roles: What they are. Those with rows are cut, all others go to each micro-batch whole.
        with_grad: Indices of those that get gradients.
        batch_size: Rows of what is cut.
        device: Where the function runs; `None` leaves everything where it is.
        prefetch: Micro-batches to copy ahead.

    """

    def __init__(
        self,
        leaves: Sequence[Any],
        roles: Sequence[Role],
        *,
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
        # What all micro-batches share is copied once, not with each of them.
        self._leaves = [
            leaf.to(device) if isinstance(leaf, Tensor) and device and not role.has_rows else leaf
            for leaf, role in zip(leaves, roles, strict=True)
        ]
        self._versions = self._count_writes()
        # What is copied to another device is a copy already, so nothing can write to the original.
        self._suspects = {
            index
            for index, leaf in enumerate(self._leaves)
            if roles[index].has_rows
            and isinstance(leaf, Tensor)
            and (device is None or device.type == leaf.device.type)
        }
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._row_lengths = _row_lengths(self._leaves, roles, batch_size)
        self.is_padded = bool(self._row_lengths)
        """Whether masks say how long rows are."""

    def cut(self, rows: int, parts: int | None = None) -> None:
        """Cut the batch; until then it is one micro-batch.

        Args:
            rows: In a micro-batch; the last one may have fewer.
            parts: How many to make, as even as can be, with up to that many rows.
        """
        # Ranks of a sharded tower make as many parts, whatever their rows: then even ones are best.
        count = parts or 1
        even = [self.batch_size * part // count for part in range(count + 1)]
        bounds = even if parts else [*range(0, self.batch_size, rows), self.batch_size]
        self._slices = [slice(start, stop) for start, stop in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[tuple[slice, list[Any]]]:
        """Yield the rows and the leaves of every micro-batch, in order."""
        if self._copies_ahead():
            return self._copied_ahead(self._slices)
        return ((rows, self._take(rows)) for rows in self._slices)

    def first_run(self) -> Iterator[tuple[slice, list[Any]]]:
        """Iterate for the first time, and note what the function writes to."""
        for rows, leaves in self:
            # Cloned before the function may write: a replay needs what the call was given.
            before = {i: self._rows(i, rows).clone() for i in self._suspects}
            yield rows, leaves
            # Autograd counts what is written in place, also through views.
            now = self._count_writes()
            written = {i for i, version in enumerate(now) if version != self._versions[i]}
            self._versions = now
            # Of shared leaves, and those that the first micro-batch left alone, there is no copy.
            if not written <= self._suspects:
                raise WrittenError(min(written - self._suspects))
            # Later micro-batches are copied where the first one shows that it is needed.
            self._suspects = written
            self._kept.update({(i, rows.start): before[i] for i in written})

    def for_grad(self, leaves: list[Any]) -> list[Tensor]:
        """Make what gets gradients a graph's own in a micro-batch; return where they arrive."""
        inputs = []
        for index in self._with_grad:
            # A leaf of its own: the gradient of a micro-batch ends here, and not in the caller.
            inputs.append(leaves[index].detach().requires_grad_())
            # No leaf, as the caller's is no leaf: the tower may write to it in place.
            leaves[index] = inputs[-1].clone()
        return inputs

    def samples(self, rows: int) -> list[list[Any]]:
        """Return copies of the first rows: as many as an iteration has on the device at a time."""
        # Copies, as a function may write to its rows, and a probe must leave no trace.
        count = max(self._prefetch + 1, 2) if self._copies_ahead() else 1
        # As long as rows of the batch can be, since later ones may be longer.
        return [
            [_copied(self._part(i, slice(0, rows), False)) for i in range(len(self._leaves))]
            for _ in range(count)
        ]

    def repeated(self, count: int) -> list[Any]:
        """Return a batch of copies of the first row."""
        leaves = [
            _first_row(leaf, role, count) if role.has_rows else leaf
            for leaf, role in zip(self._leaves, self._roles, strict=True)
        ]
        tensors = [_copied(x) for x in leaves]
        return [x.to(self._device) if isinstance(x, Tensor) else x for x in tensors]

    def written_since(self) -> list[int]:
        """Return the leaves that were written to since the first iteration ended."""
        now = self._count_writes()
        return [
            index
            for index, version in enumerate(self._versions)
            # What the function itself writes to is replayed from copies.
            if version != now[index] and (index, 0) not in self._kept
        ]

    def _count_writes(self) -> list[int]:
        # As by `version_of`: torch counts no writes to tensors of inference mode.
        return [
            leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
            for leaf in self._leaves
        ]

    def _copies_ahead(self) -> bool:
        is_cuda = self._device is not None and self._device.type == "cuda"
        return is_cuda and any(self._is_on_host(index) for index in range(len(self._leaves)))

    def _is_on_host(self, index: int) -> bool:
        leaf = self._leaves[index]
        return (
            self._roles[index].has_rows and isinstance(leaf, Tensor) and leaf.device.type == "cpu"
        )

    def _take(self, rows: slice) -> list[Any]:
        return [self._part(index, rows) for index in range(len(self._leaves))]

    def lengths(self, rows: slice) -> dict[int, int]:
        """Return the lengths of the batch's padded rows, by those that a micro-batch is cut to."""
        return {_longest_of(of, rows): length for length, of in self._row_lengths.items()}

    def _rows(self, index: int, rows: slice, is_short: bool = True) -> Any:
        """Return some rows of a leaf, as long as the longest of them if they shall be short."""
        role = self._roles[index]
        part = self._leaves[index][rows if role.each == 1 else role.slice(rows)]
        is_padded = role.padding is not None and isinstance(part, Tensor) and part.ndim > 1
        if not is_short or not is_padded:
            return part
        of = self._row_lengths.get(part.shape[1])
        return part if of is None else part[:, : _longest_of(of, rows)]

    def _part(self, index: int, rows: slice, is_short: bool = True) -> Any:
        leaf = self._leaves[index]
        if (index, rows.start) in self._kept:
            # A copy of the copy: the function will write to it once more.
            return self._kept[index, rows.start].clone()
        if not self._roles[index].has_rows:
            return leaf
        part = self._rows(index, rows, is_short)
        return part.to(self._device) if isinstance(part, Tensor) and self._device else part

    def _copied_ahead(self, slices: list[slice]) -> Iterator[tuple[slice, list[Any]]]:
        """Copy on a stream of its own, which stays behind the stream that uses the copies.

        Before a copy starts, the copying stream waits for all that was asked of the other one. So
        memory that has been let go of by then is used again without `record_stream`, whose blocks
        come back only when the host looks: one that is far ahead would take new ones without end.
        What is waited for is the micro-batch before the one that runs during the copy.
        """
        copying = _copying_stream(self._device)
        copied: deque[tuple[dict[int, Tensor], torch.cuda.Event]] = deque()
        started = 0
        for index, rows in enumerate(slices):
            # The user of the iterator still holds the micro-batch before.
            last = min(max(index, index - bool(index) + self._prefetch), len(slices) - 1)
            if started <= last:
                copying.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(copying):
                for following in slices[started : last + 1]:
                    parts = {
                        i: self._copy(self._rows(i, following))
                        for i in range(len(self._leaves))
                        if self._is_on_host(i)
                    }
                    # An event each: to wait for the stream is to wait for the copies ahead, too.
                    copied.append((parts, copying.record_event()))
            started = last + 1
            yield rows, self._arrived(rows, *copied.popleft())

    def _copy(self, part: Tensor) -> Tensor:
        # From pageable memory a copy would wait, whatever `non_blocking` says.
        if part.device.type == "cpu" and not part.is_pinned():
            # torch's host allocator keeps the pinned block until the copy is done.
            part = part.pin_memory()
        return part.to(self._device, non_blocking=True)

    def _arrived(
        self, rows: slice, parts: dict[int, Tensor], copied: torch.cuda.Event
    ) -> list[Any]:
        """Hold the current stream until the copies are done, and put them among the leaves."""
        # The stream waits and not the host, which goes on to queue the tower.
        torch.cuda.current_stream(self._device).wait_event(copied)
        return [
            parts[index] if index in parts else self._part(index, rows)
            for index in range(len(self._leaves))
        ]


def _row_lengths(leaves: Sequence[Any], roles: Sequence[Role], rows: int) -> dict[int, list[int]]:
    """Return for each row of the batch up to where its masks have values, by the masks' length.

    Args:
        leaves: The arguments of a tower.
        roles: What they are.
        rows: Of the batch, B.

    Raises:
        ValueError: A mask is not of shape (B, L).
    """
    masks = [x for x, role in zip(leaves, roles, strict=True) if role.kind == "mask"]
    lengths: dict[int, Tensor] = {}
    for mask in masks:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise ValueError(
                "Passed a tower an argument that is declared as 'mask', and is no tensor with a "
                "number for each token of each row. Declare it as 'rows'."
            )
        length = mask.shape[1]
        ends = torch.arange(1, length + 1, device=mask.device)
        ends_B = ((mask != 0) * ends).view(rows, -1).amax(1).clamp(min=1)
        lengths[length] = torch.maximum(lengths.get(length, ends_B), ends_B)
    # Read once a call, as a GPU is waited for.
    return {length: ends_B.tolist() for length, ends_B in lengths.items()}


def _longest_of(lengths: Sequence[int], rows: slice) -> int:
    """Return how long the longest of some rows is."""
    return max(lengths[rows])


def _first_row(leaf: Any, role: Role, count: int) -> Any:
    first = leaf[: role.each]
    if isinstance(leaf, Tensor):
        return torch.cat([first] * count)
    return np.concatenate([first] * count) if isinstance(leaf, np.ndarray) else first * count


def _copied(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.clone()
    return part.copy() if isinstance(part, np.ndarray) else part


@functools.cache
def _copying_stream(device: torch.device | None) -> torch.cuda.Stream:
    """Return the one stream that copies to a device; each has its own pool in the allocator."""
    return torch.cuda.Stream(device)
