"""Says what is wrong with an argument: one that a constructor does not take, or a bad value."""

import contextlib
import difflib
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from lightning_mp._argument_values import PATH, Check, ValueTable, refuse_values, shown

__all__ = [
    "PATH",
    "Check",
    "check_arguments",
    "check_values",
    "explains_arguments",
    "keeps_arguments",
    "nearest",
    "refuse_values",
    "typed_as",
]

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Parameters = Sequence[inspect.Parameter]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TABLES: weakref.WeakKeyDictionary[type, ValueTable] = weakref.WeakKeyDictionary()


def typed_as(function: _Function) -> Callable[[Any], _Function]:
    """Return a decorator that gives its function the type of another, for type checkers."""
    return lambda decorated: decorated


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return which of `names` was probably meant by `name`, if any is like it."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def explains_arguments(
    *,
    checks: Mapping[str, Check | str] | None = None,
    also: Collection[str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> Callable[[_Class], _Class]:
    """Make a constructor refuse wrong arguments in a sentence: names, and values.

    Python says of `BalancedAMP("bf16")` that `__init__` takes 1 positional argument but 2 were
    given, and of a misspelt keyword that `**kwargs` pass on to DDP nothing before training starts.
    The class keeps its signature, which LightningCLI reads, and subclasses may have their own.

    Args:
        checks: As of a `ValueTable`. Those of base classes hold for arguments of the same name.
        also: The names that `**kwargs` take; `None` where whatever they go to checks them.
        hints: A sentence for each name that is often passed and stands for something else.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__  # type: ignore[misc]
        parameters = list(inspect.signature(init).parameters.values())[1:]
        table = _TABLES[cls] = ValueTable(init, {**_inherited(cls), **(checks or {})})

        # By `__wrapped__`, which this sets, LightningCLI finds the signature.
        @functools.wraps(init)
        def explained(self: Any, *args: Any, **kwargs: Any) -> None:
            problem = (
                # In this order, as a misspelt argument is a missing one too.
                _unknown_name(table, parameters, kwargs, also, hints or {})
                or _without_name(table, parameters, args)
                or _missing(parameters, args, kwargs)
            )
            if problem is None:
                bound = table.bound(functools.partial(_called, self, cls), (self, *args), kwargs)
                init(*bound.args, **bound.kwargs)
                return
            # The users of a subclass with a constructor of its own have not passed these arguments.
            name = type(self).__name__ if type(self).__init__ is explained else cls.__name__
            passed = [shown(value) for value in args]
            passed += [f"{key}={shown(value)}" for key, value in kwargs.items()]
            raise TypeError(f"Passed `{name}({', '.join(passed)})`. {problem}")

        cls.__init__ = explained  # type: ignore[misc]
        return cls

    return decorate


def check_arguments(**checks: Check | str) -> Callable[[_Function], _Function]:
    """Make a function refuse wrong values of some arguments, as a constructor would."""

    def decorate(function: _Function) -> _Function:
        table, signature = ValueTable(function, checks), inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            for name in checks.keys() & given.keys():
                table.taken(lambda _: function.__qualname__, name, given[name])
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check_values(owner: object, values: Mapping[str, Any]) -> None:
    """Refuse values, by name, that an object's constructor would refuse."""
    table = next(_TABLES[base] for base in type(owner).__mro__ if base in _TABLES)
    for name, value in values.items():
        table.taken(lambda _: type(owner).__name__, name, value)


def _inherited(cls: type) -> dict[str, Check | str]:
    """Return the checks of base classes, the nearest of which counts."""
    tables = [_TABLES[base] for base in cls.__mro__ if base in _TABLES]
    return {name: check for table in reversed(tables) for name, check in table.checks.items()}


def _called(self: object, cls: type, argument: str) -> str:
    """Return the class that a user has passed an argument to: a subclass, if it takes that."""
    parameters = inspect.signature(type(self).__init__).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return (type(self) if passes_on or argument in parameters else cls).__name__


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
    table: ValueTable,
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
        return said + (_by_value(table, value) or f"It takes {_listed(known)}.")
    return None


def _without_name(table: ValueTable, parameters: _Parameters, args: Sequence[Any]) -> str | None:
    places = [p for p in parameters if p.kind in _POSITIONAL]
    if len(args) <= len(places) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    value = args[len(places)]
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not names:
        return f"It takes {len(places)} arguments: {_listed([p.name for p in places])}."
    said = f"{shown(value)} must be passed by name. "
    return said + (_by_value(table, value) or f"The names are {_listed(names)}.")


def _missing(parameters: _Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    for index, parameter in enumerate(parameters):
        is_single = parameter.kind in (*_POSITIONAL, *_BY_NAME)
        is_given = index < len(args) or parameter.name in kwargs
        if is_single and parameter.default is parameter.empty and not is_given:
            return f"`{parameter.name}` is missing. Pass `{parameter.name}=...`."
    return None


def _by_value(table: ValueTable, value: Any) -> str | None:
    """Guess what a value was meant for: an argument that has it among its choices."""
    name = table.with_choice(value) if isinstance(value, str) else None
    return name and f"Did you mean `{name}={value!r}`?"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
