"""Health of what a model computes: logits that grow, attention that narrows, idle experts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_mp.callbacks._rules.ranges import GrowthRule
from lightning_mp.callbacks._rules.records import Learning, Verdict

__all__ = ["ExpertRule", "LogitRule"]

_FIRST, _KEPT = 5, 64  # samples whose median is a level, and samples that are kept
# Grown: beyond 50. Attention: of two keys whose logits differ by 20, a softmax leaves one 2e-9.
# Output logits: near 50, bf16 rounds by up to 0.125, which changes a probability by an eighth.
# Entropy is kept as its inverse, so that 50 is a share of 0.02.
_LARGE = 50.0
# And so many times the first level. Logits grow while a model learns; log Z need not.
_TIMES = {
    "attention_logit": 8.0,
    "attention_entropy": 8.0,
    "output_logit": 8.0,
    "output_log_z": 4.0,
}
_STARVED = 0.01  # of an even share of the tokens
_CROWDED = 0.9  # of all tokens
_TOKENS = 500  # of an even share that a judgement needs: a hundredth of them is five
_SAMPLES = 5  # and it needs so many samples


@dataclass(eq=False)
class LogitRule(GrowthRule):
    """Judges numbers that grow where training is unstable, by a limit and by their trend."""

    _samples: dict[str, list[float]] = field(default_factory=dict, init=False)

    def judge(
        self, kind: str, name: str, step: int, value: float, limit: float = math.inf
    ) -> Verdict | None:
        """Take in a sample of a tensor; return what is wrong with it."""
        key = f"{kind}:{name}"
        kept = self._samples[key] = [*self._samples.get(key, []), value][-_KEPT:]
        usual, grown = statistics.median(kept[:_FIRST]), statistics.median(kept[-_FIRST:])
        self.add(key, step, -math.log2(grown + 1e-30))
        if value > limit:
            return Verdict(kind, value, limit, tensor=name)
        threshold = max(_TIMES[kind] * usual, _LARGE)
        if grown <= threshold or not self.is_trend(key):
            return None
        numbers = {"usual": usual}
        return Verdict(kind, value, threshold, tensor=name, tags=("growing",), numbers=numbers)


@dataclass(eq=False)
class ExpertRule(Learning):
    """Judges how a router divides tokens, by sums over samples with enough tokens to tell."""

    # By name of the router: samples, tokens, and choices of each expert since the last judgement.
    _seen: dict[str, list[float]] = field(default_factory=dict, init=False)

    def judge(self, router: str, tokens: float, chosen: Sequence[float]) -> list[Verdict]:
        """Take in the tokens of a sample, and how many of them chose each expert."""
        before = self._seen.get(router, [0.0] * (2 + len(chosen)))
        seen = [a + b for a, b in zip(before, (1.0, tokens, *chosen), strict=True)]
        samples, tokens, *chosen = seen
        even = sum(chosen) / len(chosen)  # choices of each expert if all had as many
        self._seen[router] = seen
        if samples < _SAMPLES or even < _TOKENS:
            return []
        del self._seen[router]
        verdicts = []
        numbers = {"even": even / tokens, "samples": samples}
        starved = [at for at, count in enumerate(chosen) if count < _STARVED * even]
        if starved:
            tensor = f"{router}[{starved[0]}]"
            share, limit = chosen[starved[0]] / tokens, _STARVED * even / tokens
            more = {**numbers, "count": len(starved), "of": len(chosen)}
            verdicts.append(Verdict("expert_dead", share, limit, tensor=tensor, numbers=more))
        share = max(chosen) / tokens
        # Where each token takes half of the experts, one that all tokens take is no failure.
        if share > _CROWDED and even / tokens < _CROWDED / 2:
            tensor = f"{router}[{[*chosen].index(max(chosen))}]"
            crowded = Verdict("expert_overloaded", share, _CROWDED, tensor=tensor, numbers=numbers)
            verdicts.append(crowded)
        return verdicts
