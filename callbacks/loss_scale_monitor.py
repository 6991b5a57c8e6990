"""`LossScaleMonitor`: says when the loss scale sinks, long before it is at its floor."""

import contextlib
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._step.training_state import loss_scale_of, lower_rate, step_of
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.precision.loss_scaler import LossScaler

__all__ = ["LossScaleMonitor"]

_FP16_MAX = torch.finfo(torch.float16).max


@explains_arguments()
class LossScaleMonitor(InstabilityMonitor):
    """Watches the loss scale and the steps that are skipped for it.

    torch's scaler halves its scale at every overflow and says nothing: 17 overflows in a row take
    it from 65536 below 1, where gradients below 6e-8 are all zero. This warns at the seventh. Works
    with the plugins of this package and with Lightning's `16-mixed`, fused optimizers included,
    whose skipped steps show in nothing but the scale.

    Looks at every step that an optimizer tries; the scale of torch's scaler is copied without
    waiting and judged a step later. Logs, every `trainer.log_every_n_steps` steps:
    `instability/loss_scale`, `instability/skipped_steps` (in all),
    `instability/skipped_in_a_row` and `instability/skip_rate` (of the last `window_steps`).

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

    Alarms:
        `loss_scale_low`, `skip_rate`, and as an error `loss_scale_floor`: a step was skipped at
        the lowest scale there is, so that no lower one can cure it.

    References:
        torch.amp.GradScaler; loss scaling in Mixed Precision Training, arXiv:1710.03740.
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
        for name, value, is_good, accepted in (
            ("max_skip_rate", max_skip_rate, 0 < max_skip_rate < 1, "between 0 and 1"),
            ("window_steps", window_steps, window_steps >= 1, "at least 1"),
            ("calibration_steps", calibration_steps, calibration_steps >= 0, "at least 0"),
            ("min_scale", min_scale, min_scale > 0, "above 0"),
        ):
            if not is_good:
                raise ValueError(
                    f"Passed `LossScaleMonitor({name}={value!r})`. `{name}` must be {accepted}. "
                    "Leave it out for the default."
                )
        self.max_skip_rate = max_skip_rate
        self.window_steps = window_steps
        self.calibration_steps = calibration_steps
        self.min_scale = min_scale
        self.steps = 0  # judged so far
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.scale: float | None = None
        self._window: deque[bool] = deque(maxlen=window_steps)
        self._has_stepped = False
        self._readback = AsyncReadback()

    @property
    def skip_rate(self) -> float:
        """Skipped steps as a share of the last `window_steps` steps."""
        return sum(self._window) / self.window_steps

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note that an optimizer is about to step."""
        scale = loss_scale_of(trainer)
        if not isinstance(scale, Tensor):
            self.scale = scale if self.scale is None else self.scale
        elif self.scale is None and not len(self._readback):
            # The scale before the first step tells whether that step lowers it.
            self._readback.submit(step_of(trainer), scale, is_start=True)
        self._has_stepped = True

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Judge the step, or with torch's scaler the steps whose scale has arrived."""
        if not self._has_stepped:
            return
        self._has_stepped = False
        scale, step = loss_scale_of(trainer), step_of(trainer)
        if isinstance(scale, Tensor):
            self._readback.submit(step, scale, is_start=False)
            self._judge_arrived(trainer, self._readback.ready())
        elif scale is not None:
            scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
            self._judge(trainer, step, scale, bool(scaler.last_step_skipped))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the steps that are left."""
        self._judge_arrived(trainer, self._readback.drain())

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Judge the steps that are left; the last one may have ended training."""
        with contextlib.suppress(RuntimeError):  # a device that has failed gives nothing back
            self._judge_arrived(trainer, self._readback.drain())
        scale = loss_scale_of(trainer)
        if self._has_stepped and isinstance(scale, float):
            self._has_stepped = False
            scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
            self._judge(trainer, step_of(trainer), scale, bool(scaler.last_step_skipped))

    def _judge_arrived(self, trainer: pl.Trainer, samples: list[Any]) -> None:
        for sample in samples:
            scale = float(sample.array)
            if not sample.context["is_start"]:
                # torch's scaler lowers its scale at each overflow and at nothing else.
                self._judge(
                    trainer, sample.step, scale, self.scale is not None and scale < self.scale
                )
            self.scale = scale

    def _judge(self, trainer: pl.Trainer, step: int, scale: float, is_skipped: bool) -> None:
        before, self.scale = self.scale, scale
        self.steps += 1
        self.skipped_steps += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        if self.steps > self.calibration_steps:
            self._window.append(is_skipped)
        self.history.add_point("loss_scale", step, scale)
        self.history.add_point("skipped", step, float(is_skipped))
        if (step + 1) % max(getattr(trainer, "log_every_n_steps", 50), 1) == 0:
            metrics = {
                "instability/loss_scale": scale,
                "instability/skipped_steps": float(self.skipped_steps),
                "instability/skipped_in_a_row": float(self.skipped_in_a_row),
                "instability/skip_rate": self.skip_rate,
            }
            self.log_metrics(trainer, metrics, step)
        self._check_scale(trainer, step, before, is_skipped)
        self._check_rate(trainer, step)

    def _check_scale(
        self, trainer: pl.Trainer, step: int, before: float | None, is_skipped: bool
    ) -> None:
        scale, floor, is_dynamic = self.scale or 0.0, *_limits(trainer)
        if is_skipped and (not is_dynamic or (before is not None and before <= floor)):
            fix = (
                "Check the loss and the data for NaN" if is_dynamic else "Pass loss_scale='dynamic'"
            )
            self.alarm(
                trainer,
                "loss_scale_floor",
                f"A step was skipped at the lowest loss scale, {scale:g}, the "
                f"{self.skipped_in_a_row}. in a row.",
                f"{fix}, add NonFiniteLocator() to name the module, then keep it in fp32 by "
                "fp32_modules=[...] or train with half='bf16'.",
                step=step,
                severity="error",
                value=scale,
                threshold=floor,
            )
        elif is_dynamic and is_skipped and scale < self.min_scale:
            self.alarm(
                trainer,
                "loss_scale_low",
                f"The loss scale fell to {scale:g}, below {self.min_scale:g}, after "
                f"{self.skipped_in_a_row} skipped steps in a row: gradients reach "
                f"{_FP16_MAX / max(scale, 1e-38):.3g}.",
                f"Lower the learning rate to {lower_rate(trainer):.3g} or double its warm-up, or "
                "add NonFiniteLocator() and keep the module that it names in fp32 by "
                "fp32_modules=[...].",
                step=step,
                value=scale,
                threshold=self.min_scale,
            )

    def _check_rate(self, trainer: pl.Trainer, step: int) -> None:
        if self.skip_rate > self.max_skip_rate:
            skipped = sum(self._window)
            self.alarm(
                trainer,
                "skip_rate",
                f"{skipped} of the last {len(self._window)} steps were skipped for overflow, more "
                f"than {self.max_skip_rate:.1%} of {self.window_steps}; the loss scale is "
                f"{self.scale:g}.",
                f"Lower the learning rate to {lower_rate(trainer):.3g}, or pass "
                f"LossScaleConfig(max_scale={self.scale:g}, growth_interval=4000).",
                step=step,
                value=self.skip_rate,
                threshold=self.max_skip_rate,
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return counts and window."""
        return {
            **super().state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "scale": self.scale,
            "window": list(self._window),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state_dict)
        for name in ("steps", "skipped_steps", "skipped_in_a_row", "scale"):
            setattr(self, name, state_dict[name])
        self._window = deque(state_dict["window"], maxlen=self.window_steps)


def _limits(trainer: pl.Trainer) -> tuple[float, bool]:
    """Return the lowest scale, and whether the scale moves."""
    scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    if isinstance(scaler, LossScaler):
        return scaler.config.min_scale, scaler.config.dynamic
    return 1.0, True  # torch's has none; below 1, what unscaling gains is lost
