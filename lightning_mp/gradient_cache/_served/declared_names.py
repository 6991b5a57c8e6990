"""Names of roles that match nothing: misspelt, they change the loss."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_mp._arguments import nearest, refuse_values
from lightning_mp.gradient_cache._served.roles import Declared, Place, is_named

__all__ = ["DeclaredNames"]

_WORDS: dict[Place, str] = {
    "argument": "argument of a tower that was called",
    "output": "output of a tower that was called",
    "field": "field of the batch",
}


class DeclaredNames:
    """Notes what the names of declared roles match, until every tower has been called once.

    Args:
        owner: Whose `roles` they are.
        declared: Which has the names.
    """

    def __init__(self, owner: object, declared: Declared) -> None:
        self.owner = owner
        self.agree: Callable[[list[bool]], list[bool]] = list
        """Returns which facts hold on any rank, so that ranks raise together."""
        self._declared = declared
        self.is_open = bool(declared.words)
        """Whether there is a name that may match nothing."""
        self._called: set[str] = set()
        # In the order of the calls, for messages.
        self._paths: dict[Place, dict[str, None]] = {"argument": {}, "output": {}, "field": {}}

    def note(self, place: Place, paths: Iterable[str]) -> None:
        """Note the names of what there is in a place."""
        self._paths[place].update(dict.fromkeys(paths))

    def note_call(self, tower: str, signature_of: Callable[..., Any]) -> None:
        """Note a tower, and all that it can be called with."""
        self._called.add(tower)
        # Also what this call leaves at its default: a later one may pass it.
        with contextlib.suppress(TypeError, ValueError):  # a function of C has no signature
            self.note("argument", inspect.signature(signature_of).parameters)

    def check(self, towers: Collection[str] = ()) -> None:
        """Refuse names that match nothing, once some towers have been called; then never again.

        Raises:
            ValueError: A name matches nothing that can have its role.
        """
        if not self.is_open:
            return
        names = list(self._declared.words)
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
        places = " and no ".join(_WORDS[place] for place in self._declared.places(name))
        refuse_values(
            self.owner,
            f"No {places} is named {name!r}. "
            + (f"Did you mean {near!r}?" if near else f"The names are {known}."),
            roles={name: self._declared.words[name] for name in missing},
        )

    def close(self) -> None:
        """Check no more, as where ranks may end a run at different places."""
        self.is_open = False

    def _known(self, name: str) -> list[str]:
        places = self._declared.places(name)
        return list(dict.fromkeys(path for place in places for path in self._paths[place]))
