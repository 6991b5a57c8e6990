"""The subject of a plan: a model, its towers, data, precision and optimizer states."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lightning_mp._nested import tensors_in

__all__ = ["PRECISIONS", "StaticBytes", "Subject", "TowerBytes", "state_bytes"]


@dataclass(frozen=True)
class StaticBytes:
    """Bytes of one parameter on a rank."""

    weight: int  # the weight that the optimizer updates, with its residual if it has one
    copy: int  # the half copy for the forward; autocast makes one in each forward
    gradient: int  # the gradient that the optimizer receives
    bucket: int  # the gradient in the buckets of DDP
    frozen: int  # a weight that is not trained, of which autocast keeps no copy
    activations: torch.dtype  # dtype in which most modules compute
    policy: str  # source of this dtype: `"none"`, `"autocast"` or `"weights"`
    stepped: str = "float32"  # dtype of the weights that the optimizer receives

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype that a half model has; `None` if the weights keep theirs."""
        return self.activations if self.policy == "weights" else None

    def at_rest(self, parameters: int, states: Mapping[str, int], frozen: int = 0) -> float:
        """Return the bytes of weights, copies, optimizer states and buckets."""
        weights = parameters * (self.weight + self.copy + self.bucket) + frozen * self.frozen
        return float(weights + states[self.stepped])


PRECISIONS = {
    "32-true": StaticBytes(4, 0, 4, 4, 4, torch.float32, "none"),
    "16-mixed": StaticBytes(4, 2, 4, 4, 4, torch.float16, "autocast"),
    "bf16-mixed": StaticBytes(4, 2, 4, 4, 4, torch.bfloat16, "autocast"),
    "BalancedAMP": StaticBytes(4, 2, 4, 4, 6, torch.float16, "autocast"),
    "PureFP16": StaticBytes(4, 0, 4, 2, 2, torch.float16, "weights"),
    "bf16-true": StaticBytes(2, 0, 2, 2, 2, torch.bfloat16, "weights", stepped="bfloat16"),
}
"""Bytes by Lightning's name of a precision, or by plugin. `PureFP16` has a weight and a residual of
2 bytes each, and gradients of 4 bytes from `on_before_optimizer_step` on."""


@dataclass(frozen=True)
class TowerBytes:
    """Figures of one tower for one pair."""

    saved_per_pair: float  # bytes that the forward of a pair leaves in memory for the backward
    peak_per_row: float  # bytes of a row at the peak of forward and backward
    tokens_per_pair: float  # bytes of an output beyond the features, such as tokens
    flops_per_pair: float  # FLOPs of a forward
    parameters: int  # values of the gradients that its replays sum aside
    width: int  # feature width, D
    backward_flops_per_pair: float  # FLOPs of the backward; 0 for a frozen tower


@dataclass(frozen=True)
class Subject:
    """The properties of a model and its data that determine memory and time."""

    name: str  # for headings
    parameters: int  # trained values
    optimizer: str  # for the table, with the reason if it is assumed
    states: Mapping[str, int]  # bytes of its states, by the dtype of the weights that it receives
    towers: Mapping[str, TowerBytes]  # by name
    pair_bytes: float  # bytes of a pair on the device
    precision: str  # a key of `PRECISIONS`
    micro_batch: int = 128  # pairs that a tower processes at a time, m
    frozen_parameters: int = 0  # values that are not trained
    offload: bool = False  # whether the batch stays in host memory
    prefetch: int = 2  # micro-batches copied ahead with `offload`
    loader_batches: int = 1  # loader batches of a step
    loader_pairs: int | None = None  # pairs of a loader batch; `None` without a loader
    devices: int | None = None  # ranks of a node; `None` if the config gives no number
    nodes: int = 1  # nodes of the config
    workers: int = 8  # workers of a loader
    loaded_pair_bytes: float = 0.0  # bytes of a pair as the loader yields it, if it differs
    is_sharded: bool = False  # whether the ranks share weights, gradients and states
    found: str = field(default="", compare=False)  # how the towers were measured, for the table

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], **known: Any) -> Subject:
        """Return the subject of a model; assume the states of AdamW if an optimizer cannot step."""
        trained = [p for p in model.parameters() if p.requires_grad]
        dtypes = dict.fromkeys(static.stepped for static in PRECISIONS.values())
        name = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        try:
            states = {dtype: state_bytes(optimizers, getattr(torch, dtype)) for dtype in dtypes}
        except Exception as error:  # an optimizer may raise anything
            name = f"AdamW, because {name} cannot step here ({str(error).splitlines()[0]})"
            adamw = [torch.optim.AdamW(trained)]
            states = {dtype: state_bytes(adamw, getattr(torch, dtype)) for dtype in dtypes}
        parameters = sum(p.numel() for p in trained)
        frozen = sum(p.numel() for p in model.parameters()) - parameters
        known |= {"parameters": parameters, "frozen_parameters": frozen}
        return cls(optimizer=name, states=states, **known)

    @property
    def static(self) -> StaticBytes:
        """The bytes of a parameter."""
        return PRECISIONS[self.precision]

    @property
    def rank_batch(self) -> int | None:
        """Pairs of a rank in a step."""
        return self.loader_pairs and self.loader_pairs * self.loader_batches

    @property
    def host_pair_bytes(self) -> float:
        """Bytes of a pair in host memory; with `offload`, the batch of the step stays there."""
        loaded = self.loaded_pair_bytes or self.pair_bytes
        return max(loaded, self.pair_bytes) if self.offload else loaded

    @property
    def width(self) -> int:
        """Feature width D."""
        return next(iter(self.towers.values())).width

    def flops_per_pair(self, *, cached: bool) -> float:
        """Return the FLOPs of a forward and backward of a pair through all towers."""
        # A gradient cache runs the forward twice, except for frozen towers.
        return sum(
            tower.flops_per_pair * (2 if cached and tower.backward_flops_per_pair else 1)
            + tower.backward_flops_per_pair
            for tower in self.towers.values()
        )


def state_bytes(optimizers: Sequence[Optimizer], dtype: torch.dtype) -> int:
    """Return the bytes of all states after a step; the optimizers lose their own states.

    Each shape is stepped once, on a tensor without memory, or on zeros for an optimizer that reads
    values, such as torch's Adafactor. The step of an optimizer may raise an error.
    """
    total = 0
    for optimizer in optimizers:
        groups = optimizer.param_groups
        for group in groups:
            shapes = Counter(p.shape for p in group["params"] if p.requires_grad)
            for shape, count in shapes.items():
                try:
                    found = _state_bytes_of_one(optimizer, group, shape, dtype, FakeTensorMode())
                except Exception:  # an optimizer may raise anything
                    found = _state_bytes_of_one(optimizer, group, shape, dtype, nullcontext())
                total += count * found
        optimizer.param_groups = groups
    return total


def _state_bytes_of_one(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    mode: AbstractContextManager[object],
) -> int:
    optimizer.state.clear()  # states of the previous shape
    with mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # SafeAdamW
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.zeros_like(param)
        optimizer.param_groups = [{**group, "params": [param]}]
        optimizer.step()
    # Views of one buffer count once.
    storages = (state.untyped_storage() for state in tensors_in([*optimizer.state.values()]))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
