"""Cross entropies of this rank's images and texts against targets, beside what the sweeps add up.

Shapes:
    b: images of this rank. n: its texts. q: images that have a text of their own, the first ones;
    it is text i of image i. D: feature width. W: ranks.

With the log-sum-exp `neg_i` of a row but for the positive `pos_i = S_ii`, and a target Y whose rows
add up to 1, the cross entropy is

    lse_i - sum_j Y_ij S_ij = softplus(neg_i - pos_i) + scale <image_i, text_i - sum_j Y_ij text_j>.

The second term is exactly 0 where text i is the whole target, so that such a pair keeps its digits.
It takes no b x b matrix, for Y has the structure of a `Match`. All of it is O(b) numbers and
O(b D) products, so autograd does the rest: what it returns for `neg_i` goes into the second sweep.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._sums.matches import (
    Everything,
    Groups,
    Listed,
    Match,
    Own,
    Unmasked,
    to_columns,
    to_rows,
)
from lightning_mp.contrastive._sums.plan import Plan
from lightning_mp.contrastive._tiles.tile_backend import Limits
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["Shares", "Task", "make_task"]


class Shares(NamedTuple):
    """What the cross entropies count in the loss, in units of the largest share of all ranks.

    Args:
        rows_b: Of the images' cross entropies, 0 to 1.
        columns_n: Of the texts'.
        unit: What 1 stands for: 1 / (2 B) where all weigh the same.
    """

    rows_b: Tensor
    columns_n: Tensor
    unit: Tensor


class Task(NamedTuple):
    """The targets of all cross entropies, and what these count.

    Args:
        match: What belongs to what.
        matched: q.
        shares: What counts.
        smoothing: The part of a target that is spread evenly.
        field: Over what.
        limits: What rows take for a false negative.
        wanted: Whether the cross entropies of images count, and those of texts.
    """

    match: Match
    matched: int
    shares: Shares
    smoothing: float
    field: Match
    limits: Limits | None
    wanted: tuple[bool, bool]

    def loss(
        self,
        image_bD: Tensor,
        text_nD: Tensor,
        scale: Tensor,
        row_neg_b: Tensor,
        column_neg_n: Tensor,
        negatives_bkD: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's part of the loss in units of `shares.unit`, to be differentiated.

        Args:
            image_bD: In the accumulation dtype, as the texts.
            text_nD: The texts.
            scale: One value in the state dtype.
            row_neg_b: Log-sum-exps of the rows without own positives, in the state dtype.
            column_neg_n: Those of the columns.
            negatives_bkD: What each row alone has beside, in any dtype.
        """
        q = self.matched
        pos_q = _dots(image_bD[:q], text_nD[:q], scale.dtype) * scale
        # A positive of +inf is an overflow, not a loss of 0.
        pos_q = pos_q.masked_fill(pos_q == torch.inf, torch.nan)
        extra_bk = pos_q.new_zeros(len(image_bD), 0)
        if negatives_bkD is not None and negatives_bkD.shape[1]:
            dots_bk = _dots(image_bD, negatives_bkD, scale.dtype)
            extra_bk = dots_bk * scale
            if self.limits is not None:
                # A number that no exponential reaches; infinities would make gradients NaN.
                left_out_bk = dots_bk > self.limits.rows_b[:, None]
                extra_bk = extra_bk.masked_fill(left_out_bk, torch.finfo(scale.dtype).min / 2)
            row_neg_b = torch.logaddexp(row_neg_b, extra_bk.logsumexp(1))
        total = scale.new_zeros(())
        ways: tuple[tuple[Any, ...], ...] = (
            (self.shares.rows_b, row_neg_b, image_bD, text_nD, to_rows, extra_bk),
            (self.shares.columns_n, column_neg_n, text_nD, image_bD, to_columns, extra_bk[:0, :0]),
        )
        for is_wanted, (share, *way) in zip(self.wanted, ways, strict=True):
            if is_wanted:
                terms = self._terms(pos_q, scale, *way)
                # A term that does not count may be infinite, and 0 times that is NaN.
                total = total + (share * terms).where(share != 0, 0.0).sum()
        return total

    def _terms(
        self,
        pos_q: Tensor,
        scale: Tensor,
        neg: Tensor,
        features: Tensor,
        others: Tensor,
        product: Callable[[Match, Tensor], Tensor],
        extra_nk: Tensor,
    ) -> Tensor:
        """Return the cross entropies of images, or of texts, among the others."""
        q = self.matched
        # The positive is no part of `neg`, and where there is none the term is `neg` itself.
        margin_q = neg[:q] - pos_q
        terms = torch.cat([torch.logaddexp(margin_q, margin_q.new_zeros(())), neg[q:]])
        # One positive a row, all of the target: the products below are zeros.
        if not self.smoothing and isinstance(self.match, Own):
            return terms
        own = torch.cat([others[:q], others.new_zeros(len(neg) - q, others.shape[1])])
        # Counted by the same product, which goes over all ranks.
        ones = others.new_ones(len(others), 1)
        # What has no positive gets a target of zeros, and its term is masked by its share.
        target = product(self.match, others) / product(self.match, ones).clamp_min(1)
        if self.smoothing:
            # None are left for a text beyond the images' own whose id all images have.
            count_n1 = (product(self.field, ones) + extra_nk.shape[1]).clamp_min(1)
            share_n1 = self.smoothing / count_n1
            target = (1 - self.smoothing) * target + share_n1 * product(self.field, others)
            if extra_nk.shape[1]:
                terms = terms - share_n1[:, 0] * extra_nk.sum(1)
        return terms + scale * _dots(features, own - target, scale.dtype)


def make_task(options: PairOptions, image_bD: Tensor, text_nD: Tensor, plan: Plan) -> Task:
    """Return what the options ask for, on all ranks at once."""
    b, n = len(image_bD), len(text_nD)
    weight_b = image_bD.new_ones(b, dtype=state_dtype(image_bD.device))
    if options.weights is not None:
        weight_b = options.weights.to(weight_b.dtype)
        # To look at them would wait for the device; so the loss says it.
        weight_b = weight_b.masked_fill(weight_b < 0, torch.nan)
    match: Match = Own(b, n)
    if options.pairing is not None:
        match = Listed(options.pairing.images_e, options.pairing.texts_e, b, n)
        # Without a positive there is no term, and a text weighs what its images do on average.
        weight_b = weight_b.where(match.to_rows(weight_b.new_ones(n)) > 0, 0)
        images_n = match.to_columns(torch.ones_like(weight_b)).clamp_min(1)
        weight_n = match.to_columns(weight_b) / images_n
    else:
        weight_n = match.to_columns(weight_b)
    if options.grouped_ids is not None:
        match = Groups(options.grouped_ids, b, plan.exchange)
    everything = Everything(b, n, plan.exchange)
    field: Match = everything
    if options.masked_ids is not None:
        groups = Groups(options.masked_ids, b, plan.exchange)
        field = Unmasked(everything, groups, Own(b, n))
    matched = b if plan.matched is None else plan.matched
    shares = _shares(weight_b, weight_n, plan)
    smoothing = options.label_smoothing
    return Task(match, matched, shares, smoothing, field, plan.limits, plan.wanted)


def _shares(rows_b: Tensor, columns_n: Tensor, plan: Plan) -> Shares:
    """Return what weights count, whose sums over all ranks are 1 in either direction."""
    ways = plan.wanted
    world_size, rank = plan.exchange.world_size, plan.exchange.rank
    # Every rank puts its largest in a place of its own: a sum is all that an exchange has.
    numbers = rows_b.new_zeros(2, 1 + world_size)
    for number, weight in zip(numbers, (rows_b, columns_n), strict=True):
        number[0], number[1 + rank] = weight.sum(), weight.amax()
    numbers = plan.exchange.all_reduce(numbers)
    # Where all weigh nothing, the loss is 0.
    sums = numbers[:, 0].masked_fill(numbers[:, 0] == 0, 1)
    factors = torch.stack([way / sum(ways) / total for way, total in zip(ways, sums, strict=True)])
    # Shares of up to 1 stay: in fp16, gradients of `negatives` at 1 / 2B would be flushed.
    unit = (factors * numbers[:, 1:].amax(1)).amax()
    factors = factors / unit.masked_fill(unit == 0, 1)
    return Shares(rows_b * factors[0], columns_n * factors[1], unit)


def _dots(left_bD: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inner products of rows with one row each, (b, D), or with several, (b, k, D)."""
    right_bkD = right if right.ndim == 3 else right[:, None]
    dots_bk: Tensor = _Dots.apply(left_bD, right_bkD, dtype)
    return dots_bk if right.ndim == 3 else dots_bk[:, 0]


class _Dots(torch.autograd.Function):
    """Inner products of rows in a wide dtype, whose gradients are products in a narrow one."""

    @staticmethod
    def forward(ctx: Any, left_bD: Tensor, right_bkD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(left_bD, right_bkD)
        # One of k at a time: wide copies of all would be k times the features.
        return torch.stack([row_dots(left_bD, x_bD, dtype) for x_bD in right_bkD.unbind(1)], 1)

    @staticmethod
    def backward(ctx: Any, cotangent_bk: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left_bD, right_bkD = ctx.saved_tensors
        cotangent_bk = cotangent_bk.to(left_bD.dtype)
        needs_left, needs_right, _ = ctx.needs_input_grad
        d_left_bD = torch.zeros_like(left_bD) if needs_left else None
        d_right_bkD = torch.empty_like(right_bkD) if needs_right else None
        for place, cotangent_b in enumerate(cotangent_bk.unbind(1)):
            if d_left_bD is not None:
                d_left_bD.addcmul_(right_bkD[:, place], cotangent_b[:, None])
            if d_right_bkD is not None:
                d_right_bkD[:, place] = left_bD * cotangent_b[:, None]
        return d_left_bD, d_right_bkD, None
