"""`LossScaleMonitor`: warns when the loss scale falls, long before it reaches the floor."""

import math
from collections import deque
from dataclasses import replace

import torch
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.records import Sample, Verdict
from lightning_mp.callbacks._step.training_state import scaler_of
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.precision.loss_scaler import LossScaler

__all__ = ["LossScaleMonitor"]

_FP16_MAX = torch.finfo(torch.float16).max


@explains_arguments(
    checks={
        "max_skip_rate": "(0, 1)",
        "window_steps": "[1, inf)",
        "calibration_steps": "[0, inf)",
        "min_scale": "(0, inf)",
    }
)
class LossScaleMonitor(InstabilityMonitor):
    """Warns of a falling loss scale and of too many skipped steps.

    torch's `GradScaler` halves the scale at every overflow without notice: 17 consecutive overflows
    take it from 65536 below 1, where all gradients below 6e-8 underflow. The monitor warns at the
    seventh.

    Example: `Trainer(callbacks=LossScaleMonitor())`

    Args:
        max_skip_rate: Maximum share of skipped steps among the last `window_steps` steps.
        window_steps: Number of steps for the skip rate.
        calibration_steps: Number of initial steps that do not count for the skip rate, while a
            dynamic scale finds its level.
        min_scale: Minimum loss scale. At a scale of 1024, fp16 gradients above 65504 / 1024 = 64
            overflow and gradients below 2.9e-11 underflow.
        repeat_after_steps: Minimum number of steps between two equal alarms.

    Raises:
        ValueError: An argument is out of range.
    """

    every_step = True
    keeps = ("steps", "skipped_steps", "skipped_in_a_row", "scale", "_window", "_judged")

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
        self.max_skip_rate = max_skip_rate
        self.window_steps = window_steps
        self.calibration_steps = calibration_steps
        self.min_scale = min_scale
        self.steps = 0  # number of judged steps
        self.skipped_steps = 0
        self.skipped_in_a_row = 0  # up to the last step
        self.scale: float | None = None  # after the last step
        self._window: deque[bool] = deque(maxlen=window_steps)  # whether each step was skipped
        self._judged = -1  # last judged step; several optimizers may share a step

    @property
    def skip_rate(self) -> float:
        """Share of skipped steps among the last `window_steps` steps."""
        return sum(self._window) / self.window_steps

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        facts, scale = sample.facts, sample.facts.next_loss_scale
        if scale is None or facts.step == self._judged:
            return []
        self._judged = facts.step
        is_skipped = bool(facts.skipped)
        self.scale = scale
        self.steps += 1
        self.skipped_steps += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        # A dynamic scale finds its level by overflows, which are not a failure.
        if self.steps > self.calibration_steps:
            self._window.append(is_skipped)
        metrics = {
            "loss_scale": scale,
            "skipped_steps": float(self.skipped_steps),
            "skipped_in_a_row": float(self.skipped_in_a_row),
            "skip_rate": self.skip_rate,
        }
        trainer = self.recorder.trainer
        # All optimizers share the scale, so metric names get no optimizer suffix.
        self.record(metrics, replace(facts, optimizer=0), trainer.log_every_n_steps)
        verdicts: list[Verdict] = []
        scaler, before = scaler_of(trainer), facts.loss_scale
        floor, is_dynamic = 1.0, True  # torch's scaler has no floor; below 1 it has no benefit
        if isinstance(scaler, LossScaler):
            floor, is_dynamic = scaler.config.min_scale, scaler.config.dynamic
        # A skip at the lowest scale cannot be cured by a lower scale.
        if is_skipped and (not is_dynamic or (before is not None and before <= floor)):
            tags = () if is_dynamic else ("static",)
            verdicts = [Verdict("loss_scale_floor", scale, floor, "error", tags=tags)]
        elif is_dynamic and is_skipped and scale < self.min_scale:
            is_lost = facts.loss is not None and not math.isfinite(facts.loss)
            tags = ("forward",) if is_lost else ()
            low = Verdict("loss_scale_low", scale, self.min_scale, tags=tags)
            # torch's scaler has no floor and can reach 0.
            verdicts = [low.given(reach=_FP16_MAX / max(scale, 1e-38))]
        verdicts = [found.given(in_a_row=self.skipped_in_a_row) for found in verdicts]
        if self.skip_rate > self.max_skip_rate:
            rate = Verdict("skip_rate", self.skip_rate, self.max_skip_rate)
            rate = rate.given(skipped=sum(self._window), of=len(self._window))
            verdicts.append(rate.given(scale=scale, window=self.window_steps))
        return verdicts
