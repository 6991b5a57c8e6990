"""`ClipLoss` and `SigLipLoss`: open_clip's losses, computed by the losses of this package."""

import warnings
from typing import Literal

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
        fix="Start the run with `torchrun`: ranks come from `torch.distributed`.",
    ),
}


class _KnowsRanks(ContrastiveLoss):
    """A loss that is told its rank and the number of ranks."""

    rank: int
    world_size: int

    def _problem(self, request: Request) -> str | None:
        """Return the error and the fix if the arguments of a call are invalid, `None` otherwise."""
        is_initialized = dist.is_available() and dist.is_initialized()
        found = (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)
        # 1 is open_clip's default.
        if self.world_size == 1 or (self.rank, self.world_size) == found:
            return super()._problem(request)
        return (
            f"Passed `{request.owner}(rank={self.rank}, world_size={self.world_size})`, but the "
            f"process group has rank {found[0]} of {found[1]}, so the loss would have other "
            "negatives. Call `torch.distributed.init_process_group` first, or leave both out."
        )


@explains_arguments(checks=_CHECKS)
class ClipLoss(_KnowsRanks):
    r"""open_clip's `ClipLoss`, with its signature and values, computed by `ContrastiveLoss`.

    Replace `from open_clip import ClipLoss` by `from lightning_mp import ClipLoss`; the rest of the
    training script stays. open_clip holds b x B logits, `B = W b`, for each direction; this loss
    holds a workspace of 32 MiB (544 MiB on CUDA). The value is the mean over both directions,

    .. math::
        L = \frac{1}{2} \left[ \mathrm{CE}(s \, I T^T, \mathrm{arange}(B))
            + \mathrm{CE}(s \, T I^T, \mathrm{arange}(B)) \right],

    over the global batch, on every rank. With `local_loss=True`, open_clip returns the mean over
    the rank's own rows; the mean of these values over ranks is the same. Gradients, averaged by
    DDP, equal open_clip's with `gather_with_grad=True`.

    Args:
        local_loss: Has no effect: every rank computes its own rows in either case.
        gather_with_grad: Gradients are always those of the global batch. With False and several
            ranks, open_clip's are W times too small, and a warning says so.
        cache_labels: Has no effect: the loss needs no labels.
        rank: Rank of this process. The first call raises an error if the process group disagrees.
        world_size: Number of ranks; likewise.
        use_horovod: Must be False.

    Shapes:
        image_features, text_features: (b, D), normalized. logit_scale: one value, already
        exponentiated. logit_bias: one value or `None`. Returns a scalar.

    Raises:
        ValueError: If arguments are invalid, on all ranks at once.

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
                f"Passed `ClipLoss(gather_with_grad=False, world_size={world_size})`. open_clip's "
                "gradients of the encoders are W times too small with it; this loss returns the "
                "gradients of one process with the global batch. Divide the learning rate of SGD "
                f"by {world_size}, and keep Adam's. Pass `gather_with_grad=True` to silence this.",
                stacklevel=3,
            )


@explains_arguments(
    checks={
        "rank": "[0, inf)",
        "world_size": "[1, inf)",
        "chunk_size": Check("[0, inf)", fix="Leave it out: the workspace limits the tiles."),
        "dist_impl": Check(fix="Leave it out: it has no effect on the exchange of texts."),
    }
)
class SigLipLoss(_KnowsRanks, SigmoidContrastiveLoss):
    r"""open_clip's `SigLipLoss`, with its signature, computed by `SigmoidContrastiveLoss`.

    open_clip returns on each rank the sum over the rank's own images, divided by the rank batch.
    This loss returns the mean of these values over ranks, the loss of the global batch,

    .. math::
        L = \frac{1}{B} \sum_{ij} \mathrm{softplus}(-z_{ij} (s \, I_i T_j + c)),

    with `z_ij` of 1 for a pair and -1 otherwise. Gradients, averaged by DDP, are the same.

    Args:
        cache_labels: Has no effect: the loss needs no labels.
        rank: Rank of this process. The first call raises an error if the process group disagrees.
        world_size: Number of ranks; likewise.
        dist_impl: Has no effect. In open_clip it selects one of four equivalent exchanges.
        chunk_size: Has no effect. In open_clip it is the number of rows of logits in memory.

    Shapes:
        image_features, text_features: (b, D), normalized. logit_scale, logit_bias: one value each.
        Returns a scalar.

    Raises:
        ValueError: If arguments are invalid, on all ranks at once.

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
