"""When features collapse, by their spread and their effective rank, and a scale at its limit."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lightning_mp.callbacks._rules.records import Learning, Verdict

__all__ = ["RepresentationRule"]

_FALLEN = 3.0  # times below the highest
_START, _TWICE = 20, 2  # samples in a row: of features that never spread, of others
_RANK_FALLEN, _FULL = 8.0, 8.0  # times below the highest; ranks that can fall so far
_STANDS = 5  # samples of one scale


@dataclass(eq=False)
class RepresentationRule(Learning):
    """Judges the features of each tower, and the scale of each loss."""

    min_spread: float
    _samples: dict[str, int] = field(default_factory=dict, init=False)
    # By name of features: the highest so far, and samples in a row that were too low.
    _spread: dict[str, float] = field(default_factory=dict, init=False)
    _rank: dict[str, float] = field(default_factory=dict, init=False)
    _low: dict[str, int] = field(default_factory=dict, init=False)
    _flat: dict[str, int] = field(default_factory=dict, init=False)
    # By name of the loss: its scale, samples in a row that had it, and whether it ever moved.
    _scale: dict[str, float] = field(default_factory=dict, init=False)
    _same: dict[str, int] = field(default_factory=dict, init=False)
    _moved: dict[str, bool] = field(default_factory=dict, init=False)

    def features(self, name: str, spread: float, rank: float) -> Iterator[Verdict]:
        """Take in a sample of features: spread in [0, 1] and effective rank."""
        samples = self._samples[name] = self._samples.get(name, 0) + 1
        highest = self._spread[name] = max(self._spread.get(name, 0.0), spread)
        low = self._low[name] = self._low.get(name, 0) + 1 if spread < self.min_spread else 0
        numbers = {"usual": highest}
        if low >= _TWICE and spread < highest / _FALLEN:
            verdict = Verdict("feature_collapse", spread, self.min_spread, "error", name)
            yield replace(verdict, numbers=numbers)
            return
        if low == samples >= _START:
            yield Verdict(
                "feature_collapse", spread, self.min_spread, "warning", name, ("from start",)
            )
        full = self._rank[name] = max(self._rank.get(name, 0.0), rank)
        limit = full / _RANK_FALLEN
        flat = self._flat[name] = self._flat.get(name, 0) + 1 if rank < limit else 0
        if flat >= _TWICE and full > _FULL:
            yield Verdict("feature_rank", rank, limit, "warning", name, numbers={"usual": full})

    def scale(self, name: str, value: float) -> Iterator[Verdict]:
        """Take in a sample of a scale that is trained."""
        before = self._scale.get(name, value)
        self._moved[name] = self._moved.get(name, False) or value != before
        same = self._same[name] = self._same.get(name, 0) + 1 if value == before else 1
        self._scale[name] = value
        if same == _STANDS and self._moved[name]:
            numbers = {"samples": same}
            yield Verdict("temperature_clamped", value, None, "info", name, numbers=numbers)
