"""What all rules share: they return numbers and no words, and what they have learnt can be kept."""

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["Learning", "Severity", "Verdict"]

Severity = Literal["info", "warning", "error"]


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
    numbers: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    words: tuple[str, str] | None = None  # message and remedy, where they are no templates


class Learning:
    """Keeps the attributes that `learnt` names in checkpoints, without their underscore.

    In plain numbers, lists and dicts, for checkpoints that are read with `weights_only=True`.
    """

    def learnt(self) -> Iterable[str]:
        """Return the names of attributes; of a dataclass, its fields that are no arguments."""
        return [each.name for each in fields(self) if not each.init]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        values = {name.removeprefix("_"): getattr(self, name) for name in self.learnt()}
        return {k: list(v) if isinstance(v, deque) else copy.deepcopy(v) for k, v in values.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what another one has learnt; what is not there stays as it is."""
        for name in self.learnt():
            own = getattr(self, name)
            value = copy.deepcopy(state_dict.get(name.removeprefix("_"), own))
            setattr(self, name, deque(value, own.maxlen) if isinstance(own, deque) else value)
