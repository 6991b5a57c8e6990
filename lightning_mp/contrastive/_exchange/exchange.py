"""`Exchange`: the interface of the code that exchanges columns and per-column sums between ranks.

Shapes:
    b: rank batch. m: visiting columns. W: ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
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
        """Return uninitialised memory of the shape of `like` that `add` sends without a copy."""
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


class Exchange(Protocol):
    """Brings the columns of all ranks to each rank, once per sweep.

    All ranks call `visit` and `Home.add` in the same order. Transfers overlap with the work on the
    visiting columns.
    """

    rank: int
    """This rank within the group."""
    world_size: int
    """Number of ranks that share the batch."""
    global_batch_size: int
    """Number of rows of all ranks."""

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        """Yield all columns in blocks.

        Args:
            shard: This rank's tensors, each with its batch as the first dimension.
            values: A few numbers per column; they are the last tensor of the visiting columns.
        """
        ...

    def home(self, combine: Combine) -> Home:
        """Return an empty sum; `"logsumexp"` adds exponentials, `"max"` takes the maximum."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        ...
