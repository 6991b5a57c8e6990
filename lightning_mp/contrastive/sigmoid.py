"""`SigmoidContrastiveLoss`: SigLIP's loss over all pairs of the global batch, without the matrix.

Shapes:
    b: this rank's batch. D: feature width.
"""

import torch.distributed as dist

from lightning_mp._arguments import explains_arguments
from lightning_mp.contrastive._call.request import RULES, Request
from lightning_mp.contrastive._tiles.literals import Backend, ExchangeName, TileDtype
from lightning_mp.contrastive.loss import ContrastiveLoss

__all__ = ["SigmoidContrastiveLoss"]


@explains_arguments(
    hints={
        **dict.fromkeys(RULES, "It belongs to a softmax; pass it to `ContrastiveLoss`."),
        "directions": "Each pair counts once, in no direction.",
    },
)
class SigmoidContrastiveLoss(ContrastiveLoss):
    r"""Sigmoid (SigLIP) loss of all pairs over all ranks, exact and without a b x b matrix.

    open_clip's `SigLipLoss` holds a b x b matrix of logits, of sigmoids and of cotangents: 12.9 GB
    at b = 32,768 in fp32. This loss works out value and gradients tile by tile in one sweep.

    .. math::
        L = \frac{1}{B} \sum_{ij} \mathrm{softplus}(-z_{ij} S_{ij}), \qquad
        S = \mathrm{logit\_scale} \cdot \mathrm{image} \, \mathrm{text}^T + \mathrm{logit\_bias},

    where `z_ij` is 1 for a pair and -1 for all others, and B is the global batch size. open_clip
    returns the part of a rank's own images divided by its own b; the mean over ranks is L. Texts
    that `positives` names have `z_ij` of 1, `negatives` of an image alone add terms to its row,
    and `weights`, brought to a mean of 1, multiply rows.

    Args:
        process_group: As in `ContrastiveLoss`, like all that follow.
        workspace_bytes: Memory for tiles, in bytes.
        backend: Code that multiplies tiles.
        tile_dtype: What Triton tiles multiply.
        autotune: Time the shapes of Triton tiles.
        exchange: How texts of other ranks travel.

    Shapes:
        image_features: (b, D), normalised by the caller. text_features: (n, D) with n >= b.
        ids: (n,), those of the texts. logit_scale, logit_bias: one value; SigLIP starts at 10 and
        -10, as a bias near minus the logarithm of B keeps the negatives from drowning the pair.
        Returns a scalar in fp32, float64 for float64.

    Raises:
        ValueError: For arguments or features that cannot be used, on all ranks at once.

    References: SigLIP, arXiv:2303.15343; open_clip, https://github.com/mlfoundations/open_clip.

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

    def _problem(self, request: Request) -> str | None:
        """Return what is wrong with the arguments of a call, and the fix; `None` if all is well."""
        for name in ("guide_image", "guide_text"):
            if getattr(request, name) is not None:
                return (
                    f"Passed `{name}` to `{request.owner}`, which leaves out no false negatives. "
                    f"Leave `{name}` out, or take `ContrastiveLoss`."
                )
        if request.weights is not None and self.backend == "triton":
            return (
                f"Passed `weights` to `{request.owner}(backend='triton')`, whose kernels weigh all "
                "images alike. Pass `backend='auto'`, which takes torch's tiles for weights."
            )
        return super()._problem(request)
