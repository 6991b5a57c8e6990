"""What every rule returns: numbers, and no words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["Severity", "Verdict"]

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Verdict:
    """A rule that was broken. `sentences.words_for` puts it into words.

    Args:
        kind: The rule, in `snake_case`; the kind of the alarm.
        value: What was measured.
        threshold: What it was held against.
        severity: Of the alarm.
        tensor: The parameter or module.
        says: Key of the message, where that of `kind` does not fit.
        fix: Key of the remedy, likewise.
        numbers: What the sentences have further, by the names in them.
        words: Message and remedy, where they are no templates.
    """

    kind: str
    value: float | None = None
    threshold: float | None = None
    severity: Severity = "warning"
    tensor: str | None = None
    says: str = ""
    fix: str = ""
    numbers: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    words: tuple[str, str] | None = None
