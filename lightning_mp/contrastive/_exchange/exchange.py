"""What the loss asks of the code that brings the columns of other ranks, and takes sums back home.

Shapes:
    b: this rank's batch. m: columns that are visiting. W: ranks.
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
    """Columns of some ranks that this rank works on now.

    Args:
        columns: For each tensor of the shard, its rows of all visiting columns.
        diagonal: The positive of row `i` is visiting column `i + diagonal`; `None`: none visits.
        positive_rows: The rows whose positive visits; only they have one.
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
        """Return what all ranks together have about this rank's own columns, in its own order."""
        ...

    def parts(self) -> Tensor:
        """Return parts of `result()` that are left to be combined by their first dimension."""
        ...


class Exchange(Protocol):
    """Brings every column of every rank to this rank once in a sweep.

    All ranks go through `visit` and `Home.add` in the same order; what travels does so while the
    visiting columns are in use.
    """

    @property
    def rank(self) -> int:
        """This rank within the group."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks share the batch."""
        ...

    @property
    def global_batch_size(self) -> int:
        """Rows on all ranks together."""
        ...

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        """Yield all columns, some at a time.

        Args:
            shard: This rank's tensors, each with its batch as the first dimension.
            values: One or some numbers of each of its columns, small beside the others; they come
                last among the visiting columns.
        """
        ...

    def home(self, combine: Combine) -> Home:
        """Return an empty sum; `"logsumexp"` adds exponentials, `"max"` keeps the largest."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        ...
