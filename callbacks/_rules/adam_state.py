"""When Adam's second moment no longer tells what the next gradient is like."""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from lightning_mp.callbacks._rules.adam_statistics import AdamField
from lightning_mp.callbacks._rules.ranges import ROUNDING
from lightning_mp.callbacks._rules.verdict import Learning, Verdict

__all__ = ["AdamNumbers", "AdamStateRule"]

_ALL = 0.99  # of a tensor: what is too much without any knowledge of what is usual
_MEMORY = 0.1  # of the 1 / (1 - beta2) steps of a second moment, before its RMS says something
_ALIVE = 1e-4  # the chance of so long a run without gradient at which a tensor counts as dead

_UNKNOWN: dict[str, Any] = {
    "samples": 0,
    "rms": 0.0,  # the highest one at the start
    "below": 0.0,  # the largest share below epsilon at the start
    "newest": (),  # RMS values
    "zero_from": None,  # the step from which on its gradient has been zero
    "with": 0,  # samples with a gradient,
    "without": 0,  # without one before this run,
    "run": 0,  # and in it
    "grown": 0,  # pairs of samples between which its second moment did not just fade
    "moment": 0.0,  # the second moment at the last sample,
    "at": 0,  # and Adam's step
    "from": 0,  # its first step
    "is_real": False,  # whether its gradient ever was more than rounding
}


class AdamNumbers:
    """What one step is about to do to one tensor, from its row of `adam_statistics`."""

    def __init__(self, name: str, row_K: npt.NDArray[Any]) -> None:
        sums = dict(zip(AdamField, map(float, row_K), strict=True))
        count = max(sums[AdamField.NUMEL], 1.0)
        weight = math.sqrt(sums[AdamField.SQUARED_WEIGHT])
        self.name = name
        self.numel = int(count)
        self.is_judged = sums[AdamField.NUMEL] > 0 and not sums[AdamField.NON_FINITE]
        self.is_zero = not sums[AdamField.NON_ZERO]  # the whole gradient
        self.rms = math.sqrt(sums[AdamField.SQUARED_RATIO] / count)  # of `g / max(sqrt(v), eps)`
        self.gradient_rms = math.sqrt(sums[AdamField.SQUARED_GRADIENT] / count)
        # The share of moving values with `sqrt(v) < eps`.
        self.below_epsilon = sums[AdamField.BELOW_EPSILON] / max(sums[AdamField.NON_ZERO], 1.0)
        # The norm of the update over that of the weights; NaN for weights of 0.
        update = math.sqrt(sums[AdamField.SQUARED_UPDATE])
        self.ratio = update / weight if weight else math.nan
        self.second_moment = sums[AdamField.SECOND_MOMENT]
        self.step = int(sums[AdamField.STEP])  # how many steps Adam will have made


@dataclass(kw_only=True, eq=False)
class AdamStateRule(Learning):
    """Judges samples of Adam's states; a high RMS is confirmed by a second sample.

    The arguments are those of `AdamStateMonitor`; why so: docs/callbacks/adam-state-monitor.md.
    """

    baseline_samples: int
    max_update_rms: float
    max_below_epsilon: float
    zero_run_steps: int
    min_ratio: float
    max_ratio: float
    wants_more: bool = field(default=False, init=False)  # samples at once, to confirm a high RMS
    _usual: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _highest_rate: float = field(default=0.0, init=False)
    _last_rate: float = field(default=0.0, init=False)
    _suspects: dict[str, int] = field(default_factory=dict, init=False)  # step of a first high RMS

    def judge(
        self,
        step: int,
        tensors: Collection[AdamNumbers],
        *,
        rate: float | None,
        beta2: float,
        eps: float,
        first: Collection[str],
    ) -> list[Verdict]:
        """Take in a sample of the tensors whose numbers are all finite; return what is wrong.

        Of several with a high RMS, those in `first` are named before others.
        """
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        is_rising, self._last_rate = (rate or 0.0) > self._last_rate, rate or 0.0
        is_silent = all(numbers.is_zero for numbers in tensors)
        moving = [numbers.gradient_rms for numbers in tensors if not numbers.is_zero]
        rounding = ROUNDING * statistics.median(moving) if moving else 0.0
        verdicts: list[Verdict] = []
        high: list[Verdict] = []
        for numbers in tensors:
            usual = self._usual.setdefault(numbers.name, {**_UNKNOWN, "from": step})
            usual["samples"] += 1
            found = [self._judge_zero_run(step, numbers, usual, beta2, is_silent)]
            newest = usual["newest"] = [*usual["newest"], numbers.rms][-32:]
            is_known = usual["samples"] > self.baseline_samples
            usual["is_real"] |= numbers.gradient_rms > rounding
            if usual["is_real"]:
                found.append(self._judge_epsilon(numbers, usual, eps, is_known))
                knows_rate = is_known or (rate is not None and not is_rising)
                found.append(self._judge_ratio(numbers, rate, is_known, knows_rate))
            verdicts += [replace(verdict, tensor=numbers.name) for verdict in found if verdict]
            if not is_known or numbers.step < _MEMORY / (1 - beta2):
                usual["rms"] = max(usual["rms"], numbers.rms)
                usual["below"] = max(usual["below"], numbers.below_epsilon)
                continue
            limit = max(self._highest_rms(numbers, newest), 1.5 * usual["rms"])
            if numbers.rms > limit:
                high.append(Verdict("update_rms", numbers.rms, limit, tensor=numbers.name))
        return verdicts + self._confirm(step, high, first)

    def _highest_rms(self, numbers: AdamNumbers, newest: list[float]) -> float:
        """Return what is still fine for a tensor of this size, this sparse and this noisy."""
        # The RMS of few values is noisy, the more so as those of a bias move together.
        limit = self.max_update_rms * (1 + 10 / math.sqrt(numbers.numel))
        moving = [rms for rms in newest if rms > 0]
        sparse = math.sqrt(len(newest) / max(len(moving), 1))
        return max(limit * sparse, 3 * statistics.median(moving or [0.0]))

    def _confirm(self, step: int, high: list[Verdict], first: Collection[str]) -> list[Verdict]:
        if not high:
            return []
        names = [str(verdict.tensor) for verdict in high]
        suspects, self._suspects = self._suspects, dict.fromkeys(names, step)
        confirmed = [v for v in high if step - suspects.get(str(v.tensor), -100) <= 10]
        self.wants_more = not confirmed
        if not confirmed:
            return []
        chosen = [v for v in confirmed if v.tensor in first] or confirmed
        worst = max(chosen, key=lambda v: (v.value or 0) / (v.threshold or 1))
        return [replace(worst, numbers={"count": len(confirmed)})]

    def _judge_epsilon(
        self, numbers: AdamNumbers, usual: dict[str, Any], eps: float, is_known: bool
    ) -> Verdict | None:
        share = numbers.below_epsilon
        # What Adam divides by should be mostly the gradient's size: a thousandth of it is left.
        root = math.sqrt(numbers.second_moment / numbers.numel)
        power = math.floor(math.log10(max(numbers.gradient_rms, root, 1e-30))) - 3
        words = {"eps": eps, "usual": usual["below"], "excess": self.max_below_epsilon}
        words["lower_eps"] = min(eps / 1000, 10.0**power)
        threshold = usual["below"] + self.max_below_epsilon
        if is_known and share > threshold:
            return Verdict("below_epsilon", share, threshold, numbers=words)
        if share < _ALL:
            return None
        return Verdict("below_epsilon", share, _ALL, says="below_epsilon_all", numbers=words)

    def _judge_zero_run(
        self, step: int, numbers: AdamNumbers, usual: dict[str, Any], beta2: float, is_silent: bool
    ) -> Verdict | None:
        # Between samples without gradient, a second moment falls by beta2 a step, but for rounding.
        left = usual["moment"] * beta2 ** max(numbers.step - usual["at"], 0)
        has_grown = numbers.second_moment > 1.001 * left
        usual["moment"], usual["at"] = numbers.second_moment, numbers.step
        if has_grown or not numbers.is_zero:
            usual["grown"] += 1
            usual["without"] += usual["run"]
            usual["run"], usual["zero_from"] = 0, None
        if not numbers.is_zero:
            usual["with"] += 1
            return None
        usual["run"] += not is_silent
        if usual["zero_from"] is None:
            usual["zero_from"] = step
        steps = step - usual["zero_from"]
        boost = _boost(steps, beta2)
        seen = max(step - usual["from"], 1)
        if is_silent:
            is_long = boost >= self.max_update_rms
        else:
            had_always = usual["with"] >= 3 and not usual["without"]
            is_long = had_always or math.exp(-usual["grown"] * steps / seen) < _ALIVE
        if not usual["grown"] or steps < self.zero_run_steps or not is_long:
            return None
        words = {"boost": boost, "limit": _boost(math.inf, beta2)}
        return Verdict("zero_run", steps, self.zero_run_steps, numbers=words)

    def _judge_ratio(
        self, numbers: AdamNumbers, rate: float | None, is_known: bool, knows_rate: bool
    ) -> Verdict | None:
        if numbers.is_zero:
            return None
        # Neither a schedule that ends near 0 nor one that begins there is a failure.
        is_low = numbers.ratio < self.min_ratio and knows_rate
        is_low = is_low and (rate is None or rate > 1e-3 * self._highest_rate)
        if not is_low and not (is_known and numbers.ratio > self.max_ratio):
            return None
        low = (self.min_ratio, "update_to_weight_low")
        threshold, fix = low if is_low else (self.max_ratio, "")
        words = {"least": self.min_ratio, "most": self.max_ratio}
        return Verdict("update_to_weight", numbers.ratio, threshold, fix=fix, numbers=words)


def _boost(steps: float, beta2: float) -> float:
    """Return how much longer than before a step is, after so many without gradient."""
    return math.sqrt(1 / (beta2 ** (steps + 1) + 1 - beta2))
