"""Finds names in `roles` that match nothing: a misspelt name would silently change the loss."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_mp._arguments import nearest, refuse_values
from lightning_mp.gradient_cache._served.roles import DeclaredRoles, Origin, is_named

__all__ = ["DeclaredNames"]

_DESCRIPTIONS: dict[Origin, str] = {
    "argument": "argument of a tower that was called",
    "output": "output of a tower that was called",
    "field": "field of the batch",
}


class DeclaredNames:
    """Records which declared names match something, until every tower has been called once.

    The `owner` got the names in `roles`, and errors name it.
    """

    def __init__(self, owner: object, declared: DeclaredRoles) -> None:
        self.owner = owner
        self.agree: Callable[[list[bool]], list[bool]] = list
        """Returns which facts hold on any rank, so that all ranks raise together."""
        self._declared = declared
        self.is_open = bool(declared.texts)
        """Whether the names have not been checked yet."""
        self._called: set[str] = set()
        # A dict keeps the order of the calls, for messages.
        self._paths: dict[Origin, dict[str, None]] = {"argument": {}, "output": {}, "field": {}}

    def note(self, origin: Origin, paths: Iterable[str]) -> None:
        self._paths[origin].update(dict.fromkeys(paths))

    def note_call(self, tower: str, signature_of: Callable[..., Any]) -> None:
        """Record a called tower and the parameters of its signature."""
        self._called.add(tower)
        # All parameters, because a later call may pass one that this call leaves at its default.
        with contextlib.suppress(TypeError, ValueError):  # C functions have no signature
            self.note("argument", inspect.signature(signature_of).parameters)

    def check(self, towers: Collection[str] = ()) -> None:
        """Raise for names that match nothing, once all `towers` have been called on all ranks."""
        if not self.is_open:
            return
        names = list(self._declared.texts)
        found = [any(is_named(path, [name]) for path in self._known(name)) for name in names]
        facts = self.agree([*found, *(tower in self._called for tower in towers)])
        if not all(facts[len(found) :]) or not self._called:
            return
        self.is_open = False
        missing = [name for name, is_found in zip(names, facts, strict=False) if not is_found]
        if not missing:
            return
        name = missing[0]
        known = self._known(name)
        near = nearest(name, known)
        missing_origins = " and no ".join(
            _DESCRIPTIONS[origin] for origin in self._declared.origins(name)
        )
        refuse_values(
            self.owner,
            f"No {missing_origins} is named {name!r}. "
            + (f"Did you mean {near!r}?" if near else f"The names are {known}."),
            roles={name: self._declared.texts[name] for name in missing},
        )

    def _known(self, name: str) -> list[str]:
        origins = self._declared.origins(name)
        return list(dict.fromkeys(path for origin in origins for path in self._paths[origin]))
