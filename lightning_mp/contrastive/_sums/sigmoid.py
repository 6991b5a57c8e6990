"""The sigmoid loss of all pairs in one sweep, gradients included.

With `S = scale * image @ text.T + bias`, every positive adds `softplus(-S_ii)` and every negative
`softplus(S_ij)`. Each term depends on its own logit only, so one sweep computes loss and gradients:

    dL/dS_ij = sigmoid(S_ij) / B    for i != j,        dL/dS_ii = -sigmoid(-S_ii) / B,

`dL/dimage = scale dL/dS text`, `dL/dtext = scale dL/dS.T image`, `dL/dbias = sum dL/dS`,
`dL/dscale = sum_i <image_i, (dL/dS text)_i>`. Positives are not part of the sweep, as in `softmax`.
"""

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.matches import add_rows
from lightning_mp.contrastive._sums.products import dots
from lightning_mp.contrastive._sums.statistics import loss_statistics
from lightning_mp.contrastive._sums.sweep import LargestNegatives, Plan, SweepResult, sweep
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, row_dots

__all__ = ["sigmoid_loss"]


def sigmoid_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients: one unit of work, and one for each tower's gradient."""
    image_bD, text_nD = plan.request.image, plan.request.text
    largest = LargestNegatives(plan) if plan.statistics else None
    weights_b = _weights(plan)
    totals_2, d_image_bD, d_text_nD = _negatives(plan, weights_b, largest)
    own_b = plan.scale.new_ones(len(image_bD)) if weights_b is None else weights_b
    _add_further_positives(plan, own_b, totals_2, d_image_bD, d_text_nD)
    d_scale, d_negatives_bkD = _add_own_negatives(plan, own_b, totals_2, d_image_bD)
    q = plan.matched
    pos_b = row_dots(image_bD[:q], text_nD[:q], plan.state).mul_(plan.scale).add_(plan.bias)
    # A positive of +inf is an overflow, not a loss of 0.
    pos_b = pos_b.masked_fill(pos_b == torch.inf, torch.nan)
    # `1 - sigmoid(pos_b)` would lose the digits of a converged pair.
    weight_b = torch.sigmoid(-pos_b)
    losses_b = torch.logaddexp(-pos_b, pos_b.new_zeros(()))
    if weights_b is not None:
        own_q = own_b[:q]
        # A term of weight 0 may be infinite, and their product is NaN.
        losses_b, weight_b = ((x * own_q).where(own_q != 0, 0.0) for x in (losses_b, weight_b))
    loss = losses_b.sum()
    # One tensor, which one collective adds up; `finish` fills the last place.
    sums = torch.stack([totals_2[0] + loss, totals_2[1] - weight_b.sum(), loss.new_zeros(())])
    sums /= plan.pairs
    if plan.trains:
        plan.tiles.finish(
            image_bD, text_nD, d_image_bD, d_text_nD, weight_b, plan.scale, plan.pairs,
            plan.exchange.world_size, sums[2] if plan.needs_grad.scale else None,
        )  # fmt: skip
    if d_image_bD is None:  # otherwise `finish` computes it from the gradient of the images
        sums[2] += d_scale / plan.pairs
    sums = plan.exchange.all_reduce(sums)
    statistics_5 = None
    if largest is not None:
        # Triton's maxima ignore NaN, the loss does not.
        probability_b = torch.where(sums[0].isnan(), torch.nan, pos_b.sigmoid())
        probability_2b = torch.stack([probability_b, probability_b])
        # Maxima are without the bias.
        statistics_5 = loss_statistics(plan, pos_b - plan.bias, probability_2b, largest.home())
    loss, d_bias, d_scale = (x.clone() for x in sums)  # outputs must not be views
    return SweepResult(loss, statistics_5, d_image_bD, d_text_nD, d_scale, d_bias, d_negatives_bkD)


def _weights(plan: Plan) -> Tensor | None:
    """Return the weights of images with a mean of 1 over all ranks; `None` for equal weights."""
    if plan.weights_b is None:
        return None
    total = plan.exchange.all_reduce(plan.weights_b.sum())
    # If all weights are 0, the loss is 0.
    return plan.weights_b * (plan.pairs / total.masked_fill(total == 0, 1))


def _negatives(
    plan: Plan, weights_b: Tensor | None, largest: LargestNegatives | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the negatives' part of loss and `sum dL/dS`, and of the towers' gradients, times B."""
    image_bD, (use_image, use_text) = plan.request.image, plan.computes_grad
    # Not `empty_like`, which keeps strides: `finish` in Triton requires contiguous memory.
    d_image_bD = image_bD.new_empty(image_bD.shape, dtype=plan.dtype) if use_image else None
    d_text = plan.exchange.home("sum") if use_text else None
    # In the state dtype, because there is a term for every pair.
    totals_2 = plan.scale.new_zeros(2)
    for block in sweep(plan, largest=largest):
        part_mD = None if d_text is None else d_text.empty(block.text_mD, plan.dtype)
        logits = block.logits(image_bD, block.text_mD)
        plan.tiles.sigmoid_sweep(
            logits._replace(scale=plan.scale, weights_b=weights_b), plan.bias, totals_2,
            Derivatives(d_image_bD, part_mD),
        )  # fmt: skip
        if d_text is not None and part_mD is not None:
            d_text.add(part_mD)
    return totals_2, d_image_bD, None if d_text is None else d_text.result()


def _add_further_positives(
    plan: Plan,
    own_b: Tensor,
    totals_2: Tensor,
    d_image_bD: Tensor | None,
    d_text_nD: Tensor | None,
) -> None:
    """Add further positives of an image to sums and gradients; `own_b` are the images' weights.

    The sweep has summed them as negatives. Since `softplus(-x) = softplus(x) - x`, subtracting
    their logits corrects the sum to within the rounding of a logit.
    """
    pairing, request, dtype = plan.pairing, plan.request, plan.dtype
    if pairing is None:
        return
    # The sweep masks text i of image i, but not its other positives.
    images_e, texts_e = pairing.images_e[pairing.others], pairing.texts_e[pairing.others]
    image_eD, text_eD = request.image[images_e], request.text[texts_e]
    logits_e = row_dots(image_eD, text_eD, plan.state) * plan.scale + plan.bias
    own_e = own_b[images_e]
    totals_2 -= torch.stack([(own_e * logits_e).sum(), own_e.sum()])
    weights_e1 = -own_e.to(dtype)[:, None]
    if d_image_bD is not None:
        add_rows(d_image_bD, images_e, weights_e1 * text_eD.to(dtype))
    if d_text_nD is not None:
        add_rows(d_text_nD, texts_e, weights_e1 * image_eD.to(dtype))


def _add_own_negatives(
    plan: Plan, own_b: Tensor, totals_2: Tensor, d_image_bD: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add `negatives` of an image; return their part of `B dL/dscale`, and their gradient."""
    negatives_bkD, image_bD, dtype = plan.request.negatives, plan.request.image, plan.dtype
    if negatives_bkD is None:
        return plan.scale.new_zeros(()), None
    products_bk = dots(image_bD.to(dtype), negatives_bkD, plan.state)
    logits_bk = products_bk * plan.scale + plan.bias
    losses_bk = own_b[:, None] * torch.logaddexp(logits_bk, logits_bk.new_zeros(()))
    weights_bk = own_b[:, None] * logits_bk.sigmoid()
    totals_2 += torch.stack([losses_bk.sum(), weights_bk.sum()])
    if d_image_bD is not None:
        d_image_bD += (weights_bk.to(dtype)[:, None] @ negatives_bkD.to(dtype))[:, 0]
    d_negatives_bkD = None
    if plan.request.needs_grad[-1]:
        share_bk = weights_bk * plan.scale * (plan.exchange.world_size / plan.pairs)
        d_negatives_bkD = share_bk.to(dtype)[..., None] * image_bD.to(dtype)[:, None]
    return (weights_bk * products_bk).sum(), d_negatives_bkD
