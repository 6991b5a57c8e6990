"""Nested inputs and outputs of modules: opens containers and rebuilds them with other items."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Container", "map_tensors", "map_values", "open_container", "tensors_in"]

_NO_CONTAINERS = (bool, int, float, str, torch.Size, torch.dtype, torch.device)


class Container(NamedTuple):
    """The items of a container, their keys, and a function that rebuilds it with other items.

    Keys are indices, the keys of a mapping, or, if `has_fields`, the names of fields.
    """

    keys: list[Any]
    items: list[Any]
    close: Callable[[list[Any]], Any]
    has_fields: bool = False


def open_container(value: Any) -> Container | None:
    """Open a sequence, a mapping or a dataclass; return `None` for every other value."""
    if isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make"):
        return Container(list(value._fields), list(value), value._make, True)
    if isinstance(value, (list, tuple)):
        return Container(list(range(len(value))), list(value), lambda items: _like(value, items))
    if isinstance(value, Mapping):  # also batches and outputs of Hugging Face
        keys = list(value)
        items = [value[key] for key in keys]
        return Container(keys, items, lambda items: _mapping_like(value, keys, items))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field without a default may not be set yet.
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        items = [getattr(value, name) for name in names]
        return Container(names, items, lambda items: _dataclass_like(value, names, items), True)
    return None


def _like(value: Any, items: list[Any]) -> Any:
    if type(value) is list or isinstance(value, tuple):
        return type(value)(items)
    copied = copy.copy(value)  # keeps the attributes of a subclass
    copied[:] = items
    return copied


def _mapping_like(value: Any, keys: list[Any], items: list[Any]) -> Any:
    pairs = zip(keys, items, strict=True)
    if isinstance(value, (dict, UserDict)):
        copied = copy.copy(value)  # keeps the attributes of a `BatchEncoding`
    elif isinstance(value, MutableMapping) and hasattr(value, "copy"):
        copied = value.copy()
    else:
        # The mapping may be immutable, and `copy.copy` may share its memory with the original.
        return type(value)(dict(pairs))
    for key, item in pairs:
        copied[key] = item
    return copied


def _dataclass_like(value: Any, names: list[str], items: list[Any]) -> Any:
    # `dataclasses.replace` would call the constructor, whose arguments may not be the fields.
    copied = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(copied, name, item)  # the dataclass may be frozen
    return copied


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with `change` applied to its tensors; the original is unchanged."""
    if isinstance(value, Tensor):
        return change(value)
    # These common types first, for speed and for Dynamo, which does not trace `copy.copy`.
    if value is None or isinstance(value, _NO_CONTAINERS):
        return value
    if type(value) in (tuple, list):
        return type(value)([map_tensors(item, change) for item in value])
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    opened = open_container(value)
    if opened is None:
        return value
    return opened.close([map_tensors(item, change) for item in opened.items])


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif type(value) in (tuple, list, dict):  # first, for speed
        for item in value.values() if type(value) is dict else value:
            _collect(item, found)
    elif value is not None and not isinstance(value, _NO_CONTAINERS):
        opened = open_container(value)
        for item in () if opened is None else opened.items:
            _collect(item, found)


def map_values(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to the values of a nested tensor of either layout."""
    if tensor.layout is not torch.jagged:
        return torch.nested.as_nested_tensor([change(each) for each in tensor.unbind()])
    jagged: Any = tensor
    return torch.nested.nested_tensor_from_jagged(
        change(jagged.values()),
        jagged.offsets(),
        jagged.lengths(),
        jagged_dim=jagged._ragged_idx,
    )
