"""What the host makes of statistics once they have arrived.

Legend: `N` tensors, `K` columns of `StatField`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from lightning_mp.numerics.stat_fields import StatField

__all__ = ["TensorStats"]

_FP16_LARGEST = torch.finfo(torch.float16).max
_Numbers = npt.NDArray[np.float64]


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
        names, numels = tuple(self.names), tuple(self.numels)
        stats = np.asarray(self.stats_NK, dtype=np.float64)
        if stats.shape != (len(names), len(StatField)) or len(numels) != len(names):
            raise ValueError(
                f"Passed `TensorStats` {len(names)} names, {len(numels)} sizes and statistics of "
                f"shape {list(stats.shape)}. There must be one name, one size and one row of "
                f"{len(StatField)} a tensor. Pass those of the tensors that `tensor_stats` got."
            )
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"Passed `TensorStats` the name {twice!r} twice. Names must differ. Prefix them, "
                "as by the optimizer they belong to."
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "numels", numels)
        object.__setattr__(self, "stats_NK", stats)

    def column(self, field: StatField) -> _Numbers:
        """Return one statistic of all tensors, in the order of their names."""
        return self.stats_NK[:, field]

    @cached_property
    def amax(self) -> dict[str, float]:
        """The largest finite magnitudes."""
        return self._named(self.column(StatField.AMAX))

    @cached_property
    def smallest(self) -> dict[str, float]:
        """The smallest finite magnitudes other than 0; inf where there is none."""
        return self._named(self.column(StatField.SMALLEST))

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

    @cached_property
    def mean(self) -> dict[str, float]:
        """The mean of the finite values; 0 without any."""
        return self._named(self.column(StatField.SUM) / self._finite())

    @cached_property
    def rms(self) -> dict[str, float]:
        """The root of the mean square of the finite values; 0 without any."""
        return self._named(np.sqrt(self.column(StatField.SUM_OF_SQUARES) / self._finite()))

    @cached_property
    def norm(self) -> dict[str, float]:
        """The Euclidean norm of the finite values."""
        return self._named(np.sqrt(self.column(StatField.SUM_OF_SQUARES)))

    def headroom_bits(self, scale: float = 1.0, largest: float = _FP16_LARGEST) -> dict[str, float]:
        """Return how many doublings the largest magnitude is away from overflow.

        `log2(largest / (amax * scale))`; negative where values overflow, inf where all are 0.

        Args:
            scale: The loss scale at which values are held.
            largest: What the format holds; 65504 for fp16.
        """
        with np.errstate(divide="ignore"):
            return self._named(np.log2(largest / scale) - np.log2(self.column(StatField.AMAX)))

    def _share(self, field: StatField) -> _Numbers:
        return self.column(field) / np.maximum(np.asarray(self.numels, dtype=np.float64), 1)

    def _finite(self) -> _Numbers:
        return np.maximum(np.asarray(self.numels) - self.column(StatField.NON_FINITE), 1)

    def _named(self, numbers: _Numbers) -> dict[str, float]:
        return dict(zip(self.names, numbers.tolist(), strict=True))
