"""Runs a training step once more with hooks, and leaves everything as it was."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_mp.callbacks._locate.trace import Trace
from lightning_mp.callbacks._step.batches import copy_containers, loss_in, named_tensors
from lightning_mp.numerics.floats import accumulation_dtype
from lightning_mp.numerics.replay_state import BufferState, RngState
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision

__all__ = ["Record", "can_replay", "replay"]


@dataclass(frozen=True, eq=False)
class Record:
    """What it takes to run a batch again."""

    batch: Any  # as `training_step` got it; containers are copies
    batch_idx: int  # of the epoch
    rng: RngState  # the generators before the step
    loss: float | None = None  # what came out, if it is known


class _ReachedStepError(Exception):
    """Ends a replay in manual optimization, at the optimizer step that the real run stands at."""


def can_replay(trainer: pl.Trainer) -> bool:
    """Return whether batches are handed to `training_step`, which does not fetch them itself."""
    step = trainer.lightning_module.training_step
    return not is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def replay(trainer: pl.Trainer, record: Record, scale: float | None, optimizer_steps: int) -> Trace:
    """Run a batch again, forward and backward, eagerly and without steps; return what was seen.

    Afterwards all but the trace is as before. In manual optimization it ends before the step of an
    optimizer with the number `optimizer_steps` within the batch, from 1; with 0 it runs to the end.
    What `training_step` itself sends to other ranks is sent again: all ranks replay together.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    trace = Trace(module)
    trace.note("batch", named_tensors(record.batch, "batch"))
    trace.note("parameters", module.named_parameters())
    trace.note("buffers", module.named_buffers())

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trace.note("loss", [("loss", loss)])
        is_off = isinstance(trainer.precision_plugin, DeepSpeedPrecision)  # it keeps gradients
        hooks = (getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())
        is_off |= any(hooks)  # which step parameters in the backward
        has_backward = loss.requires_grad and not is_off
        if not has_backward or not bool(torch.isfinite(loss).all()):
            return loss.detach()
        if scale is not None:
            loss = loss.to(accumulation_dtype(loss.dtype)) * scale
        trainer.precision_plugin.backward(loss, module, *(args or (None,)), **kwargs)
        return loss.detach()

    with ExitStack() as stack:
        stack.enter_context(_undisturbed(trainer, record.batch))
        if not module.automatic_optimization:
            _hold_steps(stack, trainer, backward, optimizer_steps)
        if isinstance(model := strategy.model, DistributedDataParallel):
            is_due = model.require_forward_param_sync
            stack.callback(setattr, model, "require_forward_param_sync", is_due)
            stack.enter_context(model.no_sync())
        if "torch._dynamo" in sys.modules:  # code may be compiled, and takes no hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(trace)
        record.rng.restore()
        loss = None
        with suppress(_ReachedStepError):
            loss = loss_in(_training_step(trainer, record))
        if module.automatic_optimization and loss is not None:
            backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        gradients = ((name, p.grad) for name, p in module.named_parameters())
        trace.note("gradients", ((name, g) for name, g in gradients if g is not None))
        trace.read()
    return trace


def _training_step(trainer: pl.Trainer, record: Record) -> Any:
    strategy, module = trainer.strategy, trainer.lightning_module
    batch = copy_containers(record.batch)  # there may be another replay
    kwargs = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, record.batch_idx)
    is_plain_ddp = isinstance(strategy.model, DistributedDataParallel) and (
        type(strategy).training_step is Strategy.training_step
    )
    if not is_plain_ddp:  # sharded, or in micro-batches: the strategy knows how
        return strategy.training_step(*kwargs.values())
    with trainer.precision_plugin.train_step_context():
        return module.training_step(*kwargs.values())


@contextmanager
def _undisturbed(trainer: pl.Trainer, batch: Any) -> Iterator[None]:
    """Put back what a step changes beside its result."""
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    connector, plugin = trainer._logger_connector, trainer.precision_plugin
    with ExitStack() as stack:
        stack.callback(RngState(trainer.strategy.root_device, module).restore)
        stack.callback(BufferState(module).restore)
        if isinstance(plugin, ScaledPrecision):
            stack.callback(plugin.inf_clamp.load_state_dict, plugin.inf_clamp.state_dict())
        for metric in module.modules():
            if isinstance(metric, Metric):
                stack.callback(vars(metric).update, _metric_state(metric))
        for owner, name in (
            (loop, "_results"),
            (connector, "_current_fx"),
            (module, "_current_fx_name"),
            (module, "_param_requires_grad_state"),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
        for parameter in _parameters(trainer):
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        loop._results = _ResultCollection(training=True)
        loop._results.batch = batch
        module._current_fx_name = "training_step"
        yield


def _parameters(trainer: pl.Trainer) -> list[Tensor]:
    """Return the parameters of the model and of its optimizers."""
    stepped = [g["params"] for opt in trainer.optimizers for g in opt.param_groups]
    own = list(trainer.lightning_module.parameters())
    return list(dict.fromkeys([*own, *(p for group in stepped for p in group)]))


def _metric_state(metric: Metric) -> dict[str, Any]:
    state: dict[str, Any] = metric._copy_state_dict()
    for name in ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced"):
        if name in vars(metric):
            state[name] = vars(metric)[name]
    return state


def _hold_steps(
    stack: ExitStack, trainer: pl.Trainer, backward: Callable[..., Tensor], optimizer_steps: int
) -> None:
    """Take over what a manual `training_step` does itself, until the stack is left."""
    module, strategy, steps = trainer.lightning_module, trainer.strategy, 0

    def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        nonlocal steps
        result = None if closure is None else closure()
        steps += 1
        if steps == optimizer_steps:
            raise _ReachedStepError
        return result

    def nothing(*_: Any, **__: Any) -> None:
        pass

    _replace(stack, strategy, "backward", backward)
    _replace(stack, module, "clip_gradients", nothing)
    for optimizer in (*strategy._lightning_optimizers, *strategy.optimizers):
        _replace(stack, optimizer, "step", step)
    for config in strategy.lr_scheduler_configs:
        _replace(stack, config.scheduler, "step", nothing)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put something in the place of a method of one object, until the stack is left."""
    attributes = vars(owner)
    stack.callback(attributes.update, {k: each for k, each in attributes.items() if k == name})
    stack.callback(attributes.pop, name)
    attributes[name] = value
