"""The sigmoid loss of all pairs in one sweep, gradients included.

Shapes:
    B: global batch. b: this rank's batch. n: its texts, of which the first b belong to its images.
    m: columns that are visiting. D: feature width. W: ranks.

With `S = scale * image @ text.T + bias`, every pair adds `softplus(-S_ii)`, and what is no pair
`softplus(S_ij)`. What each contributes depends on its own logit alone, so that loss and
gradients come from one sweep:

    dL/dS_ij = sigmoid(S_ij) / B    for i != j,        dL/dS_ii = -sigmoid(-S_ii) / B,

`dL/dimage = scale dL/dS text`, `dL/dtext = scale dL/dS.T image`, `dL/dbias = sum dL/dS`,
`dL/dscale = sum_i <image_i, (dL/dS text)_i>`. Positives stay outside the sweep, as in `infonce`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Visit
from lightning_mp.contrastive._sums.infonce import Plan, not_differentiable
from lightning_mp.contrastive._tiles.tile_backend import Maxima
from lightning_mp.contrastive.statistics import MaximaSweep, measure
from lightning_mp.numerics.first_derivatives import first_derivatives_only
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = [
    "NO_SECOND_DERIVATIVE",
    "SigmoidPairs",
    "SigmoidSwept",
    "differentiate",
    "sides_of",
    "sweep",
]

NO_SECOND_DERIVATIVE = (
    "Called a second derivative through `SigmoidContrastiveLoss`, which has a first one only. "
    "Write a gradient penalty on something else, or use a dense loss for it."
)


class SigmoidSwept(NamedTuple):
    """Loss and gradients of a cotangent of 1, times B; features without the scale.

    Args:
        totals: Loss, gradients of bias and scale, over all ranks.
        d_image_bD: `B dL/dS text`; `None` if not wanted.
        d_text_nD: `B dL/dS.T image`; likewise.
    """

    totals: Tensor
    d_image_bD: Tensor | None
    d_text_nD: Tensor | None


class SigmoidPairs(torch.autograd.Function):
    """The loss over the batches of all ranks, the same value on each of them.

    Gradients are scaled for a mean over ranks, as those of `InfoNCE` are.
    """

    @staticmethod
    def forward(
        ctx: Any, image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        """Sweep once over all columns, for the gradients too if there is a backward to come."""
        loss, swept, statistics_5 = sweep(image_bD, text_nD, scale, bias, plan)
        # Only the way to the features, along which second derivatives are refused, is of use.
        ctx.save_for_backward(image_bD, text_nD, scale, bias, *swept)
        ctx.plan, ctx.dtype = plan, image_bD.dtype
        return loss, not_differentiable(ctx, statistics_5)

    @staticmethod
    @first_derivatives_only(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, cotangent: Tensor, _: object) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by the cotangent."""
        _, _, scale, bias, *swept = ctx.saved_tensors
        pairs, world_size = ctx.plan.global_pairs, ctx.plan.exchange.world_size
        sizes = (pairs, world_size, ctx.dtype)
        return (*differentiate(cotangent, scale, bias, SigmoidSwept(*swept), *sizes), None)


def differentiate(
    cotangent: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: SigmoidSwept,
    pairs: int,
    world_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of images, texts, scale and bias; `pairs` is B."""
    totals, *features = swept
    with torch.autocast(totals.device.type, enabled=False):
        unit = cotangent.to(totals.dtype) / pairs
        factor = scale.to(totals.dtype).reshape(()) * unit * world_size
        d_image_bD, d_text_nD = (None if x is None else (x * factor).to(dtype) for x in features)
        d_scale = (totals[2] * unit).to(scale.dtype).reshape(scale.shape)
        d_bias = None if bias is None else (totals[1] * unit).to(bias.dtype).reshape(bias.shape)
    return d_image_bD, d_text_nD, d_scale, d_bias


def sides_of(image_needs: bool, text_needs: bool, scale_needs: bool) -> tuple[bool, bool]:
    """Return whether products with texts and with images are to be made.

    With no features to train, the scale still needs the gradient of one side.
    """
    return image_needs or (scale_needs and not text_needs), text_needs


def sweep(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, SigmoidSwept, Tensor | None]:
    """Return loss, gradients and, where they are wanted, statistics.

    It takes one unit of work, and one more for each side's gradient.
    """
    state = state_dtype(image_bD.device)
    with torch.autocast(image_bD.device.type, enabled=False):
        bias = scale.new_zeros(()) if bias is None else bias
        scale, bias = (x.to(state).reshape(()) for x in (scale, bias))
        totals, d_image_bD, d_text_nD, maxima = _negatives_sweep(
            image_bD, text_nD, scale, bias, plan
        )
        pos_b = row_dots(image_bD, text_nD[: len(image_bD)], state).mul_(scale).add_(bias)
        # A positive of +inf is an overflow, not a loss of 0.
        pos_b = pos_b.masked_fill(pos_b == torch.inf, torch.nan)
        weight_b = torch.sigmoid(-pos_b)
        loss = torch.logaddexp(-pos_b, pos_b.new_zeros(())).sum()
        weight_b1 = weight_b.to(accumulation_dtype(image_bD.dtype))[:, None]
        for grad_nD, other_nD in ((d_image_bD, text_nD), (d_text_nD, image_bD)):
            if grad_nD is not None:
                b = len(weight_b1)
                grad_nD[:b].addcmul_(other_nD[:b], weight_b1, value=-1.0)
        d_scale = loss.new_zeros(())
        if plan.scale_needs_grad:
            # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway.
            if d_image_bD is not None:
                d_scale = row_dots(image_bD, d_image_bD, state).sum()
            elif d_text_nD is not None:
                d_scale = row_dots(text_nD, d_text_nD, state).sum()
        sums = torch.stack([totals[0] + loss, totals[1] - weight_b.sum(), d_scale])
        sums = plan.exchange.all_reduce(sums)
        statistics_5 = None
        if maxima is not None:
            # Triton's maxima pass over a NaN, and the loss does not.
            sound_b = torch.where(sums[0].isnan(), torch.nan, pos_b.sigmoid())
            statistics_5 = measure(
                image_bD, text_nD, scale, bias, pos_b - bias,
                torch.stack([sound_b, sound_b]), maxima, plan.exchange, plan.tiles,
            )  # fmt: skip
    loss = (sums[0] / plan.global_pairs).to(accumulation_dtype(image_bD.dtype))
    return loss, SigmoidSwept(sums, d_image_bD, d_text_nD), statistics_5


def _negatives_sweep(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor | None, Maxima | None]:
    """Return what the negatives add to loss and bias, and to `B dL/dS` times features; maxima."""
    dtype = accumulation_dtype(image_bD.dtype)
    use_image, use_text = sides_of(
        plan.image_needs_grad, plan.text_needs_grad, plan.scale_needs_grad
    )
    d_image_bD = torch.empty_like(image_bD, dtype=dtype) if use_image else None
    d_text = plan.exchange.home("sum") if use_text else None
    totals_2 = scale.new_zeros(2)
    largest = MaximaSweep(image_bD, plan.exchange) if plan.statistics else None

    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD = visit.columns[0]
        part_mD = None if d_text is None else torch.empty_like(text_mD, dtype=dtype)
        maxima = None if largest is None else largest.block(text_mD)
        logits = plan.logits(visit, image_bD, text_mD, scale, is_first=is_first)
        plan.tiles.sigmoid_sweep(logits, bias, totals_2, d_image_bD, part_mD, maxima)
        if largest is not None and maxima is not None:
            largest.add(maxima)
        if d_text is not None and part_mD is not None:
            d_text.add(part_mD)

    for index, visit in enumerate(plan.exchange.visit([text_nD, *plan.travelling])):
        sweep_block(visit, index == 0)
    maxima = None if largest is None else largest.result()
    return totals_2, d_image_bD, None if d_text is None else d_text.result(), maxima
