"""The columns of a packed tensor of statistics, and a view of them on the host.

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

    All columns but `NON_FINITE` describe the finite values only, so that one NaN does not hide a
    million other gradients.
    """

    AMAX = 0
    """Largest magnitude; 0 without finite values."""

    ZEROS = 1
    """Number of zeros."""

    SUBNORMALS = 2
    """Number of non-zero values whose scaled magnitude is below 2^-14."""

    NON_FINITE = 3
    """Number of NaN, inf and -inf."""

    SUM_OF_SQUARES = 4
    """Sum of squares of the finite values."""


@dataclass(frozen=True, eq=False)
class TensorStats:
    """Statistics of named tensors on the host, with the shares that alarms use.

    Counts alone mislead: 40,000 zeros are negligible in an embedding of 38M values but not in a
    bias. Properties map names to numbers; `column` returns a statistic as an array.
    """

    names: Sequence[str]  # distinct dotted names
    numels: Sequence[int]  # from `stored_numels`
    stats_NK: _Numbers  # from `tensor_stats`, on the host

    def __post_init__(self) -> None:
        names, count, shape = self.names, len(self.names), self.stats_NK.shape
        if shape != (count, len(StatField)) or len(self.numels) != count:
            raise ValueError(
                f"Passed `TensorStats` {count} names, {len(self.numels)} sizes and statistics of "
                f"shape {list(shape)}. Each tensor needs one name, one size and one row of "
                f"{len(StatField)} statistics. Pass them for the tensors given to `tensor_stats`."
            )
        if len(set(names)) < count:  # a dictionary would lose one
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"Passed `TensorStats` the name {twice!r} twice. Names must differ. Add a "
                "prefix, such as the name of the optimizer."
            )

    def column(self, field: StatField) -> _Numbers:
        """Return one statistic of all tensors, in the order of `names`."""
        return self.stats_NK[:, field]

    @cached_property
    def amax(self) -> dict[str, float]:
        """Largest finite magnitude."""
        return self._by_name(self.column(StatField.AMAX))

    @cached_property
    def non_finite(self) -> dict[str, int]:
        """Number of NaN and infinite values."""
        return {
            name: int(n) for name, n in self._by_name(self.column(StatField.NON_FINITE)).items()
        }

    @cached_property
    def zero_share(self) -> dict[str, float]:
        """Share of zeros, from 0 to 1; 0 for an empty tensor."""
        return self._by_name(self._share(StatField.ZEROS))

    @cached_property
    def subnormal_share(self) -> dict[str, float]:
        """Share of values that are subnormal or flushed to zero in fp16 at the given scale."""
        return self._by_name(self._share(StatField.SUBNORMALS))

    def headroom_bits(self, scale: float = 1.0) -> dict[str, float]:
        """Return the number of doublings between the largest magnitude and overflow in fp16.

        `log2(65504 / (amax * scale))`; negative if values overflow, inf if all values are 0.
        """
        with np.errstate(divide="ignore"):
            # log2(0) is intended: tensors of zeros have a headroom of inf.
            bits = np.log2(_FP16_LARGEST / scale) - np.log2(self.column(StatField.AMAX))
        return self._by_name(bits)

    def _share(self, field: StatField) -> _Numbers:
        # Shares of an empty tensor are 0.
        return self.column(field) / np.maximum(np.asarray(self.numels, dtype=np.float64), 1)

    def _by_name(self, numbers: _Numbers) -> dict[str, float]:
        return dict(zip(self.names, numbers.tolist(), strict=True))
