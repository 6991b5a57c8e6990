"""What rules get, facts of a step, and give, verdicts; the alarms these become, and their history.

Imports neither torch nor Lightning.
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
# Unbounded, a run of 1e6 steps would take 16 MB for each curve.
_MAX_POINTS = 4096  # of a curve
_MAX_COLUMNS = 256  # of a heat map
_MAX_ALARMS = 2000


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step of one optimizer. While it is under way, what is not known yet is `None`."""

    step: int  # optimizer steps tried before, the axis of Lightning's loggers
    global_step: int  # optimizer steps completed before
    epoch: int  # counted from 0
    batch_idx: int  # the batch of the epoch; of several accumulated ones the last
    # The one to look at: with the highest loss (NaN counts as highest) where ranks exchange them,
    # with shards the one with the largest gradient; else this one.
    rank: int
    optimizer: int = 0
    optimizer_name: str = ""
    lr: float | None = None  # of its first group
    highest_lr: float | None = None  # of this optimizer so far
    # Unscaled, the mean of micro-batches, and of ranks where they exchange it; in manual
    # optimization the sum of what was backpropagated since the last step.
    loss: float | None = None
    gradient_norm: float | None = None  # of all its unscaled gradients, before clipping
    largest_gradient: str | None = None  # the parameter with the largest gradient norm
    largest_gradient_norm: float | None = None
    loss_scale: float | None = None  # what the step was made with; `None` without one
    next_loss_scale: float | None = None  # what the scaler made of it
    skipped: bool | None = None  # by the loss scaler or the precision plugin

    @property
    def whose(self) -> str:
        """Which optimizer's loss it is, where there are several; else nothing."""
        return f" of optimizer {self.optimizer}" if self.optimizer else ""

    @property
    def is_rate_ending(self) -> bool:
        """Whether a schedule has lowered the learning rate to less than a tenth."""
        lr, highest = self.lr, self.highest_lr
        return lr is not None and highest is not None and lr < 0.1 * highest


@dataclass(frozen=True)
class Sample:
    """What a monitor has observed of a step, on the host."""

    facts: StepFacts
    array: Any = None  # of numpy; `None` where the monitor has observed nothing
    context: Mapping[str, Any] = field(default_factory=dict)  # such as the names of rows


@dataclass(frozen=True)
class Verdict:
    """A rule that was broken, in numbers. `words_for` puts it into words."""

    kind: str  # the rule, in `snake_case`; the kind of the alarm
    value: float | None = None  # what was measured
    threshold: float | None = None  # what it was held against
    severity: Severity = "warning"
    tensor: str | None = None  # the parameter or module
    tags: tuple[str, ...] = ()  # what holds beside it, as the keys of sentences have it
    also: tuple[str, ...] = ()  # sentences that the message goes on with
    ways: tuple[str, ...] = ()  # sentences of remedies, in place of that of the kind
    # What the sentences have further, by the names in them.
    numbers: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, str] | None = None  # message and remedy, of monitors of one's own
    rank: int | None = None  # whose data it comes from, where that is not the rank of the step


def first_of_each_kind(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the first verdict of each kind, which counts the others: mostly they follow."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.kind, []).append(verdict)
    return [
        dataclasses.replace(first, numbers={"count": 1 + len(rest), **first.numbers})
        for first, *rest in groups.values()
    ]


class Learning:
    """Keeps the attributes that `learnt` names in checkpoints, without their underscore."""

    def learnt(self) -> Iterable[str]:
        """Return the names of attributes; of a dataclass, its fields that are no arguments."""
        return [each.name for each in fields(self) if not each.init]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        values = {name.removeprefix("_"): getattr(self, name) for name in self.learnt()}
        # Lists for deques: `torch.load(weights_only=True)` takes plain types only.
        return {k: list(v) if isinstance(v, deque) else copy.deepcopy(v) for k, v in values.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what another one has learnt; what is not there stays as it is."""
        for name in self.learnt():
            own = getattr(self, name)
            value = copy.deepcopy(state_dict.get(name.removeprefix("_"), own))
            setattr(self, name, deque(value, own.maxlen) if isinstance(own, deque) else value)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One thing that went wrong, or is about to.

    Args:
        step: The training step that it happened in: optimizer steps tried before, counted from 0,
            which is the axis of Lightning's loggers.
        monitor: The class of the callback that saw it.
        kind: What it is, in `snake_case`; one for each rule.
        severity: `"warning"`, `"error"`, or `"info"` for what was done about it.
        message: Where it was, one sentence with tensor, number and threshold, and the remedy.
        remedy: The last part of `message`: what to set.
        tensor: The dotted name of the parameter or module, if there is one.
        value: What was measured.
        threshold: What it was held against.
        epoch: Counted from 0; `None` where it is not known.
        batch_idx: The batch of that epoch, of several accumulated ones the last.
        rank: The rank to look at for the data.
        batch_path: The file that the batch was saved in, if it was.
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
        """Where it happened, as `message` begins."""
        parts = {"epoch": self.epoch, "batch": self.batch_idx, "rank": self.rank}
        known = "".join(f", {k} {v}" for k, v in parts.items() if v is not None)
        return f"Step {self.step}{known}"


@dataclass
class History:
    """Alarms, curves and heat maps, thinned as they grow: old and new steps stay, evenly spaced."""

    alarms: list[Alarm] = field(default_factory=list)  # in the order in which they were raised
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # by step
    # {"names": rows, "columns": pairs of step and values by row}; NaN is no value.
    maps: dict[str, dict[str, Any]] = field(default_factory=dict)
    _strides: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)

    def add_alarm(self, alarm: Alarm) -> None:
        """Remember an alarm; the first and the newest of more than 2000 stay."""
        self.alarms.append(alarm)
        if len(self.alarms) > _MAX_ALARMS:
            del self.alarms[_MAX_ALARMS // 2]

    def add_point(self, name: str, step: int, value: float) -> None:
        points = self.curves.setdefault(name, [])
        if self._is_due("curve " + name):
            points.append((step, float(value)))
            # Every second one goes, and from now on only every second one comes.
            if len(points) >= _MAX_POINTS:
                del points[1::2]
                self._strides["curve " + name] *= 2

    def add_column(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Add one step, or to that step, of a heat map; tensors that are new to it get a row."""
        heat = self.maps.setdefault(name, {"names": [], "columns": []})
        names: list[str] = heat["names"]
        columns: list[tuple[int, list[float]]] = heat["columns"]
        is_other_part = self._newest.get(name) == step  # as of a second optimizer
        self._newest[name] = step
        if is_other_part and not (columns and columns[-1][0] == step):
            return  # the step was left out
        if not is_other_part and not self._is_due("map " + name):
            return
        before = columns.pop()[1] if is_other_part else []
        known = dict.fromkeys(names, math.nan)
        known.update(zip(names, before, strict=False))
        known.update({tensor: float(value) for tensor, value in values.items()})
        names[:] = list(known)
        columns.append((step, list(known.values())))
        if len(columns) >= _MAX_COLUMNS:
            del columns[1::2]
            self._strides["map " + name] *= 2

    def forget_from(self, step: int) -> None:
        """Drop what was recorded from a step on, which a run that goes on there records anew."""
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
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "History":
        own = copy.deepcopy(dict(plain))
        return cls(**own | {"alarms": [Alarm(**alarm) for alarm in plain["alarms"]]})
