"""Reads every step once for all monitors of a Trainer; brings what they observe to the host."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.callbacks._rules.records import Alarm, Sample, StepFacts
from lightning_mp.callbacks._step.batches import BatchKeeper, loss_in
from lightning_mp.callbacks._step.training_state import (
    Moment,
    TrainingStep,
    is_fused,
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
_LATE = 2  # steps that a sample may arrive after the facts of its step

__all__ = ["FactsRecorder", "facts_of", "recorder_of", "without_raising"]


@dataclass
class _Pending:
    """A step whose batch is not over: what the host knows, and numbers on the device."""

    facts: StepFacts
    names: list[str]  # of the gradients that were measured
    parts: dict[Any, Tensor] = field(default_factory=dict)  # by name of a fact, or by monitor
    context: dict[Any, dict[str, Any]] = field(default_factory=dict)  # by monitor


class FactsRecorder(pl.Callback):
    """Reads every step once; the monitors of a Trainer share one.

    Before each optimizer step, or at the end of the batch, monitors `observe`. What they return
    travels to the host with the facts of the step, in one copy. A step or two later they `judge`.
    """

    def __init__(self) -> None:
        self.highest_rates: dict[int, float] = {}  # by optimizer; in the checkpoints of monitors
        self._names: dict[int, str] = {}
        self._hooks = ExitStack()
        self._readback = AsyncReadback()
        self._reset()

    def _reset(self) -> None:
        self._hooks.close()
        with suppress(RuntimeError):  # of a device that has failed
            self._readback.drain()
        self.trainer: Any = None  # while training
        self._monitors: list[Any] = []
        self._measures_norm = self._is_lockstep = False
        self._due: set[Optimizer] = set()
        self._pending: list[_Pending] = []
        self._arrived: deque[tuple[StepFacts, dict[Any, Sample]]] = deque()
        self.now: StepFacts | None = None
        self.newest: StepFacts | None = None  # of those that have arrived
        self.newest_loss: Tensor | None = None  # unscaled, of the last backward
        self.skipped: bool | None = None  # the last step; `None` while only `newest` will tell
        self.step: TrainingStep | None = None  # of the optimizer that is about to step
        self.located: Alarm | None = None  # of what is not finite since then
        self.batches: BatchKeeper | None = None  # where one of the callbacks has `save_batch`
        self._losses: list[Tensor] = []  # since the last optimizer step

    # --- for monitors ----------------------------------------------------------------------------

    def send(self, tensor: Tensor, receive: Callable[[npt.NDArray[Any]], None]) -> None:
        """Start to copy a tensor to the host, which `receive` is called with when it is there."""
        self._readback.submit(self.now.step if self.now else 0, tensor, receive=receive)

    def drain(self) -> None:
        """Wait for everything on its way, for those that must know before a step."""
        for each in self._readback.drain():
            each.context["receive"](each.array)

    def deliver(self) -> None:
        """Have all monitors judge the steps that have arrived, and raise their alarms."""
        while self._arrived and self.trainer is not None:
            facts, samples = self._arrived.popleft()
            for monitor in self._monitors:
                sample = samples.get(monitor)
                if sample is not None or monitor.every_step:
                    for verdict in monitor.judge(sample or Sample(facts)):
                        monitor.say(self.trainer, verdict, facts)

    def finish(self) -> None:
        """Wait for what is on its way, the step about to be made too, and have it judged."""
        if self.trainer is not None:
            self._submit(self.trainer)
        self.catch_up()

    def catch_up(self) -> None:
        """Wait for what is on its way, and have it judged."""
        self.drain()
        self.deliver()

    # --- hooks -----------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        self._names, self.trainer = parameter_names(pl_module), trainer
        # Decided by what is attached, not by what has arrived so far, as all ranks must agree.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._monitors = [c for c in callbacks if getattr(c, "recorder", None) is self]
        self._measures_norm = any(monitor.needs_gradient_norm for monitor in self._monitors)
        # Monitors act on what arrives, on all ranks at the same step.
        is_late = trainer.strategy.root_device.type != "cpu"
        self._is_lockstep = trainer.world_size > 1 and is_late
        if any(monitor.save_batch for monitor in self._monitors):
            self.batches = BatchKeeper(trainer)
        if isinstance(scaler_of(trainer), torch.amp.GradScaler):
            for each in trainer.optimizers:
                self._hooks.enter_context(each.register_step_pre_hook(self._called))

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        self.now = facts_of(trainer, batch_idx)
        if self.batches is not None:
            oldest = 0 if self.newest is None else self.newest.step - _LATE
            self.batches.hold(self.now.step, batch, oldest)

    @override
    def on_before_backward(self, trainer: pl.Trainer, _: Any, loss: Tensor) -> None:
        # Lightning hands it over after the loss scale, and divided by the accumulated batches.
        scale = loss_scale_of(trainer)
        self.newest_loss = loss.detach().float().mean() / (1.0 if scale is None else scale)
        self._losses.append(self.newest_loss)

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: pl.Trainer, _: Any, optimizer: Optimizer) -> None:
        if self._is_lockstep:
            # Lightning has waited for the device at the start of the batch: nothing is waited for.
            self.drain()
        # Of a `LightningOptimizer` the one inside, which `trainer.optimizers` holds.
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
        if loss is not None:  # a `training_step` that returned None is not skipped for overflow
            self._due.add(plain)
        pending = _Pending(self.now, [])
        step = self.step = TrainingStep(trainer, self.now, plain, self._names, self.newest_loss)
        # Without both `training_step` returned None. Ranks cannot know that of each other.
        if self._measures_norm and (
            step.found.gradients or loss is not None or trainer.world_size > 1
        ):
            step.signals = measure_signals(trainer, step.found, loss)
            loss = step.signals.values[0] if loss is not None else None
            pending.parts["signals"] = step.signals.packed
            pending.names = step.found.names
        numbers = {"loss": loss, "lr": lr, "loss_scale": scale}
        # Cloned, as the scaler and schedules change theirs in place before the copy is made.
        pending.parts |= {
            k: v.detach().reshape(()).clone() for k, v in numbers.items() if isinstance(v, Tensor)
        }
        self._pending.append(pending)
        self._observe("before step")

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        loss = loss_in(outputs)
        if self._pending and "loss" not in self._pending[-1].parts and loss is not None:
            # In manual optimization a backward may pass Lightning by.
            self._pending[-1].parts["loss"] = loss.detach().float().mean()
        self._observe("batch end")
        self._submit(trainer)
        # On a GPU one rank may have what another one still waits for.
        for each in () if self._is_lockstep else self._readback.ready():
            each.context["receive"](each.array)
        self.deliver()

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.finish()

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        # Of a device that has failed nothing comes back.
        with without_raising(self), suppress(RuntimeError):
            self.finish()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._reset()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [c for c in callbacks if c is not self]  # type: ignore[attr-defined]

    # --- inside ----------------------------------------------------------------------------------

    def _observe(self, moment: Moment) -> None:
        step = self.step
        if step is None or not self._pending:
            return
        pending = self._pending[-1]
        for monitor in (each for each in self._monitors if each.moment == moment):
            step.context = {}
            # A mode that a monitor has in place for the model is not for the statistics.
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
        # Lightning divides by the batches of a full step; the last of an epoch may have fewer.
        return total * (trainer.accumulate_grad_batches / len(losses))

    def _submit(self, trainer: pl.Trainer) -> None:
        """Send the steps of the batch on their way, now that their outcome is known."""
        pending, self._pending = self._pending, []
        self.step = None
        if not pending:
            return
        self.skipped, after = self._outcome(trainer), loss_scale_of(trainer)
        root = trainer.strategy.root_device
        home = torch.device("cpu") if root.type == "mps" else root  # MPS has no float64
        for each in pending:
            known = after if isinstance(after, float) else None
            facts = replace(each.facts, skipped=self.skipped, next_loss_scale=known)
            if isinstance(after, Tensor):  # of torch's scaler: read here, it would be a host sync
                each.parts["next_loss_scale"] = after.detach().reshape(())
            shapes = {key: tuple(part.shape) for key, part in each.parts.items()}
            parts = (part.detach().reshape(-1) for part in each.parts.values())
            sent = [part.to(home, non_blocking=True).double() for part in parts]
            arrive = partial(self._arrive, facts, each.names, shapes, each.context)
            self.send(torch.cat(sent) if sent else torch.zeros(0), arrive)
        self.now = facts

    def _outcome(self, trainer: pl.Trainer) -> bool | None:
        """Return whether the step was skipped; `None` where only the scale can tell, later."""
        # torch's `GradScaler` does not say whether it skipped: a step that was due and not called
        # was. It always calls fused optimizers, which skip on the device.
        due, self._due = self._due, set()
        scaler = scaler_of(trainer)
        if isinstance(trainer.precision_plugin, ScaledPrecision):
            return scaler is not None and bool(scaler.last_step_skipped)
        if not isinstance(scaler, torch.amp.GradScaler) or scaler._scale is None or not due:
            return False
        return None if any(is_fused(each) for each in due) else True

    def _arrive(
        self,
        facts: StepFacts,
        names: list[str],
        shapes: dict[Any, tuple[int, ...]],
        context: dict[Any, dict[str, Any]],
        array: npt.NDArray[Any],
    ) -> None:
        """Put the numbers that have arrived into the facts of their step, and into samples."""
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()], dtype=int)
        split = zip(shapes.items(), np.split(array, ends), strict=False)
        parts = {key: part.reshape(shape) for (key, shape), part in split}
        known = {key: part.tolist() for key, part in parts.items() if isinstance(key, str)}
        if "signals" in known:
            loss, norm, index, largest, rank, losses = known.pop("signals")
            known |= {"gradient_norm": norm, "rank": int(rank)} | ({"loss": loss} if losses else {})
            if names:
                known |= {"largest_gradient": names[int(index)], "largest_gradient_norm": largest}
        if facts.skipped is None:
            # torch's scaler lowers its scale at each overflow and at nothing else.
            known["skipped"] = known["next_loss_scale"] < known["loss_scale"]
        facts = replace(facts, **known)
        highest = max(self.highest_rates.get(facts.optimizer, 0.0), facts.lr or 0.0)
        self.highest_rates[facts.optimizer] = highest
        facts = self.newest = replace(facts, highest_lr=highest)
        if not facts.skipped and facts.loss is not None and math.isfinite(facts.loss):
            self.located = None
        samples = {m: Sample(facts, parts[m], own) for m, own in context.items()}
        self._arrived.append((facts, samples))

    def _called(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_fused(optimizer):
            self._due.discard(optimizer)


@contextmanager
def without_raising(callback: pl.Callback) -> Iterator[None]:
    """Keep `on_exception` from hiding the exception that it is called for behind its own."""
    try:
        yield
    except Exception as error:
        _log.warning(usage("hook_failed", callback=type(callback).__name__, error=error))


def facts_of(trainer: pl.Trainer, batch_idx: int | None = None) -> StepFacts:
    """Return what the host knows of the step that a hook is called in."""
    return StepFacts(
        step=step_of(trainer),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        batch_idx=trainer.fit_loop.epoch_loop.batch_idx if batch_idx is None else batch_idx,
        rank=trainer.global_rank,
    )


def recorder_of(trainer: pl.Trainer) -> FactsRecorder:
    """Return the recorder of a Trainer; whoever comes first makes it."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    recorder = next((c for c in callbacks if isinstance(c, FactsRecorder)), None)
    if recorder is None:
        recorder = FactsRecorder()
        # First, so that what it has read is there in every hook of the others.
        trainer.callbacks = [recorder, *callbacks]  # type: ignore[attr-defined]
    return recorder
