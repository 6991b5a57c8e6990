"""Rule for underflow of values, and the module whose units have died."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_mp.callbacks._rules.records import Learning, Severity, Verdict

__all__ = ["ALIVE", "ROUNDING", "UnderflowJudge", "origin_of"]

# A gradient that is pure rounding error (of a bias before a norm, of attention keys) is at most the
# rounding error of fp16 relative to other gradients, with a factor of 4 for sums.
ROUNDING = 2.0**-9
ALIVE = 1e-4  # probability of a run without gradients below which a tensor counts as dead
_UNUSED = 1e-6  # the same per sample, of which a run has thousands


@dataclass(eq=False)
class UnderflowJudge(Learning):
    """Tells underflow from other zeros; see docs/callbacks/gradient-underflow-monitor.md."""

    baseline_samples: int
    warn_excess: float  # share of zeros above the usual share, if rising
    alarm_excess: float  # the same, whether rising or not
    is_absolute: bool = False  # judge the first sample, or two consecutive, without a baseline
    # Per tensor: number of samples, highest and lowest share in the first samples, the latest four
    # shares, and whether the last sample was an underflow without a baseline.
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
        """Add a sample of a tensor and return a verdict.

        `is_rounding`: the gradient is pure rounding error; `is_gone`: no gradient is left although
        there is a loss.
        """
        usual = self._usual.setdefault(
            name, {"samples": 0, "highest": 0.0, "lowest": 1.0, "newest": [], "was_cut": False}
        )
        usual["samples"] += 1
        usual["gone"] = usual.get("gone", 0) + 1 if zero_share == 1 else 0  # consecutive samples
        usual["all_gone"] = usual.get("all_gone", 0) + (zero_share == 1)
        was_cut = usual["was_cut"] or usual["samples"] == 1
        # The dtype cuts the distribution if there are as many subnormals as zeros, or if 90% of the
        # nonzero values are subnormal.
        is_many = zero_share > self.alarm_excess and subnormal_share > 0
        is_cut = is_many and subnormal_share >= min(zero_share, 0.9 * (1 - zero_share))
        usual["was_cut"] = is_gone or (self.is_absolute and is_cut and not is_rounding)
        highest = usual["highest"]
        if was_cut and usual["was_cut"]:
            limit, tags = self.alarm_excess, ("at once",)
            found = Verdict("underflow", zero_share, limit, "error", name, tags)
            return found.given(usual=highest, excess=limit, subnormal=subnormal_share)
        if usual["samples"] <= self.baseline_samples:
            if zero_share < 1:  # otherwise, for example, an expert that this batch did not use
                usual["highest"] = max(usual["highest"], zero_share)
                usual["lowest"] = min(usual["lowest"], zero_share)
            return None
        newest = usual["newest"] = [*usual["newest"], zero_share][-4:]
        if len(newest) < 2:
            return None
        steady = min(newest[-2:])  # ignores one odd batch
        # The usual range extends above the highest share by the difference to the lowest.
        excess = steady - (2 * usual["highest"] - usual["lowest"])
        # Zeros without subnormals come from dead units, not from underflow. An expert may have no
        # gradient in some batches, so a run of such samples must be unlikely given how often the
        # expert had a gradient before.
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
        found = Verdict("underflow", zero_share, limit + highest, severity, name)
        return found.given(usual=highest, excess=limit, subnormal=subnormal_share)


def origin_of(dead: Collection[str], names: Iterable[str]) -> str | None:
    """Return the module whose units died, given the parameters with zero gradients.

    Modules before the dead units get no gradient, while biases of later modules still do. So the
    result is the last module without any gradient, or `None`.
    """
    is_whole: dict[str, bool] = {}
    for name in names:
        owner = name.rpartition(".")[0]
        is_whole[owner] = is_whole.get(owner, True) and name in dead
    return next((owner for owner in reversed(is_whole) if is_whole[owner]), None)
