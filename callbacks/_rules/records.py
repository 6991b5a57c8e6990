"""Data classes of the rules: facts of a step, samples, verdicts, alarms, and their history.

This module imports neither torch nor Lightning.
"""

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = [
    "Alarm",
    "History",
    "Learning",
    "Sample",
    "Severity",
    "StepFacts",
    "Verdict",
    "first_of_each_kind",
]

Severity = Literal["info", "warning", "error"]
# Without bounds, a run of 1e6 steps would take 16 MB per curve.
_MAX_POINTS = 4096  # per curve
_MAX_COLUMNS = 256  # per heat map
_MAX_ALARMS = 2000


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts of one optimizer step. Facts that are not known yet are `None`."""

    step: int  # number of optimizer steps attempted before, the axis of Lightning's loggers
    global_step: int  # number of optimizer steps completed before
    epoch: int  # counted from 0
    batch_idx: int  # batch of the epoch; the last of accumulated batches
    # If ranks exchange losses, the rank with the highest loss (NaN counts as highest); with shards,
    # the rank with the largest gradient; otherwise this rank.
    rank: int
    optimizer: int = 0
    optimizer_name: str = ""
    lr: float | None = None  # learning rate of the first parameter group
    highest_lr: float | None = None  # highest learning rate of this optimizer so far
    # Unscaled mean over micro-batches, and over ranks if they exchange losses. In manual
    # optimization, the sum of all losses that were backpropagated since the last step.
    loss: float | None = None
    gradient_norm: float | None = None  # norm of all unscaled gradients, before clipping
    largest_gradient: str | None = None  # name of the parameter with the largest gradient norm
    largest_gradient_norm: float | None = None
    loss_scale: float | None = None  # scale of this step; `None` without a loss scale
    next_loss_scale: float | None = None  # scale after the update
    skipped: bool | None = None  # whether scaler or precision plugin skipped the step

    @property
    def is_rate_ending(self) -> bool:
        """Whether a schedule has lowered the learning rate below a tenth of its maximum."""
        lr, highest = self.lr, self.highest_lr
        return lr is not None and highest is not None and lr < 0.1 * highest


@dataclass(frozen=True)
class Sample:
    """The observation of a monitor in one step, on the host."""

    facts: StepFacts
    array: Any = None  # NumPy array; `None` if the monitor observed nothing
    context: Mapping[str, Any] = field(default_factory=dict)  # for example the names of rows


@dataclass(frozen=True)
class Verdict:
    """The result of a rule in numbers; `words_for` chooses the sentences."""

    kind: str  # kind of the alarm, in `snake_case`
    value: float | None = None  # measured value
    threshold: float | None = None  # limit of the value
    severity: Severity = "warning"
    tensor: str | None = None  # name of the parameter or module
    tags: tuple[str, ...] = ()  # conditions that select a sentence
    also: tuple[str, ...] = ()  # keys of sentences that are appended to the message
    remedies: tuple[str, ...] = ()  # keys of remedies, instead of the remedy of the kind
    # Further fields of the sentences, by name.
    numbers: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, str] | None = None  # message and remedy of a user's monitor
    rank: int | None = None  # rank of the data, if it differs from the rank of the step

    def given(self, **numbers: Any) -> "Verdict":
        """Return the verdict with further fields of its sentences."""
        return dataclasses.replace(self, numbers={**self.numbers, **numbers})


def first_of_each_kind(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the first verdict of each kind with the number of verdicts of that kind."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.kind, []).append(verdict)
    counts = ((first, 1 + len(rest)) for first, *rest in groups.values())
    return [first.given(**{"count": count, **first.numbers}) for first, count in counts]


class Learning:
    """Saves the attributes named by `learnt` in checkpoints, without a leading underscore."""

    def learnt(self) -> Iterable[str]:
        """Return names of attributes; for a dataclass, of fields that are not arguments."""
        return [each.name for each in fields(self) if not each.init]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        values = {name.removeprefix("_"): getattr(self, name) for name in self.learnt()}
        # Deques become lists, because `torch.load(weights_only=True)` allows only plain types.
        return {k: list(v) if isinstance(v, deque) else copy.deepcopy(v) for k, v in values.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; attributes that the state lacks keep their value."""
        for name in self.learnt():
            own = getattr(self, name)
            value = copy.deepcopy(state_dict.get(name.removeprefix("_"), own))
            setattr(self, name, deque(value, own.maxlen) if isinstance(own, deque) else value)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """An alarm of a monitor.

    Args:
        step: Training step of the alarm: the number of optimizer steps attempted before, which is
            the axis of Lightning's loggers.
        monitor: Class name of the monitor.
        kind: Kind of the alarm, in `snake_case`.
        severity: `"warning"`, `"error"`, or `"info"` for a note.
        message: Place, a sentence with tensor, value and threshold, and the remedy.
        remedy: The remedy, which is also the last part of `message`.
        tensor: Dotted name of the parameter or module, if there is one.
        value: Measured value.
        threshold: Limit of the value.
        epoch: Epoch, counted from 0; `None` if unknown.
        batch_idx: Batch of the epoch; the last of accumulated batches.
        rank: Rank of the data that caused the alarm.
        batch_path: File in which the batch was saved, if any.
    """

    step: int
    monitor: str
    kind: str
    severity: Severity
    message: str
    remedy: str
    tensor: str | None = None
    value: float | None = None
    threshold: float | None = None
    epoch: int | None = None
    batch_idx: int | None = None
    rank: int | None = None
    batch_path: str | None = None

    @property
    def place(self) -> str:
        """Step, epoch, batch and rank, with which `message` begins."""
        parts = {"epoch": self.epoch, "batch": self.batch_idx, "rank": self.rank}
        known = "".join(f", {k} {v}" for k, v in parts.items() if v is not None)
        return f"Step {self.step}{known}"


@dataclass
class History:
    """Alarms, curves and heat maps, thinned evenly over all steps as they grow."""

    alarms: list[Alarm] = field(default_factory=list)  # in the order of time
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # (step, value)
    # {"names": rows, "columns": pairs of step and values by row}; NaN means no value.
    maps: dict[str, dict[str, Any]] = field(default_factory=dict)
    _strides: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)

    def add_alarm(self, alarm: Alarm) -> None:
        """Add an alarm; beyond 2000 alarms, those in the middle are dropped."""
        self.alarms.append(alarm)
        if len(self.alarms) > _MAX_ALARMS:
            del self.alarms[_MAX_ALARMS // 2]

    def add_point(self, name: str, step: int, value: float) -> None:
        points = self.curves.setdefault(name, [])
        if self._is_due("curve " + name):
            points.append((step, float(value)))
            # Drop every second point, and from now on record only every second point.
            if len(points) >= _MAX_POINTS:
                del points[1::2]
                self._strides["curve " + name] *= 2

    def count(self, name: str) -> int:
        """Return the number of points that a curve has received, also of those that it dropped."""
        return self._seen.get("curve " + name, -1) + 1

    def add_column(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step to a heat map; new tensors get a new row."""
        heat = self.maps.setdefault(name, {"names": [], "columns": []})
        names: list[str] = heat["names"]
        columns: list[tuple[int, list[float]]] = heat["columns"]
        # Otherwise the values are another part, for example of a second optimizer.
        if self._newest.get(name) != step and self._is_due("map " + name):
            columns.append((step, []))
        self._newest[name] = step
        if not columns or columns[-1][0] != step:
            return  # the step is left out
        known = dict.fromkeys(names, math.nan)
        known.update(zip(names, columns.pop()[1], strict=False))
        known.update({tensor: float(value) for tensor, value in values.items()})
        names[:] = list(known)
        columns.append((step, list(known.values())))
        if len(columns) >= _MAX_COLUMNS:
            del columns[1::2]
            self._strides["map " + name] *= 2

    def forget_from(self, step: int) -> None:
        """Drop everything from a step on, because a resumed run records these steps again."""
        for points in self.curves.values():
            points[:] = [point for point in points if point[0] < step]
        for heat in self.maps.values():
            heat["columns"] = [column for column in heat["columns"] if column[0] < step]
        self._newest = {name: newest for name, newest in self._newest.items() if newest < step}

    def _is_due(self, key: str) -> bool:
        seen = self._seen[key] = self._seen.get(key, -1) + 1
        return seen % self._strides.setdefault(key, 1) == 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, tuples, lists and dicts, for a checkpoint."""
        # Points and columns do not change, and copying each number would delay a checkpoint.
        return {
            "alarms": [dataclasses.asdict(alarm) for alarm in self.alarms],
            "curves": {name: list(points) for name, points in self.curves.items()},
            "maps": {
                name: {k: list(v) for k, v in heat.items()} for name, heat in self.maps.items()
            },
            **{name: dict(getattr(self, name)) for name in ("_strides", "_seen", "_newest")},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "History":
        own = copy.deepcopy(dict(plain))
        return cls(**own | {"alarms": [Alarm(**alarm) for alarm in plain["alarms"]]})
