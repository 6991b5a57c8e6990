"""Rule for parameters that do not train, and for weights that vanish or explode."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lightning_mp.callbacks._rules.records import Learning, Verdict, first_of_each_kind

__all__ = ["ParameterNumbers", "ParameterRule"]

_STEADY = 5  # consecutive samples
_LEAST_RMS = 1.0  # smaller weights never count as exploded; initial weights are below


class ParameterNumbers(NamedTuple):
    """Measurements of one parameter in one sample; norms and `numel` cover all shards."""

    name: str
    numel: int
    weight_norm: float
    gradient_norm: float  # 0 without a gradient
    has_gradient: bool  # in this step
    had_gradient: bool  # in any step of this run
    is_changed: bool | None  # since the last sample; `None` if unknown
    is_matrix: bool
    rate: float | Tensor | None  # learning rate of its group, which need not have one

    @property
    def rms(self) -> float:
        return self.weight_norm / math.sqrt(max(self.numel, 1))


@dataclass(eq=False)
class ParameterRule(Learning):
    """Judges gradients, changes and sizes of the parameters of an optimizer."""

    patience: int
    max_untrained: float
    min_gradient: float
    min_weight: float
    max_weight: float
    # By parameter: the step of its first sample, the step of its last change, whether it has ever
    # had a gradient, and the number of consecutive samples with a vanishing gradient.
    _seen: dict[str, int] = field(default_factory=dict, init=False)
    _changed: dict[str, int] = field(default_factory=dict, init=False)
    _lived: dict[str, bool] = field(default_factory=dict, init=False)
    _faint: dict[str, int] = field(default_factory=dict, init=False)
    # By weight: first RMS, highest RMS, and number of consecutive samples out of bounds.
    _first: dict[str, float] = field(default_factory=dict, init=False)
    _highest: dict[str, float] = field(default_factory=dict, init=False)
    _outside: dict[str, int] = field(default_factory=dict, init=False)

    def judge(self, step: int, parameters: Sequence[ParameterNumbers]) -> list[Verdict]:
        verdicts = [*self._untrained(step, parameters), *self._vanishing(parameters)]
        for each in parameters:
            verdicts += self._size(each)
        return first_of_each_kind(verdicts)

    def _untrained(self, step: int, parameters: Sequence[ParameterNumbers]) -> Iterable[Verdict]:
        for each in parameters:
            name = each.name
            self._seen.setdefault(name, step)
            # With alternating tasks, other steps than the sampled ones may have a gradient.
            is_alive = each.gradient_norm != 0 or (each.had_gradient and not each.has_gradient)
            self._lived[name] = self._lived.get(name, False) or is_alive
            if each.is_changed is not False or name not in self._changed:
                self._changed[name] = step
        patient = [p for p in parameters if step - self._seen[p.name] >= self.patience]
        dead = [p for p in patient if not self._lived[p.name]]
        alive = [p for p in patient if self._lived[p.name]]
        still = [p for p in alive if step - self._changed[p.name] >= self.patience]
        total = max(sum(p.numel for p in parameters), 1)
        for kind, found in {"no_gradient": dead, "unchanged_weights": still}.items():
            share = sum(p.numel for p in found) / total
            if share > self.max_untrained:
                first, count, of = found[0], len(found), len(parameters)
                # Read only here, because reading a tensor waits for the device.
                rate = None if first.rate is None else float(first.rate)
                tags = ("unknown rate",) if rate is None else ("no rate",) if rate == 0 else ()
                verdict = Verdict(kind, share, self.max_untrained, tensor=first.name, tags=tags)
                yield verdict.given(count=count, of=of, steps=self.patience, rate=rate or 0.0)

    def _vanishing(self, parameters: Sequence[ParameterNumbers]) -> Iterable[Verdict]:
        relative = {
            p.name: p.gradient_norm / p.weight_norm
            for p in parameters
            if p.is_matrix and 0 < p.weight_norm < math.inf and 0 < p.gradient_norm < math.inf
        }
        largest = max(relative, key=relative.__getitem__, default="")
        for name, size in relative.items():
            share = size / relative[largest]
            self._faint[name] = self._faint.get(name, 0) + 1 if share < self.min_gradient else 0
            if self._faint[name] >= _STEADY:
                verdict = Verdict("vanishing_gradients", share, self.min_gradient, tensor=name)
                yield verdict.given(largest=largest)

    def _size(self, each: ParameterNumbers) -> Iterable[Verdict]:
        name, rms = each.name, each.rms
        if not each.is_matrix or not 0 < rms < math.inf:
            return
        first = self._first.setdefault(name, rms)
        highest = self._highest[name] = max(self._highest.get(name, 0.0), rms)
        has_grown = rms > max(self.max_weight * first, _LEAST_RMS)
        is_outside = rms < self.min_weight * highest or has_grown
        self._outside[name] = self._outside.get(name, 0) + 1 if is_outside else 0
        if self._outside[name] >= 2:
            kind, usual = ("weight_growth", first) if has_grown else ("weight_collapse", highest)
            limit = usual * (self.max_weight if has_grown else self.min_weight)
            yield Verdict(kind, rms, limit, tensor=name).given(usual=usual)
