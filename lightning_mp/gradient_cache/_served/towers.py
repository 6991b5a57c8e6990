"""Finds towers by name and intercepts their calls."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Tower", "find_tower", "modules_of", "sharded_modules"]

Handler = Callable[["Tower", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`handler(tower, original, args, kwargs)` handles a call instead of the tower."""


_NO_OBJECTS = (nn.Module, ModuleType, type)


@dataclass(eq=False)
class Tower:
    """A submodule, or a method of a submodule, whose calls can be intercepted."""

    name: str  # a dotted path
    module: Any  # the submodule, or the owner of the method; `None` for a plain function
    signature_of: Callable[..., Any]  # its parameters name the arguments of a call
    method: str | None = None

    def __post_init__(self) -> None:
        self.sharded = sharded_modules(self.module)
        # A function of several modules gets a new list of them in every call.
        one = self.module if isinstance(self.module, nn.ModuleList) else [self.module]
        self.identity = tuple(map(id, one))
        # They reduce gradients in the backward of their own forward, which a replay is not.
        if _modules_of(self.module, "FullyShardedDataParallel"):
            raise ValueError(
                f"Passed the tower `{self.name}`, which contains `FullyShardedDataParallel`: its "
                "replays would lose gradients. Shard towers with `fully_shard` (FSDP 2), or use "
                "DDP."
            )
        if isinstance(self.module, DistributedDataParallel) and self.module.static_graph:
            raise ValueError(
                f"Passed the tower `{self.name}` in DDP with `static_graph=True`, which would not "
                "average the gradients of its replays. Leave `static_graph` out, or wrap the whole "
                "model in DDP."
            )

    @contextmanager
    def intercepted(self, handler: Handler) -> Iterator[None]:
        """Send every call to `handler` until the context ends.

        `nn.Module.__call__` uses `_compiled_call_impl` if it is set, so setting this attribute on
        the instance intercepts compiled and plain modules alike and leaves hooks and `forward`
        unchanged. A method is intercepted by an instance attribute of its name. Copies and pickles
        of the module, such as a teacher made in a training step, are not intercepted: torch drops
        `_compiled_call_impl`, and the method attribute copies as the original method.
        """
        # Not `setattr`, which a compiled module forwards to the module inside it.
        attributes = vars(self.module)
        name = "_compiled_call_impl" if self.method is None else self.method
        before = {name: attributes[name]} if name in attributes else {}
        called = self.module._call_impl if self.method is None else getattr(self.module, name)
        original = attributes.get(name) or called
        attributes[name] = _Interceptor(self, name, original, handler)
        try:
            yield
        finally:
            # Removed instead of set to `None`, so that the class attribute is visible again.
            attributes.pop(name, None)
            attributes |= before


class _Interceptor:
    """Receives the calls of a module or method; copies of it are the original method."""

    def __init__(
        self, tower: Tower, attribute: str, original: Callable[..., Any], handler: Handler
    ) -> None:
        self._tower, self._attribute = tower, attribute
        self._original, self._handler = original, handler
        # `signature_of` finds this object instead of an intercepted method.
        with suppress(TypeError, ValueError):  # C functions have no signature
            self.__signature__ = inspect.signature(tower.signature_of)

    # A compiled training step has a graph break here, because a handler keeps state.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self._tower, self._original, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        owner = getattr(self._original, "__self__", None)
        if owner is self._tower.module:
            # By name, so that the copy finds its own method.
            return getattr, (owner, self._attribute)
        return _itself, (self._original,)


def _itself(value: Any) -> Any:
    return value


def find_tower(model: nn.Module, name: str) -> Tower:
    """Return the submodule or method of `model` with the dotted path `name`."""
    path, _, last = name.rpartition(".")
    owner = target = None
    with suppress(AttributeError):
        owner = model.get_submodule(path)
        target = getattr(owner, last)
    if isinstance(target, nn.Module):
        return Tower(name, target, target.forward)
    if callable(target):
        return Tower(name, owner, target, last)
    candidates = list(_tower_names(model))
    near = difflib.get_close_matches(name, candidates, n=5, cutoff=0.5)
    children = [child for child, _ in model.named_children()]
    raise ValueError(
        f"{type(model).__name__} has no submodule or method {name!r}, which `towers` contains. "
        + (f"Similar names: {near}." if near else f"Its submodules: {children}.")
        + " Pass `towers=[...]` with dotted paths from the model, such as 'visual' or "
        "'model.encode_image'."
    )


def _tower_names(model: nn.Module) -> Iterable[str]:
    """Yield the paths of all submodules, and of the methods that their own classes define."""
    for path, module in model.named_modules():
        if path:
            yield path
        prefix = f"{path}." if path else ""
        for cls in type(module).__mro__:
            # Methods of framework classes are not towers and would hide similar names.
            if cls.__module__.split(".")[0] in ("torch", "lightning", "pytorch_lightning"):
                break
            for name, value in vars(cls).items():
                if callable(value) and not name.startswith("_") and name != "forward":
                    yield f"{prefix}{name}"


def modules_of(function: Callable[..., Any], arguments: Iterable[Any]) -> list[nn.Module]:
    """Return the module of a method, or else those that the arguments and the closure hold."""
    held = [*arguments]
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    owner = getattr(function, "__self__", None)
    for whole in (function, owner):
        if isinstance(whole, nn.Module):
            return [whole]
    with suppress(TypeError, ValueError):  # C functions have no closure
        closure = inspect.getclosurevars(inspect.unwrap(function))
        held += [*closure.nonlocals.values(), *closure.globals.values()]
    # An object, such as one around a model of Hugging Face, may hold a module.
    held += [owner, function]
    objects = [x for x in held if hasattr(x, "__dict__") and not isinstance(x, _NO_OBJECTS)]
    held += [value for each in objects for value in vars(each).values()]
    return list({id(x): x for x in held if isinstance(x, nn.Module)}.values())


def sharded_modules(module: nn.Module | None) -> list[Any]:
    """Return the modules that `fully_shard` was applied to."""
    return _modules_of(module, "FSDPModule")


def _modules_of(module: nn.Module | None, kind: str) -> list[Any]:
    """Return the modules of a class of `torch.distributed.fsdp`, without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if module is None or fsdp is None:
        return []
    return [each for each in module.modules() if isinstance(each, getattr(fsdp, kind))]
