"""When a loss scale that sinks, or skips too often, means trouble."""

from collections import deque
from dataclasses import dataclass, field

import torch

from lightning_mp.callbacks._rules.verdict import Learning, Verdict

__all__ = ["LossScaleRule"]

_FP16_MAX = torch.finfo(torch.float16).max


@dataclass(kw_only=True, eq=False)
class LossScaleRule(Learning):
    """Judges the loss scale after each step.

    Absolute legs: a skip at the lowest scale, which no lower one can cure, and a scale below
    `min_scale`. A rate: too many skips in the newest steps.

    The arguments are those of `LossScaleMonitor`.
    """

    max_skip_rate: float
    window_steps: int
    calibration_steps: int
    min_scale: float
    steps: int = field(default=0, init=False)
    skipped_steps: int = field(default=0, init=False)
    skipped_in_a_row: int = field(default=0, init=False)
    scale: float | None = field(default=None, init=False)
    _window: deque[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._window = deque(maxlen=self.window_steps)

    @property
    def skip_rate(self) -> float:
        """Skipped steps as a share of the last `window_steps` steps."""
        return sum(self._window) / self.window_steps

    def judge(
        self, before: float | None, scale: float, is_skipped: bool, floor: float, is_dynamic: bool
    ) -> list[Verdict]:
        """Take in a step, with the scale before and after it, and return what is wrong."""
        self.scale = scale
        self.steps += 1
        self.skipped_steps += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        if self.steps > self.calibration_steps:
            self._window.append(is_skipped)
        found = []
        in_a_row = {"in_a_row": self.skipped_in_a_row}
        if is_skipped and (not is_dynamic or (before is not None and before <= floor)):
            fix = "" if is_dynamic else "loss_scale_floor_static"
            lowest = Verdict("loss_scale_floor", scale, floor, "error", fix=fix, numbers=in_a_row)
            found.append(lowest)
        elif is_dynamic and is_skipped and scale < self.min_scale:
            numbers = {**in_a_row, "reach": _FP16_MAX / max(scale, 1e-38)}
            found.append(Verdict("loss_scale_low", scale, self.min_scale, numbers=numbers))
        if self.skip_rate > self.max_skip_rate:
            numbers = {"skipped": sum(self._window), "of": len(self._window), "scale": scale}
            numbers["window"] = self.window_steps
            found.append(Verdict("skip_rate", self.skip_rate, self.max_skip_rate, numbers=numbers))
        return found
