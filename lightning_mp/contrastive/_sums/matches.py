"""Which texts belong to which images over all ranks, as matrices that are multiplied without being.

Each is a matrix M of zeros and ones, images by texts, over all ranks. What the losses need of it
are products with features, `M @ text` and `M.T @ image`, and these are sums over groups: O((b + n)
D) in memory and time, where M has `b n` elements.

Shapes:
    b: images of this rank. n: its texts. m: texts that visit. D: width of what is multiplied.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Exchange
from lightning_mp.numerics.floats import state_dtype

__all__ = ["Everything", "Groups", "Listed", "Match", "Own", "Unmasked"]


class Match(Protocol):
    """M, by its products."""

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return this rank's rows of `M @ x`, (b, D), from the `x_nD` of all ranks."""
        ...

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return this rank's rows of `M.T @ x`, (n, D), from the `x_bD` of all ranks."""
        ...


class Own(NamedTuple):
    """Text i belongs to image i, and no other does."""

    b: int
    n: int

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        return x_nD[: self.b]

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        return _padded(x_bD, self.n)


class Groups(NamedTuple):
    """Images and texts of equal ids belong to each other, on whatever ranks they are.

    Args:
        ids_n: What the texts show, int64; the first b also say what the images do.
        b: Images.
        exchange: How what is summed travels.
    """

    ids_n: Tensor
    b: int
    exchange: Exchange

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        return self._sums(self.ids_n[: self.b], x_nD)

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        # Shards are as long as a rank has texts; zeros add nothing to any group.
        return self._sums(self.ids_n, _padded(x_bD, len(self.ids_n)))

    def _sums(self, ids: Tensor, x_nD: Tensor) -> Tensor:
        """Return for each of `ids` the sum of what comes with an equal one."""
        sorted_ids = ids.sort().values
        # The place of an id is that of the first equal one; what has none here goes past the end.
        sums = x_nD.new_zeros(len(ids) + 1, *x_nD.shape[1:])
        for visit in self.exchange.visit([x_nD, self.ids_n]):
            x_mD, ids_m = visit.columns
            places = torch.searchsorted(sorted_ids, ids_m)
            found = sorted_ids[places.clamp(max=len(ids) - 1)] == ids_m
            add_rows(sums, places.where(found, len(ids)), x_mD)
        return sums[torch.searchsorted(sorted_ids, ids)]


class Listed(NamedTuple):
    """Images belong to texts of this rank that a list names.

    No pair of image and text comes twice.
    """

    images_e: Tensor
    texts_e: Tensor
    b: int
    n: int

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        sums = x_nD.new_zeros(self.b, *x_nD.shape[1:])
        add_rows(sums, self.images_e, x_nD[self.texts_e])
        return sums

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        sums = x_bD.new_zeros(self.n, *x_bD.shape[1:])
        add_rows(sums, self.texts_e, x_bD[self.images_e])
        return sums


class Everything(NamedTuple):
    """All texts belong to all images."""

    b: int
    n: int
    exchange: Exchange

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        return self._total(x_nD, self.b)

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        return self._total(x_bD, self.n)

    def _total(self, x_nD: Tensor, count: int) -> Tensor:
        # The rounding of this sum would go into every row.
        total = self.exchange.all_reduce(x_nD.sum(0, dtype=state_dtype(x_nD.device)))
        return total.to(x_nD.dtype).expand(count, *total.shape)


class Unmasked(NamedTuple):
    """All texts belong to all images, but for those of equal ids that are not their own."""

    everything: Everything
    groups: Groups
    own: Own

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        every, group, own = (match.to_rows(x_nD) for match in self)
        # The own one is in its group as well, and is to stay.
        return every - group + own

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        every, group, own = (match.to_columns(x_bD) for match in self)
        return every - group + own


def add_rows(total: Tensor, places: Tensor, x_mD: Tensor) -> None:
    """Add rows at places, some of which may be the same, in an order that no run changes."""
    if total.device.type == "cpu":
        total.index_add_(0, places, x_mD)
    else:  # `index_add_` would be in the order of the run, this sorts
        total.index_put_((places,), x_mD, accumulate=True)


def _padded(x_bD: Tensor, n: int) -> Tensor:
    """Return n rows, those past the end zeros."""
    rest = x_bD.new_zeros(n - len(x_bD), *x_bD.shape[1:])
    return torch.cat([x_bD, rest]) if len(rest) else x_bD
