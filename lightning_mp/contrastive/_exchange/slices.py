"""Columns of all ranks at once, in few slices: slice `t` of every rank's shard comes by one gather.

With T slices and shards of `b_r` rows, slice `t` of rank `r` is rows `t b_r / T` to
`(t + 1) b_r / T`. A block of visiting columns is slice `t` of all ranks, in the order of ranks.
While it is in use the next one travels. What a rank has summed up about a block goes home by one
reduce-scatter, or by one all-to-all for maxima and log-sum-exps, which no reduction adds exactly.

A ring takes W turns for the same columns: 64 ranks of 1,024 pairs launch the kernels of 64 sweeps
where T = 1 launches those of one, and a flat ring crosses nodes through one network card, where a
collective knows the topology.

Shapes:
    b: this rank's batch. m: columns of a block. D: width. W: ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Combine, Visit

__all__ = ["Slices", "all_gather", "block_bytes", "slice_count"]

# torch 2.13 renames both and deprecates the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def block_bytes(batch_sizes: Sequence[int], row_bytes: int, count: int) -> int:
    """Return the bytes that travel, arrive and leave at a time with `count` slices.

    That is one block of features and of their gradients; two with more slices than one, as the
    next and the last are under way; and one more, with gaps, where batch sizes differ.
    """
    copies = 1 + (count > 1) + (len(set(batch_sizes)) > 1)
    return copies * len(batch_sizes) * -(-max(batch_sizes) // count) * row_bytes


def slice_count(batch_sizes: Sequence[int], row_bytes: int, budget: int) -> int:
    """Return the fewest slices whose blocks fit a budget in bytes; slices have a row at least."""
    if block_bytes(batch_sizes, row_bytes, 1) <= budget:
        return 1
    most = max(batch_sizes)
    rows = budget // block_bytes(batch_sizes, row_bytes, most) if most > 1 else 1
    return -(-most // max(1, rows))


class Slices:
    """The exchange by slices, see `Exchange`.

    Ranks may bring different batch sizes. Pieces are then padded to the longest to travel, because
    the collectives take equal ones, and cut on arrival.

    Args:
        batch_sizes: Rows on each rank.
        rank: This rank within the group.
        group: The process group; `None` is the default one.
        count: T; the same on all ranks.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        count: int = 1,
    ) -> None:
        self.batch_sizes = tuple(batch_sizes)
        self.rank = rank
        self.group = group
        self.count = count
        # The first tensor that has travelled, and all ranks' of it where one slice is all.
        self._of: Tensor | None = None
        self._block: Tensor | None = None

    @property
    def world_size(self) -> int:
        """How many ranks share the batch."""
        return len(self.batch_sizes)

    @property
    def global_batch_size(self) -> int:
        """Rows on all ranks together."""
        return sum(self.batch_sizes)

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        """Yield every slice of all ranks, see `Exchange.visit`."""
        by_rank = None if values is None else self._all_values(values)
        # The second sweep finds the texts here that came at once for the first.
        # By identity, for to compare values would wait for the device.
        here = [self._block] if self._block is not None and self._of is shard[0] else []
        travelling = self._send(shard[len(here) :], 0)
        for index in range(self.count):
            columns = [*here, *(gather.wait() for gather in travelling)]
            travelling = self._send(shard, index + 1)
            if self.count == 1 and self._of is None:
                self._of, self._block = shard[0], columns[0]
            if by_rank is not None:
                columns.append(self._values_of(by_rank, index))
            own = self.own_rows(index)
            first = sum(self.sizes(index)[: self.rank])
            yield Visit(columns, first - own.start, own)

    def home(self, combine: Combine) -> "SlicedSum":
        """Return an empty sum about columns, see `Exchange.home`."""
        return SlicedSum(self, combine)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def sizes(self, index: int) -> list[int]:
        """Return the rows of every rank in a slice."""
        # Rounded down at both ends, so that slices of any count add up to the batch.
        return [
            (index + 1) * size // self.count - index * size // self.count
            for size in self.batch_sizes
        ]

    def own_rows(self, index: int) -> slice:
        """Return this rank's rows of a slice."""
        size = self.batch_sizes[self.rank]
        return slice(index * size // self.count, (index + 1) * size // self.count)

    def _all_values(self, values: Tensor) -> Tensor:
        """Return the values of all ranks' columns, (W, longest batch) or with more dimensions."""
        # All at once, whatever the slices: some numbers a column make one small gather.
        most = max(self.batch_sizes)
        by_rank = values.new_empty(self.world_size, most, *values.shape[1:])
        all_gather(by_rank.flatten(0, 1), _padded(values, [len(values)], most), group=self.group)
        return by_rank

    def _values_of(self, by_rank: Tensor, index: int) -> Tensor:
        """Return the values of the columns of a slice."""
        starts = [index * size // self.count for size in self.batch_sizes]
        sizes = self.sizes(index)
        if len(set(self.batch_sizes)) == 1:
            return by_rank[:, starts[0] : starts[0] + sizes[0]].flatten(0, 1)
        pieces = zip(by_rank, starts, sizes, strict=True)
        return torch.cat([values[start : start + size] for values, start, size in pieces])

    def _send(self, shard: Sequence[Tensor], index: int) -> list["_Gather"]:
        if index == self.count:
            return []
        rows, sizes = self.own_rows(index), self.sizes(index)
        return [_Gather(tensor[rows], sizes, self.group) for tensor in shard]


class _Gather:
    """Rows of all ranks on their way here."""

    def __init__(self, rows: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> None:
        self._sizes = sizes
        self._sent = _padded(rows, [len(rows)], max(sizes))  # read in place until it has arrived
        self._arriving = rows.new_empty(len(sizes) * max(sizes), *rows.shape[1:])
        self._work = all_gather(self._arriving, self._sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the rows in the order of ranks; on a GPU this holds the stream, not the host."""
        self._work.wait()
        most = max(self._sizes)
        if min(self._sizes) == most:
            return self._arriving
        pieces = zip(self._arriving.split(most), self._sizes, strict=True)
        return torch.cat([piece[:size] for piece, size in pieces])


class SlicedSum:
    """A sum about the columns of each slice that goes home while the next slice is in use."""

    def __init__(self, slices: Slices, combine: Combine) -> None:
        self._slices = slices
        self._combine = combine
        self._home: list[Tensor] = []
        self._sent: tuple[Tensor, Tensor, Any] | None = None

    def add(self, part: Tensor) -> None:
        """Send this rank's part about the columns that visit now to their ranks."""
        index = len(self._home) + (self._sent is not None)
        if index == self._slices.count:
            raise RuntimeError(f"`SlicedSum.add()` came more than {index} times, once a slice.")
        # One on its way at a time, as `block_bytes` counts.
        self._arrive()
        sizes, group = self._slices.sizes(index), self._slices.group
        own = sizes[self._slices.rank]
        # No collective adds exponentials: of those all parts come, to be added here.
        if self._combine == "sum":
            part = _padded(part, sizes, max(sizes))
            home = part.new_empty(max(sizes), *part.shape[1:])
            work = _reduce_scatter(home, part, group=group, async_op=True)
            # Held until it has arrived: the collective reads `part` where it lies.
            self._sent = (home[:own], part, work)
        else:
            home = part.new_empty(len(sizes), own, *part.shape[1:])
            outgoing = part.contiguous()
            # Into a view: what arrives has to be in `home`.
            work = dist.all_to_all_single(
                home.flatten(0, 1), outgoing, [own] * len(sizes), sizes, group=group, async_op=True
            )
            self._sent = (home, outgoing, work)

    def result(self) -> Tensor:
        """Return the sum over all ranks about this rank's own columns."""
        self._arrive()
        if len(self._home) != self._slices.count:
            raise RuntimeError(
                f"`SlicedSum.result()` came after {len(self._home)} calls of `add`. It needs one "
                f"for each of the {self._slices.count} slices; make them first."
            )
        return self._home[0] if len(self._home) == 1 else torch.cat(self._home)

    def parts(self) -> Tensor:
        """Return what the ranks have sent, if one slice is all; or the sum as the only part."""
        if self._slices.count > 1 or self._sent is None or self._combine == "sum":
            return self.result()[None]
        # Not added up: `pair_terms` does that on its way.
        home, _, work = self._sent
        work.wait()
        return home

    def _arrive(self) -> None:
        if self._sent is None:
            return
        home, _, work = self._sent
        work.wait()
        # Added in the order of ranks, so that every run rounds alike.
        if self._combine != "sum":
            home = home.logsumexp(0) if self._combine == "logsumexp" else home.amax(0)
        self._home.append(home)
        self._sent = None


def _padded(tensor: Tensor, sizes: list[int], most: int) -> Tensor:
    """Return pieces of `sizes` rows with zeros up to `most` rows after each."""
    if all(size == most for size in sizes):  # the usual case takes no copy
        return tensor.contiguous()
    padded = tensor.new_zeros(len(sizes), most, *tensor.shape[1:])
    for target, piece in zip(padded, tensor.split(sizes), strict=True):
        target[: len(piece)] = piece
    return padded.flatten(0, 1)
