"""Batches as they came, for a replay or a file."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["copy_containers"]


def copy_containers(value: Any) -> Any:
    """Return a batch whose containers are copies and whose tensors are the same.

    `training_step` may take something out of a batch, as by `batch.pop("labels")`.
    """
    if isinstance(value, Tensor | str | bytes | int | float | None):
        return value
    if type(value) is tuple or type(value) is list:
        return type(value)(map(copy_containers, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy_containers, value))
    try:
        copied = copy.copy(value)
        if isinstance(value, Mapping):
            for key, each in value.items():
                copied[key] = copy_containers(each)
        else:
            vars(copied).update({k: copy_containers(each) for k, each in vars(value).items()})
    except Exception:  # it forbids that; then it is kept as it is
        return value
    return copied
