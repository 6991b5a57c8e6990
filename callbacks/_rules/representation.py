"""Rules for features that collapse or do not change, and for a logit scale at its limit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lightning_mp.callbacks._rules.records import Learning, Verdict

__all__ = ["RepresentationRule", "Sketch"]

_FALLEN = 3.0  # factor by which the spread is below its maximum
# Consecutive samples of an alarm: for features that never spread, and for others.
_START, _TWICE = 20, 2
_RANK_FALLEN = 8.0  # factor by which the effective rank is below its maximum
_FULL = 8.0  # least maximum of a rank that can fall by this factor
_STANDS = 5  # samples with the same logit scale
_UNCHANGED = 8  # consecutive samples in which one tower did not change and another did
# Squared distance from the first sample, relative to the sampling error. A tower that does not
# change has an expected distance of 1, with a deviation of about 0.4 for 32 dependent statistics.
_STILL, _MOVED = 2.5, 5.0

Sketch = list[tuple[float, float]]  # means of some features, and their squared standard errors


@dataclass(eq=False)
class RepresentationRule(Learning):
    """Judges the features of each tower, and the logit scale of each loss."""

    min_spread: float
    wants_more: bool = field(default=False, init=False)  # whether a low sample is unconfirmed
    _samples: dict[str, int] = field(default_factory=dict, init=False)
    # By name of the features: highest values so far, and numbers of consecutive low samples.
    _spread: dict[str, float] = field(default_factory=dict, init=False)
    _rank: dict[str, float] = field(default_factory=dict, init=False)
    _low: dict[str, int] = field(default_factory=dict, init=False)
    _flat: dict[str, int] = field(default_factory=dict, init=False)
    # Sketch of the first sample, and number of consecutive samples that do not differ from it.
    _sketch: dict[str, Sketch] = field(default_factory=dict, init=False)
    _still: dict[str, int] = field(default_factory=dict, init=False)
    # By name of the loss: logit scale, number of consecutive samples with this value, and whether
    # the scale has ever changed.
    _scale: dict[str, float] = field(default_factory=dict, init=False)
    _same: dict[str, int] = field(default_factory=dict, init=False)
    _moved: dict[str, bool] = field(default_factory=dict, init=False)

    def features(self, name: str, spread: float, rank: float) -> Iterator[Verdict]:
        """Add a sample of features, with their spread in [0, 1] and effective rank.

        Sets `wants_more` at the first low sample, which a second one must confirm.
        """
        samples = self._samples[name] = self._samples.get(name, 0) + 1
        highest = self._spread[name] = max(self._spread.get(name, 0.0), spread)
        low = self._low[name] = self._low.get(name, 0) + 1 if spread < self.min_spread else 0
        has_fallen = bool(low) and spread < highest / _FALLEN
        self.wants_more |= has_fallen and low < _TWICE
        if has_fallen and low >= _TWICE:
            collapse = Verdict("feature_collapse", spread, self.min_spread, "error", name)
            yield collapse.given(usual=highest)
            return
        if low == samples >= _START:
            tags = ("from start",)
            yield Verdict("feature_collapse", spread, self.min_spread, "warning", name, tags)
        full = self._rank[name] = max(self._rank.get(name, 0.0), rank)
        limit = full / _RANK_FALLEN
        flat = self._flat[name] = self._flat.get(name, 0) + 1 if rank < limit else 0
        self.wants_more |= 0 < flat < _TWICE and full > _FULL
        if flat >= _TWICE and full > _FULL:
            yield Verdict("feature_rank", rank, limit, "warning", name).given(usual=full)

    def unchanged(self, sketches: Mapping[str, Sketch]) -> Iterator[Verdict]:
        """Add a sample of all trainable towers; report towers that do not change while one does."""
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
                yield verdict.given(other=most, times=moved[most])

    def scale(self, name: str, value: float) -> Iterator[Verdict]:
        """Add a sample of a trainable logit scale."""
        before = self._scale.get(name, value)
        self._moved[name] = self._moved.get(name, False) or value != before
        same = self._same[name] = self._same.get(name, 0) + 1 if value == before else 1
        self._scale[name] = value
        if same == _STANDS and self._moved[name]:
            yield Verdict("temperature_clamped", value, None, "info", name).given(samples=same)
