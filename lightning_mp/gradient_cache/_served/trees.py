"""Nested values as trees, whose leaves have paths such as `batch.pixel_values` or `images[0]`."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lightning_mp._nested import open_container

__all__ = ["Tree", "open_call", "open_tree"]


@dataclasses.dataclass(slots=True)
class Tree:
    """A nested value: a container with its children, or a leaf."""

    path: str  # such as `batch.pixel_values` or `images[0]`
    value: Any
    children: "list[Tree] | None" = None  # `None` for a leaf
    close: Callable[[list[Any]], Any] = list  # returns a container of the same type

    @property
    def leaves(self) -> "list[Tree]":
        if self.children is None:
            return [self]
        return [leaf for child in self.children for leaf in child.leaves]

    def prune(self, is_leaf: "Callable[[Tree], bool]") -> "Tree":
        """Turn the containers for which `is_leaf` holds into leaves; return the tree itself."""
        if self.children is not None and is_leaf(self):
            self.children = None
        for child in self.children or ():
            child.prune(is_leaf)
        return self

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return containers of the same types with other leaves; the original is unchanged."""
        remaining = iter(leaves)  # of an iterator, `iter` returns the iterator itself
        if self.children is None:
            return next(remaining)
        return self.close([child.rebuild(remaining) for child in self.children])


def open_tree(value: Any, path: str = "") -> Tree:
    """Open the containers that torch's pytrees or `open_container` know, recursively."""
    # The first dimension of a packed sequence is not the batch.
    opened = None if isinstance(value, (Tensor, PackedSequence)) else _open(value)
    if opened is None:
        return Tree(path, value)
    steps, items, close = opened
    children = [
        open_tree(item, f"{path}{step}" if path else step.lstrip("."))
        for step, item in zip(steps, items, strict=True)
    ]
    return Tree(path, value, children, close)


def open_call(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tree:
    """Open the arguments of a call; `rebuild` of the tree returns args and kwargs."""
    keywords, count = list(kwargs), len(names)
    values = zip([*names, *keywords], [*args, *kwargs.values()], strict=True)

    def close(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(values[:count]), dict(zip(keywords, values[count:], strict=True))

    return Tree("", None, [open_tree(value, name) for name, value in values], close)


def _open(value: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]] | None:
    """Return the path steps, the items and the `close` of a container; `None` for a leaf."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is not None:  # built-in containers, and also Hugging Face's `ModelOutput`s
        items, context = node.flatten_fn(value)
        items = list(items)
        steps = _path_steps(list(value) if isinstance(value, Mapping) else range(len(items)))
        return steps, items, lambda items: node.unflatten_fn(items, context)
    opened = open_container(value)
    return None if opened is None else (_path_steps(opened.keys), opened.items, opened.close)


def _path_steps(keys: Iterable[Any]) -> list[str]:
    return [f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in keys]
