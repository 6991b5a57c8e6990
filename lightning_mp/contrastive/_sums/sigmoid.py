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

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Visit
from lightning_mp.contrastive._sums.plan import Found, Plan
from lightning_mp.contrastive._tiles.tile_backend import Maxima
from lightning_mp.contrastive.statistics import MaximaSweep, measure
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["sigmoid_pairs"]


def sigmoid_pairs(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan
) -> Found:
    """Return the loss and its gradients; one unit of work, and one more for each side's."""
    state = state_dtype(image_bD.device)
    bias = scale.new_zeros(()) if bias is None else bias
    scale, bias = (x.to(state).reshape(()) for x in (scale, bias))
    totals, d_image_bD, d_text_nD, maxima = _negatives_sweep(image_bD, text_nD, scale, bias, plan)
    pos_b = row_dots(image_bD, text_nD[: len(image_bD)], state).mul_(scale).add_(bias)
    # A positive of +inf is an overflow, not a loss of 0.
    pos_b = pos_b.masked_fill(pos_b == torch.inf, torch.nan)
    # Not `1 - sigmoid(pos_b)`, which loses the digits of a converged pair.
    weight_b = torch.sigmoid(-pos_b)
    loss = torch.logaddexp(-pos_b, pos_b.new_zeros(())).sum()
    # One tensor, which one collective adds up; `finish` fills the last place.
    sums = torch.stack([totals[0] + loss, totals[1] - weight_b.sum(), loss.new_zeros(())])
    sums /= plan.global_pairs
    if plan.trains:
        plan.tiles.finish(
            image_bD, text_nD, d_image_bD, d_text_nD, weight_b, scale, plan.global_pairs,
            plan.exchange.world_size, sums[2] if plan.scale_needs_grad else None,
        )  # fmt: skip
    sums = plan.exchange.all_reduce(sums)
    statistics_5 = None
    if maxima is not None:
        # Triton's maxima pass over a NaN, and the loss does not.
        sound_b = torch.where(sums[0].isnan(), torch.nan, pos_b.sigmoid())
        # Maxima come without the bias.
        statistics_5 = measure(
            image_bD, text_nD, scale, bias, pos_b - bias, torch.stack([sound_b, sound_b]), maxima,
            plan.exchange, plan.tiles,
        )  # fmt: skip
    loss, d_bias, d_scale = (x.clone() for x in sums)  # none may be a view
    return Found(loss, d_image_bD, d_text_nD, None, d_scale, d_bias, statistics_5)


def _negatives_sweep(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor | None, Maxima | None]:
    """Return what the negatives add to loss and bias, and to `B dL/dS` times features; maxima."""
    dtype = accumulation_dtype(image_bD.dtype)
    use_image, use_text = plan.sides
    # Not `empty_like`, which keeps strides: `finish` in Triton takes it for contiguous.
    d_image_bD = image_bD.new_empty(image_bD.shape, dtype=dtype) if use_image else None
    d_text = plan.exchange.home("sum") if use_text else None
    # In the state dtype, as the scale is by now: terms are as many as pairs.
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
