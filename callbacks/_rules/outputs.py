"""Rules for outputs: forecasts of overflow, growing logits, starved and overloaded experts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_mp.callbacks._rules.records import Learning, Verdict

__all__ = ["ExpertRule", "GrowthRule", "LogitRule"]

_NEWEST, _LEAST = 16, 5  # largest and smallest number of samples of a line
# A slope is significant beyond 6 standard errors. Normal noise exceeds this in one of 200 lines
# with 3 degrees of freedom, the minimum, and in one of 6000 with ten samples.
_SIGNIFICANT = 6.0
_LEVEL = 5  # samples of the median that is a level
# Least level of an alarm. If the logits of two keys differ by 20, softmax gives one key a weight of
# 2e-9. Near 50, bf16 rounds output logits by up to 0.125, which changes a probability by an eighth.
# Entropy is stored as its inverse, so 50 means an entropy share of 0.02.
_LARGE = 50.0
# Least growth since the first level. Logits grow while a model learns; log Z need not.
_TIMES, _TIMES_LOG_Z = 8.0, 4.0
_STARVED = 0.01  # share of the tokens that the expert would get under an even split
_CROWDED = 0.9  # share of all tokens
# A judgement needs 5 samples, and 500 tokens per expert under an even split: 1% of them is 5.
_TOKENS, _SAMPLES = 500, 5


@dataclass(eq=False)
class GrowthRule(Learning):
    """Forecasts the step of an overflow from the headroom in bits of each tensor."""

    _growth: dict[str, list[tuple[int, float]]] = field(default_factory=dict, init=False)

    def add(self, name: str, step: int, bits: float) -> None:
        self._growth[name] = [*self._growth.get(name, []), (step, bits)][-_NEWEST:]

    def slope(self, name: str) -> float | None:
        """Return the bits per step if they are significantly negative."""
        samples = self._growth.get(name, [])
        if len(samples) < _LEAST:
            return None
        steps, bits = zip(*samples, strict=True)
        slope, start = statistics.linear_regression(steps, bits)
        mean = statistics.fmean(steps)
        noise = sum((b - start - slope * s) ** 2 for s, b in samples) / (len(samples) - 2)
        error = (noise / sum((s - mean) ** 2 for s in steps)) ** 0.5
        return slope if slope < -_SIGNIFICANT * error else None

    def overflow_step(self, name: str, left: float = 0.0) -> int | None:
        """Return the step at which `left` bits are left, `None` without a significant slope."""
        slope = self.slope(name)
        if slope is None:
            return None
        step, bits = self._growth[name][-1]
        return max(int(step - (bits - left) / slope), step)  # never in the past


@dataclass(eq=False)
class LogitRule(GrowthRule):
    """Judges values that grow when training is unstable, by a limit and by their trend."""

    _samples: dict[str, list[float]] = field(default_factory=dict, init=False)

    def judge(
        self, kind: str, name: str, step: int, value: float, limit: float = math.inf
    ) -> Verdict | None:
        key = f"{kind}:{name}"
        kept = self._samples[key] = [*self._samples.get(key, []), value]
        del kept[_LEVEL:-_LEVEL]  # the first and the latest level
        usual, grown = statistics.median(kept[:_LEVEL]), statistics.median(kept[-_LEVEL:])
        self.add(key, step, -math.log2(grown + 1e-30))
        if value > limit:
            return Verdict(kind, value, limit, tensor=name)
        times = _TIMES_LOG_Z if kind == "output_log_z" else _TIMES
        threshold = max(times * usual, _LARGE)
        if grown <= threshold or self.slope(key) is None:
            return None
        return Verdict(kind, value, threshold, tensor=name, tags=("growing",)).given(usual=usual)


@dataclass(eq=False)
class ExpertRule(Learning):
    """Judges how a router divides tokens among experts, over as many samples as this needs."""

    # By router, since the last judgement: samples, tokens, and number of tokens of each expert.
    _seen: dict[str, list[float]] = field(default_factory=dict, init=False)

    def judge(self, router: str, tokens: float, chosen: Sequence[float]) -> list[Verdict]:
        """Add a sample: the number of tokens, and of tokens routed to each expert."""
        before = self._seen.get(router, [0.0] * (2 + len(chosen)))
        seen = [a + b for a, b in zip(before, (1.0, tokens, *chosen), strict=True)]
        samples, tokens, *chosen = seen
        even = sum(chosen) / len(chosen)  # tokens of each expert under an even split
        self._seen[router] = seen
        if samples < _SAMPLES or even < _TOKENS:
            return []
        del self._seen[router]
        verdicts = []
        starved = [at for at, count in enumerate(chosen) if count < _STARVED * even]
        if starved:
            share, limit = chosen[starved[0]] / tokens, _STARVED * even / tokens
            dead = Verdict("expert_dead", share, limit, tensor=f"{router}[{starved[0]}]")
            verdicts.append(dead.given(count=len(starved), of=len(chosen)))
        share = max(chosen) / tokens
        # If each token uses half of the experts, an expert that all tokens use is no failure.
        if share > _CROWDED and even / tokens < _CROWDED / 2:
            tensor = f"{router}[{[*chosen].index(max(chosen))}]"
            verdicts.append(Verdict("expert_overloaded", share, _CROWDED, tensor=tensor))
        return [found.given(even=even / tokens, samples=samples) for found in verdicts]
