"""Cross entropies of this rank's images and texts with general targets, outside of the sweeps.

With the log-sum-exp `neg_i` of a row without its positive `pos_i = S_ii`, and a target Y whose rows
sum to 1, the cross entropy is

    lse_i - sum_j Y_ij S_ij = softplus(neg_i - pos_i) + scale <image_i, text_i - sum_j Y_ij text_j>.

The second term is exactly 0 if text i is the whole target, so such a pair keeps its digits. It
needs no b x b matrix, because Y has the structure of a `Match`. The whole computation takes O(b)
numbers and O(b D) products, so autograd differentiates it; the gradients of `neg_i` enter the
second sweep.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_mp.contrastive._sums import matches
from lightning_mp.contrastive._sums.products import dots, positive_logits, product
from lightning_mp.contrastive._sums.sweep import Plan

__all__ = ["CrossEntropies"]


class CrossEntropies:
    """The cross entropies of a plan: targets and weights; made on all ranks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        b, n, pairing = len(plan.request.image), len(plan.request.text), plan.pairing
        weight_b = plan.weights_b
        if weight_b is None:
            weight_b = plan.request.image.new_ones(b, dtype=plan.state)
        own, every = matches.Own(b, n), matches.Everything(b, n, plan.exchange)
        self.match: matches.Match = own  # the positive pairs
        if pairing is not None:
            self.match = matches.Listed(pairing.images_e, pairing.texts_e, b, n)
        # Without a positive there is no term. A text has the mean weight of its images.
        weight_b = weight_b.where(self.match.times(weight_b.new_ones(n)) > 0, 0)
        images_n = self.match.times(torch.ones_like(weight_b), True).clamp_min(1)
        weight_n = self.match.times(weight_b, True) / images_n
        # Weights of the images' cross entropies in the loss, (b,), and of the texts', (n,). Their
        # sum over all ranks and directions is 1 / `unit`.
        self.shares, self.unit = _shares(plan, weight_b, weight_n)
        if plan.grouped_ids_n is not None:
            self.match = matches.Groups(plan.grouped_ids_n, b, plan.exchange)
        # The pairs that the log-sum-exp sums over; smoothing spreads part of each target over them.
        self.denominator: matches.Match = every
        if plan.ids_n is not None:
            same = matches.Groups(plan.ids_n, b, plan.exchange)
            self.denominator = matches.Unmasked(every, same, own)

    def loss(
        self,
        image_bD: Tensor,
        text_nD: Tensor,
        scale: Tensor,
        negatives_bkD: Tensor | None,
        row_neg_b: Tensor,
        column_neg_n: Tensor,
    ) -> Tensor:
        """Return this rank's part of the loss divided by `unit`; autograd differentiates it.

        Features are in the accumulation dtype. The scale and the log-sum-exps of rows and columns,
        which are without the positives, are in the state dtype.
        """
        q, thresholds = self.plan.matched, self.plan.thresholds
        pos_q = positive_logits(image_bD[:q], text_nD[:q], scale)
        extra_bk = pos_q.new_zeros(len(image_bD), 0)
        if negatives_bkD is not None and negatives_bkD.shape[1]:
            dots_bk = dots(image_bD, negatives_bkD, scale.dtype)
            extra_bk = dots_bk * scale
            if thresholds is not None:
                # A finite value whose exponential is 0: -inf would make gradients NaN.
                masked_bk = dots_bk > thresholds.rows_b[:, None]
                extra_bk = extra_bk.masked_fill(masked_bk, torch.finfo(scale.dtype).min / 2)
            row_neg_b = torch.logaddexp(row_neg_b, extra_bk.logsumexp(1))
        total = scale.new_zeros(())
        directions: tuple[tuple[Any, ...], ...] = (
            (self.shares[0], row_neg_b, image_bD, text_nD, False, extra_bk),
            (self.shares[1], column_neg_n, text_nD, image_bD, True, extra_bk[:0, :0]),
        )
        for is_used, (share, *direction) in zip(self.plan.has_terms, directions, strict=True):
            if is_used:
                terms = self._terms(pos_q, scale, *direction)
                # A term of weight 0 may be infinite, and their product is NaN.
                total = total + (share * terms).where(share != 0, 0.0).sum()
        return total

    def _terms(
        self,
        pos_q: Tensor,
        scale: Tensor,
        neg: Tensor,
        features: Tensor,
        others: Tensor,
        is_of_texts: bool,
        extra_nk: Tensor,
    ) -> Tensor:
        """Return the cross entropies of the images, or of the texts."""
        q, smoothing = self.plan.matched, self.plan.request.label_smoothing
        # `neg` is without the positive. If there is no positive, the term is `neg` itself.
        margin_q = neg[:q] - pos_q
        terms = torch.cat([torch.logaddexp(margin_q, margin_q.new_zeros(())), neg[q:]])
        # If the positive is the whole target, the products below are 0.
        if not smoothing and isinstance(self.match, matches.Own):
            return terms
        own = torch.cat([others[:q], others.new_zeros(len(neg) - q, others.shape[1])])
        # The product with ones counts positives over all ranks.
        ones = others.new_ones(len(others), 1)
        # Rows without a positive get a target of 0; their weight is 0.
        target = product(self.match, others, is_of_texts)
        target = target / product(self.match, ones, is_of_texts).clamp_min(1)
        if smoothing:
            # The count is 0 for a text without an image whose id equals those of all images.
            count_n1 = product(self.denominator, ones, is_of_texts) + extra_nk.shape[1]
            share_n1 = smoothing / count_n1.clamp_min(1)
            spread = share_n1 * product(self.denominator, others, is_of_texts)
            target = (1 - smoothing) * target + spread
            if extra_nk.shape[1]:
                terms = terms - share_n1[:, 0] * extra_nk.sum(1)
        return terms + scale * dots(features, own - target, scale.dtype)


def _shares(plan: Plan, rows_b: Tensor, columns_n: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the shares of rows and columns, and their unit, the largest weight of all ranks."""
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
    return (rows_b * factors[0], columns_n * factors[1]), unit
