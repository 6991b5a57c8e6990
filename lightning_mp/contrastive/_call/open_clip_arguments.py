"""What the arguments of open_clip's `ClipLoss` mean for a loss that is exact over all ranks."""

import warnings

import torch.distributed as dist

__all__ = ["check_ranks", "take_open_clip"]


def take_open_clip(gather_with_grad: bool, world_size: int, use_horovod: bool) -> None:
    """Say what is different here.

    Raises:
        ValueError: For Horovod.
    """
    if use_horovod:
        raise ValueError(
            "Passed `ContrastiveLoss(use_horovod=True)`. Ranks are those of `torch.distributed`. "
            "Start the run with `torchrun`, and leave `use_horovod` out."
        )
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


def check_ranks(said: tuple[int, int] | None, group: dist.ProcessGroup | None) -> None:
    """Refuse a rank and a number of ranks that are not those of the group.

    Raises:
        ValueError: They differ, such as where `torch.distributed` is not initialised.
    """
    if said is None:
        return
    is_initialized = dist.is_available() and dist.is_initialized()
    is_found = (dist.get_rank(group), dist.get_world_size(group)) if is_initialized else (0, 1)
    if said != is_found:
        raise ValueError(
            f"Passed `ContrastiveLoss(rank={said[0]}, world_size={said[1]})`, but the process "
            f"group has rank {is_found[0]} of {is_found[1]}, so the negatives would be others. "
            "Call `torch.distributed.init_process_group` first, or leave both out."
        )
