"""`ClipLoss` and `SigLipLoss`: open_clip's names, arguments and values on the losses of this room.

Shapes:
    b: this rank's batch. D: feature width.
"""

import warnings
from typing import Any, Literal

import torch.distributed as dist

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive.loss import ContrastiveLoss
from lightning_mp.contrastive.sigmoid import SigmoidContrastiveLoss

__all__ = ["ClipLoss", "SigLipLoss"]

_CHECKS: dict[str, Check | str] = {
    "rank": "[0, inf)",
    "world_size": "[1, inf)",
    "use_horovod": Check(
        test=lambda value: not value,
        words="False",
        fix="Start the run with `torchrun`: ranks are those of `torch.distributed`.",
    ),
}


@explains_arguments(checks=_CHECKS)
class ClipLoss(ContrastiveLoss):
    r"""open_clip's `ClipLoss`, with its signature and values, computed by `ContrastiveLoss`.

    Replace `from open_clip import ClipLoss` by `from lightning_mp import ClipLoss`: nothing else of
    a training script changes. open_clip holds b x B logits, `B = W b`, for each direction; this
    loss a workspace of 32 MiB (512 MiB on CUDA). The value is the mean over both directions,

    .. math::
        L = \frac{1}{2} \left[ \mathrm{CE}(s \, I T^T, \mathrm{arange}(B))
            + \mathrm{CE}(s \, T I^T, \mathrm{arange}(B)) \right],

    of the global batch, on every rank. With `local_loss=True` open_clip's value is that of the
    rank's own rows, whose mean over ranks is the same. After DDP's mean, gradients are open_clip's
    with `gather_with_grad=True`.

    Args:
        local_loss: Accepted. Every rank works on its own rows in either case.
        gather_with_grad: Gradients are always those of the global batch. open_clip's are W times
            too small with False and several ranks, of which a warning tells.
        cache_labels: Accepted. There are no labels to keep.
        rank: Of this process; refused in the first call where the process group has another one.
        world_size: Ranks; likewise.
        use_horovod: Only False is accepted.

    Shapes:
        image_features, text_features: (b, D), normalised. logit_scale: one value, already
        exponentiated. logit_bias: one value or `None`. Returns a scalar.

    Raises:
        ValueError: For arguments that cannot be used, on all ranks at once.

    References:
        - open_clip, https://github.com/mlfoundations/open_clip, `src/open_clip/loss.py`

    Example::

        loss_fn = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
        loss = loss_fn(image_features, text_features, logit_scale)
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        if world_size > 1 and not gather_with_grad and not rank:
            warnings.warn(
                f"Passed `ClipLoss(gather_with_grad=False, world_size={world_size})`. In "
                "open_clip that makes the gradients of encoders W times too small. Here they are "
                "those of one process with the whole batch: divide the learning rate of SGD by "
                f"{world_size}, and keep Adam's. Pass `gather_with_grad=True` to silence this.",
                stacklevel=3,
            )

    def _problem(self, request: Request) -> str | None:
        """Return what is wrong with the arguments of a call, and the fix; `None` if all is well."""
        return _ranks_problem(self, request) or super()._problem(request)


@explains_arguments(
    checks={
        "rank": "[0, inf)",
        "world_size": "[1, inf)",
        "chunk_size": Check("[0, inf)", fix="Leave it out: the workspace bounds tiles."),
        "dist_impl": Check(fix="Leave it out: texts travel by one gather, whatever is passed."),
    },
)
class SigLipLoss(SigmoidContrastiveLoss):
    r"""open_clip's `SigLipLoss`, with its signature, computed by `SigmoidContrastiveLoss`.

    open_clip returns on each rank the part of the rank's own images, divided by the rank's batch;
    this loss returns the mean over ranks of that, the loss of the global batch,

    .. math::
        L = \frac{1}{B} \sum_{ij} \mathrm{softplus}(-z_{ij} (s \, I_i T_j + c)),

    with `z_ij` of 1 for a pair and -1 for all others. Gradients after DDP's mean are the same.

    Args:
        cache_labels: Accepted. There are no labels to keep.
        rank: Of this process; refused in the first call where the process group has another one.
        world_size: Ranks; likewise.
        dist_impl: Accepted: how open_clip sends texts. The gradients of all four are the same.
        chunk_size: Accepted: rows of logits that open_clip holds at a time.

    Shapes:
        image_features, text_features: (b, D), normalised. logit_scale, logit_bias: one value each.
        Returns a scalar.

    Raises:
        ValueError: For arguments that cannot be used, on all ranks at once.

    References:
        - open_clip, https://github.com/mlfoundations/open_clip, `src/open_clip/loss.py`

    Example::

        loss_fn = SigLipLoss(rank=rank, world_size=world_size)
        loss = loss_fn(image_features, text_features, logit_scale, logit_bias)
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: Literal["bidir", "shift", "reduce", "gather"] | None = None,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def _problem(self, request: Request) -> str | None:
        """Return what is wrong with the arguments of a call, and the fix; `None` if all is well."""
        return _ranks_problem(self, request) or super()._problem(request)


def _ranks_problem(loss: Any, request: Request) -> str | None:
    """Return what is wrong with a rank and a number of ranks: they are not those of the group."""
    if loss.world_size == 1:  # open_clip's default
        return None
    is_initialized = dist.is_available() and dist.is_initialized()
    found = (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)
    if (loss.rank, loss.world_size) == found:
        return None
    return (
        f"Passed `{request.owner}(rank={loss.rank}, world_size={loss.world_size})`, but the "
        f"process group has rank {found[0]} of {found[1]}, so the negatives would be others. "
        "Call `torch.distributed.init_process_group` first, or leave both out."
    )
