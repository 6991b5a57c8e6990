"""`SigmoidContrastiveLoss`: SigLIP's loss over all pairs of the global batch, without the matrix.

Shapes:
    b: this rank's batch. D: feature width.
"""

import torch.distributed as dist

from lightning_mp._arguments import explains_arguments
from lightning_mp.contrastive._call.request import GIVEN, RULES, Request
from lightning_mp.contrastive._tiles.words import Backend, ExchangeName, TileDtype
from lightning_mp.contrastive.loss import ContrastiveLoss

__all__ = ["SigmoidContrastiveLoss"]


@explains_arguments(
    hints={
        **dict.fromkeys(RULES, "It belongs to a softmax; pass it to `ContrastiveLoss`."),
        "directions": "Each pair counts once, in no direction.",
    },
)
class SigmoidContrastiveLoss(ContrastiveLoss):
    r"""Sigmoid (SigLIP) loss of all pairs, exact over all ranks and without a b x b matrix.

    `SigLipLoss` is its form for code of open_clip, whose own sends texts around the ranks too, but
    holds a b x b matrix of logits, of their sigmoids and of their cotangents for each: 12.9 GB at
    b = 32,768 in fp32. Here loss and gradients are worked out tile by tile in one sweep, in memory
    that grows with b.

    .. math::
        L = \frac{1}{B} \sum_{ij} \mathrm{softplus}(-z_{ij} S_{ij}), \qquad
        S = \mathrm{logit\_scale} \cdot \mathrm{image} \, \mathrm{text}^T + \mathrm{logit\_bias},

    where `z_ij` is 1 for a pair and -1 for all others.

    **Normalisation**: the sum over all `B^2` pairs is divided by the global batch size B. open_clip
    returns on each rank the part of the rank's own images, divided by the rank's own batch size b;
    the mean of that over ranks is L where all ranks have the same b. So a model trained under DDP
    gets the same gradients from both. This loss returns L itself, on every rank, and stays exact
    where batch sizes differ.

    **Work**: one sweep over the tiles of S, three matrix products of `2 b^2 D` FLOPs. Gradients are
    worked out in the forward, where a backward can follow; they wait for it as two (b, D) matrices
    in fp32, beside the features. The bias gets its exact gradient.

    **Precision**, **backends**, **several ranks**, **duplicates**, **statistics**, **more texts
    than images** and the arguments are those of `ContrastiveLoss`. Logits are rounded as fp32
    (float64 for float64 features); the Triton tiles keep `sigmoid(S_ij)` in `tile_dtype` between
    its two products. The pairs of the batch stay outside the sweep in fp32 and float64.

    Args:
        process_group: As in `ContrastiveLoss`, like all up to `exchange`.
        workspace_bytes: Memory for tiles, in bytes.
        backend: Code that multiplies tiles.
        tile_dtype: What Triton tiles multiply.
        autotune: Time the Triton tile shapes.
        exchange: How the texts of other ranks come.

    Shapes:
        image_features: (b, D), which the caller normalises where that is wanted.
        text_features: (n, D) with n >= b. ids: (n,), those of the texts.
        logit_scale, logit_bias: one value; SigLIP starts at 10 and -10. Without a bias of about
            minus the logarithm of B, the B - 1 negatives of each row drown its pair. Returns a
            scalar in fp32 (float64 for float64).

    Raises:
        ValueError: For arguments or features that cannot be used, on all ranks at once.

    References:
        - SigLIP, https://arxiv.org/abs/2303.15343
        - open_clip, https://github.com/mlfoundations/open_clip, `SigLipLoss`

    Example::

        loss_fn = SigmoidContrastiveLoss()
        loss = loss_fn(image_features, text_features, self.logit_scale.exp(), self.logit_bias)
    """

    _is_softmax = False

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        workspace_bytes: int | None = None,
        backend: Backend = "auto",
        tile_dtype: TileDtype = "auto",
        autotune: bool = False,
        exchange: ExchangeName = "slices",
    ) -> None:
        super().__init__(
            process_group=process_group, workspace_bytes=workspace_bytes, backend=backend,
            tile_dtype=tile_dtype, autotune=autotune, exchange=exchange,
        )  # fmt: skip

    def problem(self, request: Request) -> str | None:
        """Return what is wrong with the arguments of a call, and the fix; `None` if all is well."""
        for name in GIVEN:
            if name != "ids" and getattr(request, name) is not None:
                return (
                    f"Passed `{name}` to `{request.owner}`, which knows `ids` alone. Leave "
                    f"`{name}` out, or take `ContrastiveLoss`."
                )
        return super().problem(request)
