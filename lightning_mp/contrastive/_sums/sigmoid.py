"""The sigmoid loss of all pairs in one sweep, gradients included.

Shapes:
    B: global batch. b: this rank's batch. n: its texts, of which the first b belong to its images.
    m: columns that are visiting. D: feature width. W: ranks.

With `S = scale * image @ text.T + bias`, every pair adds `softplus(-S_ii)`, and what is no pair
`softplus(S_ij)`. What each contributes depends on its own logit alone, so that loss and
gradients come from one sweep:

    dL/dS_ij = sigmoid(S_ij) / B    for i != j,        dL/dS_ii = -sigmoid(-S_ii) / B,

`dL/dimage = scale dL/dS text`, `dL/dtext = scale dL/dS.T image`, `dL/dbias = sum dL/dS`,
`dL/dscale = sum_i <image_i, (dL/dS text)_i>`. Positives stay outside the sweep, as in `softmax`.
"""

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.statistics import Largest, measure
from lightning_mp.contrastive._sums.sweep import Block, Found, Plan, sweep
from lightning_mp.contrastive._tiles.tile_backend import row_dots

__all__ = ["sigmoid_loss"]


def sigmoid_loss(plan: Plan) -> Found:
    """Return the loss and its gradients; one unit of work, and one more for each side's."""
    request, state = plan.request, plan.state
    image_bD, text_nD, scale = request.image, request.text, request.scale
    bias = scale.new_zeros(()) if request.bias is None else request.bias
    scale, bias = (x.to(state).reshape(()) for x in (scale, bias))
    largest = Largest(plan) if plan.statistics else None
    pairs = _Pairs(plan, scale, bias, largest)
    found, *maxima = sweep(plan, [pairs, largest] if largest else [pairs])
    totals_2, d_image_bD, d_text_nD = found
    pos_b = row_dots(image_bD, text_nD[: len(image_bD)], state).mul_(scale).add_(bias)
    # A positive of +inf is an overflow, not a loss of 0.
    pos_b = pos_b.masked_fill(pos_b == torch.inf, torch.nan)
    # Not `1 - sigmoid(pos_b)`, which loses the digits of a converged pair.
    weight_b = torch.sigmoid(-pos_b)
    loss = torch.logaddexp(-pos_b, pos_b.new_zeros(())).sum()
    # One tensor, which one collective adds up; `finish` fills the last place.
    sums = torch.stack([totals_2[0] + loss, totals_2[1] - weight_b.sum(), loss.new_zeros(())])
    sums /= plan.pairs
    if plan.trains:
        plan.tiles.finish(
            image_bD, text_nD, d_image_bD, d_text_nD, weight_b, scale, plan.pairs,
            plan.exchange.world_size, sums[2] if plan.needs.scale else None,
        )  # fmt: skip
    sums = plan.exchange.all_reduce(sums)
    statistics_5 = None
    if maxima:
        # Triton's maxima pass over a NaN, and the loss does not.
        sound_b = torch.where(sums[0].isnan(), torch.nan, pos_b.sigmoid())
        # Maxima come without the bias.
        statistics_5 = measure(plan, pos_b - bias, torch.stack([sound_b, sound_b]), maxima[0])
    loss, d_bias, d_scale = (x.clone() for x in sums)  # none may be a view
    return Found(loss, d_image_bD, d_text_nD, None, d_scale, d_bias, statistics_5)


class _Pairs:
    """What the negatives add to loss and bias, and to `B dL/dS` times features, as a visitor.

    Args:
        plan: What all ranks have agreed on.
        scale: In the state dtype.
        bias: Likewise.
        largest: The maxima to raise, if a rank wants statistics; a visitor after this one.
    """

    def __init__(self, plan: Plan, scale: Tensor, bias: Tensor, largest: Largest | None) -> None:
        image_bD, (use_image, use_text) = plan.request.image, plan.sides
        # Not `empty_like`, which keeps strides: `finish` in Triton takes it for contiguous.
        self._image_bD = image_bD.new_empty(image_bD.shape, dtype=plan.dtype) if use_image else None
        self._text = plan.exchange.home("sum") if use_text else None
        self._scale, self._bias, self._largest = scale, bias, largest
        # In the state dtype, as the scale is by now: terms are as many as pairs.
        self._totals_2 = scale.new_zeros(2)

    def block(self, block: Block) -> None:
        """Add what these columns and the rows make of each other."""
        part_mD = None
        if self._text is not None:
            part_mD = block.text_mD.new_empty(block.text_mD.shape, dtype=block.plan.dtype)
        maxima = None if self._largest is None else self._largest.fresh(block.text_mD)
        logits = block.logits(block.plan.request.image, block.text_mD)
        block.plan.tiles.sigmoid_sweep(
            logits._replace(scale=self._scale), self._bias, self._totals_2, self._image_bD, part_mD,
            maxima,
        )  # fmt: skip
        if self._text is not None and part_mD is not None:
            self._text.add(part_mD)

    def home(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sums, and what was added for images and for texts."""
        text_nD = None if self._text is None else self._text.result()
        return self._totals_2, self._image_bD, text_nD
