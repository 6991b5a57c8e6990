"""Reads every step once for all monitors of a Trainer and copies observations to the host."""

import functools
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.callbacks._rules.records import Alarm, Sample, StepFacts
from lightning_mp.callbacks._step.batches import BatchKeeper, loss_in
from lightning_mp.callbacks._step.training_state import (
    Moment,
    TrainingStep,
    loss_scale_of,
    measure_signals,
    parameter_names,
    scaler_of,
    step_of,
)
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision

_log = logging.getLogger(__name__)
_LATE = 2  # steps by which a sample may arrive after the facts of its step

__all__ = ["FactsRecorder", "facts_of", "never_raising", "recorder_of"]


def never_raising(on_exception: Callable[..., None]) -> Callable[..., None]:
    """Make `on_exception` log its errors, which would hide the exception that it handles."""

    @functools.wraps(on_exception)
    def logging_errors(self: pl.Callback, *args: Any) -> None:
        try:
            on_exception(self, *args)
        except Exception as error:
            _log.warning(usage("hook_failed", callback=type(self).__name__, error=error))

    return logging_errors


@dataclass
class _Pending:
    """A step before the end of its batch: facts that the host knows, and tensors on the device."""

    facts: StepFacts
    has_loss: bool
    names: list[str] = field(default_factory=list)  # parameters with a measured gradient
    parts: dict[Any, Tensor] = field(default_factory=dict)  # by name of a fact or by monitor
    context: dict[Any, dict[str, Any]] = field(default_factory=dict)  # by monitor


class FactsRecorder(pl.Callback):
    """Reads every step once for all monitors of a Trainer.

    It calls `observe` of the monitors before each optimizer step, or at the end of the batch. One
    copy brings their tensors and the facts of the step to the host; one or two steps later, it
    calls `judge`. It holds the hooks of all monitors.
    """

    def __init__(self) -> None:
        # Monitors save these two in checkpoints.
        self.highest_rates: dict[int, float] = {}  # by optimizer
        self.located: Alarm | None = None  # the locator's alarm, until a step is finite again
        self._names: dict[int, str] = {}
        self._is_changed = False  # whether the model may have new parameters
        self.hooks = ExitStack()  # until the end of the batch
        self.step_hooks = ExitStack()  # until the end of training
        self._readback = AsyncReadback()
        self._reset()

    def _reset(self) -> None:
        self._remove_hooks()
        with suppress(RuntimeError):  # the device may have failed
            self._readback.drain()
        self.trainer: Any = None  # while training
        self._monitors: list[Any] = []
        self._measures_norm = self._is_late = self._is_lockstep = False
        self._pending: list[_Pending] = []
        self._arrived: deque[tuple[StepFacts, dict[Any, Sample]]] = deque()
        self.now: StepFacts | None = None
        self.newest: StepFacts | None = None  # the latest facts that have arrived
        self.newest_loss: Tensor | None = None  # unscaled loss of the last backward
        self.step: TrainingStep | None = None  # step of the optimizer that is about to step
        self.batches: BatchKeeper | None = None  # if a callback has `save_batch`
        self._losses: list[Tensor] = []  # since the last optimizer step

    # --- for monitors ----------------------------------------------------------------------------

    def send(self, tensor: Tensor, receive: Callable[[npt.NDArray[Any]], None]) -> None:
        """Start to copy a tensor to the host; call `receive` with the array when it arrives."""
        self._readback.submit(self.now.step if self.now else 0, tensor, receive=receive)

    def drain(self) -> None:
        """Wait for all pending copies and receive them."""
        for each in self._readback.drain():
            each.context["receive"](each.array)

    def finish(self) -> None:
        """Submit the current step as well, wait for all pending copies, and judge them."""
        if self.trainer is not None:
            self._submit(self.trainer)
        self.catch_up()

    def finish_before_error(self, monitor: Any, optimizer: Optimizer) -> None:
        """Judge the current step, on which a monitor raises an error; no hook comes after it."""
        monitors: list[Any] = self._monitors
        for each in monitors[monitors.index(monitor) + 1 :]:
            module = self.trainer and self.trainer.lightning_module
            each.on_before_optimizer_step(self.trainer, module, optimizer)
        for each in monitors:
            each._before_error()
        self.finish()

    def catch_up(self, *, waits: bool = True) -> None:
        """Judge the steps that have arrived and raise their alarms; wait for pending copies."""
        for each in self._readback.drain() if waits else self._readback.ready():
            each.context["receive"](each.array)
        while self._arrived and self.trainer is not None:
            facts, samples = self._arrived.popleft()
            for monitor in self._monitors:
                sample = samples.get(monitor)
                if sample is not None or monitor.every_step:
                    for verdict in monitor.judge(sample or Sample(facts)):
                        monitor.say(self.trainer, verdict, facts)

    # --- hooks -----------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        self._names, self.trainer = parameter_names(pl_module), trainer
        # All ranks must agree, so this depends only on the callbacks of the Trainer.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._monitors = [c for c in callbacks if getattr(c, "recorder", None) is self]
        self._measures_norm = any(monitor.needs_gradient_norm for monitor in self._monitors)
        # Monitors act on arrived facts, so facts must arrive at the same step on all ranks. Copies
        # from a GPU may be ready on one rank and pending on another, but Lightning has waited for
        # the device at the start of the batch, so `drain` does not wait.
        self._is_late = trainer.strategy.root_device.type != "cpu"
        self._is_lockstep = self._is_late and trainer.world_size > 1
        if any(monitor.save_batch for monitor in self._monitors):
            self.batches = BatchKeeper(trainer)
        for register in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            self.step_hooks.enter_context(register(self._note_change))

    def _note_change(self, *_: object) -> None:
        self._is_changed = True

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.close()  # if a callback has skipped the rest of an epoch
        self.now = facts_of(trainer, batch_idx)
        if self.batches is not None:
            oldest = 0 if self.newest is None else self.newest.step - _LATE
            self.batches.hold(self.now.step, batch, oldest)

    @override
    def on_before_backward(self, trainer: pl.Trainer, _: Any, loss: Tensor) -> None:
        # Lightning has multiplied the loss by the loss scale and divided it by the accumulated
        # batches.
        scale = loss_scale_of(trainer)
        mean = loss.detach().float()
        mean = mean.mean() if mean.ndim else mean
        self.newest_loss = mean.clone() if scale is None else mean / scale
        self._losses.append(self.newest_loss)

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: pl.Trainer, _: Any, optimizer: Optimizer) -> None:
        if self._is_late:
            self.catch_up(waits=self._is_lockstep)  # while the GPU is busy with the backward
        if self._is_changed:  # a layer was added or replaced
            self._is_changed, self._names = False, parameter_names(trainer.lightning_module)
        if self._pending and trainer.lightning_module.automatic_optimization:
            self._losses.clear()  # LBFGS evaluates the loss again within its step
            return
        # `trainer.optimizers` holds the optimizer inside a `LightningOptimizer`.
        plain, scale = getattr(optimizer, "optimizer", optimizer), loss_scale_of(trainer)
        lr = next((group.get("lr") for group in optimizer.param_groups), None)
        self.now = replace(
            self.now or facts_of(trainer),
            global_step=trainer.global_step,
            optimizer=next((i for i, each in enumerate(trainer.optimizers) if each is plain), 0),
            optimizer_name=type(plain).__name__,
            lr=lr if isinstance(lr, int | float) else None,
            loss_scale=scale if isinstance(scale, float) else None,
        )
        loss = self._take_loss(trainer)
        pending = _Pending(self.now, loss is not None)
        step = self.step = TrainingStep(trainer, self.now, plain, self._names, self.newest_loss)
        # Without gradients and loss, `training_step` returned `None`; other ranks cannot know.
        if self._measures_norm and (
            step.found.gradients or loss is not None or trainer.world_size > 1
        ):
            pending.parts["signals"] = step.signals = measure_signals(trainer, step.found, loss)
            loss = None
            pending.names = step.found.names
        numbers = {"loss": loss, "lr": lr, "loss_scale": scale}
        # Cloned, because scaler and schedules change their tensors in place before the copy.
        pending.parts |= {
            k: v.detach().reshape(()).clone() for k, v in numbers.items() if isinstance(v, Tensor)
        }
        self._pending.append(pending)
        self._observe("before step")

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        self.hooks.close()
        loss = loss_in(outputs)
        if self._pending and not self._pending[-1].has_loss and loss is not None:
            # In manual optimization, a backward may bypass Lightning.
            self._pending[-1].parts["loss"] = loss.detach().float().mean()
        self._observe("batch end")
        is_received = self._is_late and (bool(self._pending) or self._is_lockstep)
        self._submit(trainer)
        if not is_received:
            self.catch_up(waits=self._is_lockstep)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.finish()

    @override
    @never_raising
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        self._remove_hooks()
        with suppress(RuntimeError):  # a device that has failed returns nothing
            self.finish()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._reset()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [c for c in callbacks if c is not self]  # type: ignore[attr-defined]

    # --- inside ----------------------------------------------------------------------------------

    def _remove_hooks(self) -> None:
        self.hooks.close()
        self.step_hooks.close()

    def _observe(self, moment: Moment) -> None:
        step = self.step
        if step is None or not self._pending:
            return
        pending = self._pending[-1]
        for monitor in (each for each in self._monitors if each.moment == moment):
            step.context = {}
            # A monitor's mode for the model must not see the functions of the statistics.
            with torch._C.DisableTorchFunction():
                seen = monitor.observe(step)
            if seen is not None:
                monitor.samples += 1
                pending.parts[monitor], pending.context[monitor] = seen, step.context

    def _take_loss(self, trainer: pl.Trainer) -> Tensor | None:
        losses, self._losses = self._losses, []
        if not losses:
            return None
        total = sum(losses[1:], start=losses[0])
        if not trainer.lightning_module.automatic_optimization:
            return total
        # Lightning divides by the batches of a full step; the last step of an epoch may have fewer.
        share = trainer.accumulate_grad_batches / len(losses)
        return total if share == 1 else total * share

    def _submit(self, trainer: pl.Trainer) -> None:
        """Start to copy the steps of the batch, whose outcome is known now."""
        pending, self._pending = self._pending, []
        self.step = None
        if not pending:
            return
        after, scaler = loss_scale_of(trainer), scaler_of(trainer)
        # torch's scaler does not report skipped steps, so the next loss scale will tell.
        skipped = None if isinstance(after, Tensor) else False
        if isinstance(trainer.precision_plugin, ScaledPrecision) and scaler is not None:
            skipped = bool(scaler.last_step_skipped)
        root = trainer.strategy.root_device
        home = torch.device("cpu") if root.type == "mps" else root  # MPS has no float64
        for each in pending:
            known = after if isinstance(after, float) else None
            each.facts = replace(each.facts, skipped=skipped, next_loss_scale=known)
            if isinstance(after, Tensor):  # torch's scaler; reading it here would be a host sync
                each.parts["next_loss_scale"] = after.detach().reshape(())
            flat = [p.detach().reshape(-1).to(home, non_blocking=True) for p in each.parts.values()]
            # `cat` promotes the dtypes of floats, but fp32 does not hold every integer.
            sent = [part if part.is_floating_point() else part.double() for part in flat]
            arrive = functools.partial(self._arrive, each)
            self.send(torch.cat(sent) if sent else torch.zeros(0), arrive)
        self.now = each.facts

    def _arrive(self, pending: _Pending, array: npt.NDArray[Any]) -> None:
        """Add the arrived numbers to the facts of their step and to samples."""
        facts, names, array = pending.facts, pending.names, array.astype(np.float64)
        parts, start = dict[Any, npt.NDArray[Any]](), 0
        for key, sent in pending.parts.items():
            parts[key] = array[start : start + sent.numel()].reshape(sent.shape)
            start += sent.numel()
        known = {key: part.tolist() for key, part in parts.items() if isinstance(key, str)}
        if "signals" in known:
            loss, norm, index, largest, *of_ranks = known.pop("signals")
            rank, losses = of_ranks or (facts.rank, pending.has_loss)
            known |= {"gradient_norm": norm, "rank": int(rank)} | ({"loss": loss} if losses else {})
            if names:
                known |= {"largest_gradient": names[int(index)], "largest_gradient_norm": largest}
        if facts.skipped is None:
            # torch's scaler lowers its scale, unless it is 0, at every overflow and only then.
            scale = known["loss_scale"]
            known["skipped"] = known["next_loss_scale"] < scale or scale == 0
        rates = self.highest_rates.get(facts.optimizer, 0.0), known.get("lr", facts.lr) or 0.0
        self.highest_rates[facts.optimizer] = known["highest_lr"] = max(rates)
        facts = self.newest = replace(facts, **known)
        if self.now is not None and self.now.step == facts.step:
            self.now = facts
        loss = math.nan if facts.loss is None else facts.loss
        if not facts.skipped and math.isfinite(loss + (facts.gradient_norm or 0.0)):
            self.located = None
        samples = {m: Sample(facts, parts[m], own) for m, own in pending.context.items()}
        self._arrived.append((facts, samples))


def facts_of(trainer: pl.Trainer, batch_idx: int | None = None) -> StepFacts:
    """Return the facts that the host knows of the current step."""
    return StepFacts(
        step=step_of(trainer),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        batch_idx=trainer.fit_loop.epoch_loop.batch_idx if batch_idx is None else batch_idx,
        rank=trainer.global_rank,
    )


def recorder_of(trainer: pl.Trainer) -> FactsRecorder:
    """Return the recorder of a Trainer, which the first call creates."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    recorder = next((c for c in callbacks if isinstance(c, FactsRecorder)), None)
    if recorder is None:
        recorder = FactsRecorder()
        # The recorder comes first, so that its facts are available in hooks of other callbacks.
        trainer.callbacks = [recorder, *callbacks]  # type: ignore[attr-defined]
    return recorder
