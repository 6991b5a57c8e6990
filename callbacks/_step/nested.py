"""The tensors inside of what modules take and return, and of batches."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

__all__ = ["named_tensors", "tensors_in"]

_DEEPEST = 8  # levels of nesting that are looked into


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield what `named_tensors` does, without names."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in tuples, lists, mappings, dataclasses, batches that know `to`, and pytrees.

    Args:
        value: What a module takes or returns, or a batch.
        path: What stands before every name.
        depth: How deep `value` is nested.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _DEEPEST:
        for step, each in _members(value):
            yield from named_tensors(each, path + step, depth + 1)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # so are the outputs of Hugging Face models
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        for index, each in enumerate(value):
            yield (f".{names[index]}" if names else f"[{index}]"), each
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif hasattr(value, "to") and not isinstance(value, nn.Module):
        yield from ((f".{key}", each) for key, each in getattr(value, "__dict__", {}).items())
    else:
        leaves = [leaf for leaf in _pytree.tree_leaves(value) if leaf is not value]
        yield from ((f"[{index}]", leaf) for index, leaf in enumerate(leaves))
