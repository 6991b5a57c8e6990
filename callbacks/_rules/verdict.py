"""What all rules share: they return numbers and no words, and what they have learnt can be kept."""

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
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
    """A dataclass that learns: its state is all of its fields that are no arguments.

    In plain numbers, lists and dicts, for checkpoints that are read with `weights_only=True`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learnt, by the names of fields without their underscore."""
        values = {name: getattr(self, each.name) for name, each in self._learnt().items()}
        return {k: list(v) if isinstance(v, deque) else copy.deepcopy(v) for k, v in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one has learnt; what is not there stays as it is."""
        for name, each in self._learnt().items():
            if name in state:
                value, own = copy.deepcopy(state[name]), getattr(self, each.name)
                is_queue = isinstance(own, deque)
                setattr(self, each.name, deque(value, own.maxlen) if is_queue else value)

    def _learnt(self) -> dict[str, Field[Any]]:
        found = fields(self)  # type: ignore[arg-type]
        return {each.name.removeprefix("_"): each for each in found if not each.init}
