"""The values of `LossStatistics`, from maxima and log-sum-exps of the sweeps."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.sweep import LargestNegatives, Plan
from lightning_mp.contrastive._tiles.tile_backend import Vectors

__all__ = ["loss_statistics", "softmax_statistics"]


def loss_statistics(plan: Plan, pos_q: Tensor, probability_2q: Tensor, maxima: Vectors) -> Tensor:
    """Return the values of `LossStatistics`, (5,), by one collective.

    Image i and text i are a pair for i < q. `pos_q` are their logits and `maxima` the largest
    negatives, both without the bias. A NaN in `probability_2q` is not a hit.
    """
    request, exchange, state, dtype = plan.request, plan.exchange, plan.state, plan.dtype
    image_bD, text_nD, weights, q = request.image, request.text, request.weights, len(pos_q)
    weight_q = torch.ones_like(pos_q) if weights is None else weights[:q].to(state)
    norms_q = [torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (image_bD[:q], text_nD[:q])]
    # A hit must be one in exact arithmetic, whatever the rounding of the tiles.
    relative, absolute = plan.tiles.rounding(image_bD.shape[1], image_bD.dtype)
    size_q = plan.scale.abs() * norms_q[0] * norms_q[1] + plan.bias.abs()
    negatives_2q = torch.stack([maxima.rows_b[:q], maxima.columns_m[:q]])
    # Twice, because both logits have a rounding error.
    hits_2q = (pos_q - 2 * (relative * size_q + absolute) > negatives_2q) & ~probability_2q.isnan()
    sums_5 = torch.cat(
        [hits_2q.to(state) @ weight_q, probability_2q @ weight_q, weight_q.sum()[None]]
    )
    # Every pair is in the rows of one rank. Each rank fills one place, so the sum is a gather.
    largest_W = pos_q.new_zeros(exchange.world_size)
    largest_W[exchange.rank] = torch.cat([maxima.rows_b, pos_q]).amax() + plan.bias
    totals = exchange.all_reduce(torch.cat([sums_5, largest_W]))
    return torch.cat([totals[:4] / totals[4], totals[5:].amax(0, keepdim=True)]).to(dtype)


def softmax_statistics(
    plan: Plan, pos_q: Tensor, negative_lses: Iterable[Tensor], largest: LargestNegatives
) -> Tensor:
    """Return the values of `LossStatistics` of a softmax from log-sum-exps of the negatives."""
    probabilities = [(pos_q - neg[: len(pos_q)]).sigmoid() for neg in negative_lses]
    return loss_statistics(plan, pos_q, torch.stack(probabilities), largest.home())
