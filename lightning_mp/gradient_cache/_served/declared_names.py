"""Names of arguments and outputs that match nothing: misspelt, they change the loss."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_mp._arguments import nearest, refuse_values
from lightning_mp.gradient_cache._served.arguments import is_named
from lightning_mp.gradient_cache._served.config import CacheConfig

__all__ = ["DeclaredNames"]


_OF_OUTPUTS = ("leave_out", "means")


class DeclaredNames:
    """Notes what the declared names match, until every tower has been called once.

    Args:
        owner: Whose arguments the names are.
        config: Which has the names.
    """

    def __init__(self, owner: object, config: CacheConfig) -> None:
        self.owner = owner
        self.agree: Callable[[list[bool]], list[bool]] = list
        """Returns which facts hold on any rank, so that ranks raise together."""
        roles = {name: getattr(config, name) for name in ("rows", "whole", *_OF_OUTPUTS)}
        self._declared = [(role, name) for role, names in roles.items() for name in names]
        self.is_open = bool(self._declared)
        """Whether there is a name that may match nothing."""
        self._called: set[str] = set()
        # In the order of the calls, for messages.
        self._arguments: dict[str, None] = {}
        self._outputs: dict[str, None] = {}

    def note(
        self,
        tower: str,
        signature_of: Callable[..., Any],
        arguments: Iterable[str],
        outputs: Iterable[str],
    ) -> None:
        """Note the paths of what a tower takes and returns."""
        self._called.add(tower)
        # Also what this call leaves at its default: a later one may pass it.
        with contextlib.suppress(TypeError, ValueError):  # a function of C has no signature
            self._arguments.update(dict.fromkeys(inspect.signature(signature_of).parameters))
        self._arguments.update(dict.fromkeys(arguments))
        self._outputs.update(dict.fromkeys(outputs))

    def check(self, towers: Collection[str] = ()) -> None:
        """Refuse names that match nothing, once some towers have been called; then never again.

        Raises:
            ValueError: A name matches no argument, or of outputs none, of any tower.
        """
        if not self.is_open:
            return
        found = [
            any(is_named(path, [name]) for path in self._paths(role))
            for role, name in self._declared
        ]
        facts = self.agree([*found, *(tower in self._called for tower in towers)])
        if not all(facts[len(found) :]) or not self._called:
            return
        self.is_open = False
        missing = [
            each for each, is_found in zip(self._declared, facts, strict=False) if not is_found
        ]
        if not missing:
            return
        role, name = missing[0]
        known = list(self._paths(role))
        near = nearest(name, known)
        what = "output" if role in _OF_OUTPUTS else "argument"
        refuse_values(
            self.owner,
            f"No {what} of a tower that was called is named {name!r}. "
            + (f"Did you mean {near!r}?" if near else f"The names are {known}."),
            **{role: [other for its_role, other in missing if its_role == role]},
        )

    def close(self) -> None:
        """Check no more, as where ranks may end a run at different places."""
        self.is_open = False

    def _paths(self, role: str) -> dict[str, None]:
        return self._outputs if role in _OF_OUTPUTS else self._arguments
