"""`Exchange`: the interface of the code that exchanges columns and per-column sums between ranks.

Shapes:
    b: rank batch. m: visiting columns. W: ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Combine", "Exchange", "Home", "Visit"]

Combine = Literal["sum", "logsumexp", "max"]


@dataclass(frozen=True)
class Visit:
    """A block of columns that this rank processes.

    Args:
        columns: For each tensor of the shard, its rows of the visiting columns.
        diagonal: The positive of row `i` is visiting column `i + diagonal`; `None` without
            positives among the columns.
        positive_rows: The rows whose positive is among the columns.
    """

    columns: list[Tensor]
    diagonal: int | None
    positive_rows: slice


class Home(Protocol):
    """Accumulates a per-column sum and returns it to the rank that owns the column."""

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory of the shape of `like` that `add` sends without a copy."""
        ...

    def add(self, part: Tensor) -> None:
        """Add this rank's part of the visiting columns; called once in each visit."""
        ...

    def result(self) -> Tensor:
        """Return the sum over all ranks for this rank's columns, in their order."""
        ...

    def parts(self) -> Tensor:
        """Return parts of `result()` that remain to be combined along the first dimension."""
        ...


class Exchange(ABC):
    """Brings the columns of all ranks to each rank, once per sweep.

    All ranks call `visit` and `Home.add` in the same order. Transfers overlap with the work on the
    visiting columns.

    Args:
        batch_sizes: Rows of each rank; they may differ.
        rank: This rank within the group.
        group: The process group; `None` is the default one.
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
        dist.all_reduce(tensor, group=self.group)
        return tensor
