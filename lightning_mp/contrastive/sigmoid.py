"""`SigmoidContrastiveLoss`: SigLIP's loss over all pairs of all ranks, without the matrix."""

import torch.distributed as dist

from lightning_mp._arguments import explains_arguments
from lightning_mp.contrastive._call.request import RULES, Request
from lightning_mp.contrastive._tiles.literals import Backend, ExchangeName, TileDtype
from lightning_mp.contrastive.loss import ContrastiveLoss

__all__ = ["SigmoidContrastiveLoss"]


@explains_arguments(
    hints={
        **dict.fromkeys(RULES, "Only a softmax loss takes it; pass it to `ContrastiveLoss`."),
        "directions": "The sigmoid loss has one term per pair, without a direction.",
    }
)
class SigmoidContrastiveLoss(ContrastiveLoss):
    r"""Sigmoid (SigLIP) loss of all pairs over all ranks, exact and without a b x b matrix.

    open_clip's `SigLipLoss` holds b x b matrices of logits, sigmoids and cotangents: 12.9 GB at
    b = 32,768 in fp32. This loss computes value and gradients tile by tile in one sweep.

    .. math::
        L = \frac{1}{B} \sum_{ij} \mathrm{softplus}(-z_{ij} S_{ij}), \qquad
        S = \mathrm{logit\_scale} \cdot \mathrm{image} \, \mathrm{text}^T + \mathrm{logit\_bias},

    where `z_ij` is 1 for a pair and -1 otherwise, and B is the global batch size. open_clip returns
    the sum over a rank's own images divided by its own b; the mean over ranks is L. Texts named in
    `positives` have `z_ij` of 1, the `negatives` of an image add terms to its row, and `weights`,
    scaled to a mean of 1, multiply rows.

    Args:
        process_group: See `ContrastiveLoss` for this and the other arguments.
        workspace_bytes: Memory for tiles, in bytes.
        backend: Implementation of the tiles.
        tile_dtype: Precision of products in Triton tiles.
        autotune: Time the shapes of Triton tiles at the first call.
        exchange: How ranks exchange texts.

    Shapes:
        image_features: (b, D), normalized. text_features: (n, D) with n >= b. ids: (n,).
        logit_scale, logit_bias: one value; SigLIP starts at 10 and -10: with a bias near -log(B),
        the many negatives do not dominate the first steps. Returns a scalar in fp32; in float64
        for float64 features.

    Raises:
        ValueError: If arguments are invalid, on all ranks at once.

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
        """Return the error and the fix if the arguments of a call are invalid, `None` otherwise."""
        for name in ("guide_image", "guide_text"):
            if getattr(request, name) is not None:
                return (
                    f"Passed `{name}` to `{request.owner}`, which has no `false_negatives`. Leave "
                    f"`{name}` out, or use `ContrastiveLoss`."
                )
        if request.weights is not None and self.backend == "triton":
            return (
                f"Passed `weights` to `{request.owner}(backend='triton')`, whose kernels do not "
                "support weights. Pass `backend='auto'`, which uses torch's tiles for weights."
            )
        return super()._problem(request)
