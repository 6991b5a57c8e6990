"""All cases of all kinds of faults, and the number of cases by kind."""

import contextlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from tests.faults import disks, hooks, kills, ranks

__all__ = ["CASES", "Fault", "counts", "is_short", "outcome", "title_of"]


class Fault(Protocol):
    """A fault that is injected into a run."""

    @property
    def kind(self) -> str: ...

    def check(self) -> None:
        """Inject the fault; raise `AssertionError` if a guarantee is broken."""


CASES: dict[str, Sequence[Fault]] = {
    "kills": kills.KILLS,
    "disks": disks.DISKS,
    "hooks": hooks.HOOKS,
    "ranks": ranks.RANKS,
}
_SHORT = kills.SHORT | disks.SHORT | hooks.SHORT | ranks.SHORT
_TITLES = {
    ("kills", "hook"): "killed in a hook",
    ("kills", "effect"): "killed before a disk operation",
    ("kills", "write"): "killed during a write",
    ("disks", "full"): "disk full after a step",
    ("disks", "in the way"): "folder that cannot be created",
    ("disks", "removed"): "folder removed at a step",
    ("disks", "removed at every step"): "folder removed at every step",
    ("disks", "effect"): "one disk operation fails",
    ("hooks", "callback before"): "error in a callback before the monitors",
    ("hooks", "callback after"): "error in a callback after the monitors",
    ("hooks", "module"): "error in a hook of the model",
    ("hooks", "strategy"): "error in a method of the strategy",
    ("hooks", "precision"): "error in a method of the precision plugin",
    ("ranks", "raises"): "one of two ranks raises an error",
    ("ranks", "leaves"): "one of two ranks exits without an error",
    ("ranks", "is killed"): "one of three ranks is killed",
    ("ranks", "hangs"): "one of two ranks hangs",
}


def title_of(family: str, case: Fault) -> str:
    """Return the kind of fault of a case, as in the table of the documentation."""
    return _TITLES[family, getattr(case, "how", None) or getattr(case, "source", "")]


def is_short(case: Fault) -> bool:
    """Return whether `make test` runs a case; `make sweep` runs all cases."""
    return str(case) in _SHORT


def counts() -> dict[str, int]:
    """Return the number of cases by kind of fault."""
    return dict(Counter(title_of(family, c) for family, cases in CASES.items() for c in cases))


def outcome(work: tuple[str, int]) -> str:
    """Run a case; return the error, or an empty string."""
    family, index = work
    logging.disable()
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            CASES[family][index].check()
        except BaseException as error:
            return f"{type(error).__name__}: {str(error)[:500]}"
    return ""
