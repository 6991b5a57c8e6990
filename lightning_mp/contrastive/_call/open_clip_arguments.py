"""What the arguments of open_clip's losses mean for a loss that is exact over all ranks."""

import warnings
from typing import Literal

import torch.distributed as dist

__all__ = ["SigLipExchange", "ranks_problem", "take_open_clip"]

SigLipExchange = Literal["bidir", "shift", "reduce", "gather"]


def take_open_clip(gather_with_grad: bool, world_size: int) -> None:
    """Say what is different here."""
    if (
        world_size > 1
        and not gather_with_grad
        and (not dist.is_initialized() or not dist.get_rank())
    ):
        warnings.warn(
            f"Passed `ContrastiveLoss(gather_with_grad=False, world_size={world_size})`. In "
            "open_clip that makes the gradients of encoders W times too small. Here they are "
            "those of one process with the whole batch: divide the learning rate of SGD by "
            f"{world_size}, and keep Adam's. Pass `gather_with_grad=True` to silence this.",
            stacklevel=5,
        )


def ranks_problem(
    owner: str, rank: int, world_size: int, group: dist.ProcessGroup | None
) -> str | None:
    """Return what is wrong with a rank and a number of ranks: they are not those of the group."""
    if world_size == 1:  # open_clip's default
        return None
    is_initialized = dist.is_available() and dist.is_initialized()
    found = (dist.get_rank(group), dist.get_world_size(group)) if is_initialized else (0, 1)
    if (rank, world_size) == found:
        return None
    return (
        f"Passed `{owner}(rank={rank}, world_size={world_size})`, but the process "
        f"group has rank {found[0]} of {found[1]}, so the negatives would be others. "
        "Call `torch.distributed.init_process_group` first, or leave both out."
    )
