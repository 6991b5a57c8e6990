"""What a training step was: read once for all callbacks of a Trainer, without a host sync."""

from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.callbacks._rules.records import StepFacts
from lightning_mp.callbacks._step.batches import BatchKeeper, loss_in
from lightning_mp.callbacks._step.training_state import (
    NamedTensors,
    Signals,
    gradients_of,
    is_fused,
    loss_scale_of,
    measure,
    parameter_names,
    scaler_of,
    step_of,
)
from lightning_mp.numerics.async_readback import AsyncReadback, Readback
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision

_LATE = 2  # steps that a sample may arrive after the facts of its step

__all__ = ["Arrived", "FactsRecorder", "facts_of", "recorder_of"]


class Arrived(NamedTuple):
    """A step whose numbers are on the host."""

    facts: StepFacts
    extras: dict[int, npt.NDArray[Any]]  # what callbacks sent along, by `id(callback)`


@dataclass
class _Pending:
    """A step whose batch is not over: what the host knows, and numbers on the device."""

    facts: StepFacts
    names: list[str]
    parts: dict[str | int, Tensor] = field(default_factory=dict)


class FactsRecorder(pl.Callback):
    """Reads every step once; the callbacks of this package share the one of their Trainer.

    Whoever wants steps that have arrived has an `inbox`; the gradient norm, `needs_gradient_norm`.
    """

    def __init__(self) -> None:
        self.highest_rates: dict[int, float] = {}  # by optimizer; in the checkpoints of its users
        self._names: dict[int, str] = {}
        self._measures_norm = False
        self._hooks = ExitStack()
        self._inboxes: list[deque[Arrived]] = []
        self._readback = AsyncReadback()
        self._reset()

    def _reset(self) -> None:
        self._hooks.close()
        with suppress(RuntimeError):  # of a device that has failed
            self._readback.drain()
        self._due: set[Optimizer] = set()
        self._pending: list[_Pending] = []
        self.now: StepFacts | None = None
        self.newest: StepFacts | None = None  # of those that have arrived
        self.newest_loss: Tensor | None = None  # unscaled, of the last backward
        self.skipped: bool | None = None  # the last step; `None` while only `newest` will tell
        self.signals: Signals | None = None  # of the optimizer that is about to step
        self.batches: BatchKeeper | None = None  # where one of the callbacks has `save_batch`
        self._gradients: NamedTensors | None = None
        self._losses: list[Tensor] = []  # since the last optimizer step

    # --- for other callbacks ---------------------------------------------------------------------

    def gradients(self, trainer: pl.Trainer, optimizer: Optimizer) -> NamedTensors:
        """Return the gradients of the optimizer that is about to step, collected once."""
        if self._gradients is None:
            self._gradients = gradients_of(trainer, optimizer, self._names)
        return self._gradients

    def send_along(self, callback: pl.Callback, numbers: Tensor) -> None:
        """Send numbers on the device, of shape [n], with the step that is about to be made."""
        self._pending[-1].parts[id(callback)] = numbers  # one copy to the host for all

    def drain(self) -> None:
        self._deliver(self._readback.drain())

    def give_up(self, trainer: pl.Trainer) -> None:
        """Wait for the step about to be made as well."""
        self._submit(trainer)
        self.drain()

    # --- hooks -----------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        self._names = parameter_names(pl_module)
        # Decided by what is attached, not by what has arrived so far, as all ranks must agree.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._measures_norm = any(getattr(c, "needs_gradient_norm", False) for c in callbacks)
        inboxes = (getattr(c, "inbox", None) for c in callbacks)
        self._inboxes = [inbox for inbox in inboxes if inbox is not None]
        for inbox in self._inboxes:
            inbox.clear()
        if any(getattr(c, "save_batch", False) for c in callbacks):
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
        if trainer.world_size > 1 and trainer.strategy.root_device.type != "cpu":
            # Callbacks act on what arrives, on all ranks at the same step. Lightning has waited for
            # the device at the start of the batch, so that nothing is waited for here.
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
        self._gradients, self.signals = None, None
        if self._measures_norm:
            found = self.gradients(trainer, optimizer)
            # Else `training_step` returned None. Ranks cannot know that of each other.
            if found.gradients or loss is not None or trainer.world_size > 1:
                self.signals = measure(trainer, found, loss)
                loss = self.signals.values[0] if loss is not None else None
                pending.parts |= {"signals": self.signals.packed}
                pending.names = found.names
        numbers = {"loss": loss, "lr": lr, "loss_scale": scale}
        # Cloned, as the scaler and schedules change theirs in place before the copy is made.
        pending.parts |= {
            k: v.detach().reshape(1).clone() for k, v in numbers.items() if isinstance(v, Tensor)
        }
        self._pending.append(pending)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        loss = loss_in(outputs)
        if self._pending and "loss" not in self._pending[-1].parts and loss is not None:
            # In manual optimization a backward may pass Lightning by.
            self._pending[-1].parts["loss"] = loss.detach().float().mean().reshape(1)
        self._submit(trainer)
        self._deliver(self._readback.ready())

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.drain()

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        with suppress(RuntimeError):  # a device that has failed gives nothing back
            self.give_up(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._reset()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [c for c in callbacks if c is not self]  # type: ignore[attr-defined]

    # --- inside ----------------------------------------------------------------------------------

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
        self._gradients, self.signals = None, None
        if not pending:
            return
        self.skipped, after = self._outcome(trainer), loss_scale_of(trainer)
        known, device = after if isinstance(after, float) else None, trainer.strategy.root_device
        for each in pending:
            facts = replace(each.facts, skipped=self.skipped, next_loss_scale=known)
            if isinstance(after, Tensor):  # of torch's scaler: read here, it would be a host sync
                each.parts["next_loss_scale"] = after.detach().reshape(1)
            parts = each.parts.values()
            sent = [part.to(device, torch.float32, non_blocking=True) for part in parts]
            self._readback.submit(
                facts.step,
                torch.cat(sent) if sent else torch.zeros(0),
                facts=facts,
                names=each.names,
                lengths={key: len(part) for key, part in each.parts.items()},
            )
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

    def _deliver(self, arrived: list[Readback]) -> None:
        for readback in arrived:
            facts, extras = _complete(readback)
            highest = max(self.highest_rates.get(facts.optimizer, 0.0), facts.lr or 0.0)
            self.highest_rates[facts.optimizer] = highest
            self.newest = replace(facts, highest_lr=highest)
            for inbox in self._inboxes:
                inbox.append(Arrived(self.newest, extras))

    def _called(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_fused(optimizer):
            self._due.discard(optimizer)


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


def _complete(readback: Readback) -> tuple[StepFacts, dict[int, npt.NDArray[Any]]]:
    """Put the numbers that have arrived into the facts of their step."""
    facts, names, lengths = (readback.context[key] for key in ("facts", "names", "lengths"))
    ends = np.cumsum(list(lengths.values()), dtype=int)
    parts = dict(zip(lengths, np.split(readback.array, ends), strict=False))
    extras = {key: part for key, part in parts.items() if isinstance(key, int)}
    found: dict[str, Any] = {
        key: float(part[0]) for key, part in parts.items() if key not in extras and key != "signals"
    }
    if "signals" in parts:
        loss, norm, index, largest, rank, losses = map(float, parts["signals"])
        found |= {"gradient_norm": norm, "rank": int(rank)} | ({"loss": loss} if losses else {})
        if names:
            found |= {"largest_gradient": names[int(index)], "largest_gradient_norm": largest}
    if facts.skipped is None:
        # torch's scaler lowers its scale at each overflow and at nothing else.
        found["skipped"] = found["next_loss_scale"] < found["loss_scale"]
    return replace(facts, **found), extras
