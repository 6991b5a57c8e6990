"""What rules get and give: facts of a step in, verdicts out; and how what they learnt is kept."""

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = ["Learning", "Severity", "StepFacts", "Verdict"]

Severity = Literal["info", "warning", "error"]


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
class Verdict:
    """A rule that was broken. `sentences.words_for` puts it into words."""

    kind: str  # the rule, in `snake_case`; the kind of the alarm
    value: float | None = None  # what was measured
    threshold: float | None = None  # what it was held against
    severity: Severity = "warning"
    tensor: str | None = None  # the parameter or module
    says: str = ""  # key of the message, where that of `kind` does not fit
    fix: str = ""  # key of the remedy, likewise
    # What the sentences have further, by the names in them.
    numbers: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, str] | None = None  # message and remedy, where they are no templates


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
