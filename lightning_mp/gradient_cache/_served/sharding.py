"""Towers whose parameters `fully_shard` spreads over ranks.

Their layers are gathered from all ranks, forward and backward, so all ranks must run as many
micro-batches. What a layer trains in a graph is a gathered parameter, which only FSDP's own hooks
can turn into the gradient of a shard: replays are full backwards after that of the loss, without
reduction until the last.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.gradient_cache._served.towers import sharded_modules

__all__ = ["agree_on_parts", "own_parameters", "set_reduction"]


def own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters that are not sharded."""
    # Here, as only a sharded tower needs it.
    from torch.distributed.tensor import DTensor

    for part in sharded_modules(module):
        part.reshard()  # a root leaves its parameters gathered
    return [p for p in module.parameters() if not isinstance(p, DTensor)]


def set_reduction(modules: Iterable[Any], is_on: bool) -> None:
    """Have the next backwards reduce gradients, or keep them whole on every rank."""
    for module in modules:
        # Its children stand in the list themselves.
        module.set_requires_gradient_sync(is_on, recurse=False)


def agree_on_parts(tower: str, batch_size: int, rows: int, device: torch.device) -> int:
    """Return into how many micro-batches all ranks cut: as many as the largest batch needs.

    Raises:
        ValueError: Some rank has fewer rows; on all ranks.
    """
    parts = -(-batch_size // rows)
    if not (dist.is_available() and dist.is_initialized()):
        return parts
    # The largest number of parts and the smallest batch, by one maximum.
    # All ranks get the same two numbers, so all raise, and none waits for another in a gather.
    facts = torch.tensor([parts, -batch_size], device=device)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    parts, least = int(facts[0]), -int(facts[1])
    # A rank with fewer rows than parts would have an empty micro-batch.
    if parts > least:
        raise ValueError(
            f"Passed {least} rows to the tower `{tower}` on one rank, and on another so many that "
            f"they need {parts} micro-batches. A sharded tower runs equally often on all ranks. "
            "Give them batches of like sizes, or pass a larger `micro_batch_size`."
        )
    return parts
