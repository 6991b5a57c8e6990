"""The exchange by ring: shards travel from rank to rank while each rank works on the one it holds.

Rank `r` of `W` starts with its own shard. In every step it sends the shard to rank `r + 1` and
receives the next from rank `r - 1`, so that it holds the shard of rank `r - t` in step `t`. After
`W` steps each rank has seen every shard. This is the exchange of Inf-CL
(https://arxiv.org/abs/2410.17243).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Combine, Exchange, Visit

__all__ = ["FollowingSum", "Ring", "Sending"]

_COMBINED: dict[Combine, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "logsumexp": torch.logaddexp,
    "max": torch.maximum,
}


class Sending:
    """Sends tensors to the next rank and receives others from the previous one, in the background.

    `outgoing` are held until `wait` returns, because a send reads them in place.
    """

    def __init__(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], ring: "Ring"
    ) -> None:
        # Sends require contiguous memory.
        self._outgoing = [tensor.contiguous() for tensor in outgoing]
        self._incoming = list(incoming)
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


class Ring(Exchange):
    """The exchange by ring, see `Exchange`: one shard visits at a time."""

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        travelling = shard if values is None else [*shard, values]
        visiting = [tensor.contiguous() for tensor in travelling]
        own = slice(0, len(visiting[0]))
        for step in range(self.world_size):
            sending = None
            if step + 1 < self.world_size:  # travels while this rank works on it
                sending = Sending(visiting, self.empty_like(visiting, step + 1), self)
            yield Visit(visiting, 0 if step == 0 else None, own)
            if sending is not None:
                visiting = sending.wait()

    def home(self, combine: Combine) -> "FollowingSum":
        return FollowingSum(self, combine)

    def empty_like(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return buffers for the shard that this rank holds at `step`."""
        size = self.batch_sizes[(self.rank - step) % self.world_size]
        return [tensor.new_empty(size, *tensor.shape[1:]) for tensor in tensors]


class FollowingSum:
    """A per-column sum that follows each shard around the ring and ends on the shard's own rank.

    The sum of the earlier ranks arrives while this rank computes its own part. `visit` yields
    `world_size` times, and `add` is called once in each step.
    """

    def __init__(self, ring: Ring, combine: Combine) -> None:
        self._ring = ring
        self._combine = combine
        self._step = 0
        self._sending: Sending | None = None

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(like.shape, dtype=dtype)

    def add(self, part: Tensor) -> None:
        """Add this rank's part of the current shard, and send the sum on."""
        total = part
        if self._sending is not None:
            # Waits late, because the part was computed meanwhile.
            (so_far,) = self._sending.wait()
            total = _COMBINED[self._combine](so_far, part)
        self._step += 1
        # The arriving sum belongs to the next shard, which may have another size.
        incoming = self._ring.empty_like([total], self._step)
        self._sending = Sending([total], incoming, self._ring)

    def result(self) -> Tensor:
        if self._sending is None or self._step != self._ring.world_size:
            raise RuntimeError(
                f"`FollowingSum.result()` came after {self._step} calls of `add`. It needs one in "
                f"each of the {self._ring.world_size} steps of `Ring.visit`."
            )
        # The last send returns every sum to its own rank.
        (total,) = self._sending.wait()
        return total

    def parts(self) -> Tensor:
        return self.result()[None]
