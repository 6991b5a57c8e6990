"""What a plan is about: a model, its towers and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_mp.plan.precisions import PRECISIONS, StaticBytes
from lightning_mp.plan.tower_bytes import TowerBytes

__all__ = ["Subject"]

FEATURE_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Subject:
    """A model and its data, as far as memory and time depend on them.

    Args:
        name: For headings.
        parameters: Trained values.
        frozen_parameters: Values that are not trained.
        towers: By name.
        pair_bytes: Of a pair as the loader yields it.
        precision: A key of `PRECISIONS`.
        micro_batch: Pairs that a tower sees at a time, m.
        offload: Whether the batch stays in host memory.
        prefetch: Micro-batches copied ahead with `offload`.
        optimizer_bytes: Of the fp32 states of a value: 8 with Adam, 4 with momentum.
        loader_batches: Loader batches of a step.
        batch: Global batch of the config; `None` if it names none.
        found: How the towers were measured, for the table.
    """

    name: str
    parameters: int
    towers: Mapping[str, TowerBytes]
    pair_bytes: float
    precision: str
    micro_batch: int
    frozen_parameters: int = 0
    offload: bool = False
    prefetch: int = 2
    optimizer_bytes: int = 8
    loader_batches: int = 1
    batch: int | None = None
    found: str = field(default="", compare=False)

    @property
    def static(self) -> StaticBytes:
        """The bytes of a parameter."""
        return PRECISIONS[self.precision]

    @property
    def width(self) -> int:
        """Feature width D."""
        return next(iter(self.towers.values())).width

    @property
    def feature_itemsize(self) -> int:
        """Bytes of a feature's value."""
        return FEATURE_ITEMSIZE[self.static.activations]

    def flops_per_pair(self, *, cached: bool) -> float:
        """Return the FLOPs of a pair through all towers and back.

        Args:
            cached: Whether a tower that is trained runs forward twice, by gradient caching.
        """
        return sum(
            tower.flops_per_pair * (2 if cached and tower.backward_flops_per_pair else 1)
            + tower.backward_flops_per_pair
            for tower in self.towers.values()
        )
