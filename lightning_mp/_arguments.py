"""Checks of arguments: unknown names, missing arguments and invalid values."""

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
    """Return the closest match for `name` among `names`, or the only one with all its words."""
    longer = [each for each in names if {*name.split("_")} < {*each.split("_")}]
    near = difflib.get_close_matches(name, names, n=1) or longer
    return near[0] if len(near) == 1 else None


def explains_arguments(
    *,
    checks: Mapping[str, Check | str] | None = None,
    also: Collection[str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> Callable[[_Class], _Class]:
    """Decorate a class: its constructor raises errors that explain invalid names and values.

    Python's own error for `BalancedAMP("bf16")` does not name `half`, and a misspelt keyword for
    DDP is found when training starts. The class keeps its signature, which LightningCLI reads.

    Args:
        checks: Checks for a `ValueTable`. Checks of base classes apply to arguments of equal name.
        also: Names that `**kwargs` accept; `None` if the receiver of `**kwargs` checks them.
        hints: A sentence for each name that users of other libraries may pass by mistake.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__  # type: ignore[misc]
        parameters = list(inspect.signature(init).parameters.values())[1:]
        table = _TABLES[cls] = ValueTable(init, {**_inherited(cls), **(checks or {})})

        # LightningCLI finds the signature through `__wrapped__`.
        @functools.wraps(init)
        def explained(self: Any, *args: Any, **kwargs: Any) -> None:
            problem = (
                # In this order, because a misspelt argument is also missing.
                _unknown_name(table, parameters, kwargs, also, hints or {})
                or _without_name(table, parameters, args)
                or _missing(parameters, args, kwargs)
            )
            if problem is None:
                bound = table.bound(functools.partial(_called, self, cls), (self, *args), kwargs)
                init(*bound.args, **bound.kwargs)
                return
            # A subclass with its own constructor passes other arguments than its users do.
            name = type(self).__name__ if type(self).__init__ is explained else cls.__name__
            passed = [shown(value) for value in args]
            passed += [f"{key}={shown(value)}" for key, value in kwargs.items()]
            raise TypeError(f"Passed `{name}({', '.join(passed)})`. {problem}")

        cls.__init__ = explained  # type: ignore[misc]
        return cls

    return decorate


def check_arguments(**checks: Check | str) -> Callable[[_Function], _Function]:
    """Decorate a function: it raises for invalid values of the given arguments."""

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
    """Raise for values that the constructor of `owner` would not accept."""
    table = next(_TABLES[base] for base in type(owner).__mro__ if base in _TABLES)
    for name, value in values.items():
        table.taken(lambda _: type(owner).__name__, name, value)


def _inherited(cls: type) -> dict[str, Check | str]:
    """Return the checks of base classes; those of the nearest base take precedence."""
    tables = [_TABLES[base] for base in cls.__mro__ if base in _TABLES]
    return {name: check for table in reversed(tables) for name, check in table.checks.items()}


def _called(self: object, cls: type, argument: str) -> str:
    """Return the class that the user passed an argument to: the subclass if it accepts it."""
    parameters = inspect.signature(type(self).__init__).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return (type(self) if passes_on or argument in parameters else cls).__name__


def keeps_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a constructor: it stores its non-default arguments as `_arguments`."""

    @functools.wraps(init)
    def kept(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # otherwise this is the constructor of a base class
            with contextlib.suppress(TypeError):  # the constructor raises its own error
                bound = inspect.signature(init).bind(None, *args, **kwargs)
                known, (_, *passed) = bound.signature.parameters, bound.arguments.items()
                # `is not True`, because `==` of arrays returns an array.
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
            continue  # the receiver of `**kwargs` checks the name
        rejected = f"It takes no `{name}`. "
        # Hints first, because they know the meaning of the name in other libraries.
        if name in hints:
            return rejected + hints[name]
        if near is not None:
            return f"{rejected}Did you mean `{near}`?"
        return rejected + (_by_value(table, value) or f"It takes {_listed(known)}.")
    return None


def _without_name(table: ValueTable, parameters: _Parameters, args: Sequence[Any]) -> str | None:
    places = [p for p in parameters if p.kind in _POSITIONAL]
    if len(args) <= len(places) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    value = args[len(places)]
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not names:
        return f"It takes {len(places)} arguments: {_listed([p.name for p in places])}."
    rejected = f"{shown(value)} must be passed by name. "
    return rejected + (_by_value(table, value) or f"The names are {_listed(names)}.")


def _missing(parameters: _Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    for index, parameter in enumerate(parameters):
        is_single = parameter.kind in (*_POSITIONAL, *_BY_NAME)
        is_given = index < len(args) or parameter.name in kwargs
        if is_single and parameter.default is parameter.empty and not is_given:
            return f"`{parameter.name}` is missing. Pass `{parameter.name}=...`."
    return None


def _by_value(table: ValueTable, value: Any) -> str | None:
    """Suggest the argument that has the value among its choices."""
    name = table.with_choice(value) if isinstance(value, str) else None
    return name and f"Did you mean `{name}={value!r}`?"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
