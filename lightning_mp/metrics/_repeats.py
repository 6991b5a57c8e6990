"""Removes repeated rows, such as those that `DistributedSampler` adds.

Shapes: `N` rows in total, `n` rows of a batch, `D` feature width.
"""

import torch
from torch import Tensor

__all__ = ["with_keys", "without_repeats"]

_NO_KEY = -1  # key of a row that is never removed


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
