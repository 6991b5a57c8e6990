"""A module that holds a process group, and can be copied and pickled all the same."""

import copy
from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["GroupModule"]


class GroupModule(nn.Module):
    """Copies share the group, which cannot be copied; with one, no pickle is made."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.process_group = process_group

    def __deepcopy__(self, memo: dict[int, object]) -> "GroupModule":
        # Weight averaging copies whole modules, and a process group cannot be copied.
        memo[id(self.process_group)] = self.process_group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(super().__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "Passed `ContrastiveLoss(process_group=...)` to be pickled. A group belongs to its "
                "process. Set `loss.process_group = None` first, and pass the group again where "
                "the loss is loaded."
            )
        state: dict[str, Any] = super().__getstate__()
        return state
