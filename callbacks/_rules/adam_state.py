"""When Adam's second moment no longer tells what the next gradient is like."""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_mp.callbacks._rules.verdict import Verdict

__all__ = ["AdamNumbers", "AdamStateRule"]


@dataclass(frozen=True, kw_only=True)
class AdamNumbers:
    """What one step is about to do to one tensor.

    Args:
        name: The parameter.
        numel: How many values it has.
        rms: The RMS of `g / max(sqrt(v_hat), eps)`.
        below_epsilon: The share of moving values with `sqrt(v_hat) < eps`.
        ratio: The norm of the update over that of the weights; NaN for weights of 0.
        is_zero: Whether the whole gradient is 0.
    """

    name: str
    numel: int
    rms: float
    below_epsilon: float
    ratio: float
    is_zero: bool


@dataclass(kw_only=True, eq=False)
class AdamStateRule:
    """Judges samples of Adam's states; a high RMS is confirmed by a second sample.

    Args:
        baseline_samples: Samples of a tensor that tell what is usual for it.
        max_update_rms: The RMS that is too high, before the allowance for few values.
        max_below_epsilon: The share below epsilon, above the usual, that is too large.
        zero_run_steps: Steps without gradient that are too many.
        min_ratio: The ratio of update to weight that is too small.
        max_ratio: And the one that is too large.
    """

    baseline_samples: int
    max_update_rms: float
    max_below_epsilon: float
    zero_run_steps: int
    min_ratio: float
    max_ratio: float
    wants_more: bool = field(default=False, init=False)  # samples at once, to confirm a high RMS
    # Of each tensor: samples, highest RMS and highest share below epsilon at the start, the
    # newest RMS values, the step from which on its gradient has been zero, or None, and whether
    # it ever was not.
    _usual: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _highest_rate: float = field(default=0.0, init=False)
    # The step of a high RMS that waits for a second.
    _suspects: dict[str, int] = field(default_factory=dict, init=False)

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
        """Take in a sample, and return what is wrong.

        Args:
            step: Of the sample.
            tensors: Those whose numbers are all finite.
            rate: The learning rate, if it is known.
            beta2: Of Adam.
            eps: Of Adam.
            first: Names to name before others, of several with a high RMS.
        """
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        verdicts: list[Verdict] = []
        high: list[Verdict] = []
        for numbers in tensors:
            usual = self._usual_of(numbers.name)
            verdicts += self._judge_zero_run(step, numbers, usual, beta2)
            newest = usual["newest"] = [*usual["newest"], numbers.rms][-32:]
            if usual["samples"] <= self.baseline_samples:
                usual["rms"] = max(usual["rms"], numbers.rms)
                usual["below"] = max(usual["below"], numbers.below_epsilon)
                continue
            verdicts += self._judge_epsilon(numbers, usual["below"], eps)
            verdicts += self._judge_ratio(numbers, rate)
            # The RMS of few values is noisy, the more so as those of a bias move together.
            limit = self.max_update_rms * (1 + 10 / math.sqrt(numbers.numel))
            limit = max(limit, 1.5 * usual["rms"], 3 * statistics.median(newest))
            if numbers.rms > limit:
                high.append(Verdict("update_rms", numbers.rms, limit, tensor=numbers.name))
        return verdicts + self._confirm(step, high, first)

    def _usual_of(self, name: str) -> dict[str, Any]:
        empty = {"samples": 0, "rms": 0.0, "below": 0.0, "newest": []}
        usual = self._usual.setdefault(name, {**empty, "zero_from": None, "was_moving": False})
        usual["samples"] += 1
        return usual

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

    def _judge_epsilon(self, numbers: AdamNumbers, usual: float, eps: float) -> list[Verdict]:
        threshold = usual + self.max_below_epsilon
        if numbers.below_epsilon <= threshold:
            return []
        words = {"eps": eps, "usual": usual, "excess": self.max_below_epsilon}
        share = numbers.below_epsilon
        return [Verdict("below_epsilon", share, threshold, tensor=numbers.name, numbers=words)]

    def _judge_zero_run(
        self, step: int, numbers: AdamNumbers, usual: dict[str, Any], beta2: float
    ) -> list[Verdict]:
        usual["was_moving"] |= not numbers.is_zero
        if not numbers.is_zero:
            usual["zero_from"] = None
            return []
        if usual["zero_from"] is None:
            usual["zero_from"] = step
        steps = step - usual["zero_from"]
        if not usual["was_moving"] or steps < self.zero_run_steps:
            return []
        words = {"boost": _boost(steps, beta2), "limit": _boost(math.inf, beta2)}
        return [Verdict("zero_run", steps, self.zero_run_steps, tensor=numbers.name, numbers=words)]

    def _judge_ratio(self, numbers: AdamNumbers, rate: float | None) -> list[Verdict]:
        if numbers.is_zero:
            return []
        # A schedule that ends near 0 is no failure.
        is_low = numbers.ratio < self.min_ratio
        is_low = is_low and (rate is None or rate > 1e-3 * self._highest_rate)
        if not is_low and not numbers.ratio > self.max_ratio:
            return []
        threshold, fix = self.max_ratio, ""
        if is_low:
            threshold, fix = self.min_ratio, "update_to_weight_low"
        words = {"least": self.min_ratio, "most": self.max_ratio}
        verdict = Verdict("update_to_weight", numbers.ratio, threshold, fix=fix, numbers=words)
        return [replace(verdict, tensor=numbers.name)]

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual."""
        usual = {name: dict(values) for name, values in self._usual.items()}
        return {"usual": usual, "highest_rate": self._highest_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what is usual."""
        self._usual = {name: dict(values) for name, values in state["usual"].items()}
        self._highest_rate = state["highest_rate"]


def _boost(steps: float, beta2: float) -> float:
    """Return how much longer than before a step is, after so many without gradient."""
    return math.sqrt(1 / (beta2 ** (steps + 1) + 1 - beta2))
