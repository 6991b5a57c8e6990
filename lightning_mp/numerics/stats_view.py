"""The columns of a packed tensor of statistics, and what the host makes of them.

Legend: `N` tensors, `K` columns of `StatField`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["StatField", "TensorStats"]

_FP16_LARGEST = torch.finfo(torch.float16).max
_Numbers = npt.NDArray[np.float64]


class StatField(IntEnum):
    """The columns of `tensor_stats`, in their order.

    All but `NON_FINITE` look at finite values only: one NaN must not hide what the other million
    gradients do. Counts are whole numbers, exact up to 2^53 in float64.
    """

    AMAX = 0
    """The largest magnitude; 0 without finite values."""

    ZEROS = 1
    """How many values are exactly 0."""

    SUBNORMALS = 2
    """How many are not 0, but below 2^-14 in magnitude once they are scaled."""

    NON_FINITE = 3
    """How many are NaN, inf or -inf."""

    SUM_OF_SQUARES = 4
    """The sum of the squares of the finite values."""


@dataclass(frozen=True, eq=False)
class TensorStats:
    """Statistics of named tensors on the host, with the shares and means that alarms look at.

    Counts alone mislead: 40,000 zeros are nothing in a 38M embedding and everything in a bias.
    Properties are dictionaries from names to numbers; `column` gives a statistic as an array.

    Args:
        names: Dotted names, all different.
        numels: How many values each tensor stored, as by `stored_numels`.
        stats_NK: What `tensor_stats` returned, on the host; any float dtype.

    Raises:
        ValueError: Lengths differ, or a name comes twice.
    """

    names: Sequence[str]
    numels: Sequence[int]
    stats_NK: _Numbers

    def __post_init__(self) -> None:
        names, count, shape = self.names, len(self.names), self.stats_NK.shape
        if shape != (count, len(StatField)) or len(self.numels) != count:
            raise ValueError(
                f"Passed `TensorStats` {count} names, {len(self.numels)} sizes and statistics of "
                f"shape {list(shape)}. There must be one name, one size and one row of "
                f"{len(StatField)} a tensor. Pass those of the tensors that `tensor_stats` got."
            )
        if len(set(names)) < count:  # a dictionary would lose one of them
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"Passed `TensorStats` the name {twice!r} twice. Names must differ. Prefix them, "
                "as by the optimizer they belong to."
            )

    def column(self, field: StatField) -> _Numbers:
        """Return one statistic of all tensors, in the order of their names."""
        return self.stats_NK[:, field]

    @cached_property
    def amax(self) -> dict[str, float]:
        """The largest finite magnitudes."""
        return self._named(self.column(StatField.AMAX))

    @cached_property
    def non_finite(self) -> dict[str, int]:
        """How many values are NaN or infinite."""
        return {name: int(n) for name, n in self._named(self.column(StatField.NON_FINITE)).items()}

    @cached_property
    def zero_share(self) -> dict[str, float]:
        """Exact zeros as a share of all values, 0 to 1; 0 for an empty tensor."""
        return self._named(self._share(StatField.ZEROS))

    @cached_property
    def subnormal_share(self) -> dict[str, float]:
        """What is subnormal in fp16 at the scale given, flushed values included, as a share."""
        return self._named(self._share(StatField.SUBNORMALS))

    def headroom_bits(self, scale: float = 1.0) -> dict[str, float]:
        """Return how many doublings the largest magnitude is away from overflow in fp16.

        `log2(65504 / (amax * scale))`; negative where values overflow, inf where all are 0.

        Args:
            scale: The loss scale at which values are held.
        """
        with np.errstate(divide="ignore"):
            # log2(0) is meant: it gives a tensor of zeros its inf, without a warning.
            bits = np.log2(_FP16_LARGEST / scale) - np.log2(self.column(StatField.AMAX))
        return self._named(bits)

    def _share(self, field: StatField) -> _Numbers:
        # An empty tensor has no zeros among no values: a share of 0.
        return self.column(field) / np.maximum(np.asarray(self.numels, dtype=np.float64), 1)

    def _named(self, numbers: _Numbers) -> dict[str, float]:
        return dict(zip(self.names, numbers.tolist(), strict=True))
