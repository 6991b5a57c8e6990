"""Towers whose parameters are sharded over ranks by `fully_shard`.

All ranks gather each layer together, in the forward and in the backward, so all ranks must run
equally many micro-batches. The graph contains gathered parameters, and only FSDP's own hooks turn
their gradients into gradients of shards. So replays are full backwards that follow the backward of
the loss, and only the last replay reduces gradients.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.gradient_cache._served.towers import sharded_modules

__all__ = [
    "agree_on_micro_batches",
    "is_alone",
    "min_over_ranks",
    "reduce_remaining",
    "set_reduction",
    "unsharded_parameters",
]


def unsharded_parameters(module: nn.Module) -> list[Tensor]:
    # Imported here, because only sharded towers need it.
    from torch.distributed.tensor import DTensor

    for submodule in sharded_modules(module):
        submodule.reshard()  # a root module leaves its parameters gathered
    return [p for p in module.parameters() if not isinstance(p, DTensor)]


def set_reduction(modules: Iterable[Any], is_on: bool) -> None:
    """Make the next backwards reduce gradients, or accumulate whole gradients on each rank."""
    for module in modules:
        # `modules` contain the children, too.
        module.set_requires_gradient_sync(is_on, recurse=False)


def reduce_remaining(modules: Collection[Any]) -> None:
    """Reduce gradients that earlier backwards accumulated and the reducing backward did not reach.

    FSDP reduces all modules below an outermost module at the end of any backward through it. So
    this runs a backward through nothing but the hooks of each outermost module.
    """
    # Imported here, because only sharded towers need it.
    from torch.distributed.fsdp import register_fsdp_forward_method

    inner = {id(x) for module in modules for x in module.modules() if x is not module}
    set_reduction(modules, True)
    for module in (module for module in modules if id(module) not in inner):
        device = next(module.parameters()).device
        module._without_layers = torch.clone
        try:
            register_fsdp_forward_method(module, "_without_layers")
            with torch.enable_grad():
                module._without_layers(
                    torch.zeros((), device=device, requires_grad=True)
                ).backward()
        finally:
            del module._without_layers


def is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def min_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Return the smallest of each value over all ranks; all ranks must call this function."""
    if is_alone():
        return values
    least = torch.tensor(values, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.tolist()


def agree_on_micro_batches(tower: str, batch_size: int, rows: int, device: torch.device) -> int:
    """Return the number of micro-batches for all ranks: as many as the largest batch needs."""
    # All ranks get the same numbers, so either all raise or none does, and no rank waits in a
    # gather. The minimum of -ceil(B / rows) gives the largest count.
    negative_count, least = min_over_ranks([batch_size // -rows, batch_size], device)
    count = -negative_count
    # With fewer rows than micro-batches, one would be empty.
    if count > least:
        raise ValueError(
            f"Passed {least} rows to the tower `{tower}` on one rank, and {count} micro-batches of "
            "rows on another rank. All ranks must run a sharded tower equally often. Use batches "
            "of similar sizes, or pass a larger `micro_batch_size`."
        )
    return count
