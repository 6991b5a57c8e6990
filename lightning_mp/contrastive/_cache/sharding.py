"""Modules whose parameters `fully_shard` spreads over ranks."""

import sys
from typing import Any

from torch import nn

__all__ = ["sharded_modules"]


def sharded_modules(module: nn.Module | None) -> list[Any]:
    """Return the modules that `fully_shard` was called for; nothing is imported to find none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if module is None or fsdp is None:
        return []
    return [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]
