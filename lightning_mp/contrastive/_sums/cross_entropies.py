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

from lightning_mp.contrastive._sums.matches import Match, Own
from lightning_mp.contrastive._sums.products import dots, to_columns, to_rows
from lightning_mp.contrastive._tiles.exclusions import Thresholds
from lightning_mp.contrastive._tiles.tile_backend import RowsColumns

__all__ = ["CrossEntropies", "Shares"]


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


class CrossEntropies(NamedTuple):
    """The targets of all cross entropies, and what these count.

    Args:
        match: What belongs to what.
        matched: q.
        shares: What counts.
        smoothing: The part of a target that is spread evenly.
        denominator: The pairs that the log-sum-exp sums over.
        limits: What rows take for a false negative.
        has_terms: Whether the cross entropies of images count, and those of texts.
    """

    match: Match
    matched: int
    shares: Shares
    smoothing: float
    denominator: Match
    thresholds: Thresholds | None
    has_terms: RowsColumns

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
        pos_q = dots(image_bD[:q], text_nD[:q], scale.dtype) * scale
        # A positive of +inf is an overflow, not a loss of 0.
        pos_q = pos_q.masked_fill(pos_q == torch.inf, torch.nan)
        extra_bk = pos_q.new_zeros(len(image_bD), 0)
        if negatives_bkD is not None and negatives_bkD.shape[1]:
            dots_bk = dots(image_bD, negatives_bkD, scale.dtype)
            extra_bk = dots_bk * scale
            if self.thresholds is not None:
                # A number that no exponential reaches; infinities would make gradients NaN.
                left_out_bk = dots_bk > self.thresholds.rows_b[:, None]
                extra_bk = extra_bk.masked_fill(left_out_bk, torch.finfo(scale.dtype).min / 2)
            row_neg_b = torch.logaddexp(row_neg_b, extra_bk.logsumexp(1))
        total = scale.new_zeros(())
        ways: tuple[tuple[Any, ...], ...] = (
            (self.shares.rows_b, row_neg_b, image_bD, text_nD, to_rows, extra_bk),
            (self.shares.columns_n, column_neg_n, text_nD, image_bD, to_columns, extra_bk[:0, :0]),
        )
        for has_terms, (share, *way) in zip(self.has_terms, ways, strict=True):
            if has_terms:
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
            count_n1 = (product(self.denominator, ones) + extra_nk.shape[1]).clamp_min(1)
            share_n1 = self.smoothing / count_n1
            target = (1 - self.smoothing) * target + share_n1 * product(self.denominator, others)
            if extra_nk.shape[1]:
                terms = terms - share_n1[:, 0] * extra_nk.sum(1)
        return terms + scale * dots(features, own - target, scale.dtype)
