"""What rules have learnt, for checkpoints."""

import copy
from collections import deque
from dataclasses import Field, fields
from typing import Any

__all__ = ["Learning"]


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
