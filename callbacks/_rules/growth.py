"""When what grows will overflow, by a line through its logarithm."""

import statistics
from dataclasses import dataclass, field

from lightning_mp.callbacks._rules.learning import Learning

__all__ = ["GrowthRule"]

_NEWEST, _LEAST = 16, 5  # samples that a line goes through
# Slopes beyond 6 of their standard errors: at 3 degrees of freedom, the fewest, one in 200 lines
# through noise that is normal, and with ten samples one in 6000.
_SIGNIFICANT = 6.0


@dataclass(eq=False)
class GrowthRule(Learning):
    """Forecasts from the headroom of each tensor, in bits, the step at which it has none."""

    _growth: dict[str, list[tuple[int, float]]] = field(default_factory=dict, init=False)

    def add(self, name: str, step: int, bits: float) -> None:
        """Take in a sample of a tensor: its headroom at a step, finite."""
        self._growth[name] = [*self._growth.get(name, []), (step, bits)][-_NEWEST:]

    def overflow_step(self, name: str) -> int | None:
        """Return the step of the overflow, `None` where no trend is significant."""
        samples = self._growth.get(name, [])
        if len(samples) < _LEAST:
            return None
        steps, bits = zip(*samples, strict=True)
        slope, start = statistics.linear_regression(steps, bits)
        mean = statistics.fmean(steps)
        left = sum((b - start - slope * s) ** 2 for s, b in samples) / (len(samples) - 2)
        error = (left / sum((s - mean) ** 2 for s in steps)) ** 0.5
        if not slope < -_SIGNIFICANT * error:
            return None
        return max(int(steps[-1] - bits[-1] / slope), int(steps[-1]))
