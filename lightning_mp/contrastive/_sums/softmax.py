"""The symmetric contrastive loss as two sweeps over all ranks, with its gradients in closed form.

Shapes:
    B: global batch. b: this rank's batch. n: its texts, of which the first b belong to its images.
    m: columns that are visiting. D: feature width. W: ranks. R: parts, one or one of each rank.

With `S = scale * image @ text.T`, the positive `pos_i = S_ii` and the log-sum-exp of the negatives
`neg_i` of a row or a column (the diagonal left out), each of the `2 B` cross entropies is

    -log softmax_i = log(exp(pos_i) + exp(neg_i)) - pos_i = softplus(neg_i - pos_i),

and its gradient with respect to `pos_i` is `-sigmoid(neg_i - pos_i)`. Nothing cancels there: a
converged pair, whose loss is 1e-12, keeps its digits, where `lse_i - pos_i` would return the
rounding of `lse_i`. With `lse` over positives and negatives,

    dL/dS_ij = (exp(S_ij - row_lse_i) + exp(S_ij - column_lse_j)) / 2B                  for i != j
    dL/dS_ii = -(sigmoid(row_neg_i - pos_i) + sigmoid(column_neg_i - pos_i)) / 2B

and `dL/dimage = scale dL/dS text`, `dL/dtext = scale dL/dS.T image`,
`dL/dscale = sum_i <image_i, (dL/dS text)_i>`. A bias moves all logits alike, and softmax does not
see it: its gradient is exactly 0, and adding it would only cost digits.

Both sweeps come in the forward where a backward can follow: what waits for it is two (b, D)
matrices, nothing of the other ranks, and no rank waits for another one's backward.
"""

from torch import Tensor

from lightning_mp.contrastive._sums.statistics import (
    LargestNegatives,
    loss_statistics,
    softmax_probabilities,
)
from lightning_mp.contrastive._sums.sweep import Block, Plan, SweepResult, sweep
from lightning_mp.contrastive._tiles.tile_backend import Prepared, StoredTiles

__all__ = ["Gradients", "Negatives", "softmax_loss"]


def softmax_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients; one unit of work, and up to three for the gradients."""
    request, tiles = plan.request, plan.tiles
    image_bD, text_nD, scale = request.image, request.text, request.scale
    memory = plan.memory_for_tiles()
    prepared = tiles.prepare(image_bD, text_nD, scale)
    largest = LargestNegatives(plan) if plan.statistics else None
    negatives = Negatives(plan, StoredTiles(memory), prepared, largest)
    (row_neg_b, column_neg_Rn), *maxima = sweep(
        plan, [negatives, largest] if largest else [negatives]
    )
    statistics_5 = None
    if maxima:
        probability_2b = softmax_probabilities(
            prepared.pos_b, (row_neg_b, column_neg_Rn.logsumexp(0))
        )
        statistics_5 = loss_statistics(plan, prepared.pos_b, probability_2b, maxima[0])
    # The scale's gradient and the loss: each rank's parts, that one collective adds up.
    totals = row_neg_b.new_empty(1 + plan.needs_grad.scale)
    row_lse_b, column_lse_n, weight_b = tiles.pair_terms(
        row_neg_b, column_neg_Rn, prepared.pos_b, plan.has_terms, plan.terms, totals[-1]
    )
    d_image_bD = d_text_nD = None
    if plan.trains:
        gradients = Gradients(plan, row_lse_b, StoredTiles(memory))
        ((d_image_bD, d_text_nD),) = sweep(plan, [gradients], column_lse_n)
        tiles.finish(
            image_bD, text_nD, d_image_bD, d_text_nD, weight_b, scale, plan.terms,
            plan.exchange.world_size, totals[0] if plan.needs_grad.scale else None,
        )  # fmt: skip
    *d_scale, loss = plan.exchange.all_reduce(totals)
    return SweepResult(
        loss,
        d_image_bD,
        d_text_nD,
        d_scale=d_scale[0] if d_scale else None,
        statistics_5=statistics_5,
    )


class Negatives:
    """The log-sum-exps of the negatives of this rank's rows and columns, as a visitor.

    Args:
        plan: What all ranks have agreed on.
        kept: Memory for tiles.
        prepared: What the backend's `prepare` has returned, if it was called.
        largest: The maxima to raise, if a rank wants statistics; a visitor after this one.
    """

    def __init__(
        self,
        plan: Plan,
        stored: StoredTiles,
        prepared: Prepared | None,
        largest: LargestNegatives | None,
    ) -> None:
        image_bD = plan.request.image
        self._rows_b = image_bD.new_empty(len(image_bD), dtype=plan.state)
        self._columns, self._stored = plan.exchange.home("logsumexp"), stored
        self._prepared, self._largest = prepared, largest

    def block(self, block: Block) -> None:
        """Add the columns' negatives to the rows', and the rows' to theirs."""
        # Not filled: by `Logits.fresh` it is overwritten.
        part_m = self._rows_b.new_empty(len(block.text_mD))
        maxima = None if self._largest is None else self._largest.fresh(part_m)
        logits = block.logits(block.plan.request.image, block.text_mD, self._stored)
        block.plan.tiles.lse_sweep(logits, self._rows_b, part_m, self._prepared, maxima)
        self._columns.add(part_m)

    def home(self) -> tuple[Tensor, Tensor]:
        """Return the rows' log-sum-exps, (b,), and parts of the columns', (R, n)."""
        return self._rows_b, self._columns.parts()


class Gradients:
    """What the negatives add to `2B dL/dS text` and `2B dL/dS.T image`, as a visitor.

    The log-sum-exps of the columns travel with them.

    Args:
        plan: What all ranks have agreed on.
        row_lse_b: The log-sum-exps of the rows.
        kept: Those of the first sweep, counted from the start again: tiles take their places in
            the same order.
    """

    def __init__(self, plan: Plan, row_lse_b: Tensor, stored: StoredTiles) -> None:
        image_bD, (use_image, use_text) = plan.request.image, plan.computes_grad
        # Not `empty_like`, which keeps strides: `finish` in Triton takes it for contiguous.
        self._image_bD = image_bD.new_empty(image_bD.shape, dtype=plan.dtype) if use_image else None
        self._text = plan.exchange.home("sum") if use_text else None
        self._row_lse_b = row_lse_b
        self._stored = stored

    def block(self, block: Block) -> None:
        """Add what these columns and the rows make of each other."""
        part_mD = None
        if self._text is not None:
            part_mD = self._text.empty(block.text_mD, block.plan.dtype)
        logits = block.logits(block.plan.request.image, block.text_mD, self._stored)
        block.plan.tiles.grad_sweep(logits, self._row_lse_b, block.values, self._image_bD, part_mD)
        if self._text is not None and part_mD is not None:
            self._text.add(part_mD)

    def home(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what was added for images, and for texts."""
        return self._image_bD, None if self._text is None else self._text.result()
