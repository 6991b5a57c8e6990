"""The targets of the cross entropies of a call, and their weights."""

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.cross_entropies import CrossEntropies, Shares
from lightning_mp.contrastive._sums.matches import Everything, Groups, Listed, Match, Own, Unmasked
from lightning_mp.contrastive._sums.sweep import Plan

__all__ = ["cross_entropies_of"]


def cross_entropies_of(plan: Plan) -> CrossEntropies:
    """Return the cross entropies of a request; called on all ranks."""
    request, pairing = plan.request, plan.pairing
    b, n = len(request.image), len(request.text)
    weight_b = plan.weights_b
    if weight_b is None:
        weight_b = request.image.new_ones(b, dtype=plan.state)
    match: Match = Own(b, n)
    if pairing is not None:
        match = Listed(pairing.images_e, pairing.texts_e, b, n)
        # Without a positive there is no term. A text has the mean weight of its images.
        weight_b = weight_b.where(match.times(weight_b.new_ones(n)) > 0, 0)
        images_n = match.times(torch.ones_like(weight_b), True).clamp_min(1)
        weight_n = match.times(weight_b, True) / images_n
    else:
        weight_n = match.times(weight_b, True)
    if plan.grouped_ids_n is not None:
        match = Groups(plan.grouped_ids_n, b, plan.exchange)
    everything = Everything(b, n, plan.exchange)
    denominator: Match = everything
    if plan.ids_n is not None:
        denominator = Unmasked(everything, Groups(plan.ids_n, b, plan.exchange), Own(b, n))
    return CrossEntropies(plan, match, denominator, _shares(weight_b, weight_n, plan))


def _shares(rows_b: Tensor, columns_n: Tensor, plan: Plan) -> Shares:
    """Return shares whose sum over all ranks and directions is 1."""
    directions = plan.has_terms
    world_size, rank = plan.exchange.world_size, plan.exchange.rank
    # An exchange only sums, so every rank puts its largest weight in a place of its own.
    numbers = rows_b.new_zeros(2, 1 + world_size)
    for number, weight in zip(numbers, (rows_b, columns_n), strict=True):
        number[0], number[1 + rank] = weight.sum(), weight.amax()
    numbers = plan.exchange.all_reduce(numbers)
    # If all weights are 0, the loss is 0.
    sums = numbers[:, 0].masked_fill(numbers[:, 0] == 0, 1)
    factors = torch.stack(
        [used / sum(directions) / total for used, total in zip(directions, sums, strict=True)]
    )
    # Shares of up to 1, because fp16 gradients of `negatives` would underflow at 1 / 2B.
    unit = (factors * numbers[:, 1:].amax(1)).amax()
    factors = factors / unit.masked_fill(unit == 0, 1)
    return Shares(rows_b * factors[0], columns_n * factors[1], unit)
