"""Base class of metrics that store rows, and removal of rows that `DistributedSampler` repeats.

Shapes: `N` rows in total, `n` rows of a batch.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["StoredRows", "with_keys", "without_repeats"]

_NO_KEY = -1  # key of a row that is never removed


class StoredRows(Metric):
    """Base of metrics whose states are lists of tensors; subclasses define the two methods below.

    torchmetrics (1.9) clears the state at the start of `forward`, and keeps the synced state after
    an error in `compute`, so that every later `compute` would fail.
    """

    value: str | None

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Raise `ValueError` if a batch is invalid or does not fit the state."""
        raise NotImplementedError

    def _compute(self) -> dict[str, Tensor]:
        """Return all values of the state."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor] | Tensor:
        """Return the values over all batches since `reset()` and over all processes."""
        try:
            values = self._compute()
        except Exception:
            if self._is_synced and self._should_unsync:
                self.unsync()
            raise
        return values if self.value is None else values[self.value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch and return the values of this batch alone."""
        self._check(*args, **kwargs)  # with the full state
        before = {**self.__dict__, **self._copy_state_dict()}
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            self.__dict__.update(before)
            raise

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot one or several results of `compute()`, or the current result; see torchmetrics."""
        return self._plot(val, ax)

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        # torchmetrics copies every tensor in each `forward()`, O(N^2) copies over an epoch. Stored
        # tensors are never changed in place, so copies of the lists suffice.
        states = {name: getattr(self, name) for name in self._defaults}
        return {k: v if isinstance(v, Tensor) else list(v) for k, v in states.items()}


def with_keys(ids_n: Tensor, keys_n: Tensor | None, device: torch.device) -> Tensor:
    """Return ids and keys as an (n, 2) tensor in new memory."""
    ids_n = ids_n.to(device, torch.int64)
    keys_n = torch.full_like(ids_n, _NO_KEY) if keys_n is None else keys_n.to(device, torch.int64)
    return torch.stack([ids_n, keys_n], 1)


def without_repeats(values_N: Tensor, ids_and_keys_N2: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and ids, in order, without the rows whose key occurred before."""
    ids_N, keys_N = ids_and_keys_N2.unbind(1)
    # A stable sort keeps the first row with a key first.
    order_N = keys_N.argsort(stable=True)
    sorted_N = keys_N[order_N]
    is_first_N = torch.ones_like(sorted_N, dtype=torch.bool)
    is_first_N[1:] = (sorted_N[1:] != sorted_N[:-1]) | (sorted_N[1:] == _NO_KEY)
    # Indexing copies all features, so skip it if no row is repeated, as on one rank.
    if is_first_N.all():
        return values_N, ids_N
    first = order_N[is_first_N].sort().values
    return values_N[first], ids_N[first]
