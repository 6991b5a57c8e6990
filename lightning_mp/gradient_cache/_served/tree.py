"""Nested values as trees: tuples, dicts, dataclasses, `UserDict`s and their kin, opened once."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Tree", "is_array", "is_named", "lists_in", "open_call", "open_tree"]


@dataclasses.dataclass(slots=True)
class Tree:
    """A value, and what it is made of if it is a container; a leaf otherwise.

    Args:
        path: Where it stands, such as `batch.pixel_values` or `images[0]`.
        value: What it is.
        parts: What it contains; `None`: it is not opened.
        close: Makes a container of the same type of other parts.
    """

    path: str
    value: Any
    parts: "list[Tree] | None" = None
    close: Callable[[list[Any]], Any] = list

    @property
    def leaves(self) -> "list[Tree]":
        """What is not opened further, in order."""
        if self.parts is None:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves]

    def prune(self, is_leaf: "Callable[[Tree], bool]") -> "Tree":
        """Make leaves of some containers, the outermost first; return the tree itself."""
        if self.parts is not None and is_leaf(self):
            self.parts = None
        for part in self.parts or ():
            part.prune(is_leaf)
        return self

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return containers of the same types around other leaves; these stay as they are."""
        return self._filled(iter(leaves))

    def _filled(self, leaves: Iterator[Any]) -> Any:
        if self.parts is None:
            return next(leaves)
        return self.close([part._filled(leaves) for part in self.parts])


def is_named(path: str, names: Collection[str]) -> bool:
    """Return whether a path, a part that it begins with, or its last part is among `names`."""
    if not names:
        return False
    # `batch.images[0]` is named by itself, `batch.images`, `batch`, and `images`.
    steps = path.replace("[", ".[").split(".")
    begins = {".".join(steps[: k + 1]).replace(".[", "[") for k in range(len(steps))}
    return bool((begins | {steps[-1], *steps}) & set(names))


def lists_in(tree: Tree) -> list[Tree]:
    """Return plain lists and tuples that hold no batch of their own."""
    # No subclasses: a named tuple is a batch of fields, not a list of rows.
    is_plain = type(tree.value) in (list, tuple)
    if is_plain and not any(isinstance(x, (list, tuple)) for x in tree.value):
        return [tree]
    return [found for part in tree.parts or () for found in lists_in(part)]


def is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def open_tree(value: Any, path: str = "") -> Tree:
    """Take apart what torch's pytrees know, dataclasses, mappings, and subclasses of containers."""
    opened = _open(value)
    if opened is None:
        return Tree(path, value)
    parts = [
        open_tree(child, f"{path}{key}" if path else key.lstrip("."))
        for key, child in zip(opened.keys, opened.children, strict=True)
    ]
    return Tree(path, value, parts, opened.close)


def open_call(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tree:
    """Take apart the arguments of a call; the tree is rebuilt as a tuple and a dict of them."""
    keywords, count = list(kwargs), len(names)
    values = zip([*names, *keywords], [*args, *kwargs.values()], strict=True)

    def close(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(values[:count]), dict(zip(keywords, values[count:], strict=True))

    return Tree("", None, [open_tree(value, name) for name, value in values], close)


class _Opened(NamedTuple):
    keys: list[str]
    children: list[Any]
    close: Callable[[list[Any]], Any]


def _open(value: Any) -> _Opened | None:
    kind = type(value)
    # A named tuple, before pytrees take it: its paths are names rather than numbers.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _Opened([f".{name}" for name in value._fields], list(value), kind._make)
    if kind in pytree.SUPPORTED_NODES:  # also Hugging Face's `ModelOutput`s
        node = pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(value)
        children = list(children)
        keys = _keys(value, len(children))
        return _Opened(keys, children, lambda children: node.unflatten_fn(children, context))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field without a default may not be set yet.
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        children = [getattr(value, name) for name in names]
        return _Opened(
            [f".{name}" for name in names],
            children,
            lambda children: _refill(value, names, children),
        )
    if isinstance(value, Mapping):
        return _open_mapping(value)
    if isinstance(value, (list, tuple)):
        # A subclass: pytrees know `list` and `tuple` by their exact types.
        return _Opened(_keys(value, len(value)), list(value), kind)
    return None


def _open_mapping(value: Mapping[Any, Any]) -> _Opened:
    names = list(value)

    def close(children: list[Any]) -> Any:
        if not isinstance(value, (dict, UserDict)):
            # A mapping of an unknown kind may refuse to be written to, so it is made anew.
            return type(value)(dict(zip(names, children, strict=True)))  # type: ignore[call-arg]
        copied = copy.copy(value)  # keeps the attributes of a `BatchEncoding`
        for name, child in zip(names, children, strict=True):
            copied[name] = child
        return copied

    return _Opened(_keys(value, len(names)), [value[name] for name in names], close)


def _refill(value: Any, names: list[str], children: list[Any]) -> Any:
    # Not `dataclasses.replace`, which calls the constructor: fields may not be its arguments.
    copied = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(copied, name, child)  # also where it is frozen
    return copied


def _keys(value: Any, count: int) -> list[str]:
    if isinstance(value, Mapping):
        return [f".{name}" if isinstance(name, str) else f"[{name!r}]" for name in value]
    return [f"[{index}]" for index in range(count)]
