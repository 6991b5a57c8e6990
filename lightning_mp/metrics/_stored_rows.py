"""Base class of metrics that store rows, and keep them after an error."""

from typing import Any

from torch import Tensor
from torchmetrics import Metric

__all__ = ["StoredRows"]


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
