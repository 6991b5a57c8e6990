"""Float64 reference of the rule that tells spikes from noise, one value at a time."""

import math
from dataclasses import dataclass, field

import numpy as np

__all__ = ["SpikeRule"]


@dataclass
class SpikeRule:
    """Judges one signal; see `RobustWindow` for the rule."""

    floor: float
    size: int
    min_values: int
    z_threshold: float
    patience: int
    window: list[float] = field(default_factory=list)
    streak: int = 0

    def judge(self, value: float) -> tuple[bool, float]:
        """Return whether a value is a spike, and its z; add a healthy value to the window."""
        if not math.isfinite(value) or value == 0:
            return False, math.nan
        z = self._z(value)
        if z > self.z_threshold:
            self.streak += 1
            if self.streak == self.patience:
                self.window, self.streak = [], 0
            return True, z
        self.streak = 0
        self.window = [*self.window, value][-self.size :]
        return False, z

    def _z(self, value: float) -> float:
        if len(self.window) < self.min_values:
            return math.nan
        window = np.sort(np.array(self.window, dtype=np.float64))
        middle = (len(window) - 1) // 2
        is_positive = window[0] > 0
        if is_positive:
            window = np.log(window)
            value = math.log(value) if value > 0 else -math.inf
        center = window[middle]
        reach = window[-1] - center
        mad = np.sort(np.abs(window - center))[middle]
        floor = self.floor if is_positive else self.floor * abs(center)
        if not is_positive and mad == 0:
            return math.nan
        sigma = max(1.4826 * mad, floor, 2 * reach / self.z_threshold)
        return float((value - center) / sigma)
