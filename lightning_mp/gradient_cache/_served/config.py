"""The arguments of a gradient cache, declared once for `GradientCache` and the strategies."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, overload

import torch

from lightning_mp._arguments import Check
from lightning_mp.gradient_cache._served.roles import DeclaredRoles

__all__ = ["CHECKS", "CacheConfig", "takes_config"]

_Parameters = ParamSpec("_Parameters")

CHECKS: dict[str, Check | str] = {
    "micro_batch_size activation_bytes": "[1, inf)",
    "prefetch": "[0, inf)",
    "replay_tolerance": "[0, inf]",
    "roles": Check(
        test=lambda roles: DeclaredRoles(roles) is not None, words="a mapping of names to roles"
    ),
}
"""Checks of the arguments beyond their annotations."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The arguments of a gradient cache; the docstring of `GradientCache` explains them."""

    micro_batch_size: int | Literal["auto"]
    activation_bytes: int | None = None
    device: torch.device | str | None = None
    prefetch: int = 2
    roles: Mapping[str, str] | None = None
    replay_tolerance: float | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


# Type checkers see the arguments of a constructor that takes no others than the config's.
@overload
def takes_config(
    kind: Callable[_Parameters, CacheConfig],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Parameters], None]]: ...
@overload
def takes_config(
    kind: type[CacheConfig], *, without: Collection[str], documented: type, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]: ...
def takes_config(
    kind: Any, *, without: Collection[str] = (), documented: type | None = None, **defaults: Any
) -> Any:
    """Decorate a constructor: it takes the fields of a config by name and receives a `config`.

    It does not take the fields in `without`, and `defaults` replace those of the config. The
    docstring of the class `documented` explains the arguments, for `--help`.
    """

    def decorate(init: Callable[..., None]) -> Any:
        own = dict(inspect.signature(init).parameters)
        del own["config"]
        config = {n: p for n, p in inspect.signature(kind).parameters.items() if n not in without}
        for name, default in defaults.items():
            config[name] = config[name].replace(default=default)
        more = [own.pop(n) for n, p in list(own.items()) if p.kind is p.VAR_KEYWORD]

        @functools.wraps(init)
        def taking(self: Any, **kwargs: Any) -> None:
            given = {name: kwargs.pop(name) for name in config if name in kwargs}
            init(self, config=CacheConfig(**{**defaults, **given}), **kwargs)

        parameters = [*own.values(), *config.values(), *more]
        # LightningCLI reads these through `inspect.signature` and `typing.get_type_hints`.
        taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        taking.__doc__ = init.__doc__ if documented is None else documented.__doc__
        taking.__annotations__ = {p.name: p.annotation for p in parameters[1:]}
        return taking

    return decorate
