"""Which texts belong to which images, as implicit matrices: only their products are computed.

Each is a matrix M of zeros and ones, images by texts, over all ranks. The losses need the products
`M @ text` and `M.T @ image` only. These are sums over groups, O((b + n) D) in memory and time,
while M has `b n` elements. `times` returns this rank's rows of `M @ x`, (b, D), or of `M.T @ x`,
(n, D), for x of all ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Exchange
from lightning_mp.numerics.floats import state_dtype

__all__ = ["Everything", "Groups", "Listed", "Match", "Own", "Unmasked", "add_rows"]


class Own(NamedTuple):
    """Text i belongs to image i and to no other image."""

    b: int
    n: int

    def times(self, x: Tensor, transposed: bool = False) -> Tensor:
        return _pad_rows(x, self.n) if transposed else x[: self.b]


class Groups(NamedTuple):
    """Images and texts with equal ids belong together, on any ranks."""

    ids_n: Tensor  # of the texts, int64; the first b are also those of the images
    b: int
    exchange: Exchange

    def times(self, x: Tensor, transposed: bool = False) -> Tensor:
        """Return for each id the sum of the rows with an equal id."""
        ids = self.ids_n if transposed else self.ids_n[: self.b]
        # Shards have one row per text; zeros do not change the sums.
        x_nD = _pad_rows(x, len(self.ids_n))
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

    def times(self, x: Tensor, transposed: bool = False) -> Tensor:
        to, of, count = self.images_e, self.texts_e, self.b
        if transposed:
            to, of, count = of, to, self.n
        sums = x.new_zeros(count, *x.shape[1:])
        add_rows(sums, to, x[of])
        return sums


class Everything(NamedTuple):
    """All texts belong to all images."""

    b: int
    n: int
    exchange: Exchange

    def times(self, x: Tensor, transposed: bool = False) -> Tensor:
        # Summed in a wide dtype, because its rounding error enters every row.
        total = self.exchange.all_reduce(x.sum(0, dtype=state_dtype(x.device)))
        return total.to(x.dtype).expand(self.n if transposed else self.b, *total.shape)


class Unmasked(NamedTuple):
    """All texts belong to all images, except texts with equal ids that are not the image's own."""

    everything: Everything
    groups: Groups
    own: Own

    def times(self, x: Tensor, transposed: bool = False) -> Tensor:
        every, group, own = (match.times(x, transposed) for match in self)
        # The own text is also in its group, and remains.
        return every - group + own


Match = Own | Groups | Listed | Everything | Unmasked


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
