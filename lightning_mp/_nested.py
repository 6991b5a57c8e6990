"""Tensors in the nested inputs and outputs of modules, and in nested tensors."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["map_tensors", "map_values", "with_items"]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the tensors in sequences, mappings and dataclasses, not in place."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):  # a union of types would take longer, for every leaf
        return with_items(value, [map_tensors(each, change) for each in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is dict:  # which Dynamo does not copy
        return {key: map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, Mapping):  # so are batches and outputs of Hugging Face
        changed: Any = copy.copy(value)
        for key, each in value.items():
            changed[key] = map_tensors(each, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            each = map_tensors(getattr(value, field.name), change)
            object.__setattr__(changed, field.name, each)  # it may be frozen
        return changed
    return value


def with_items(like: Any, items: list[Any]) -> Any:
    """Return a sequence of the kind of another."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


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
