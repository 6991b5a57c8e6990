"""Opens what towers take and return: tuples, dicts, dataclasses, `UserDict`s and their kin."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

__all__ = ["Leaf", "Structure", "open_structure"]


class Leaf(NamedTuple):
    """Something that is not opened further.

    Args:
        path: Where it stands, such as `batch.pixel_values` or `images[0]`.
        value: What it is.
    """

    path: str
    value: Any


class Structure(NamedTuple):
    """A tree of containers, taken apart.

    Args:
        leaves: In order.
        rebuild: Makes containers of the same types around other leaves; those that were taken
            apart stay as they are.
    """

    leaves: list[Leaf]
    rebuild: Callable[[Sequence[Any]], Any]


class _Opened(NamedTuple):
    keys: list[str]
    children: list[Any]
    close: Callable[[list[Any]], Any]


def open_structure(
    value: Any, path: str = "", is_leaf: Callable[[Any], bool] = lambda value: False
) -> Structure:
    """Take apart what torch's pytrees know, dataclasses, mappings, and subclasses of containers.

    Args:
        value: The structure.
        path: Its name, which paths of leaves begin with.
        is_leaf: Says what to leave closed.
    """
    opened = None if is_leaf(value) else _open(value)
    if opened is None:
        return Structure([Leaf(path, value)], lambda leaves: leaves[0])
    parts = [
        open_structure(child, f"{path}{key}" if path else key.lstrip("."), is_leaf)
        for key, child in zip(opened.keys, opened.children, strict=True)
    ]

    def rebuild(leaves: Sequence[Any]) -> Any:
        children, start = [], 0
        for part in parts:
            stop = start + len(part.leaves)
            children.append(part.rebuild(leaves[start:stop]))
            start = stop
        return opened.close(children)

    return Structure([leaf for part in parts for leaf in part.leaves], rebuild)


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
