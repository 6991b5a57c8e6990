"""`LossScaleMonitor`: says when the loss scale sinks, long before it is at its floor."""

from collections import deque
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.loss_scale import LossScaleRule
from lightning_mp.callbacks._step.facts import StepFacts
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.precision.loss_scaler import LossScaler

__all__ = ["LossScaleMonitor"]


@explains_arguments()
class LossScaleMonitor(InstabilityMonitor):
    """Warns of a loss scale that sinks, and of too many steps skipped for it.

    torch's scaler halves its scale at every overflow and says nothing: 17 overflows in a row take
    it from 65536 below 1, where gradients below 6e-8 are all zero. This warns at the seventh.

    Example: `Trainer(callbacks=LossScaleMonitor())`

    Args:
        max_skip_rate: Warns when more of `window_steps` steps were skipped; 0.01 is 1%.
        window_steps: Steps that the rate is taken over.
        calibration_steps: Steps at the start that do not count for the rate, while a dynamic scale
            looks for its level.
        min_scale: Warns when the scale falls below. fp16 gradients of 65504 / 1024 = 64 and more
            overflow at a scale of 1024, and those below 2.9e-11 are zero.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        max_skip_rate: float = 0.01,
        window_steps: int = 1000,
        calibration_steps: int = 200,
        min_scale: float = 1024.0,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(repeat_after_steps=repeat_after_steps)
        self._check_positive(max_skip_rate=max_skip_rate, min_scale=min_scale)
        self._check(max_skip_rate < 1, "below_1", max_skip_rate=max_skip_rate)
        self._check_at_least(1, window_steps=window_steps)
        self._check_at_least(0, calibration_steps=calibration_steps)
        limits: dict[str, Any] = {
            "max_skip_rate": max_skip_rate,
            "window_steps": window_steps,
            "calibration_steps": calibration_steps,
            "min_scale": min_scale,
        }
        vars(self).update(limits)
        self._rule = LossScaleRule(**limits)
        self.inbox = deque()
        self._judged = -1  # the last step, which several optimizers may share

    steps = property(lambda self: self._rule.steps, doc="Steps judged so far.")
    skipped_steps = property(lambda self: self._rule.skipped_steps, doc="Skipped ones of them.")
    skipped_in_a_row = property(lambda self: self._rule.skipped_in_a_row, doc="The newest ones.")
    scale = property(lambda self: self._rule.scale, doc="The loss scale after the last of them.")
    skip_rate = property(lambda self: self._rule.skip_rate, doc="Of the last `window_steps`.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._judged = -1

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        for facts, _ in self.arrived():
            if facts.next_loss_scale is not None and facts.step != self._judged:
                self._judged = facts.step
                self._judge(trainer, facts, facts.next_loss_scale)

    # The last step may have ended training.
    on_train_end = on_exception = on_train_batch_end  # type: ignore[assignment]

    def _judge(self, trainer: pl.Trainer, facts: StepFacts, scale: float) -> None:
        verdicts = self._rule.judge(facts.loss_scale, scale, bool(facts.skipped), *_limits(trainer))
        self.history.add_point("skipped", facts.step, float(bool(facts.skipped)))
        metrics = {
            "loss_scale": scale,
            "skipped_steps": float(self.skipped_steps),
            "skipped_in_a_row": float(self.skipped_in_a_row),
            "skip_rate": self.skip_rate,
        }
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.record(trainer, metrics, replace(facts, optimizer=0), every_n_steps=every)
        for verdict in verdicts:
            self.say(trainer, verdict, facts)


def _limits(trainer: pl.Trainer) -> tuple[float, bool]:
    """Return the lowest scale, and whether the scale moves."""
    scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    if isinstance(scaler, LossScaler):
        return scaler.config.min_scale, scaler.config.dynamic
    return 1.0, True  # torch's has none; below 1, what unscaling gains is lost
