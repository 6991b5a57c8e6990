"""The symmetric contrastive loss as two sweeps over all ranks, with its gradients in closed form.

With `S = scale * image @ text.T`, the positive `pos_i = S_ii` and the log-sum-exp of the negatives
`neg_i` of a row or a column (without the diagonal), each of the `2 B` cross entropies is

    -log softmax_i = log(exp(pos_i) + exp(neg_i)) - pos_i = softplus(neg_i - pos_i),

and its gradient with respect to `pos_i` is `-sigmoid(neg_i - pos_i)`. Nothing cancels: a converged
pair with a loss of 1e-12 keeps its digits, while `lse_i - pos_i` would return the rounding error of
`lse_i`. With `lse` over positives and negatives,

    dL/dS_ij = (exp(S_ij - row_lse_i) + exp(S_ij - column_lse_j)) / 2B                  for i != j
    dL/dS_ii = -(sigmoid(row_neg_i - pos_i) + sigmoid(column_neg_i - pos_i)) / 2B

and `dL/dimage = scale dL/dS text`, `dL/dtext = scale dL/dS.T image`,
`dL/dscale = sum_i <image_i, (dL/dS text)_i>`. A bias shifts all logits alike and has no effect on a
softmax: its gradient is exactly 0, and adding it would only cost digits.

If a backward can follow, both sweeps run in the forward. Then only two (b, D) matrices are saved
for the backward, and no rank waits for another rank's backward.
"""

from torch import Tensor

from lightning_mp.contrastive._sums.statistics import softmax_statistics
from lightning_mp.contrastive._sums.sweep import LargestNegatives, Plan, SweepResult, sweep
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Prepared, StoredTiles, Vectors

__all__ = ["gradients", "negatives", "softmax_loss"]


def softmax_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients: one unit of work, and up to three for the gradients."""
    request, tiles = plan.request, plan.tiles
    image_bD, text_nD, scale = request.image, request.text, request.scale
    memory = plan.memory_for_tiles()
    prepared = tiles.prepare(image_bD, text_nD, scale)
    largest = LargestNegatives(plan) if plan.statistics else None
    row_neg_b, column_neg_Rn = negatives(plan, StoredTiles(memory), prepared, largest)
    statistics_5 = None
    if largest is not None:
        lses = row_neg_b, column_neg_Rn.logsumexp(0)
        statistics_5 = softmax_statistics(plan, prepared.pos_b, lses, largest)
    # This rank's parts of the scale's gradient and of the loss; one collective sums them.
    totals = row_neg_b.new_empty(1 + plan.needs_grad.scale)
    row_lse_b, column_lse_n, weight_b = tiles.pair_terms(
        row_neg_b, column_neg_Rn, prepared.pos_b, plan.has_terms, plan.terms, totals[-1]
    )
    d_image_bD = d_text_nD = None
    if plan.trains:
        d_image_bD, d_text_nD = gradients(plan, row_lse_b, column_lse_n, StoredTiles(memory))
        tiles.finish(
            image_bD, text_nD, d_image_bD, d_text_nD, weight_b, scale, plan.terms,
            plan.exchange.world_size, totals[0] if plan.needs_grad.scale else None,
        )  # fmt: skip
    *d_scale, loss = plan.exchange.all_reduce(totals)
    return SweepResult(loss, statistics_5, d_image_bD, d_text_nD, next(iter(d_scale), None))


def negatives(
    plan: Plan,
    stored: StoredTiles | None = None,
    prepared: Prepared | None = None,
    largest: LargestNegatives | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps of the negatives of rows, (b,), and parts of those of columns, (R, n).

    `prepared` is the result of the backend's `prepare`, and `largest` are raised for statistics.
    """
    image_bD = plan.request.image
    row_neg_b = image_bD.new_empty(len(image_bD), dtype=plan.state)
    columns = plan.exchange.home("logsumexp")
    for block in sweep(plan, largest=largest):
        # Uninitialized, because `Logits.fresh` says that it is overwritten.
        part_m = row_neg_b.new_empty(len(block.text_mD))
        logits = block.logits(image_bD, block.text_mD, stored)
        plan.tiles.lse_sweep(logits, Vectors(row_neg_b, part_m), prepared)
        columns.add(part_m)
    return row_neg_b, columns.parts()


def gradients(
    plan: Plan, row_lse_b: Tensor, column_lse_n: Tensor, stored: StoredTiles | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the negatives' part of `2B dL/dS text` and `2B dL/dS.T image`.

    `stored` are the tiles of `negatives`, taken again from the first one.
    """
    image_bD, (use_image, use_text) = plan.request.image, plan.computes_grad
    # Not `empty_like`, which keeps strides: `finish` in Triton requires contiguous memory.
    d_image_bD = image_bD.new_empty(image_bD.shape, dtype=plan.dtype) if use_image else None
    d_text = plan.exchange.home("sum") if use_text else None
    for block in sweep(plan, column_lse_n):
        part_mD = None if d_text is None else d_text.empty(block.text_mD, plan.dtype)
        logits = block.logits(image_bD, block.text_mD, stored)
        lses = Vectors(row_lse_b, block.values)
        plan.tiles.grad_sweep(logits, lses, Derivatives(d_image_bD, part_mD))
        if d_text is not None and part_mD is not None:
            d_text.add(part_mD)
    return d_image_bD, None if d_text is None else d_text.result()
