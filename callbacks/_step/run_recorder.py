"""Records what every run has: loss, gradient norm, loss scale and skipped steps."""

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.callbacks._step.signals import measure
from lightning_mp.callbacks._step.training_state import (
    gradients_of,
    loss_scale_of,
    parameter_names,
    step_of,
)
from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
from lightning_mp.callbacks.history import History
from lightning_mp.callbacks.spike_guard import SpikeGuard
from lightning_mp.numerics.async_readback import AsyncReadback, Readback

__all__ = ["RunRecorder"]

_NORM = "gradient_norm"
_NON_FINITE = " not finite"


class RunRecorder:
    """Writes `loss`, `gradient_norm`, `loss_scale` and `skipped` into a history, without a sync.

    A history keeps every 1024th step of a run of 4 million, in which one NaN would be lost: values
    that are not finite go into a curve of their own, named after it. `skipped` has a point for each
    skipped step, whose value is how many there were so far.

    Args:
        history: What to write into.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._readback = AsyncReadback()
        self._names: dict[int, str] = {}
        self._loss: Tensor | None = None  # summed over the micro-batches of a step
        self._losses = 0
        self._measures_norm = False
        self._has_stepped = False
        self._is_first_step = True
        self._scale: float | None = None  # of torch's scaler, after the step before

    def start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Get ready to train."""
        self._names = parameter_names(pl_module)
        # Decided by class, not by what has arrived so far, as all ranks must agree.
        others = (GradientUnderflowMonitor, SpikeGuard)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._measures_norm = not any(isinstance(each, others) for each in callbacks)
        self._loss, self._losses = None, 0
        self._is_first_step, self._scale, self._has_stepped = True, None, False

    def on_batch_start(self, trainer: pl.Trainer) -> None:
        """Drop what an earlier run has written beyond the step that this one goes on from."""
        if self._is_first_step:
            self._is_first_step = False
            first = step_of(trainer)
            for name, points in self.history.curves.items():
                self.history.curves[name] = [point for point in points if point[0] < first]

    def on_optimizer_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Measure the gradients, unless another callback does, and the scale before the step."""
        self._has_stepped = True
        step, scale = step_of(trainer), loss_scale_of(trainer)
        if isinstance(scale, Tensor) and self._scale is None and not len(self._readback):
            self._readback.submit(step, scale, name="first_scale")
        if not self._measures_norm:
            return
        index = [id(getattr(o, "optimizer", o)) for o in trainer.optimizers].index(
            id(getattr(optimizer, "optimizer", optimizer))
        )
        found = gradients_of(trainer, optimizer, self._names)
        norm = measure(trainer, found, None).values[1]
        self._readback.submit(step, norm, name=f"gradient_norm_{index}" if index else _NORM)

    def on_batch_end(self, trainer: pl.Trainer, outputs: Any) -> None:
        """Add the batch's loss, and at the end of a step send what it had on its way."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel():
            mean = loss.detach().float().mean()
            self._loss = mean if self._loss is None else self._loss + mean
            self._losses += 1
        if not trainer.fit_loop._should_accumulate():
            self._end_step(trainer)
        self.take(self._readback.ready())

    def _end_step(self, trainer: pl.Trainer) -> None:
        step = step_of(trainer)
        if self._loss is not None:
            # Lightning divides losses by the micro-batches of a full step; the last may have fewer.
            is_automatic = trainer.lightning_module.automatic_optimization
            full = trainer.accumulate_grad_batches if is_automatic else 1
            self._readback.submit(step, self._loss, name="loss", factor=full / self._losses)
            self._loss, self._losses = None, 0
        if self._has_stepped:
            self._has_stepped = False
            self._record_scale(trainer, step)

    def _record_scale(self, trainer: pl.Trainer, step: int) -> None:
        scale = loss_scale_of(trainer)
        if isinstance(scale, Tensor):
            self._readback.submit(step, scale, name="loss_scale")
        elif scale is not None:
            self.history.add_point("loss_scale", step, scale)
            scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
            if getattr(scaler, "last_step_skipped", False):
                self._add_skip(step)

    def _add_skip(self, step: int) -> None:
        skipped = self.history.curves.get("skipped", [])
        self.history.add_point("skipped", step, skipped[-1][1] + 1 if skipped else 1)

    def take(self, arrived: list[Readback]) -> None:
        """Write what has arrived into the history."""
        for name, step, value in (
            (a.context["name"], a.step, float(a.array) * a.context.get("factor", 1.0))
            for a in arrived
        ):
            if name in ("first_scale", "loss_scale"):
                # torch's scaler lowers its scale at each overflow and at nothing else.
                if self._scale is not None and value < self._scale:
                    self._add_skip(step)
                self._scale = value
            if name != "first_scale":
                self.history.add_point(name, step, value)
                if not math.isfinite(value):
                    self.history.add_point(name + _NON_FINITE, step, value)

    def finish(self) -> None:
        """Wait for what is on its way, and write it down."""
        self.take(self._readback.drain())
