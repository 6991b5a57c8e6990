"""Describes a verdict in words: chooses the sentences and fills in the numbers."""

from collections.abc import Collection
from typing import Any

from lightning_mp.callbacks._rules.records import Verdict
from lightning_mp.callbacks._words import non_finite, sentences

__all__ = ["MESSAGES", "REMEDIES", "SENTENCES", "SHARED", "words_for"]

MESSAGES = {**sentences.MESSAGES, **non_finite.MESSAGES}
REMEDIES = {**sentences.REMEDIES, **non_finite.REMEDIES}
SENTENCES = {**sentences.SENTENCES, **non_finite.SENTENCES}
SHARED = {**sentences.SHARED, **non_finite.SHARED}

_ORDINALS = ("zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


class _Number:
    """A number with additional formats: ordinals, `{n:th}`, and nouns, `{n:count step}`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        how, _, noun = spec.partition(" ")
        if how not in ("th", "is", "count"):
            return "NaN" if not spec and self.value != self.value else format(self.value, spec)
        count = int(self.value)
        if how == "count":
            return f"{count} {noun}{'' if count == 1 else 's'}"
        if how == "is":
            return "is" if count == 1 else "are"
        last = 0 if count % 100 in (11, 12, 13) else count % 10
        numeral = f"{count}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
        return _ORDINALS[count] if count < len(_ORDINALS) else numeral


def words_for(verdict: Verdict, tags: Collection[str], **numbers: Any) -> tuple[str, str]:
    """Return message and remedy of a verdict in a run with these tags and numbers."""
    if verdict.words is not None:
        return verdict.words
    own = {"value": verdict.value, "threshold": verdict.threshold, "tensor": verdict.tensor}
    fields = {"count": 1, **numbers, **own, **verdict.numbers}
    fields = {k: _Number(v) if isinstance(v, int | float) else v for k, v in fields.items()}
    holds = {*tags, *verdict.tags}
    if "fp16" in verdict.tags:  # the tensor is in fp16, whatever the precision of the run
        holds.discard("wide")
    remedies = [_choose(SENTENCES, key, holds) for key in verdict.remedies]
    if len(remedies) > 1:
        remedies.insert(0, SENTENCES["one at a time"])
    remedies = remedies or [_choose(REMEDIES, verdict.kind, holds)]
    message = [_choose(MESSAGES, verdict.kind, holds), *(SENTENCES[key] for key in verdict.also)]
    if verdict.numbers.get("count", 1) > 1 and "{count" not in message[0]:
        message.append(SENTENCES["count"])
    remedy = " ".join(remedies)
    for name in dict.fromkeys(key.partition(",")[0] for key in SHARED):
        remedy = remedy.replace(f"{{{name}}}", _choose(SHARED, name, holds))
    return " ".join(message).format(**fields), remedy.format(**fields)


def _choose(table: dict[str, str], kind: str, holds: Collection[str]) -> str:
    """Return the sentence of a kind with the most tags, among those whose tags all hold."""
    keys = [key.split(", ") for key in table if key.split(", ")[0] == kind]
    best = max((key for key in keys if {*key[1:]} <= {*holds}), key=len)
    return table[", ".join(best)]
