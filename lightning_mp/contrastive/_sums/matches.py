"""Which texts belong to which images, as implicit matrices: only their products are computed.

Each is a matrix M of zeros and ones, images by texts, over all ranks. The losses need the products
`M @ text` and `M.T @ image` only. These are sums over groups, O((b + n) D) in memory and time,
while M has `b n` elements.

Shapes:
    b: images of this rank. n: its texts. m: visiting texts. D: width of the multiplied tensor.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Exchange
from lightning_mp.numerics.floats import state_dtype

__all__ = ["Everything", "Groups", "Listed", "Match", "Own", "Unmasked"]


class Match(Protocol):
    """Interface of M: its products."""

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return this rank's rows of `M @ x`, (b, D), from the `x_nD` of all ranks."""
        ...

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return this rank's rows of `M.T @ x`, (n, D), from the `x_bD` of all ranks."""
        ...


class Own(NamedTuple):
    """Text i belongs to image i and to no other image."""

    b: int
    n: int

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        return x_nD[: self.b]

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        return _pad_rows(x_bD, self.n)


class Groups(NamedTuple):
    """Images and texts with equal ids belong together, on any ranks.

    Args:
        ids_n: Ids of the texts, int64; the first b are also those of the images.
        b: Number of images.
        exchange: The exchange of rows between ranks.
    """

    ids_n: Tensor
    b: int
    exchange: Exchange

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        return self._sums(self.ids_n[: self.b], x_nD)

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        # Shards have one row per text; zeros do not change the sums.
        return self._sums(self.ids_n, _pad_rows(x_bD, len(self.ids_n)))

    def _sums(self, ids: Tensor, x_nD: Tensor) -> Tensor:
        """Return for each of `ids` the sum of the rows with an equal id."""
        sorted_ids = ids.sort().values
        # The index of an id is that of the first equal one; unknown ids get the index past the end.
        sums = x_nD.new_zeros(len(ids) + 1, *x_nD.shape[1:])
        for visit in self.exchange.visit([x_nD, self.ids_n]):
            x_mD, ids_m = visit.columns
            places = torch.searchsorted(sorted_ids, ids_m)
            found = sorted_ids[places.clamp(max=len(ids) - 1)] == ids_m
            add_rows(sums, places.where(found, len(ids)), x_mD)
        return sums[torch.searchsorted(sorted_ids, ids)]


class Listed(NamedTuple):
    """Pairs of images and texts of this rank, listed without repetition."""

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
        # Summed in a wide dtype, because its rounding error enters every row.
        total = self.exchange.all_reduce(x_nD.sum(0, dtype=state_dtype(x_nD.device)))
        return total.to(x_nD.dtype).expand(count, *total.shape)


class Unmasked(NamedTuple):
    """All texts belong to all images, except texts with equal ids that are not the image's own."""

    everything: Everything
    groups: Groups
    own: Own

    def to_rows(self, x_nD: Tensor) -> Tensor:
        """Return `M @ x`, see `Match`."""
        every, group, own = (match.to_rows(x_nD) for match in self)
        # The own text is also in its group, and remains.
        return every - group + own

    def to_columns(self, x_bD: Tensor) -> Tensor:
        """Return `M.T @ x`, see `Match`."""
        every, group, own = (match.to_columns(x_bD) for match in self)
        return every - group + own


def add_rows(total: Tensor, places: Tensor, x_mD: Tensor) -> None:
    """Add rows at places, which may repeat, in a fixed order."""
    if total.device.type == "cpu":
        total.index_add_(0, places, x_mD)
    else:  # sorts, while the order of `index_add_` would vary
        total.index_put_((places,), x_mD, accumulate=True)


def _pad_rows(x_bD: Tensor, n: int) -> Tensor:
    """Return n rows, padded with zeros."""
    rest = x_bD.new_zeros(n - len(x_bD), *x_bD.shape[1:])
    return torch.cat([x_bD, rest]) if len(rest) else x_bD
