"""Reads step, loss scale, ranks and gradients of a Trainer with any precision plugin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_mp.callbacks._rules.records import StepFacts
from lightning_mp.gradient_cache._served.towers import sharded_modules
from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.tensor_stats import flat_values, local_shard
from lightning_mp.optim._found_inf import takes_grad_scale
from lightning_mp.precision._choice.module_selection import as_written
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._weights.ledger import parameters_of
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.fsdp import FSDPBalancedAMP
from lightning_mp.precision.loss_scaler import LossScaler
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP

__all__ = [
    "Moment",
    "NamedTensors",
    "TrainingStep",
    "advised_plugin",
    "gather_objects",
    "gather_ranks",
    "gradients_of",
    "is_fp16",
    "is_sharded",
    "learning_rate_of",
    "loss_scale_of",
    "measure_signals",
    "norms_of",
    "numbers_of",
    "parameter_names",
    "scaler_of",
    "step_of",
    "tags_of",
]


def step_of(trainer: pl.Trainer) -> int:
    """Return the loggers' step: the number of optimizer steps attempted before."""
    # `global_step` may not count skipped steps, and it counts every optimizer of a batch.
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def loss_scale_of(trainer: pl.Trainer) -> float | Tensor | None:
    """Return the loss scale: a number, a tensor on the device, or `None` without one."""
    scaler = scaler_of(trainer)
    # torch creates the tensor when it first scales a loss.
    if isinstance(scaler, torch.amp.GradScaler):
        return scaler._scale if scaler._scale is not None else float(scaler._init_scale)
    return None if scaler is None else float(scaler.scale)


def scaler_of(trainer: pl.Trainer) -> Any:
    """Return the plugin's loss scaler, of this package or torch; `None` without an enabled one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):  # without a scale if it is disabled
        return scaler if scaler.is_enabled() else None
    return scaler if isinstance(scaler, LossScaler) else None


def is_sharded(trainer: pl.Trainer) -> bool:
    """Return whether ranks hold shards of gradients; under DDP, they hold equal gradients."""
    return isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)


def is_fp16(trainer: pl.Trainer) -> bool:
    # `16-mixed` and `16-true`; all names of bf16 begin with `bf16`.
    return str(trainer.precision_plugin.precision).startswith("16")


def gather_ranks(trainer: pl.Trainer, packed: Tensor) -> Tensor:
    """Stack tensors of equal shape of all ranks with one collective: [W, *packed.shape]."""
    if trainer.world_size == 1:
        return packed[None]
    gathered = packed.new_empty(trainer.world_size * packed.numel())  # gloo requires a flat one
    dist.all_gather_into_tensor(gathered, packed.flatten())
    return gathered.view(-1, *packed.shape)


def gather_objects(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return the values of all ranks; a collective that waits for the device."""
    if trainer.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(gathered, value)
    return gathered


def tags_of(trainer: pl.Trainer, facts: StepFacts) -> set[str]:
    """Return the conditions of a run that select sentences of alarms."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    holds = {
        "wide": not is_fp16(trainer),
        "ending": facts.is_rate_ending or not learning_rate_of(trainer),
        "locator": any(
            kind.__name__ == "NonFiniteLocator" for each in callbacks for kind in type(each).__mro__
        ),
        "rewinding": any(getattr(each, "action", "") == "rewind" for each in callbacks),
    }
    return {tag for tag, is_so in holds.items() if is_so}


def advised_plugin(trainer: pl.Trainer) -> type[ScaledPrecision]:
    """Return the class of plugin that a remedy names: the run's own, or one for its strategy."""
    if isinstance(trainer.precision_plugin, ScaledPrecision):
        return type(trainer.precision_plugin)
    if isinstance(trainer.strategy, FSDPStrategy):
        return FSDPBalancedAMP
    is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    return ModelParallelBalancedAMP if is_sharded else BalancedAMP


def numbers_of(trainer: pl.Trainer, facts: StepFacts) -> dict[str, Any]:
    """Return the fields that sentences of every monitor use."""
    plugin = trainer.precision_plugin
    # Lightning's own plugins cannot keep modules in fp32.
    is_ours = isinstance(plugin, ScaledPrecision)
    # Passing a list replaces the plugin's list.
    kept = getattr(plugin, "fp32_modules", ()) if is_ours else ("norm",)
    lists = {"kept": kept, "clamped": getattr(getattr(plugin, "inf_clamp", None), "modules", ())}
    return {
        **{key: "".join(f"{each!r}, " for each in given) for key, given in lists.items()},
        "plugin": advised_plugin(trainer).__name__,
        "lower_rate": learning_rate_of(trainer) / 2,
        "of_optimizer": f" of optimizer {facts.optimizer}" if facts.optimizer else "",
    }


def learning_rate_of(trainer: pl.Trainer) -> float:
    """Return the largest learning rate; this is a host sync if the rate is a tensor."""
    rates = [group.get("lr") for each in trainer.optimizers for group in each.param_groups]
    # `None` if the optimizer computes its rate itself, as Hugging Face's `Adafactor`.
    return max((float(rate) for rate in rates if rate is not None), default=0.0)


class NamedTensors(NamedTuple):
    """Tensors of an optimizer under the names of the model's parameters."""

    names: list[str]  # dotted
    gradients: list[Tensor]  # gradients of the parameters that have one
    parameters: list[Tensor]  # the tensors that the optimizer updates
    unscale: float | Tensor  # 1, or the inverse loss scale on the device


_LARGE = 2**18  # values; torch's norm has a relative error of 1e-6, and of 1e-5 at 2**20 values

Moment = Literal["before step", "batch end"]


@dataclass(eq=False)
class TrainingStep:
    """The optimizer step that a monitor observes. Nothing here waits for the device."""

    trainer: pl.Trainer
    facts: StepFacts
    optimizer: Optimizer
    names: dict[int, str]  # names of parameters, by `id`
    loss: Tensor | None  # unscaled loss of the last backward
    signals: Tensor | None = None  # result of `measure_signals`, if a monitor needs the norm
    context: dict[str, Any] = field(default_factory=dict)  # set by the monitor that observes

    @cached_property
    def found(self) -> NamedTensors:
        """The gradients of the optimizer, collected once for all monitors."""
        return gradients_of(self.trainer, self.optimizer, self.names)

    def gather(self, tensor: Tensor, *, shards_only: bool = False, **context: Any) -> Tensor:
        """Stack the tensors of all ranks: [W, *tensor.shape].

        With `shards_only`, W is 1 if all ranks hold equal values. `context`, for example the names
        of rows, becomes part of the sample.
        """
        self.context = context
        is_same = shards_only and not is_sharded(self.trainer)
        return tensor[None] if is_same else gather_ranks(self.trainer, tensor)

    def gather_rows(self, rows: Mapping[Any, Tensor], missing: Tensor) -> Tensor | None:
        """Stack the rows of all ranks under the keys of any rank: [W, N, K].

        Ranks have different rows if they call different modules, such as experts. `missing` stands
        for a row that a rank lacks. Returns `None` if no rank has a row.
        """
        of_ranks = gather_objects(self.trainer, [*rows])
        keys = list(dict.fromkeys(key for each in of_ranks for key in each))
        if not keys:
            return None
        root = self.trainer.strategy.root_device
        found = (rows.get(key, missing) for key in keys)
        table = [row.to(root, missing.dtype, non_blocking=True) for row in found]
        return self.gather(torch.stack(table), keys=keys)


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> dotted name; call between steps."""
    for sharded in sharded_modules(module):
        sharded.reshard()  # the sanity check of the validation leaves weights of the root gathered
    return {id(p): as_written(name) for name, p in module.named_parameters()}


def gradients_of(trainer: pl.Trainer, optimizer: Optimizer, names: dict[int, str]) -> NamedTensors:
    """Return an optimizer's gradients in `on_before_optimizer_step`, alike on all ranks."""
    scale = loss_scale_of(trainer)
    # With torch's scaler, whose scale is a tensor, fused optimizers unscale in their step.
    is_fused = takes_grad_scale(optimizer)
    inverse = scale.reciprocal() if isinstance(scale, Tensor) and is_fused else 1.0
    found = NamedTensors([], [], [], inverse)
    for at, p in enumerate(parameters_of(optimizer)):
        gradient = p.grad
        # A rank may lack a gradient (empty shard, unused branch), but all must send the same rows.
        if gradient is None and p.requires_grad and trainer.world_size > 1:
            gradient = p.detach().new_empty(0)
        if gradient is not None:
            found.names.append(names.get(id(p)) or f"unnamed parameter {at}")
            found.gradients.append(gradient)
            found.parameters.append(p)
    return found


def measure_signals(trainer: pl.Trainer, found: NamedTensors, loss: Tensor | None) -> Tensor:
    """Return the mean loss of the ranks that have one (or 0), the gradient norm, and more.

    The third and fourth number are index and norm of the largest gradient; with several ranks, the
    rank of `StepFacts` and the number of ranks with a loss follow.
    """
    if found.gradients:
        norms = norms_of(found.gradients)
        norms = norms * found.unscale if isinstance(found.unscale, Tensor) else norms
    else:  # under FSDP, a rank without any gradient must still join the collective
        norms = torch.zeros(1, device=trainer.strategy.root_device)
    norm, (largest, index) = torch.linalg.vector_norm(norms), norms.max(0)  # NaN is the largest
    mean = norm.new_zeros(()) if loss is None else loss.to(norms.device, non_blocking=True)
    of_ranks: list[Tensor] = []
    if trainer.world_size > 1:
        own = torch.stack([mean, norm, torch.full_like(norm, loss is not None)])
        loss_W, norm_W, has_W = gather_ranks(trainer, own).unbind(1)
        count, is_shard = has_W.sum(), is_sharded(trainer)
        mean = loss_W.sum() / count.clamp(min=1)
        # HSDP replicates shards, so the norm is too large by a constant factor, which no rule uses.
        norm = torch.linalg.vector_norm(norm_W) if is_shard else norm_W.amax()
        losses = torch.where(has_W > 0, loss_W, -torch.inf)
        rank = (norm_W if is_shard else losses).nan_to_num(nan=torch.inf).argmax()
        of_ranks = [rank, count]
    numbers = (mean, norm, index, largest, *of_ranks)
    return torch.stack([each.to(norms.dtype) for each in numbers])


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the fp32 norm of each gradient; half-precision gradients are summed in fp32."""
    local = [
        each.coalesce().values() if each.is_sparse else each for each in map(local_shard, gradients)
    ]
    groups: Any = _group_tensors_by_device_and_dtype([[*local]], with_indices=True)
    device, parts, order = local[0].device, list[Tensor](), list[int]()
    for (tensors,), rows in groups.values():
        parts.append(_norms_of_group(tensors).to(device, torch.float32, non_blocking=True))
        order += rows
    if len(parts) == 1:
        return parts[0]
    norms = torch.cat(parts)
    return torch.empty_like(norms).scatter_(0, send(torch.tensor(order), device), norms)


def _norms_of_group(gradients: list[Tensor]) -> Tensor:
    first = gradients[0]
    if first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64):
        # Small tensors share one call. For large ones, `dot` uses all cores and is more accurate.
        small = [g for g in gradients if g.numel() < _LARGE]
        if len(small) < len(gradients):
            norms = iter(torch._foreach_norm(small, 2) if small else ())
            large = (flat_values(g) if g.numel() >= _LARGE else None for g in gradients)
            each = (next(norms) if x is None else x.dot(x).sqrt_() for x in large)
            return torch.stack([*each])
    in_fp32 = torch.float32 if first.dtype.itemsize < 4 else None
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=in_fp32))
