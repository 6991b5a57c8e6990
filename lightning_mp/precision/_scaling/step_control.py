"""Holds LR schedules and `global_step` where a step was skipped."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.types import LRSchedulerConfig

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["HeldSchedule", "held", "hold_global_step", "stop_rate_finder"]


class HeldSchedule(LRSchedulerConfig):
    """A scheduler configuration that does not advance while the last step was skipped.

    Lightning advances step-wise schedules after every optimizer step, also if a loss scaler skipped
    the step (Lightning#5558, #16228): if the first 30 of 100 warm-up steps overflow, only 70 steps
    of warm-up take effect.
    """

    def __init__(self, config: LRSchedulerConfig, is_held: Callable[[], bool]) -> None:
        self._is_held = is_held
        super().__init__(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})

    @property
    def frequency(self) -> int:
        """Number of batches between two steps of the schedule."""
        # Lightning checks whether `(batch_idx + 1) % frequency == 0`.
        return sys.maxsize if self.interval == "step" and self._is_held() else self._frequency

    @frequency.setter
    def frequency(self, value: int) -> None:
        self._frequency = value


def held(
    configs: Iterable[LRSchedulerConfig], is_held: Callable[[], bool]
) -> list[LRSchedulerConfig]:
    """Return configurations of schedules that do not advance while `is_held`."""
    return [c if isinstance(c, HeldSchedule) else HeldSchedule(c, is_held) for c in configs]


def hold_global_step(model: "pl.LightningModule") -> None:
    """Subtract one step from the progress in advance, because Lightning is about to add one.

    `global_step` controls weight averaging and `max_steps`.
    """
    loop = model.trainer.fit_loop.epoch_loop
    if model.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for tracker in (progress.total, progress.current):
        # Lightning does not count steps in hooks, and its rate finder averages losses by the count.
        if tracker.ready > tracker.completed and not _finds_rate(model.trainer):
            tracker.ready -= 1
            tracker.completed -= 1


def stop_rate_finder(model: Any) -> bool:
    """End the search of Lightning's learning rate finder; return whether it is running."""
    model.trainer.should_stop |= _finds_rate(model.trainer)
    return _finds_rate(model.trainer)


def _finds_rate(trainer: Any) -> bool:
    return any(isinstance(each, _LRCallback) for each in trainer.callbacks)
