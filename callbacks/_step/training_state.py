"""What monitors read from a Trainer: the step, gradients, the loss scale; with any plugin."""

from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "NamedTensors",
    "gather_ranks",
    "gradients_of",
    "is_sharded",
    "loss_scale_of",
    "lower_rate",
    "parameter_names",
    "plain_name",
    "step_of",
]

# What wrappers put into names that their users do not write.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class NamedTensors(NamedTuple):
    """Tensors of an optimizer under the names of the model's parameters.

    Args:
        names: Dotted names.
        gradients: Of each parameter; those of parameters without one are left out.
        parameters: What the optimizer steps and keeps state for.
        unscale: What to multiply gradients by: 1 where they are unscaled already, else the inverse
            loss scale, on the device.
    """

    names: list[str]
    gradients: list[Tensor]
    parameters: list[Tensor]
    unscale: float | Tensor


def step_of(trainer: pl.Trainer) -> int:
    """Return the training step that a hook is called in.

    Optimizer steps tried before, skipped ones too, counted from 0 over epochs: the axis of
    Lightning's loggers. `trainer.global_step` stands still while steps are skipped.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def plain_name(name: str) -> str:
    """Return a dotted name without what `torch.compile`, FSDP and checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> dotted name."""
    return {id(p): plain_name(name) for name, p in module.named_parameters()}


def gradients_of(trainer: pl.Trainer, optimizer: Optimizer, names: dict[int, str]) -> NamedTensors:
    """Return an optimizer's gradients in `on_before_optimizer_step`.

    With the plugins of this package they are unscaled and in fp32 there. With Lightning's
    `16-mixed` they are unscaled, except those of fused optimizers, which unscale inside `step`.
    Among several ranks a parameter without gradient has an empty one, so that all name the same.

    Args:
        trainer: The trainer.
        optimizer: What is about to step.
        names: What `parameter_names` returned.
    """
    plugin = trainer.precision_plugin
    found = NamedTensors([], [], [], _unscale(plugin, optimizer))
    has_ranks = trainer.world_size > 1
    for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        gradient = parameter.grad
        if gradient is None and has_ranks and parameter.requires_grad:
            gradient = parameter.detach().new_empty(0)
        if gradient is not None:
            found.names.append(names.get(id(parameter), f"unnamed parameter {index}"))
            found.gradients.append(gradient)
            found.parameters.append(parameter)
    return found


def _unscale(plugin: object, optimizer: Optimizer) -> float | Tensor:
    scaler = getattr(plugin, "scaler", None)
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if isinstance(scaler, torch.amp.GradScaler) and scaler._scale is not None and is_fused:
        return scaler._scale.reciprocal()
    return 1.0


def loss_scale_of(trainer: pl.Trainer) -> float | Tensor | None:
    """Return the loss scale: a number, a tensor on the device, or `None` without one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        return scaler._scale if scaler._scale is not None else float(scaler._init_scale)
    return None if scaler is None else float(scaler.scale)


def is_sharded(trainer: pl.Trainer) -> bool:
    """Return whether ranks hold different parts of gradients; under DDP they all hold the same."""
    return isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)


def gather_ranks(packed: Tensor) -> Tensor:
    """Stack the tensors of all ranks in one collective: shape [W, *packed.shape].

    Every rank must call it at the same steps, with the same shape.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return packed[None]
    world_size = dist.get_world_size()
    gathered = packed.new_empty(world_size * packed.numel())  # gloo takes no further dimensions
    dist.all_gather_into_tensor(gathered, packed.flatten())
    return gathered.view(world_size, *packed.shape)


def lower_rate(trainer: pl.Trainer) -> float:
    """Return half of the largest learning rate, to suggest it; a sync where it is a tensor."""
    rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups]
    return max(rates, default=0.0) / 2
