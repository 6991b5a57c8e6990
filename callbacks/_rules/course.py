"""Rules for slow changes: the loss compared with its best and start, the trend of gradients."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_mp.callbacks._rules.records import Learning, Verdict

__all__ = ["SIGMA_PER_MAD", "CourseRule", "noise_of"]

_EVERY = 8  # steps between two judgements
_WINDOW = 32  # steps of the median; its error is 0.22 times the noise of a step
_FIRST = 4  # steps of the median at the start; later steps have changed the weights
_LASTING = 4  # consecutive judgements, which span the steps of one median
# The standard deviation of a normal distribution is 1.4826 times its median absolute deviation.
SIGMA_PER_MAD = 1.4826
# A median that is higher by 6 deviations of a step is higher by 20 of its own errors. This is not
# noise, even if steps are as dependent as if only one in 16 were new.
_NOISES = 6.0
_NOISES_NOW = 3.0  # in units of the noise at the new level, which grows with the level
_FLOOR = 0.05  # least noise, as a share of the best level
_TIMES_RECOVERED = 3.0  # for losses that swing, such as rewards
_RIVALS = 10.0  # both losses of a GAN may rise to several times their start
_LOST = 0.5  # share of the improvement that a divergence has lost
_STALLED = 96  # steps without a loss below its start, after a rise
_HORIZON = 1000  # the same without a rise, which is only a note
_GROWTH = 10.0  # factor of a gradient norm above its lowest level
_TREND = 16  # judgements (128 steps) in which the norm must rise from quarter to quarter


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of at least three values about their trend."""
    # The median of differences is robust to a slope and to outliers. Differences of independent
    # values have sqrt(2) times their deviation.
    steps = [after - before for before, after in itertools.pairwise(values)]
    center = statistics.median(steps)
    return SIGMA_PER_MAD * statistics.median(abs(s - center) for s in steps) / 2**0.5


@dataclass(eq=False)
class CourseRule(Learning):
    """Judges slow changes of an optimizer's loss and gradient norm, in units of the loss's noise.

    Levels are medians of 32 steps. `best` is the lowest level so far, `recovered` the largest rise
    that was followed by a new best. A divergence satisfies for 32 steps

        level - best > max(6 noise at the best, 3 noise now, 3 recovered, (start - best) / 2)

    docs/callbacks/spike-guard.md explains this rule, stalls and trends.
    """

    rivals: Sequence["CourseRule"] = ()  # rules of other optimizers, as in a GAN
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _WINDOW), init=False)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW), init=False)
    _norm_levels: deque[float] = field(default_factory=lambda: deque(maxlen=_TREND), init=False)
    # Plain numbers for checkpoints. `steps` counts finite steps.
    _known: dict[str, float] = field(default_factory=lambda: {"steps": 0.0}, init=False)

    def judge(self, step: int, loss: float | None, norm: float | None) -> list[Verdict]:
        """Add a step and return verdicts. Non-finite values are ignored."""
        known = self._known
        known["steps"] += 1
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
            if len(self._losses) == _FIRST and "start" not in known:
                start, first = statistics.median_low(self._losses), self._losses[0]
                # If the learning rate is far too high, the first step alone multiplies the loss.
                known["start"] = known["best"] = first if 0 < 2 * first < start else start
                known["best_step"] = step
        if norm is not None and 0 < norm < math.inf:
            self._norms.append(norm)
        # Medians of 32 steps change little from step to step.
        if known["steps"] % _EVERY:
            return []
        found = [] if "start" not in known else self._judge_loss(step)
        return found + self._judge_norm(step)

    def _judge_loss(self, step: int) -> list[Verdict]:
        known, losses = self._known, list(self._losses)
        noise = max(noise_of(losses), _FLOOR * abs(known["best"]))
        # A rise right at the start is measured over few steps.
        early = statistics.median(losses[-_EVERY:]) - known["start"]
        if known["steps"] <= _STALLED and early > known.get("risen", 0.0):
            known["risen"] = early
        if len(losses) < _WINDOW:
            return []
        level = statistics.median(losses[-_WINDOW:])
        known["level"] = level
        if level < known["best"]:
            known["recovered"] = max(known.get("recovered", 0.0), known.get("rise", 0.0))
            known |= {"best": level, "best_step": step, "noise": noise, "rise": 0.0}
        # A rise that was followed by a new best was a swing, for example of rewards.
        rise = level - known["best"]
        known["rise"] = max(known.get("rise", 0.0), rise)
        gained = known["start"] - known["best"]
        usual = known.get("noise", 0.0)
        rivals = self._true_rivals()
        limit = max(_NOISES * usual, _LOST * gained) * (_RIVALS if rivals else 1.0)
        # The noise at the start is unknown, so a rise must exceed the present noise by more.
        now = _NOISES_NOW if gained > 0 else _NOISES
        limit = max(limit, now * noise, _TIMES_RECOVERED * known.get("recovered", 0.0))
        known["excess"] = rise - limit
        # One of several opposing losses may rise for long, so all must have risen.
        is_lost = all(rule._known.get("excess", -1.0) > 0 for rule in (self, *rivals))
        is_new = self._lasts("divergence", is_lost)
        if known["divergence"] >= _LASTING:
            known["rise"] = 0.0  # a divergence is no swing
        if is_new:
            tags = () if gained > 0 else ("from start",)
            found = Verdict("divergence", level, known["best"] + limit, "warning", "loss", tags)
            numbers = {key: known[key] for key in ("best", "best_step")}
            return [found.given(**numbers, window=_WINDOW)]
        return [] if known["divergence"] else self._judge_stall(level, max(noise, usual))

    def _true_rivals(self) -> list["CourseRule"]:
        return [rule for rule in self.rivals if "start" in rule._known]

    def _judge_stall(self, level: float, noise: float) -> list[Verdict]:
        known = self._known
        steps, start, risen = known["steps"], known["start"], known.get("risen", 0.0)
        # A best level below the start by the noise of a step (4 errors of a level) means learning.
        if start - known["best"] > noise or "stalled" in known or self._true_rivals():
            return []
        if steps >= _STALLED and risen > _NOISES * noise:
            found = Verdict("stalled_loss", level, start, tensor="loss")
        elif steps >= _HORIZON:
            found = Verdict("stalled_loss", level, start, "info", "loss", ("long",))
        else:
            return []
        known["stalled"] = steps
        return [found.given(start=start, steps=steps, peak=start + risen)]

    def _judge_norm(self, step: int) -> list[Verdict]:
        known = self._known
        if len(self._norms) < _WINDOW:
            return []
        level = statistics.median(self._norms)
        self._norm_levels.append(level)
        if level < known.get("lowest", level * 2):
            known |= {"lowest": level, "lowest_step": step}
        quarters = list(self._norm_levels)[:: _TREND // 4]
        is_rising = len(self._norm_levels) == _TREND and quarters == sorted(set(quarters))
        # A norm may grow while the loss is at its best.
        above = known["level"] - known["best"] if "level" in known else 0.0
        is_best = not self._true_rivals() and above <= known.get("noise", 0.0)
        limit = _GROWTH * known["lowest"]
        if not self._lasts("trend", level > limit and is_rising and not is_best):
            return []
        numbers = {key: known[key] for key in ("lowest", "lowest_step")}
        found = Verdict("gradient_trend", level, limit, tensor="gradient norm").given(**numbers)
        return [found.given(times=level / known["lowest"], window=_WINDOW, span=_TREND * _EVERY)]

    def _lasts(self, what: str, is_so: bool) -> bool:
        """Return whether a condition has just held for 32 steps; true once until it ends."""
        count = self._known[what] = self._known.get(what, 0.0) + 1 if is_so else 0.0
        return count == _LASTING
