"""When values vanish because a format is too small for them, and when they will overflow it."""

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_mp.callbacks._rules.records import Learning, Severity, Verdict

__all__ = ["ALIVE", "GrowthRule", "ROUNDING", "UnderflowJudge", "origin_of"]

# A gradient that is zero but for rounding (of a bias in front of a norm, of the keys of attention)
# is as small beside others as a rounding of fp16 beside 1, with a factor of 4 for sums.
ROUNDING = 2.0**-9
ALIVE = 1e-4  # the chance of so long a run without gradient at which a tensor counts as dead
_UNUSED = 1e-6  # the same for samples, of which a run has thousands


@dataclass(eq=False)
class UnderflowJudge(Learning):
    """Tells vanished values from zeros by nature; docs/callbacks/gradient-underflow-monitor.md."""

    baseline_samples: int
    warn_excess: float  # of zeros above the usual, if it is rising
    alarm_excess: float  # in any case
    is_absolute: bool = False  # judges the first sample, or any two in a row, without a baseline
    # Of each tensor: samples, largest share and its lowest at the start, newest four after it, and
    # whether the last sample was an underflow by itself.
    _usual: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def judge(
        self,
        name: str,
        zero_share: float,
        subnormal_share: float,
        is_rounding: bool = False,
        *,
        is_gone: bool = False,
    ) -> Verdict | None:
        """Take a sample of a tensor in, and return what is wrong with it.

        `is_gone` where no gradient is left, though there is a loss; `is_rounding` where it is no
        gradient at all, of which something could vanish.
        """
        usual = self._usual.setdefault(
            name, {"samples": 0, "highest": 0.0, "lowest": 1.0, "newest": [], "was_cut": False}
        )
        usual["samples"] += 1
        usual["gone"] = usual.get("gone", 0) + 1 if zero_share == 1 else 0  # samples in a row
        usual["all_gone"] = usual.get("all_gone", 0) + (zero_share == 1)
        was_cut = usual["was_cut"] or usual["samples"] == 1
        # A format ends inside of the distribution: as many values are just above its end, and nine
        # in ten of those that are not zero.
        is_many = zero_share > self.alarm_excess and subnormal_share > 0
        is_cut = is_many and subnormal_share >= min(zero_share, 0.9 * (1 - zero_share))
        usual["was_cut"] = is_gone or (self.is_absolute and is_cut and not is_rounding)
        highest = usual["highest"]
        if was_cut and usual["was_cut"]:
            words = {"usual": highest, "excess": self.alarm_excess, "subnormal": subnormal_share}
            limit, tags = self.alarm_excess, ("at once",)
            return Verdict("underflow", zero_share, limit, "error", name, tags, numbers=words)
        if usual["samples"] <= self.baseline_samples:
            if zero_share == 1:  # an expert that this batch did not use says nothing
                return None
            usual["highest"] = max(usual["highest"], zero_share)
            usual["lowest"] = min(usual["lowest"], zero_share)
            return None
        newest = usual["newest"] = [*usual["newest"], zero_share][-4:]
        if len(newest) < 2:
            return None
        steady = min(newest[-2:])  # one odd batch does not count
        # As far above the highest as that was above the lowest is still usual.
        excess = steady - (2 * usual["highest"] - usual["lowest"])
        # Zeros without subnormals are those of a dead unit, not of a format that ends.
        # An expert that some batches do not use has none now and then: so long a run of samples
        # without must be unlikely by how often there was a gradient before.
        before = usual["samples"] - usual["gone"]
        unused = 1 - (before - usual["all_gone"] + usual["gone"]) / before if before else 1.0
        is_unlikely = max(unused, 1 / (before + 2)) ** usual["gone"] < _UNUSED
        has_stopped = steady == 1 > usual["highest"] and is_unlikely
        if excess <= self.warn_excess or not (has_stopped or subnormal_share >= excess / 2):
            return None
        is_bad = excess > self.alarm_excess
        if not is_bad and (len(newest) < 4 or sum(newest[2:]) <= sum(newest[:2])):
            return None
        severity: Severity = "error" if is_bad else "warning"
        limit = self.alarm_excess if is_bad else self.warn_excess
        words = {"usual": highest, "excess": limit, "subnormal": subnormal_share}
        return Verdict("underflow", zero_share, limit + highest, severity, name, numbers=words)


def origin_of(dead: Collection[str], names: Iterable[str]) -> str | None:
    """Return the module whose units died, given the parameters whose gradients are zero.

    Modules before it get no gradient. Modules behind it see zeros, but their biases still learn. So
    it is the last module of which no parameter has a gradient; `None` if there is none.
    """
    is_whole: dict[str, bool] = {}
    for name in names:
        owner = name.rpartition(".")[0]
        is_whole[owner] = is_whole.get(owner, True) and name in dead
    return next((owner for owner in reversed(is_whole) if is_whole[owner]), None)


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

    def is_trend(self, name: str) -> bool:
        """Return whether a tensor grows beyond noise."""
        return self._line(self._growth.get(name, [])) is not None

    def overflow_step(self, name: str, left: float = 0.0) -> int | None:
        """Return the step at which `left` bits are left, `None` where no trend is significant."""
        samples = [(step, bits - left) for step, bits in self._growth.get(name, [])]
        slope = self._line(samples)
        if slope is None:
            return None
        step, bits = samples[-1]
        return max(int(step - bits / slope), int(step))  # never in the past

    def _line(self, samples: list[tuple[int, float]]) -> float | None:
        """Return the slope where headroom falls by more than noise."""
        if len(samples) < _LEAST:
            return None
        steps, bits = zip(*samples, strict=True)
        slope, start = statistics.linear_regression(steps, bits)
        mean = statistics.fmean(steps)
        noise = sum((b - start - slope * s) ** 2 for s, b in samples) / (len(samples) - 2)
        error = (noise / sum((s - mean) ** 2 for s in steps)) ** 0.5
        return slope if slope < -_SIGNIFICANT * error else None
