"""Says what is wrong with an argument: one that a constructor does not take, or a bad value."""

import contextlib
import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin

__all__ = [
    "check_choice",
    "check_count",
    "explains_arguments",
    "is_number",
    "keeps_arguments",
    "nearest",
]

_Class = TypeVar("_Class", bound=type)
_Parameters = Sequence[inspect.Parameter]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60  # characters; an argument may be a whole model


def check_count(
    owner: str,
    name: str,
    value: object,
    least: int = 1,
    *,
    other: str = "",
    fix: str = "Leave it out to get the default.",
) -> None:
    """Refuse what is no integer, or too small a one.

    `other` is what else is accepted, such as `"'auto' or "`; `fix` says what to pass instead.

    Raises:
        ValueError: With what is accepted.
    """
    # `True` is an integer to Python, and would pass for 1.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"Passed `{owner}({name}={value!r})`. `{name}` must be {other}an integer of at least "
            f"{least}. {fix}"
        )


def check_choice(owner: object, name: str, value: object, known: Collection[str]) -> None:
    """Refuse an argument of an object's constructor that is not among those known.

    Raises:
        ValueError: With what is accepted.
    """
    if value not in known:
        raise ValueError(
            f"Passed `{type(owner).__name__}({name}={value!r})`. `{name}` must be one of "
            f"{', '.join(map(repr, known))}."
        )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return which of `names` was probably meant by `name`, if any is like it."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def explains_arguments(
    *, also: Collection[str] | None = None, hints: Mapping[str, str] | None = None
) -> Callable[[_Class], _Class]:
    """Make a class name the argument that it does not take, and what is near.

    Python says of `BalancedAMP("bf16")` that `__init__` takes 1 positional argument but 2 were
    given, and of a misspelt keyword that `**kwargs` pass on to DDP nothing before training starts.
    The class keeps its signature, which LightningCLI reads, and subclasses may have their own.

    Args:
        also: The names that `**kwargs` take; `None` where whatever they go to checks them.
        hints: A sentence for each name that is often passed and stands for something else.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__  # type: ignore[misc]
        signature = inspect.signature(init)
        parameters = list(signature.parameters.values())[1:]

        # By `__wrapped__`, which this sets, LightningCLI finds the signature.
        @functools.wraps(init)
        def explained(self: Any, *args: Any, **kwargs: Any) -> None:
            problem = (
                # In this order, as a misspelt argument is a missing one too.
                _unknown_name(parameters, kwargs, also, hints or {})
                or _without_name(parameters, args)
                or _missing(parameters, args, kwargs)
            )
            if problem is None:
                init(self, *args, **kwargs)
                return
            # The users of a subclass with a constructor of its own have not passed these arguments.
            name = type(self).__name__ if type(self).__init__ is explained else cls.__name__
            shown = [_shown(value) for value in args]
            shown += [f"{key}={_shown(value)}" for key, value in kwargs.items()]
            raise TypeError(f"Passed `{name}({', '.join(shown)})`. {problem}")

        cls.__init__ = explained  # type: ignore[misc]
        return cls

    return decorate


def keeps_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor keep its arguments, other than defaults, as `_arguments`."""

    @functools.wraps(init)
    def kept(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # else this is a base's
            with contextlib.suppress(TypeError):  # the constructor itself says what is wrong
                bound = inspect.signature(init).bind(None, *args, **kwargs)
                known, (_, *passed) = bound.signature.parameters, bound.arguments.items()
                # An array has no one answer to whether it is equal.
                self._arguments = {k: v for k, v in passed if (v == known[k].default) is not True}
        init(self, *args, **kwargs)

    return kept


def _unknown_name(
    parameters: _Parameters,
    kwargs: Mapping[str, Any],
    also: Collection[str] | None,
    hints: Mapping[str, str],
) -> str | None:
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = [p.name for p in parameters if p.kind in _BY_NAME] + list(also or ())
    for name, value in kwargs.items():
        if name in known:
            continue
        near = nearest(name, known)
        if near is None and takes_more and also is None:
            continue  # whatever takes the rest will say what it does not know
        said = f"It takes no `{name}`. "
        # Before what is near: a hint knows what the name stands for elsewhere.
        if name in hints:
            return said + hints[name]
        if near is not None:
            return f"{said}Did you mean `{near}`?"
        return said + (_by_value(parameters, value) or f"It takes {_listed(known)}.")
    return None


def _without_name(parameters: _Parameters, args: Sequence[Any]) -> str | None:
    places = [p for p in parameters if p.kind in _POSITIONAL]
    if len(args) <= len(places) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    value = args[len(places)]
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    said = f"{_shown(value)} must be passed by name. "
    return said + (_by_value(parameters, value) or f"The names are {_listed(names)}.")


def _missing(parameters: _Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    for index, parameter in enumerate(parameters):
        is_single = parameter.kind in (*_POSITIONAL, *_BY_NAME)
        is_given = index < len(args) or parameter.name in kwargs
        if is_single and parameter.default is parameter.empty and not is_given:
            return f"`{parameter.name}` is missing. Pass `{parameter.name}=...`."
    return None


def _by_value(parameters: _Parameters, value: Any) -> str | None:
    """Guess what a value was meant for: an argument that has it among its choices."""
    for parameter in parameters:
        if isinstance(value, str) and value in _choices(parameter.annotation):
            return f"Did you mean `{parameter.name}={value!r}`?"
    return None


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    # Choices stand inside of unions and sequences too, as in `Literal[...] | None`.
    for part in get_args(annotation):
        yield from _choices(part)


def _shown(value: Any) -> str:
    if isinstance(value, str) and "://" in value:
        return repr(value.partition("://")[0] + "://...")  # the rest may hold a secret
    return " ".join(_repr.repr(value).split())  # a tensor's has line breaks


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
