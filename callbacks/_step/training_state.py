"""What monitors read from a Trainer: the step, the loss scale, the ranks; with any plugin."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "gather_ranks",
    "is_fused",
    "is_sharded",
    "learning_rate_of",
    "loss_scale_of",
    "scaler_of",
    "step_of",
]


def step_of(trainer: pl.Trainer) -> int:
    """Return the loggers' step: optimizer steps tried before, skipped ones too, from 0."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def loss_scale_of(trainer: pl.Trainer) -> float | Tensor | None:
    """Return the loss scale: a number, a tensor on the device, or `None` without one."""
    scaler = scaler_of(trainer)
    if isinstance(scaler, torch.amp.GradScaler):
        return scaler._scale if scaler._scale is not None else float(scaler._init_scale)
    return None if scaler is None else float(scaler.scale)


def scaler_of(trainer: pl.Trainer) -> Any:
    """Return the plugin's loss scaler, this package's or torch's; `None` without one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer unscales and skips inside its step, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_sharded(trainer: pl.Trainer) -> bool:
    """Return whether ranks hold different parts of gradients; under DDP they all hold the same."""
    return isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)


def gather_ranks(packed: Tensor) -> Tensor:
    """Stack the tensors of all ranks, alike in shape, in one collective: [W, *packed.shape]."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return packed[None]
    world_size = dist.get_world_size()
    gathered = packed.new_empty(world_size * packed.numel())  # gloo takes no further dimensions
    dist.all_gather_into_tensor(gathered, packed.flatten())
    return gathered.view(world_size, *packed.shape)


def learning_rate_of(trainer: pl.Trainer) -> float:
    """Return the largest learning rate; a sync where it is a tensor."""
    rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
    return max(map(float, rates), default=0.0)
