"""Towers by their names, and a way to take over the calls to them for a while."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Tower", "find_tower"]

Handler = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""`handler(original, module, args, kwargs)` answers a call in the tower's place."""

_MISSING = object()


class Tower:
    """A submodule or a method of one, whose calls can be answered by somebody else.

    Args:
        name: The dotted path, for messages.
        module: The submodule, or the one whose method it is.
        method: The name of the method; `None` for calls to the submodule itself.
    """

    def __init__(self, name: str, module: nn.Module, method: str | None) -> None:
        self.name = name
        self.module = module
        self._method = method

    @contextmanager
    def intercepted(self, handler: Handler) -> Iterator[None]:
        """Send every call to `handler` until the context ends.

        A call of a module goes through `_compiled_call_impl` if that is set. Setting it on the
        instance therefore catches compiled and plain modules alike, leaves hooks and `forward`
        as they are, and stays behind when the module is copied or pickled, for which torch drops
        that attribute. A method is caught by an attribute of its instance.
        """
        # Not `setattr`: a compiled module forwards that to the module inside it.
        attributes = vars(self.module)
        name = "_compiled_call_impl" if self._method is None else self._method
        before = attributes.get(name, _MISSING)
        original = self._original(None if before is _MISSING else before)

        @torch.compiler.disable
        def intercept(*args: Any, **kwargs: Any) -> Any:
            return handler(original, self.module, args, kwargs)

        attributes[name] = intercept
        try:
            yield
        finally:
            if before is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = before

    def _original(self, before: Any) -> Callable[..., Any]:
        if before is not None:
            return before  # type: ignore[no-any-return]
        if self._method is None:
            return self.module._call_impl
        return getattr(self.module, self._method)  # type: ignore[no-any-return]


def find_tower(model: nn.Module, name: str) -> Tower:
    """Return the submodule or method of `model` that `name` (a dotted path) stands for.

    Raises:
        ValueError: There is none; the message lists names that are near.
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
            if cls.__module__.split(".")[0] in ("torch", "lightning", "pytorch_lightning"):
                break
            for name, value in vars(cls).items():
                if callable(value) and not name.startswith("_") and name != "forward":
                    yield f"{prefix}{name}"
