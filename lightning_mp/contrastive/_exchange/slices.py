"""The exchange by slices: one all-gather brings slice `t` of the shards of all ranks.

With T slices and shards of `b_r` rows, slice `t` of rank `r` is rows `t b_r / T` to
`(t + 1) b_r / T`. A block of visiting columns is slice `t` of all ranks. The next block travels
while the current one is in use. Sums over a block return to the ranks of its columns by one
reduce-scatter; maxima and log-sum-exps, which no reduction combines exactly, by one all-to-all.

A ring takes W steps for the same columns: with 64 ranks of 1,024 pairs, each rank launches the
kernels of a sweep 64 times; with one slice, once. A ring also crosses nodes through one network
card, while a collective uses the topology.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Combine, Exchange, Home, Visit
from lightning_mp.contrastive._exchange.padding import Padding, padding_of

__all__ = ["Slices", "all_gather", "block_bytes", "slice_count"]

# torch 2.13 renames both and deprecates the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def block_bytes(batch_sizes: Sequence[int], row_bytes: int, count: int) -> int:
    """Return the bytes of the blocks that are in memory at one time with `count` slices.

    One block is the features of all ranks, padded to the longest, and their gradients. With several
    slices there is a second one, in transit.
    """
    return (1 + (count > 1)) * len(batch_sizes) * -(-max(batch_sizes) // count) * row_bytes


def slice_count(batch_sizes: Sequence[int], row_bytes: int, budget: int) -> int:
    """Return the smallest number of slices whose blocks fit a budget in bytes."""
    if block_bytes(batch_sizes, row_bytes, 1) <= budget:
        return 1
    most = max(batch_sizes)
    rows = budget // block_bytes(batch_sizes, row_bytes, most) if most > 1 else 1
    return -(-most // max(1, rows))


class Slices(Exchange):
    """The exchange by slices, see `Exchange`; `count` is T, the same on all ranks."""

    def __init__(
        self,
        batch_sizes: Sequence[int],
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        count: int = 1,
    ) -> None:
        super().__init__(batch_sizes, rank, group)
        self.count = count
        # The first tensor that was sent, and its rows of all ranks, if there is only one slice.
        self._sent: Tensor | None = None
        self._block: Tensor | None = None

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        by_rank = None if values is None else self._all_values(values)
        # With one slice, the second sweep reuses the texts of the first. Tensors are compared by
        # identity, because a comparison of values would wait for the device.
        here = [self._block] if self._block is not None and self._sent is shard[0] else []
        travelling = self._send(shard[len(here) :], 0)
        for index in range(self.count):
            columns = [*here, *(gather.wait() for gather in travelling)]
            travelling = self._send(shard, index + 1)
            if self.count == 1 and self._sent is None:
                self._sent, self._block = shard[0], columns[0]
            if by_rank is not None:
                columns.append(self._values_of(by_rank, index))
            own = self.own_rows(index)
            yield Visit(columns, self.padding(index).own_start - own.start, own)

    def home(self, combine: Combine) -> "SlicedSum":
        return SlicedSum(self, combine)

    def rows(self, index: int) -> list[slice]:
        """Return the rows of every rank in a slice."""
        # Both ends are rounded down, so that slices cover the batch for any count.
        return [
            slice(index * size // self.count, (index + 1) * size // self.count)
            for size in self.batch_sizes
        ]

    def own_rows(self, index: int) -> slice:
        return self.rows(index)[self.rank]

    def padding(self, index: int) -> Padding:
        """Return where the rows of all ranks are in a slice."""
        return padding_of(tuple(rows.stop - rows.start for rows in self.rows(index)), self.rank)

    def _all_values(self, values: Tensor) -> Tensor:
        """Return the values of all ranks' columns, (W, longest batch) or with more dimensions."""
        # One gather for all slices, since a few numbers per column are small.
        longest = max(self.batch_sizes)
        by_rank = values.new_empty(self.world_size, longest, *values.shape[1:])
        all_gather(by_rank.flatten(0, 1), _padded(values, longest), group=self.group)
        return by_rank

    def _values_of(self, by_rank: Tensor, index: int) -> Tensor:
        """Return the values of the columns of a slice, in the order of its block."""
        padding = self.padding(index)
        if self.count > 1:
            pieces = zip(by_rank, self.rows(index), strict=True)
            longest = padding.longest
            by_rank = torch.stack([values[rows.start :][:longest] for values, rows in pieces])
        return padding.compact(by_rank.flatten(0, 1))

    def _send(self, shard: Sequence[Tensor], index: int) -> list["_Gather"]:
        if index == self.count:
            return []
        rows, padding = self.own_rows(index), self.padding(index)
        return [_Gather(tensor[rows], padding, self.group) for tensor in shard]


class _Gather:
    def __init__(self, rows: Tensor, padding: Padding, group: dist.ProcessGroup | None) -> None:
        self._padding = padding
        # Held until it has arrived, because the collective reads it in place.
        self._sent = _padded(rows, padding.longest)
        self._arriving = rows.new_empty(padding.rows, *rows.shape[1:])
        self._work = all_gather(self._arriving, self._sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the rows of all ranks; on a GPU the stream waits for them, not the host."""
        self._work.wait()
        return self._padding.compact(self._arriving)


class SlicedSum(Home):
    """A per-column sum whose result for a slice travels while the next slice is in use."""

    def __init__(self, slices: Slices, combine: Combine) -> None:
        self._slices = slices
        self._combine = combine
        self._home: list[Tensor] = []
        self._sent: tuple[Tensor, Tensor, Any] | None = None
        self._outgoing: Tensor | None = None

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        padding = self._slices.padding(self._index)
        self._outgoing = like.new_empty(padding.rows, *like.shape[1:], dtype=dtype)
        return self._outgoing[padding.window]

    def add(self, part: Tensor) -> None:
        index, group = self._index, self._slices.group
        # `block_bytes` counts one part in transit at a time.
        self._arrive()
        padding, own_rows = self._slices.padding(index), self._slices.own_rows(index)
        own = own_rows.stop - own_rows.start
        if self._outgoing is None and padding.is_needed:
            self.empty(part, part.dtype).copy_(part)
        outgoing = part.contiguous() if self._outgoing is None else self._outgoing
        outgoing, self._outgoing = padding.spread(outgoing), None
        if self._combine == "sum":
            home = part.new_empty(padding.longest, *part.shape[1:])
            work = _reduce_scatter(home, outgoing, group=group, async_op=True)
            home = home[:own]
        else:  # no collective adds exponentials: the parts of all ranks are combined on arrival
            home = part.new_empty(self._slices.world_size, padding.longest, *part.shape[1:])
            # `flatten` returns a view of `home`.
            work = dist.all_to_all_single(home.flatten(0, 1), outgoing, group=group, async_op=True)
            home = home[:, :own]
        # `outgoing` is held until it has arrived, because the collective reads it in place.
        self._sent = (home, outgoing, work)

    @property
    def _index(self) -> int:
        """The slice that is visiting."""
        return len(self._home) + (self._sent is not None)

    def result(self) -> Tensor:
        self._arrive()
        if len(self._home) != self._slices.count:
            raise RuntimeError(
                f"`SlicedSum.result()` came after {len(self._home)} calls of `add`. It needs one "
                f"for each of the {self._slices.count} slices."
            )
        return self._home[0] if len(self._home) == 1 else torch.cat(self._home)

    def parts(self) -> Tensor:
        """Return the parts of all ranks if there is only one slice; otherwise the sum alone."""
        if self._slices.count > 1 or self._sent is None or self._combine == "sum":
            return self.result()[None]
        # `pair_terms` combines the parts.
        home, _, work = self._sent
        work.wait()
        return home.contiguous()

    def _arrive(self) -> None:
        if self._sent is None:
            return
        home, _, work = self._sent
        work.wait()
        # Combined in the order of ranks, so that every run rounds alike.
        if self._combine != "sum":
            home = home.logsumexp(0) if self._combine == "logsumexp" else home.amax(0)
        self._home.append(home)
        self._sent = None


def _padded(rows: Tensor, longest: int) -> Tensor:
    """Return rows with zeros up to `longest` of them; equal batches take no copy."""
    missing = longest - len(rows)
    if not missing:
        return rows.contiguous()
    return F.pad(rows, [0] * (2 * rows.ndim - 1) + [missing])
