"""`Exchange`: brings columns to all ranks and per-column sums back; its simplest form, by ring.

In a ring, shards travel from rank to rank while each rank works on the one it holds. Rank `r` of
`W` starts with its own shard. In every step it sends the shard to rank `r + 1` and receives the
next from rank `r - 1`, so that it holds the shard of rank `r - t` in step `t`. After `W` steps each
rank has seen every shard. This is the exchange of Inf-CL (https://arxiv.org/abs/2410.17243). A
single process is a ring of one rank.
"""

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "CollectiveError",
    "Combine",
    "Exchange",
    "FollowingSum",
    "Home",
    "Ring",
    "Sending",
    "Visit",
    "collective_error",
]

Combine = Literal["sum", "logsumexp", "max"]
_COMBINED: dict[Combine, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "logsumexp": torch.logaddexp,
    "max": torch.maximum,
}
_FOLDERS = (os.path.dirname(dist.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


class CollectiveError(RuntimeError):
    """A collective of a loss failed; `__cause__` is the original error."""


def collective_error(owner: str, error: RuntimeError) -> CollectiveError | None:
    """Return the error to raise if a collective raised `error`, `None` otherwise."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    # Errors of torch's C++ end in a Python frame of these folders.
    is_of_exchange = last.f_code.co_filename.startswith(_FOLDERS)
    is_alone = not (dist.is_available() and dist.is_initialized())
    if is_alone or not is_of_exchange or isinstance(error, torch.OutOfMemoryError):
        return None
    return CollectiveError(
        f"A collective of `{owner}` failed on rank {dist.get_rank()}: {error}. Another rank has "
        "probably stopped before: look at the other ranks' logs first, for the earliest error. "
        "All ranks of the group must call the loss the same number of times."
    )


@dataclass(frozen=True)
class Visit:
    """A block of columns that this rank processes."""

    columns: list[Tensor]  # for each tensor of the shard, its rows of the visiting columns
    # The positive of row `i` is visiting column `i + diagonal`; `None` without positives.
    diagonal: int | None
    positive_rows: slice  # the rows whose positive is among the columns


class Home(ABC):
    """Accumulates a per-column sum and returns it to the rank that owns the column."""

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory of the shape of `like` that `add` sends without a copy."""
        # Not `empty_like`, which keeps strides: `finish` in Triton requires contiguous memory.
        return like.new_empty(like.shape, dtype=dtype)

    @abstractmethod
    def add(self, part: Tensor) -> None:
        """Add this rank's part of the visiting columns; called once in each visit."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the sum over all ranks for this rank's columns, in their order."""

    def parts(self) -> Tensor:
        """Return parts of `result()` that remain to be combined along the first dimension."""
        return self.result()[None]


class Exchange(ABC):
    """Brings the columns of all ranks to each rank, once per sweep.

    All ranks call `visit` and `Home.add` in the same order. Transfers overlap with the work on the
    visiting columns. `batch_sizes` are the rows of each rank; they may differ.
    """

    def __init__(
        self, batch_sizes: Sequence[int], rank: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        self.batch_sizes = tuple(batch_sizes)
        self.world_size, self.global_batch_size = len(batch_sizes), sum(batch_sizes)
        self.rank, self.group = rank, group

    @abstractmethod
    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        """Yield all columns of a shard in blocks; `values`, a few numbers per column, come last."""

    @abstractmethod
    def home(self, combine: Combine) -> Home:
        """Return an empty sum; `"logsumexp"` adds exponentials, `"max"` takes the maximum."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


class Ring(Exchange):
    """The exchange by ring, see `Exchange`: one shard visits at a time."""

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        travelling = shard if values is None else [*shard, values]
        visiting = [tensor.contiguous() for tensor in travelling]
        own = slice(0, len(visiting[0]))
        for step in range(self.world_size):
            sending = None
            if step + 1 < self.world_size:  # travels while this rank works on it
                sending = Sending(visiting, step + 1, self)
            yield Visit(visiting, 0 if step == 0 else None, own)
            if sending is not None:
                visiting = sending.wait()

    def home(self, combine: Combine) -> "FollowingSum":
        return FollowingSum(self, combine)


class Sending:
    """Sends tensors to the next rank and receives others from the previous one, in the background.

    The received ones belong to the shard that this rank holds at `step`. `outgoing` are held until
    `wait` returns, because a send reads them in place.
    """

    def __init__(self, outgoing: Sequence[Tensor], step: int, ring: Ring) -> None:
        # Sends require contiguous memory.
        self._outgoing = [tensor.contiguous() for tensor in outgoing]
        size = ring.batch_sizes[(ring.rank - step) % ring.world_size]
        self._incoming = [x.new_empty(size, *x.shape[1:]) for x in self._outgoing]
        # One batch of sends and receives: NCCL runs the operations of a group in order, so two
        # ranks that both sent first would wait for each other.
        following, previous = ((ring.rank + step) % ring.world_size for step in (1, -1))
        operations = [
            dist.P2POp(operation, tensor, group=ring.group, group_peer=peer)
            for sent, received in zip(self._outgoing, self._incoming, strict=True)
            for operation, tensor, peer in (
                (dist.isend, sent, following),
                (dist.irecv, received, previous),
            )
        ]
        self._requests = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Return the received tensors; on a GPU the stream waits for them, not the host."""
        for request in self._requests:
            request.wait()
        self._outgoing.clear()
        return self._incoming


class FollowingSum(Home):
    """A per-column sum that follows each shard around the ring and ends on the shard's own rank.

    The sum of the earlier ranks arrives while this rank computes its own part. `visit` yields
    `world_size` times, and `add` is called once in each step.
    """

    def __init__(self, ring: Ring, combine: Combine) -> None:
        self._ring = ring
        self._combine = combine
        self._step = 0
        self._sum: Sending | Tensor | None = None

    def add(self, part: Tensor) -> None:
        total = part
        if isinstance(self._sum, Sending):
            # Waits late, because the part was computed meanwhile.
            (so_far,) = self._sum.wait()
            total = _COMBINED[self._combine](so_far, part)
        self._step += 1
        self._sum = total
        if self._ring.world_size > 1:
            # The arriving sum belongs to the next shard, which may have another size.
            self._sum = Sending([total], self._step, self._ring)

    def result(self) -> Tensor:
        if self._sum is None or self._step != self._ring.world_size:
            raise RuntimeError(
                f"`FollowingSum.result()` came after {self._step} calls of `add`. It needs one in "
                f"each of the {self._ring.world_size} steps of `Ring.visit`."
            )
        # The last send returns every sum to its own rank.
        return self._sum.wait()[0] if isinstance(self._sum, Sending) else self._sum
