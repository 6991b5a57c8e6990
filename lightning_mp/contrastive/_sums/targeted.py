"""The contrastive loss with general targets: the two sweeps of `softmax` and cross entropies.

The first sweep computes the log-sum-exps of the negatives. A function of them and of O(b D)
products is the loss, and autograd differentiates it. Its gradients with respect to the log-sum-exps
of rows, `g_i`, and of columns, `h_j`, are between 0 and 1, and

    dL/dS_ij = g_i exp(S_ij - row_neg_i) + h_j exp(S_ij - column_neg_j)
             = exp(S_ij - (row_neg_i - log g_i)) + exp(S_ij - (column_neg_j - log h_j)):

so the second sweep is that of `softmax` with shifted log-sum-exps.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.cross_entropies import CrossEntropies
from lightning_mp.contrastive._sums.softmax import gradients, negatives
from lightning_mp.contrastive._sums.statistics import softmax_statistics
from lightning_mp.contrastive._sums.sweep import LargestNegatives, Plan, SweepResult
from lightning_mp.contrastive._tiles.tile_backend import StoredTiles, row_dots

__all__ = ["LogitMatrix", "differentiated_loss", "targeted_loss"]


class LogitMatrix(NamedTuple):
    """The logits of a plan: of images and texts, or of texts in rows, or of images in columns."""

    plan: Plan
    rows_are_images: bool = True
    columns_are_images: bool = False


def targeted_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients: one unit of work, and up to three for the gradients."""
    memory = plan.memory_for_tiles()
    largest = LargestNegatives(plan) if plan.statistics else None
    row_neg_b, column_neg_Rn = negatives(plan, StoredTiles(memory), largest=largest)
    lses = row_neg_b, column_neg_Rn.logsumexp(0)
    statistics_5 = None
    if largest is not None:  # statistics require one positive per row
        q = plan.matched
        pos_q = row_dots(plan.request.image[:q], plan.request.text[:q], plan.state)
        statistics_5 = softmax_statistics(plan, pos_q.mul_(plan.scale), lses, largest)
    cross_entropies = CrossEntropies(plan)
    result = differentiated_loss(
        plan, [LogitMatrix(plan)], lses, cross_entropies.loss, cross_entropies.unit, memory
    )
    return result._replace(statistics_5=statistics_5)


def differentiated_loss(
    plan: Plan,
    matrices: Sequence[LogitMatrix],
    lses: Sequence[Tensor],
    part_of: Callable[..., Tensor],
    unit: Tensor | float,
    memory: Tensor,
) -> SweepResult:
    """Return a loss and its gradients from those of a function of features and log-sum-exps.

    `lses` are the log-sum-exps of the negatives of each matrix, of rows and then of columns.
    `part_of` returns this rank's part of the loss, divided by `unit`, from images, texts, scale,
    `negatives` and the log-sum-exps. `memory` holds the tiles that the first sweep has stored.
    """
    request, dtype = plan.request, plan.dtype
    # Widened, because autograd accumulates gradients in the dtype of the leaves.
    inputs = [request.image.to(dtype), request.text.to(dtype), plan.scale, request.negatives, *lses]
    # Equal on all ranks, because the graph may contain collectives.
    needs = [*plan.needs_grad, request.needs_grad[-1], *(plan.trains for _ in lses)]
    part, derivatives = _differentiated(part_of, inputs, needs)
    d_image_bD, d_text_nD, d_scale, d_negatives_bkD, *d_lses = derivatives
    # Empty if nothing trains.
    shifted = [_weighted_lse(lse, d) for lse, d in zip(lses, d_lses, strict=True) if d is not None]
    for matrix, row_b, column_n in zip(matrices, shifted[::2], shifted[1::2], strict=False):
        request = matrix.plan.request
        of_sides = gradients(matrix.plan, row_b, column_n, StoredTiles(memory))
        if d_scale is not None:
            # sum <I, dL/dS T> = sum <T, dL/dS^T I>: either gradient serves.
            towers = zip((request.image, request.text), of_sides, strict=True)
            features, grad = next((x, grad) for x, grad in towers if grad is not None)
            d_scale = d_scale + row_dots(features, grad, plan.state).sum()
        are_images = matrix.rows_are_images, matrix.columns_are_images
        for is_of_images, of_side in zip(are_images, of_sides, strict=True):
            total = d_image_bD if is_of_images else d_text_nD
            if total is not None and of_side is not None:
                # Autograd's part contains the scale, the sweep's part does not.
                total[: len(of_side)].addcmul_(of_side, plan.scale.to(dtype))
    # One tensor for one collective.
    parts = [part] if d_scale is None else [d_scale, part]
    *d_scales, loss = plan.exchange.all_reduce(torch.stack(parts) * unit)
    # W for features only, since the scale's gradient was summed over ranks.
    factor = unit * plan.exchange.world_size
    if d_negatives_bkD is not None:
        # Widened first, because fp16 underflows after the product with the unit, about 1 / 2B.
        d_negatives_bkD = d_negatives_bkD.to(dtype)
    for total in (d_image_bD, d_text_nD, d_negatives_bkD):
        if total is not None:
            total.mul_(factor)
    d_scale = next(iter(d_scales), None)
    return SweepResult(loss, None, d_image_bD, d_text_nD, d_scale, d_negatives_bkD=d_negatives_bkD)


def _differentiated(
    part_of: Callable[..., Tensor], inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return a function's value and the gradients of the inputs that need one."""
    leaves = [
        None if x is None else x.detach().requires_grad_(need)
        for x, need in zip(inputs, needs, strict=True)
    ]
    with torch.set_grad_enabled(any(needs)):
        part = part_of(*leaves)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    found: Iterable[Tensor] = map(torch.zeros_like, wanted)
    # With k = 0, `negatives` are not part of the graph.
    if part.requires_grad:
        found = torch.autograd.grad(part, wanted, materialize_grads=True)
    remaining = iter(found)
    return part.detach(), [next(remaining) if need else None for need in needs]


def _weighted_lse(lse: Tensor, cotangent: Tensor) -> Tensor:
    """Return `lse - log(cotangent)`, infinite where the cotangent is 0."""
    # Without negatives, `lse` is -inf, and -inf - log(0) would be NaN.
    return (lse - cotangent.log()).masked_fill_(cotangent == 0, torch.inf)
