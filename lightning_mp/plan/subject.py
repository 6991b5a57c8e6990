"""What a plan is about: a model, its towers and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp.plan.optimizer_states import state_bytes
from lightning_mp.plan.precisions import PRECISIONS, StaticBytes
from lightning_mp.plan.tower_bytes import TowerBytes

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """A model and its data, as far as memory and time depend on them."""

    name: str  # for headings
    parameters: int  # trained values
    optimizer: str  # for the table, with the reason if it is assumed
    states: Mapping[str, int]  # bytes of its states, by the dtype of the weights that it is given
    towers: Mapping[str, TowerBytes]  # by name
    pair_bytes: float  # of a pair as the loader yields it
    precision: str  # a key of `PRECISIONS`
    micro_batch: int = 128  # pairs that a tower sees at a time, m
    frozen_parameters: int = 0  # values that are not trained
    offload: bool = False  # whether the batch stays in host memory
    prefetch: int = 2  # micro-batches copied ahead with `offload`
    loader_batches: int = 1  # loader batches of a step
    batch: int | None = None  # global batch of the config; `None` if it names none
    found: str = field(default="", compare=False)  # how the towers were measured, for the table

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], **known: Any) -> Subject:
        """Return a subject with the sizes of a model, and of its optimizers' states.

        Where their steps fail here, those of AdamW are assumed.
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        dtypes = dict.fromkeys(static.stepped for static in PRECISIONS.values())
        name = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        try:
            states = {dtype: state_bytes(optimizers, getattr(torch, dtype)) for dtype in dtypes}
        except Exception as error:  # optimizers raise what they like
            name = f"AdamW, as {name} takes no step here ({str(error).splitlines()[0]})"
            adamw = [torch.optim.AdamW(trained)]
            states = {dtype: state_bytes(adamw, getattr(torch, dtype)) for dtype in dtypes}
        parameters = sum(p.numel() for p in trained)
        frozen = sum(p.numel() for p in model.parameters()) - parameters
        return cls(
            parameters=parameters,
            frozen_parameters=frozen,
            optimizer=name,
            states=states,
            **known,
        )

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
        dtype: torch.dtype = getattr(torch, self.static.activations)
        return dtype.itemsize

    def flops_per_pair(self, *, cached: bool) -> float:
        """Return the FLOPs of a pair through all towers and back."""
        return sum(
            tower.flops_per_pair * (2 if cached and tower.backward_flops_per_pair else 1)
            + tower.backward_flops_per_pair
            for tower in self.towers.values()
        )
