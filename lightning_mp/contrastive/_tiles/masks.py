"""The masks of a sweep: pairs with equal ids, and pairs above false-negative thresholds.

Shapes:
    b: rows. m: columns of one shard.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Ids", "Thresholds"]


class Ids(NamedTuple):
    """Ids of the rows and of the columns; a pair with equal ids is not a negative."""

    rows_b: Tensor
    columns_m: Tensor

    def block(self, rows: slice, columns: slice) -> "Ids":
        return Ids(self.rows_b[rows], self.columns_m[columns])


class Thresholds(NamedTuple):
    """False-negative thresholds: a row or column masks pairs with similarities above its threshold.

    Similarities are products of the contiguous `guides` of rows and columns, or of the features.
    """

    rows_b: Tensor  # in the state dtype
    columns_m: Tensor
    guides: tuple[Tensor, Tensor] | None = None

    @property
    def travelling(self) -> list[Tensor]:
        """The tensors that are sent to other ranks with the columns."""
        return [self.columns_m] if self.guides is None else [self.columns_m, self.guides[1]]

    def at(self, columns: Sequence[Tensor]) -> "Thresholds":
        """Return thresholds of the same rows with the `travelling` tensors of other columns."""
        guides = None if self.guides is None else (self.guides[0], columns[1])
        return self._replace(columns_m=columns[0], guides=guides)

    def block(self, rows: slice, columns: slice) -> "Thresholds":
        guides = None
        if self.guides is not None:
            guides = self.guides[0][rows], self.guides[1][columns]
        return Thresholds(self.rows_b[rows], self.columns_m[columns], guides)
