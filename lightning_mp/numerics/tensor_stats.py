"""Statistics of many tensors at once, gathered on the device and read by the host when it asks.

Legend: `N` tensors.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NonFinite", "count_non_finite", "first_non_finite", "stored_values"]


class NonFinite(NamedTuple):
    """Which tensor holds values that are not finite, and how many of them.

    Args:
        name: The tensor's dotted name.
        shape: Its shape.
        values: How many values it stores; fewer than its shape says where it is sparse.
        nan: How many of them are NaN.
        inf: How many of them are +inf or -inf.
    """

    name: str
    shape: tuple[int, ...]
    values: int
    nan: int
    inf: int

    def __str__(self) -> str:
        return (
            f"`{self.name}` of shape {list(self.shape)} ({self.nan} NaN and {self.inf} inf among "
            f"{self.values} values)"
        )


def stored_values(tensor: Tensor) -> Tensor:
    """Return the values that a tensor stores, sharing its memory: of a sparse one the non-zeros.

    Duplicates of a sparse gradient that was not coalesced stay apart.
    """
    return tensor._values() if tensor.is_sparse else tensor


def count_non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Count the NaN and the infinite values of every tensor, without a host sync.

    NaN and inf are told apart because they have different causes: an fp16 gradient above 65504 is
    inf, while NaN has come out of inf - inf, 0 * inf or 0 / 0 somewhere earlier. Counts are exact,
    which a non-finite norm is not: the L2 norm of finite fp32 values above 1.8e19 is inf as well.

    torch 2.13 has no multi-tensor `isnan`, so this launches kernels for every tensor. It is for
    the step on which something has gone wrong, not for every step.

    Args:
        tensors: Any dtypes and devices. Without tensors the result has no rows and is on the CPU.

    Returns:
        counts_N2: NaN in column 0 and +-inf in column 1, int64, on the device of the first tensor.
            Tensors on a second device cost one sync each.
    """
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64)
    values = [stored_values(tensor) for tensor in tensors]
    rows = [torch.stack([torch.isnan(v).sum(), torch.isinf(v).sum()]) for v in values]
    return torch.stack([row.to(values[0].device) for row in rows])


def first_non_finite(named_tensors: Iterable[tuple[str, Tensor]]) -> NonFinite | None:
    """Find the first tensor, in the order given, whose values are not all finite.

    Costs one host sync, however many tensors there are. All of them are held until it is done.

    Args:
        named_tensors: Names and tensors, such as `module.named_parameters()`.

    Returns:
        Its name, shape and counts; `None` where every value is finite.
    """
    named = list(named_tensors)
    counts = count_non_finite([tensor for _, tensor in named]).tolist()
    for (name, tensor), (nan, inf) in zip(named, counts, strict=True):
        if nan or inf:
            return NonFinite(name, tuple(tensor.shape), stored_values(tensor).numel(), nan, inf)
    return None
