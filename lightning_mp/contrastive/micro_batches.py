"""A call's arguments in micro-batches, copied to the device ahead of their use.

Shapes:
    B: the batch of one call. The arguments are a tree of tensors and anything else.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MicroBatches"]


class MicroBatches:
    """Cuts the tensors among `leaves` into micro-batches; iterate over it as often as needed.

    The batch is the first dimension of the first tensor that has one; every tensor with the same
    first dimension is cut, and everything else (masks, flags, 0-d tensors) goes to each
    micro-batch as it is. Tensors elsewhere are brought to `device` in the dtype that they have.
    From host memory to a GPU they are copied by a stream of their own, `prefetch` micro-batches
    ahead, so that at most `prefetch + 1` of them are on the device at a time.

    Args:
        leaves: The leaves of the argument tree.
        micro_batch_size: Rows in a micro-batch; the last one may have fewer.
        device: Where the function runs.
        prefetch: Micro-batches to copy ahead.

    Raises:
        ValueError: No tensor among the leaves has a first dimension, or it is empty.
    """

    def __init__(
        self, leaves: Sequence[Any], micro_batch_size: int, device: torch.device, prefetch: int
    ) -> None:
        sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
        if not sizes or sizes[0] == 0:
            what = "an empty batch" if sizes else "no tensor with a batch dimension"
            raise ValueError(
                f"Passed {what}. A tower takes at least one tensor whose first dimension is the "
                "batch. Pass the batch as an argument, not as an attribute."
            )
        self.batch_size: int = sizes[0]
        self._micro_batch_size = micro_batch_size
        self._device = device
        self._prefetch = prefetch
        self._is_cut = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.batch_size
            for leaf in leaves
        ]
        self._leaves = [
            leaf.to(device) if isinstance(leaf, Tensor) and not is_cut else leaf
            for leaf, is_cut in zip(leaves, self._is_cut, strict=True)
        ]

    def __len__(self) -> int:
        return -(-self.batch_size // self._micro_batch_size)

    def __iter__(self) -> Iterator[tuple[slice, list[Any]]]:
        """Yield the rows and the leaves of every micro-batch, in order."""
        starts = range(0, self.batch_size, self._micro_batch_size)
        slices = [
            slice(start, min(start + self._micro_batch_size, self.batch_size)) for start in starts
        ]
        if self._device.type == "cuda" and self._any_on_host():
            return self._copied_ahead(slices)
        return ((rows, self._take(rows)) for rows in slices)

    def is_cut(self, index: int) -> bool:
        """Return whether the leaf at `index` is cut, or shared by all micro-batches."""
        return self._is_cut[index]

    def _any_on_host(self) -> bool:
        return any(
            is_cut and leaf.device.type == "cpu"
            for leaf, is_cut in zip(self._leaves, self._is_cut, strict=True)
        )

    def _take(self, rows: slice) -> list[Any]:
        return [
            leaf[rows].to(self._device) if is_cut else leaf
            for leaf, is_cut in zip(self._leaves, self._is_cut, strict=True)
        ]

    def _copied_ahead(self, slices: list[slice]) -> Iterator[tuple[slice, list[Any]]]:
        copying = torch.cuda.Stream(self._device)
        waiting: deque[tuple[slice, list[Any], torch.cuda.Event]] = deque()
        for rows in slices:
            with torch.cuda.stream(copying):
                leaves = [
                    self._copy(leaf[rows]) if is_cut else leaf
                    for leaf, is_cut in zip(self._leaves, self._is_cut, strict=True)
                ]
                waiting.append((rows, leaves, copying.record_event()))
            if len(waiting) > self._prefetch:
                yield self._arrived(*waiting.popleft())
        while waiting:
            yield self._arrived(*waiting.popleft())

    def _copy(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu" and not part.is_pinned():
            part = part.pin_memory()
        return part.to(self._device, non_blocking=True)

    def _arrived(
        self, rows: slice, leaves: list[Any], copied: torch.cuda.Event
    ) -> tuple[slice, list[Any]]:
        """Hold the current stream until the copy is done, and tie its memory to that stream."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for leaf, is_cut in zip(leaves, self._is_cut, strict=True):
            if is_cut:
                leaf.record_stream(current)
        return rows, leaves
