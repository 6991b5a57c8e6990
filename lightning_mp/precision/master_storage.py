"""How a master weight is kept between two steps: in fp32, in half beside its weight, or not."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mp.numerics.split_weights import join_weight, round_stochastically, split_weight

__all__ = ["MasterStorage", "WriteBack", "make_storage"]

WriteBack = Literal["kahan", "stochastic", "nearest"]


class MasterStorage(ABC):
    """Keeps what a half weight lacks of its fp32 value, in a tensor of its own or not at all.

    Args:
        half: The dtype of working weights.
    """

    bytes_per_parameter = 0  # of what is kept beside the weight

    def __init__(self, half: torch.dtype) -> None:
        self.half = half
        self.writes = 0  # counted where rounding depends on it

    def keep(self, master: Tensor) -> Tensor | None:
        """Return what is to be kept of a master whose weight is rounded to nearest."""
        return None

    def read(self, weight: Tensor, kept: Tensor | None) -> Tensor:
        """Return the fp32 value of a weight, a new tensor; writes from outside win."""
        return weight.float()

    @abstractmethod
    def write(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor | None]:
        """Write masters into their weights, and return what is to be kept of each."""


class _Residuals(MasterStorage):
    """What rounding takes from a master, in half: Kahan summation over steps."""

    bytes_per_parameter = 2

    @override
    def keep(self, master: Tensor) -> Tensor:
        return split_weight(master.detach(), self.half)[1]

    @override
    def read(self, weight: Tensor, kept: Tensor | None) -> Tensor:
        return weight.float() if kept is None else join_weight(weight, kept)

    @override
    def write(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor | None]:
        kept: list[Tensor | None] = []
        for weight, master in zip(weights, masters, strict=True):
            rounded, residual = split_weight(master, self.half)
            weight.copy_(rounded)
            kept.append(residual)
        return kept


class _Nearest(MasterStorage):
    """Nothing: what rounding to nearest takes is lost."""

    @override
    def write(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor | None]:
        torch._foreach_copy_(list(weights), list(masters))
        return [None] * len(masters)


class _Stochastic(MasterStorage):
    """Nothing: rounding at random loses nothing on average.

    The generator starts anew at every write, from the number of writes. So ranks that hold the same
    masters round them alike, and a resumed run goes on bit for bit.
    """

    @override
    def write(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor | None]:
        generators = {
            device: torch.Generator(device).manual_seed(self.writes)
            for device in {master.device for master in masters}
        }
        self.writes += 1
        for weight, master in zip(weights, masters, strict=True):
            generator = generators[master.device]
            weight.copy_(round_stochastically(master, self.half, generator=generator))
        return [None] * len(masters)


_STORAGES: dict[WriteBack, type[MasterStorage]] = {
    "kahan": _Residuals,
    "stochastic": _Stochastic,
    "nearest": _Nearest,
}


def make_storage(write_back: WriteBack, half: torch.dtype) -> MasterStorage:
    """Make the storage that a plugin's `write_back` stands for."""
    return _STORAGES[write_back](half)
