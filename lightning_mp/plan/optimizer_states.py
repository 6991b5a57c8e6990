"""What an optimizer keeps of its parameters, found by steps on tensors of their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

__all__ = ["state_bytes"]


def state_bytes(optimizers: Sequence[Optimizer], dtype: torch.dtype) -> int:
    """Return the bytes of all states after a step, whatever the optimizers keep.

    Each shape is stepped once, alone, on a tensor without memory. An optimizer that looks at its
    values, as torch's Adafactor does, gets zeros; then one parameter is in memory at a time. Their
    own states are lost. A step may fail, for want of a closure or of a GPU.
    """
    total = 0
    for optimizer in optimizers:
        groups = optimizer.param_groups
        for group in groups:
            shapes = Counter(p.shape for p in group["params"] if p.requires_grad)
            for shape, count in shapes.items():
                try:
                    found = _of_one(optimizer, group, shape, dtype, FakeTensorMode())
                except Exception:  # optimizers raise what they like
                    found = _of_one(optimizer, group, shape, dtype, nullcontext())
                total += count * found
        optimizer.param_groups = groups
    return total


def _of_one(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    mode: AbstractContextManager[object],
) -> int:
    optimizer.state.clear()
    with mode:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.zeros_like(param)
        optimizer.param_groups = [{**group, "params": [param]}]
        optimizer.step()
    states = [leaf for leaf in tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor)]
    storages = (state.untyped_storage() for state in states)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
