"""Accepted values of arguments, from annotations and bounds."""

import collections.abc
import functools
import inspect
import math
import numbers
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

__all__ = ["PATH", "Check", "ValueTable", "refuse_values", "shown"]

_REFUSED = object()
_TEXTS = str | bytes | bytearray | memoryview
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60  # characters; an argument may be a whole model


@dataclass(frozen=True)
class Check:
    """Conditions on an argument beyond its annotation.

    The annotation alone rejects `"False"` for a bool, `True` and 1.5 for an int, NaN and infinity
    for a float, other strings for a `Literal`, and a string for a sequence of names. numpy numbers
    are converted to Python numbers.

    Args:
        bounds: Interval of a number, or of each number in a list: `"[1, inf)"` is finite and at
            least 1, `"(0, inf]"` is positive or infinite.
        least: Minimum length of a list.
        also: A further class whose objects are accepted.
        test: Returns whether a value other than `None` is accepted.
        take: Converts an accepted value. Errors of `test` and `take` are quoted in the message.
        words: Description of accepted values, instead of the one derived from the annotation.
        fix: Advice in the message, instead of leaving the argument out.
        is_secret: Whether messages hide strings.
    """

    bounds: str = "(-inf, inf)"
    least: int = 0
    also: type | None = None
    test: Callable[[Any], object] = lambda _: True
    take: Callable[[Any], Any] = lambda value: value
    words: str = ""
    fix: str = ""
    is_secret: bool = False


# A shell expands `~`, but a YAML file does not.
PATH = Check(also=os.PathLike, take=os.path.expanduser, words="a path")


def shown(value: Any) -> str:
    """Return a short representation of a value on one line, for messages."""
    if isinstance(value, str) and "://" in value:
        return repr(value.partition("://")[0] + "://...")  # the rest may hold a secret
    return " ".join(_repr.repr(value).split())  # tensors have line breaks


def refuse_values(owner: object, reason: str, **values: object) -> NoReturn:
    """Raise for constructor arguments that cannot be combined."""
    passed = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
    raise ValueError(f"Passed `{type(owner).__name__}({passed})`. {reason}")


class _Kind(NamedTuple):
    """One kind of value that an annotation accepts."""

    words: tuple[str, ...]  # its description; one word for each choice of a `Literal`
    plural: str
    take: Callable[[Any], Any]  # returns the converted value, or `_REFUSED`


class ValueTable:
    """The accepted values of each parameter of a function.

    A key of `checks` may be several names separated by spaces; a string stands for `Check(bounds)`.
    """

    def __init__(self, function: Callable[..., Any], checks: Mapping[str, Check | str]) -> None:
        self.checks = {
            name: Check(check) if isinstance(check, str) else check
            for names, check in checks.items()
            for name in names.split()
        }
        self._function, self._signature = function, inspect.signature(function)

    @functools.cached_property
    def _kinds(self) -> dict[str, list[_Kind]]:
        # Not at class creation, because annotations may name classes defined later.
        hints = typing.get_type_hints(self._function)
        return {n: list(_kinds_of(h, self.checks.get(n, Check()))) for n, h in hints.items()}

    def with_choice(self, value: str) -> str | None:
        """Return the name of an argument whose `Literal` contains the value."""
        words = (
            (name, word) for name, kinds in self._kinds.items() for k in kinds for word in k.words
        )
        return next((name for name, word in words if repr(value) in word), None)

    def bound(
        self, owner_of: Callable[[str], str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        """Return the converted arguments; `owner_of(name)` names the function in errors."""
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = self.taken(owner_of, name, value)
        return bound

    def taken(self, owner_of: Callable[[str], str], name: str, value: Any) -> Any:
        """Return the converted value of an argument, or raise."""
        kinds, check, reason = self._kinds.get(name), self.checks.get(name, Check()), ""
        if kinds is None:  # `self`
            return value
        if value is None and any(kind.plural == "None" for kind in kinds):
            return None
        taken = _first_taken(kinds, value)
        try:
            if taken is not _REFUSED and check.test(taken):
                return check.take(taken)
        except Exception as error:  # tests may raise any error
            reason = str(error)
        if _first_taken(kinds, [value]) is not _REFUSED:
            reason = f"Pass `{name}=[{shown(value)}]`."
        default = self._signature.parameters[name].default
        if default is inspect.Parameter.empty:
            usual = "It has no default."
        elif default is None or callable(default):
            usual = "Leave it out for the default."
        else:
            usual = f"Leave it out for the default, {default!r}."
        quoted = "'...'" if check.is_secret and isinstance(value, str) else shown(value)
        raise ValueError(
            f"Passed `{owner_of(name)}({name}={quoted})`. `{name}` must be "
            f"{_accepted_words(kinds, check)}. {check.fix or reason or usual}"
        )


def _first_taken(kinds: Sequence[_Kind], value: Any) -> Any:
    taken = (kind.take(value) for kind in kinds)
    return next((each for each in taken if each is not _REFUSED), _REFUSED)


def _accepted_words(kinds: Sequence[_Kind], check: Check) -> str:
    # Choices of literals first.
    ordered = sorted(kinds, key=lambda kind: not kind.words[0].startswith("'"))
    words = [word for kind in ordered for word in kind.words if word != "None"]
    if check.words:
        words = [check.words]
    elif len(words) > 1 and all(word.startswith("'") for word in words):
        words = [f"one of {', '.join(words)}"]
    words += ["None" for kind in kinds if kind.plural == "None"]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _kinds_of(annotation: Any, check: Check) -> Iterator[_Kind]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if check.also is not None:
        yield _of_class(check.also)
    if origin in (typing.Union, types.UnionType):
        for each in inner:
            yield from _kinds_of(each, check)
    elif origin is Literal:
        words = tuple(map(repr, inner))
        yield _Kind(words, ", ".join(words), functools.partial(_take_choice, inner))
    elif annotation in (int, float):
        yield _of_numbers(annotation, check.bounds)
    elif origin is collections.abc.Sequence:
        kind = "non-empty list" if check.least else "list"
        yield _of_lists(kind, list(_kinds_of(inner[0], check)), check.least, math.inf)
    elif origin is collections.abc.Mapping:
        yield _of_class(collections.abc.Mapping)
    elif origin is tuple:
        yield _of_lists("pair", list(_kinds_of(inner[0], check)), len(inner), len(inner))
    elif origin is collections.abc.Callable:
        yield _Kind(("a function",), "functions", lambda v: v if callable(v) else _REFUSED)
    elif annotation is type(None):
        yield _Kind(("None",), "None", lambda v: v if v is None else _REFUSED)
    elif isinstance(annotation, type) and annotation is not Any:  # classes
        yield _of_class(annotation)
    else:
        yield _Kind(("anything",), "anything", lambda v: v)


def _of_class(cls: type) -> _Kind:
    named = {bool: (("True", "False"), "bools"), str: (("a string",), "names")}
    words, plural = named.get(cls, ((f"a `{cls.__name__}`",), f"`{cls.__name__}`s"))
    return _Kind(words, plural, lambda v: v if isinstance(v, cls) else _REFUSED)


def _take_choice(choices: tuple[Any, ...], value: Any) -> Any:
    # Types first, because `==` of a tensor is not a bool.
    return next((c for c in choices if isinstance(value, type(c)) and value == c), _REFUSED)


def _of_numbers(kind: type, bounds: str) -> _Kind:
    ends = bounds[1:-1].split(", ")
    low, high = map(_number, ends)
    takes_low, takes_high = bounds[0] == "[", bounds[-1] == "]"
    accepted: Any = numbers.Integral if kind is int else numbers.Real
    most = sys.maxsize if kind is int else sys.float_info.max

    def take(value: Any) -> Any:
        # `True` is an `int` in Python.
        if isinstance(value, bool) or not isinstance(value, accepted):
            return _REFUSED
        if isinstance(value, numbers.Integral) and abs(int(value)) > most:  # a deque's maxlen
            return _REFUSED
        is_inside = low < value < high or (takes_low and value == low)  # NaN is not
        if not (is_inside or (takes_high and value == high)):
            return _REFUSED
        # numpy numbers in a checkpoint would be arbitrary objects.
        return value if type(value) in (int, float) else kind(value)

    limits = [f"of at least {ends[0]}" if takes_low else f"above {ends[0]}"]
    limits += [f"at most {ends[1]}" if takes_high else f"below {ends[1]}"]
    interval = " and ".join(limit for limit in limits if not limit.endswith("inf"))
    if takes_low and takes_high and math.isfinite(high):
        interval = f"from {ends[0]} to {ends[1]}"
    noun = "integer" if kind is int else "number"
    if kind is float and math.isinf(high) and not takes_high:
        noun = "finite number"
    article = "an" if kind is int else "a"
    return _Kind((f"{article} {noun} {interval}".rstrip(),), f"{noun}s {interval}".rstrip(), take)


def _number(text: str) -> float:
    base, _, exponent = text.partition("**")
    return math.pow(float(base), float(exponent or 1))


def _of_lists(name: str, kinds: Sequence[_Kind], least: int, most: float) -> _Kind:
    def take(value: Any) -> Any:
        # They are sequences too: "visual" would be six names, `b"a"` a list of 97.
        is_list = isinstance(value, collections.abc.Sequence) and not isinstance(value, _TEXTS)
        taken = [_first_taken(kinds, each) for each in value] if is_list else [_REFUSED]
        # An empty name stands for nothing.
        if any(each is _REFUSED or each == "" for each in taken) or not least <= len(taken) <= most:
            return _REFUSED
        is_same = all(one is other for one, other in zip(taken, value, strict=True))
        return value if is_same else tuple(taken)

    return _Kind((f"a {name} of {kinds[0].plural}",), f"{name}s", take)
