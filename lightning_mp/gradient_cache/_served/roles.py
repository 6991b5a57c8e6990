"""Roles of tensors: of the arguments and outputs of towers and of the fields of a batch.

Roles are inferred from shapes; where shapes are ambiguous, they are declared by name.
docs/contrastive/gradient-cache.md explains what each role means.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_mp._arguments import nearest, refuse_values

__all__ = ["ROWS", "WHOLE", "DeclaredRoles", "Role", "is_named"]

Kind = Literal["rows", "mask", "row numbers", "whole", "mean", "sum", "left out"]
Origin = Literal["argument", "output", "field"]

_KINDS: dict[Origin, tuple[Kind, ...]] = {
    "argument": ("rows", "mask", "row numbers", "whole"),
    "output": ("rows", "mask", "whole", "mean", "sum", "left out"),
    "field": ("rows", "mask", "row numbers", "whole"),
}
_DESCRIPTIONS: dict[Origin, str] = {
    "argument": "argument of a tower that was called",
    "output": "output of a tower that was called",
    "field": "field of the batch",
}
_ROWS = re.compile(r"(?:([1-9]\d*) )?rows(?: padded with (\S+))?")
_MASK = re.compile(r"mask(?: of ([1-9]\d*) rows)?")
_NUMBERS = re.compile(r"row numbers(?: of (\S+))?")


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one tensor."""

    kind: Kind
    rows_per_sample: int = 1  # of the batch
    numbered_field: str = ""  # whose rows are numbered; `""`: the batch itself
    padding: float | None = None  # fills shorter rows; `None`: all rows have one shape
    has_rows: bool = field(init=False, compare=False)
    """Whether the first dimension holds the rows of the batch."""

    def __post_init__(self) -> None:
        """Compute `has_rows` once, as it is read for every micro-batch."""
        object.__setattr__(self, "has_rows", self.kind in ("rows", "mask", "row numbers"))

    @classmethod
    def parse(cls, text: str) -> "Role":
        if found := _ROWS.fullmatch(text):
            each, padding = found.groups()
            return cls("rows", int(each or 1), padding=None if padding is None else float(padding))
        if found := _MASK.fullmatch(text):
            return cls("mask", int(found[1] or 1), padding=0.0)
        if found := _NUMBERS.fullmatch(text):
            return cls("row numbers", numbered_field=found[1] or "")
        if text not in get_args(Kind):
            raise ValueError(
                f"{text!r} is not a role. Roles are 'rows', '2 rows', 'rows padded with 0', "
                "'mask', 'row numbers', 'row numbers of text', 'whole', 'mean', 'sum' and 'left "
                "out'."
            )
        return cls(text)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the text that `parse` accepts."""
        text, rows = str(self.kind), self.rows_per_sample
        if rows > 1:
            text = f"mask of {rows} rows" if text == "mask" else f"{rows} {text}"
        if self.numbered_field:
            text += f" of {self.numbered_field}"
        is_padded = self.kind == "rows" and self.padding is not None
        return f"{text} padded with {self.padding:g}" if is_padded else text

    def slice(self, rows: slice) -> slice:
        return slice(rows.start * self.rows_per_sample, rows.stop * self.rows_per_sample)


ROWS, WHOLE = Role("rows"), Role("whole")


class DeclaredRoles:
    """The declared roles by name, from texts such as `{"prompt": "whole"}`.

    A misspelt name would silently change the loss. Therefore names that match something are
    recorded until every tower has been called once. Errors name the `owner`, which got the roles.
    """

    def __init__(self, roles: Mapping[str, str] | None, owner: object = None) -> None:
        self.texts = dict(roles or {})
        self._roles = {name: Role.parse(text) for name, text in self.texts.items()}
        self.owner = owner
        self.agree: Callable[[list[bool]], list[bool]] = list
        """Returns which facts hold on any rank, so that all ranks raise together."""
        self.is_open = bool(self.texts)
        """Whether the names have not been checked yet."""
        self._called: set[str] = set()
        # A dict keeps the order of the calls, for messages.
        self._paths: dict[Origin, dict[str, None]] = {origin: {} for origin in _KINDS}

    def role(self, path: str, origin: Origin) -> Role | None:
        """Return the declared role of a path; `None` if there is none for this origin."""
        names = [
            name
            for name, role in self._roles.items()
            if role.kind in _KINDS[origin] and is_named(path, name)
        ]
        # The longest name is the most specific: `batch.lengths` before `batch`.
        return self._roles[max(names, key=len)] if names else None

    def origins(self, name: str) -> list[Origin]:
        kind = self._roles[name].kind
        return [origin for origin, kinds in _KINDS.items() if kind in kinds]

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
        names = list(self.texts)
        found = [any(is_named(path, name) for path in self._known(name)) for name in names]
        called = [tower in self._called for tower in towers] or [bool(self._called)]
        facts = self.agree([*found, *called])
        if not all(facts[len(found) :]):
            return
        self.is_open = False
        missing = [name for name, is_found in zip(names, facts, strict=False) if not is_found]
        if not missing:
            return
        name = missing[0]
        known = self._known(name)
        near = nearest(name, known)
        missing_origins = " and no ".join(_DESCRIPTIONS[origin] for origin in self.origins(name))
        refuse_values(
            self.owner,
            f"No {missing_origins} is named {name!r}. "
            + (f"Did you mean {near!r}?" if near else f"The names are {known}."),
            roles={name: self.texts[name] for name in missing},
        )

    def _known(self, name: str) -> list[str]:
        origins = self.origins(name)
        return list(dict.fromkeys(path for origin in origins for path in self._paths[origin]))


def is_named(path: str, name: str) -> bool:
    """Return whether a name is the path, a leading part of it, or a single step of it."""
    # `batch.images[0]` is named `batch.images[0]`, `batch.images`, `batch` and `images`.
    steps = path.replace("[", ".[").split(".")
    begins = {".".join(steps[: k + 1]).replace(".[", "[") for k in range(len(steps))}
    return name in begins or name in steps
