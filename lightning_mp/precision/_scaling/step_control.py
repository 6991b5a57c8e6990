"""What Lightning counts and schedules by steps, kept still where a step was skipped."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.types import LRSchedulerConfig

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["HeldSchedule", "hold_global_step", "hold_schedules"]


class HeldSchedule(LRSchedulerConfig):
    """A scheduler's configuration that is due at no step while the last one was skipped.

    Lightning advances step-wise schedules after every optimizer step, also after one that a loss
    scaler skipped (Lightning#5558, #16228): a warm-up of 100 steps that overflows for its first 30
    has warmed up for 70.
    """

    def __init__(self, config: LRSchedulerConfig, is_held: Callable[[], bool]) -> None:
        self._is_held = is_held
        super().__init__(
            # By its fields, whichever the installed version of Lightning has.
            **{f.name: getattr(config, f.name) for f in dataclasses.fields(LRSchedulerConfig)}
        )

    @property
    def frequency(self) -> int:
        """Batches between two steps of the schedule."""
        # Lightning asks whether `(batch_idx + 1) % frequency == 0`.
        return sys.maxsize if self.interval == "step" and self._is_held() else self._frequency

    @frequency.setter
    def frequency(self, value: int) -> None:
        self._frequency = value


def hold_schedules(configs: Sequence[Any], is_held: Callable[[], bool]) -> list[LRSchedulerConfig]:
    """Return configurations that hold step-wise schedules while `is_held()`."""
    return [HeldSchedule(config, is_held) for config in configs]


def hold_global_step(model: "pl.LightningModule") -> None:
    """Take back, ahead of Lightning, the step that it is about to count.

    `global_step` tells averages of weights when to update and `max_steps` when to stop.
    """
    loop = model.trainer.fit_loop.epoch_loop
    if model.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    progress.total.completed -= 1
    progress.current.completed -= 1
