"""Samplers that return whole batches of row indices, on one or several ranks.

Legend: ``N`` rows, ``B`` rows of a global batch, ``W`` ranks, ``K`` batches an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


class TwinFreeSampler(DistributedSampler[Tensor]):
    """Forms batches such that no name occurs twice in a *global* batch.

    Two rows with the same name in a batch ("A" in bold and "A" in italics) are false negatives: the
    loss pushes the first image away from the second text, which is the same text. After a plain
    shuffle, three in ten rows of a batch of 2048 share their name with another row.

    The rows are sorted by name, with the names in random order, and dealt in turn to
    ``K = N // batch_size`` batches, so a name with at most K rows comes at most once in a batch.
    Each rank then takes every W-th row of a batch. Sizes therefore differ by at most one between
    batches and between ranks, and every row is served once an epoch.

    Args:
        name_ids: An integer for each row, ``(N,)``; rows with the same name have the same integer.
        batch_size: Smallest number of rows in a global batch.
        num_replicas: Number of ranks W.
        rank: This rank.
        seed: Seed of the order, together with the epoch; the same on every rank.
    """

    # A `DistributedSampler`, which Lightning does not replace. It would distribute the batches of
    # another sampler over ranks, and a global batch of W batches would contain duplicates.

    def __init__(
        self,
        name_ids: npt.NDArray[np.integer],
        *,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        # Explicit ranks, because torch would require a process group to find them.
        super().__init__(name_ids, num_replicas, rank, seed=seed)  # type: ignore[arg-type]
        if not num_replicas <= batch_size <= len(name_ids):
            raise ValueError(
                f"Passed `TwinFreeSampler(batch_size={batch_size!r})` for {len(name_ids)} rows on "
                f"{num_replicas} ranks. It must lie between the two. Choose a smaller batch."
            )
        _, self._name_of_row, counts = np.unique(name_ids, return_inverse=True, return_counts=True)
        self._names = len(counts)
        self._batches = len(name_ids) // batch_size
        if counts.max() > self._batches:
            raise ValueError(
                f"Passed `TwinFreeSampler(batch_size={batch_size!r})`: one name has {counts.max()} "
                f"rows, but an epoch only {self._batches} batches, so two of them would meet. "
                f"Choose a batch of at most {len(name_ids) // counts.max()} rows."
            )

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Tensor]:
        random = np.random.default_rng((self.seed, self.epoch))
        place = random.permutation(self._names)[self._name_of_row]
        # Sorted by the position of the name; the random second key shuffles the rows of a name.
        line = np.lexsort((random.random(len(place)), place))
        for batch in random.permutation(self._batches):
            rows = line[batch :: self._batches][self.rank :: self.num_replicas]
            yield torch.from_numpy(np.ascontiguousarray(rows))


class RowSampler(DistributedSampler[Tensor]):
    """Returns each row once over all ranks, in order, for validation and test.

    `DistributedSampler` repeats rows until every rank has the same number, and repeated rows would
    count twice in a recall.
    """

    def __init__(self, rows: int, *, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(range(rows), num_replicas, rank, shuffle=False)  # type: ignore[arg-type]
        self._rows = range(rank, rows, num_replicas)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.tensor(self._rows).split(self._batch_size))
