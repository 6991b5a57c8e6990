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

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Visit
from lightning_mp.contrastive._sums.plan import Found, Plan
from lightning_mp.contrastive._tiles.tile_backend import Kept, Maxima, Prepared
from lightning_mp.contrastive.statistics import MaximaSweep, measure, softmax_probabilities
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["Negatives", "infonce", "negatives_gradients", "negatives_sweep"]


class Negatives(NamedTuple):
    """What the first sweep finds out about the negatives of this rank's rows and columns.

    Args:
        row_lse_b: Log-sum-exps of the rows.
        column_lse_Rn: Parts of those of the columns, see `Home.parts`.
        maxima: Their largest logits, if a rank wants them.
    """

    row_lse_b: Tensor
    column_lse_Rn: Tensor
    maxima: Maxima | None


def infonce(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan
) -> Found:
    """Return the loss and its gradients; one unit of work, and up to three for the gradients."""
    memory = plan.memory_for_tiles(image_bD)
    prepared = plan.tiles.prepare(image_bD, text_nD, scale)
    row_neg_b, column_neg_Rn, maxima = negatives_sweep(
        image_bD, text_nD, scale, memory, plan, prepared
    )
    statistics_5 = None
    if maxima is not None:
        probability_2b = softmax_probabilities(
            prepared.pos_b, (row_neg_b, column_neg_Rn.logsumexp(0))
        )
        statistics_5 = measure(
            image_bD, text_nD, scale, bias, prepared.pos_b, probability_2b, maxima, plan.exchange,
            plan.tiles,
        )  # fmt: skip
    # The scale's gradient and the loss: each rank's parts, that one collective adds up.
    totals = row_neg_b.new_empty(1 + plan.scale_needs_grad)
    row_lse_b, column_lse_n, weight_b = plan.tiles.pair_terms(
        row_neg_b, column_neg_Rn, prepared.pos_b, plan.wanted, plan.terms, totals[-1]
    )
    d_image_bD = d_text_nD = None
    if plan.trains:
        d_image_bD, d_text_nD = negatives_gradients(
            image_bD, text_nD, scale, row_lse_b, column_lse_n, memory, plan
        )
        plan.tiles.finish(
            image_bD, text_nD, d_image_bD, d_text_nD, weight_b, scale, plan.terms,
            plan.exchange.world_size, totals[0] if plan.scale_needs_grad else None,
        )  # fmt: skip
    *d_scale, loss = plan.exchange.all_reduce(totals)
    return Found(
        loss,
        d_image_bD,
        d_text_nD,
        d_scale=d_scale[0] if d_scale else None,
        statistics_5=statistics_5,
    )


def negatives_sweep(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    memory: Tensor,
    plan: Plan,
    prepared: Prepared | None = None,
) -> Negatives:
    """Sweep over all columns for the log-sum-exps of the negatives."""
    row_neg_b = image_bD.new_empty(image_bD.shape[:1], dtype=state_dtype(image_bD.device))
    column_neg, kept = plan.exchange.home("logsumexp"), Kept(memory)
    largest = MaximaSweep(image_bD, plan.exchange) if plan.statistics else None

    # A function, so that what a block takes is free before the next one arrives.
    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD = visit.columns[0]
        # Not filled: by `Logits.fresh` it is overwritten.
        part_m = row_neg_b.new_empty(text_mD.shape[:1])
        maxima = None if largest is None else largest.block(text_mD)
        logits = plan.logits(visit, image_bD, text_mD, scale, kept, is_first=is_first)
        plan.tiles.lse_sweep(logits, row_neg_b, part_m, prepared, maxima)
        column_neg.add(part_m)
        if largest is not None and maxima is not None:
            largest.add(maxima)

    for index, visit in enumerate(plan.exchange.visit([text_nD, *plan.travelling])):
        sweep_block(visit, index == 0)
    return Negatives(row_neg_b, column_neg.parts(), None if largest is None else largest.result())


def negatives_gradients(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    row_lse_b: Tensor,
    column_lse_n: Tensor,
    memory: Tensor,
    plan: Plan,
) -> tuple[Tensor | None, Tensor | None]:
    """Return what the negatives add to `2B dL/dS text` and `2B dL/dS.T image`.

    `memory` is what the first sweep left.
    """
    dtype, (use_image, use_text) = accumulation_dtype(image_bD.dtype), plan.sides
    # Not `empty_like`, which keeps strides: `finish` in Triton takes it for contiguous.
    d_image_bD = image_bD.new_empty(image_bD.shape, dtype=dtype) if use_image else None
    d_text = plan.exchange.home("sum") if use_text else None
    # Counted from its start: tiles take their places in the order of the first sweep.
    kept = Kept(memory)

    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD, column_lse_m = visit.columns[0], visit.columns[-1]
        part_mD = None if d_text is None else torch.empty_like(text_mD, dtype=dtype)
        logits = plan.logits(visit, image_bD, text_mD, scale, kept, is_first=is_first)
        plan.tiles.grad_sweep(logits, row_lse_b, column_lse_m, d_image_bD, part_mD)
        if d_text is not None and part_mD is not None:
            d_text.add(part_mD)

    published = plan.exchange.publish(column_lse_n)
    for index, visit in enumerate(plan.exchange.visit([text_nD, *plan.travelling], published)):
        sweep_block(visit, index == 0)
    return d_image_bD, None if d_text is None else d_text.result()
