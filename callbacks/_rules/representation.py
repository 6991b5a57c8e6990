"""When features collapse or stand still, and when a logit scale is at its limit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightning_mp.callbacks._rules.records import Learning, Verdict

__all__ = ["RepresentationRule", "Sketch"]

_FALLEN = 3.0  # times below the highest
_START, _TWICE = 20, 2  # samples in a row: of features that never spread, of others
_RANK_FALLEN, _FULL = 8.0, 8.0  # times below the highest; ranks that can fall so far
_STANDS = 5  # samples of one scale
_UNCHANGED = 8  # samples in a row in which one tower stood still and another moved
# Squared distances from the first sample, in units of what sampling explains: 1 is expected of a
# tower that does not change, with a deviation of about 0.4 for 32 statistics that depend on each
# other.
_STILL, _MOVED = 2.5, 5.0

Sketch = list[tuple[float, float]]  # some means over the features, and their squared errors


@dataclass(eq=False)
class RepresentationRule(Learning):
    """Judges the features of each tower, and the logit scale of each loss."""

    min_spread: float
    _samples: dict[str, int] = field(default_factory=dict, init=False)
    # By name of features: the highest so far, and samples in a row that were too low.
    _spread: dict[str, float] = field(default_factory=dict, init=False)
    _rank: dict[str, float] = field(default_factory=dict, init=False)
    _low: dict[str, int] = field(default_factory=dict, init=False)
    _flat: dict[str, int] = field(default_factory=dict, init=False)
    _sketch: dict[str, Sketch] = field(default_factory=dict, init=False)  # the first one
    _still: dict[str, int] = field(default_factory=dict, init=False)  # samples in a row
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

    def unchanged(self, sketches: Mapping[str, Sketch]) -> Iterator[Verdict]:
        """Take in a sample of all trainable towers; name those that stand still beside others."""
        moved = dict[str, float]()
        for name, sketch in sketches.items():
            first = self._sketch.setdefault(name, sketch)
            pairs = zip(sketch, first, strict=True)
            terms = [(a - b) ** 2 / max(x + y, 1e-12) for (a, x), (b, y) in pairs]
            moved[name] = sum(terms) / len(terms)
        most = max(moved, key=moved.__getitem__, default="")
        for name, value in moved.items():
            is_still = value < _STILL and moved[most] > _MOVED
            still = self._still[name] = self._still.get(name, 0) + 1 if is_still else 0
            if still >= _UNCHANGED:
                verdict = Verdict("tower_unchanged", value, _STILL, tensor=name)
                yield replace(verdict, numbers={"other": most, "times": moved[most]})

    def scale(self, name: str, value: float) -> Iterator[Verdict]:
        """Take in a sample of a scale that is trained."""
        before = self._scale.get(name, value)
        self._moved[name] = self._moved.get(name, False) or value != before
        same = self._same[name] = self._same.get(name, 0) + 1 if value == before else 1
        self._scale[name] = value
        if same == _STANDS and self._moved[name]:
            numbers = {"samples": same}
            yield Verdict("temperature_clamped", value, None, "info", name, numbers=numbers)
