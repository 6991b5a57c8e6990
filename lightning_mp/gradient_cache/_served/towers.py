"""Towers by their names, and a way to take over the calls to them for a while."""

import copy
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Tower", "find_tower", "sharded_modules"]

Handler = Callable[["Tower", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`handler(tower, original, args, kwargs)` answers a call in the tower's place."""

# Not `None`, which an instance may hold under the name.
_MISSING = object()


class Tower:
    """A submodule or a method of one, whose calls can be intercepted.

    Args:
        name: The dotted path, for messages.
        module: The submodule, or the one whose method it is.
        method: The name of the method; `None` for calls to the submodule itself.
    """

    def __init__(self, name: str, module: nn.Module, method: str | None) -> None:
        self.name = name
        self.module = module
        self.sharded = sharded_modules(module)
        """The parts of it that `fully_shard` was called for."""
        self._method = method
        self.signature_of: Callable[..., Any] = (
            module.forward if method is None else getattr(module, method)
        )
        """Whose parameters name the arguments of a call."""

    @contextmanager
    def intercepted(self, handler: Handler) -> Iterator[None]:
        """Send every call to `handler` until the context ends.

        A call of a module goes through `_compiled_call_impl` if that is set. Setting it on the
        instance therefore catches compiled and plain modules alike, and leaves hooks and `forward`
        as they are. A method is caught by an attribute of its instance. Copies and pickles of the
        module, such as a teacher made in a training step, take their calls themselves: torch drops
        the one attribute, and the other copies as the plain method.
        """
        # Not `setattr`: a compiled module forwards that to the module inside it.
        attributes = vars(self.module)
        name = "_compiled_call_impl" if self._method is None else self._method
        before = attributes.get(name, _MISSING)
        original = self._original(None if before is _MISSING else before)
        attributes[name] = _Interceptor(self, name, original, handler)
        try:
            yield
        finally:
            if before is _MISSING:
                # Taken away, not set to `None`, so that the class's own attribute shows again.
                attributes.pop(name, None)
            else:
                attributes[name] = before

    def _original(self, before: Any) -> Callable[..., Any]:
        if before is not None:
            return before  # type: ignore[no-any-return]
        if self._method is None:
            return self.module._call_impl
        return getattr(self.module, self._method)  # type: ignore[no-any-return]


class _Interceptor:
    """Takes the calls of a module or of a method, and is the plain method in copies."""

    def __init__(
        self, tower: Tower, attribute: str, original: Callable[..., Any], handler: Handler
    ) -> None:
        self._tower, self._attribute = tower, attribute
        self._original, self._handler = original, handler
        # `signature_of` finds this object in place of a method whose calls are taken over.
        self.__signature__ = inspect.signature(tower.signature_of)

    # A compiled training step breaks its graph here: a handler keeps state between calls.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self._tower, self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        owner = getattr(self._original, "__self__", None)
        if owner is self._tower.module:
            # By its name, so that the plain method is found where the copy is loaded.
            return getattr, (owner, self._attribute)
        return _itself, (self._original,)


def _itself(value: Any) -> Any:
    return value


def find_tower(model: nn.Module, name: str) -> Tower:
    """Return the submodule or method of `model` that `name` (a dotted path) stands for.

    Raises:
        ValueError: There is no such tower; the message lists names that are near.
    """
    path, _, last = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        owner = None
    target = None if owner is None or not last else getattr(owner, last, None)
    if isinstance(target, nn.Module):
        return Tower(name, target, None)
    if owner is not None and callable(target):
        return Tower(name, owner, last)
    candidates = list(_tower_names(model))
    near = difflib.get_close_matches(name, candidates, n=5, cutoff=0.5)
    children = [child for child, _ in model.named_children()]
    raise ValueError(
        f"Passed the tower {name!r}, but {type(model).__name__} has no such submodule or method. "
        + (f"Near names: {near}." if near else f"Its submodules: {children}.")
        + " Write the dotted path from the LightningModule, such as 'visual' or "
        "'model.encode_image'."
    )


def _tower_names(model: nn.Module) -> Iterable[str]:
    """Yield the paths of all submodules, and of the methods that their own classes define."""
    for path, module in model.named_modules():
        if path:
            yield path
        prefix = f"{path}." if path else ""
        for cls in type(module).__mro__:
            # Their methods are no towers, and would hide the near names.
            if cls.__module__.split(".")[0] in ("torch", "lightning", "pytorch_lightning"):
                break
            for name, value in vars(cls).items():
                if callable(value) and not name.startswith("_") and name != "forward":
                    yield f"{prefix}{name}"


def sharded_modules(module: nn.Module | None) -> list[Any]:
    """Return the modules that `fully_shard` was called for; nothing is imported to find none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if module is None or fsdp is None:
        return []
    return [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]
