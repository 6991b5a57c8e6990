"""Rules for the next step of Adam and for its second moment."""

import math
import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from lightning_mp.callbacks._rules.adam_statistics import AdamField
from lightning_mp.callbacks._rules.records import Learning, StepFacts, Verdict
from lightning_mp.callbacks._rules.underflow import ALIVE, ROUNDING, origin_of

__all__ = ["AdamNumbers", "AdamStateRule"]

_ALL = 0.99  # share of a tensor that raises an alarm without a baseline
_MEMORY = 0.1  # share of the 1 / (1 - beta2) steps after which the RMS is meaningful


# State of each tensor, as saved in checkpoints.
_UNKNOWN: dict[str, Any] = {
    "samples": 0,
    "rms": 0.0,  # the maximum of the first samples
    "below": 0.0,  # the largest share below epsilon in the first samples
    "newest": (),  # the latest RMS values
    "zero_from": None,  # the step since which the gradient has been zero
    "with": 0,  # samples with a gradient
    "without": 0,  # samples without a gradient before the current run of zeros
    "run": 0,  # samples in the current run of zeros
    "grown": 0,  # samples before which the second moment did not only decay
    "moment": 0.0,  # the second moment at the last sample
    "at": 0,  # Adam's step at the last sample
    "from": 0,  # the step of the first sample
    "is_real": False,  # whether the gradient was ever more than rounding error
}


class AdamNumbers:
    """Measurements of the next update of one tensor, from its row of `adam_statistics`."""

    def __init__(
        self, name: str, row_K: npt.NDArray[Any], beta2: float, eps: float, clip: float
    ) -> None:
        sums = dict(zip(AdamField, map(float, row_K), strict=True))
        count = max(sums[AdamField.NUMEL], 1.0)
        weight = math.sqrt(sums[AdamField.SQUARED_WEIGHT])
        self.name, self.beta2, self.eps = name, beta2, eps
        self.is_clipped = clip < math.inf  # `clip_update_rms` of `SafeAdamW`
        self.numel = int(count)
        self.is_judged = not sums[AdamField.NON_FINITE]
        self.is_zero = not sums[AdamField.NON_ZERO]  # the whole gradient
        # RMS of `g / max(sqrt(v), eps)`.
        self.rms = math.sqrt(sums[AdamField.SQUARED_RATIO] / count)
        self.gradient_rms = math.sqrt(sums[AdamField.SQUARED_GRADIENT] / count)
        # The share of moving values with `sqrt(v) < eps`.
        self.below_epsilon = sums[AdamField.BELOW_EPSILON] / max(sums[AdamField.NON_ZERO], 1.0)
        # The norm of the update over that of the weights; NaN for weights of 0.
        update = math.sqrt(sums[AdamField.SQUARED_UPDATE]) / max(self.rms / clip, 1.0)
        self.ratio = update / weight if weight else math.nan
        self.moving, self.stagnant = sums[AdamField.NON_ZERO], sums[AdamField.STAGNANT]
        self.second_moment = sums[AdamField.SECOND_MOMENT]
        self.step = int(sums[AdamField.STEP])  # step count after this step


@dataclass(kw_only=True, eq=False)
class AdamStateRule(Learning):
    """Judges samples of Adam's states; see docs/callbacks/adam-state-monitor.md."""

    baseline_samples: int
    max_update_rms: float
    max_below_epsilon: float
    zero_run_steps: int
    min_ratio: float
    max_ratio: float
    max_stagnant: float
    # Whether the next steps must be sampled to confirm a high RMS.
    wants_more: bool = field(default=False, init=False)
    _usual: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _rates: dict[int, float] = field(default_factory=dict, init=False)  # latest, by optimizer
    _suspects: dict[str, int] = field(default_factory=dict, init=False)  # step of the last high RMS

    def judge(
        self, facts: StepFacts, tensors: Collection[AdamNumbers], first: Collection[str]
    ) -> list[Verdict]:
        """Add a sample of tensors with finite numbers and return verdicts; prefer `first`."""
        step, rate = facts.step, facts.lr
        # Neither the beginning of a warm-up nor the end of a schedule is a failure.
        is_rising = (rate or 0.0) > self._rates.get(facts.optimizer, 0.0)
        is_used = rate is None or rate > 1e-3 * (facts.highest_lr or 0.0)
        self._rates[facts.optimizer] = rate or 0.0
        is_silent = all(numbers.is_zero for numbers in tensors)
        moving = [numbers.gradient_rms for numbers in tensors if not numbers.is_zero]
        rounding = ROUNDING * statistics.median(moving) if moving else 0.0
        verdicts = self._judge_stagnant(tensors) if is_used and not is_rising else []
        high: list[Verdict] = []
        for numbers in tensors:
            usual = self._usual.setdefault(numbers.name, {**_UNKNOWN, "from": step})
            usual["samples"] += 1
            verdicts += self._judge_zero_run(step, numbers, usual, is_silent)
            newest = usual["newest"] = [*usual["newest"], numbers.rms][-32:]
            is_known = usual["samples"] > self.baseline_samples
            usual["is_real"] |= numbers.gradient_rms > rounding
            # A gradient of pure rounding error is below epsilon in any healthy run.
            if usual["is_real"]:
                verdicts += self._judge_epsilon(numbers, usual, is_known)
                # Only a second sample distinguishes a warm-up from a low learning rate.
                knows_rate = is_known or (rate is not None and not is_rising)
                verdicts += self._judge_ratio(numbers, is_known, knows_rate and is_used)
            if not is_known or numbers.step < _MEMORY / (1 - numbers.beta2):
                usual["rms"] = max(usual["rms"], numbers.rms)
                usual["below"] = max(usual["below"], numbers.below_epsilon)
                continue
            limit = max(self._highest_rms(numbers, newest), 1.5 * usual["rms"])
            if numbers.rms > limit and not numbers.is_clipped:
                high.append(Verdict("update_rms", numbers.rms, limit, tensor=numbers.name))
        dead = {str(verdict.tensor) for verdict in verdicts if verdict.kind == "zero_run"}
        origin = origin_of(dead, [numbers.name for numbers in tensors])
        verdicts.sort(key=lambda v: str(v.tensor).rpartition(".")[0] != origin)
        return verdicts + self._confirm(step, high, first)

    def _highest_rms(self, numbers: AdamNumbers, newest: list[float]) -> float:
        """Return the highest healthy RMS for the size, sparsity and noise of a tensor."""
        # The RMS of few values is noisy, especially as the values of a bias are correlated.
        limit = self.max_update_rms * (1 + 10 / math.sqrt(numbers.numel))
        moving = [rms for rms in newest if rms > 0]
        # If a share q of the samples has a gradient, the second moment is q times its square.
        sparse = math.sqrt(len(newest) / max(len(moving), 1))
        return max(limit * sparse, 3 * statistics.median(moving or [0.0]))

    def _confirm(self, step: int, high: list[Verdict], first: Collection[str]) -> list[Verdict]:
        if not high:
            return []
        names = [str(verdict.tensor) for verdict in high]
        # To ignore single odd batches, the same tensor must be high again within a few steps.
        suspects = self._suspects
        confirmed = [v for v in high if step - suspects.get(str(v.tensor), -100) <= 10]
        suspects |= dict.fromkeys(names, step)  # beside those of other optimizers
        self.wants_more = not confirmed
        if not confirmed:
            return []
        # `first` contains embeddings, where the RMS rises before the loss (arXiv:2304.13013).
        chosen = [v for v in confirmed if v.tensor in first] or confirmed
        worst = max(chosen, key=lambda v: (v.value or 0) / (v.threshold or 1))
        return [worst.given(count=len(confirmed))]

    def _judge_epsilon(
        self, numbers: AdamNumbers, usual: dict[str, Any], is_known: bool
    ) -> Iterator[Verdict]:
        share, threshold = numbers.below_epsilon, usual["below"] + self.max_below_epsilon
        is_above = is_known and share > threshold
        if is_above or share >= _ALL:
            threshold, tags = (threshold, ()) if is_above else (_ALL, ("all",))
            found = Verdict("below_epsilon", share, threshold, tensor=numbers.name, tags=tags)
            # Adam should divide mostly by the size of the gradient: epsilon is a thousandth of it.
            root = math.sqrt(numbers.second_moment / numbers.numel)
            power = math.floor(math.log10(max(numbers.gradient_rms, root, 1e-30))) - 3
            found = found.given(eps=numbers.eps, lower_eps=min(numbers.eps / 1000, 10.0**power))
            yield found.given(usual=usual["below"], excess=self.max_below_epsilon)

    def _judge_zero_run(
        self, step: int, numbers: AdamNumbers, usual: dict[str, Any], is_silent: bool
    ) -> Iterator[Verdict]:
        # Without gradients, the second moment decays by beta2 per step, except for rounding.
        left = usual["moment"] * numbers.beta2 ** max(numbers.step - usual["at"], 0)
        has_grown = numbers.second_moment > 1.001 * left
        usual["moment"], usual["at"] = numbers.second_moment, numbers.step
        if has_grown or not numbers.is_zero:
            usual["grown"] += 1
            usual["without"] += usual["run"]
            usual["run"], usual["zero_from"] = 0, None
        if not numbers.is_zero:
            usual["with"] += 1
            return
        usual["run"] += not is_silent
        if usual["zero_from"] is None:
            usual["zero_from"] = step
        steps = step - usual["zero_from"]
        boost = _boost(steps, numbers.beta2)
        seen = max(step - usual["from"], 1)
        if is_silent:  # for example, a loss of exactly 0; judge only the harm of such runs
            is_long = boost >= self.max_update_rms
        else:
            # The row of a rare token has long runs without a gradient. If gradients occur at random
            # with the observed rate, a run of this length has probability exp(-rate * steps).
            had_always = usual["with"] >= 3 and not usual["without"]
            is_long = had_always or math.exp(-usual["grown"] * steps / seen) < ALIVE
        is_harmful = is_long and not numbers.is_clipped
        if usual["grown"] and steps >= self.zero_run_steps and is_harmful:
            found = Verdict("zero_run", steps, self.zero_run_steps, tensor=numbers.name)
            yield found.given(boost=boost, limit=_boost(math.inf, numbers.beta2))

    def _judge_stagnant(self, tensors: Collection[AdamNumbers]) -> list[Verdict]:
        """Judge all weights together, because they share the learning rate and the dtype."""
        moving = sum(numbers.moving for numbers in tensors)
        share = sum(numbers.stagnant for numbers in tensors) / max(moving, 1.0)
        if share <= self.max_stagnant:
            return []
        most = max(tensors, key=lambda numbers: numbers.stagnant)
        still = sum(numbers.stagnant > 0.5 * numbers.moving for numbers in tensors)
        verdict = Verdict("stagnant_weights", share, self.max_stagnant, tensor=most.name)
        return [verdict.given(count=still)]

    def _judge_ratio(
        self, numbers: AdamNumbers, is_known: bool, may_be_low: bool
    ) -> Iterator[Verdict]:
        ratio, name = numbers.ratio, numbers.name
        is_low = may_be_low and ratio < self.min_ratio
        if not numbers.is_zero and (is_low or (is_known and ratio > self.max_ratio)):
            threshold, tags = (self.min_ratio, ("low",)) if is_low else (self.max_ratio, ())
            found = Verdict("update_to_weight", ratio, threshold, tensor=name, tags=tags)
            yield found.given(least=self.min_ratio, most=self.max_ratio)


def _boost(steps: float, beta2: float) -> float:
    """Return the factor by which the first update after a run without gradients is larger."""
    return math.sqrt(1 / (beta2 ** (steps + 1) + 1 - beta2))
