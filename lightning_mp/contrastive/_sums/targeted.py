"""The contrastive loss against targets: two sweeps as in `softmax`, and a task beside them.

Shapes:
    b: this rank's images. n: its texts. D: feature width.

The first sweep adds up the negatives, the task makes a loss of their log-sum-exps and of O(b D)
products, and autograd differentiates it there and then. What it returns for the log-sum-exps of
rows, `g_i`, and of columns, `h_j`, is between 0 and 1, and

    dL/dS_ij = g_i exp(S_ij - row_neg_i) + h_j exp(S_ij - column_neg_j)
             = exp(S_ij - (row_neg_i - log g_i)) + exp(S_ij - (column_neg_j - log h_j)):

the second sweep is that of `softmax` with other numbers in place of its log-sum-exps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.cross_entropies import CrossEntropies
from lightning_mp.contrastive._sums.softmax import Gradients, Negatives
from lightning_mp.contrastive._sums.statistics import (
    LargestNegatives,
    loss_statistics,
    softmax_probabilities,
)
from lightning_mp.contrastive._sums.sweep import Plan, SweepResult, sweep
from lightning_mp.contrastive._sums.targets import cross_entropies_of
from lightning_mp.contrastive._tiles.tile_backend import StoredTiles, row_dots

__all__ = ["shifted", "targeted_loss"]


def targeted_loss(plan: Plan, negatives_need_grad: bool) -> SweepResult:
    """Return the loss and its gradients; one unit of work, and up to three for the gradients."""
    request, state, dtype = plan.request, plan.state, plan.dtype
    image_bD, text_nD, scale = request.image, request.text, request.scale
    memory = plan.memory_for_tiles()
    largest = LargestNegatives(plan) if plan.statistics else None
    negatives = Negatives(plan, StoredTiles(memory), None, largest)
    found, *maxima = sweep(plan, [negatives, largest] if largest else [negatives])
    row_neg_b, column_neg_Rn = found
    lses = [row_neg_b, column_neg_Rn.logsumexp(0)]
    statistics_5 = None
    if maxima:  # there are pairs then, each of which has one positive
        q = plan.matched
        pos_q = row_dots(image_bD[:q], text_nD[:q], state).mul_(scale.to(state).reshape(()))
        statistics_5 = loss_statistics(plan, pos_q, softmax_probabilities(pos_q, lses), maxima[0])
    task = cross_entropies_of(plan)
    # Widened, because autograd adds gradients up in the dtype of its leaves.
    inputs = [image_bD.to(dtype), text_nD.to(dtype), scale.to(state).reshape(()), *lses]
    # As all ranks agreed: in the task's graph there may be collectives, which need all of them.
    needs = [*plan.needs_grad, plan.trains, plan.trains]
    if request.negatives is not None:
        inputs, needs = [*inputs, request.negatives], [*needs, negatives_need_grad]
    part, gradients = _differentiated(task, inputs, needs)
    d_image_bD, d_text_nD, d_scale, d_row_b, d_column_n, *d_negatives = gradients
    of_sweeps: tuple[Tensor | None, Tensor | None] = (None, None)
    if plan.trains:
        row_lse_b, column_lse_n = shifted(row_neg_b, d_row_b), shifted(lses[1], d_column_n)
        (of_sweeps,) = sweep(plan, [Gradients(plan, row_lse_b, StoredTiles(memory))], column_lse_n)
    if d_scale is not None:
        # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway.
        sides = zip((image_bD, text_nD), of_sweeps, strict=True)
        features, grad = next((x, grad) for x, grad in sides if grad is not None)
        d_scale = d_scale + row_dots(features, grad, state).sum()
    # In one tensor, for one collective.
    parts = [part] if d_scale is None else [d_scale, part]
    *d_scales, loss = plan.exchange.all_reduce(torch.stack(parts) * task.shares.unit)
    # W for features alone: the scale's parts were added up over ranks.
    unit = task.shares.unit * plan.exchange.world_size
    for of_task, of_sweep in zip((d_image_bD, d_text_nD), of_sweeps, strict=True):
        if of_task is not None and of_sweep is not None:
            # The task's part has the scale in it, as autograd went through it; the sweep's has not.
            of_task.addcmul_(of_sweep, scale.to(dtype).reshape(())).mul_(unit)
    return SweepResult(
        loss, d_image_bD, d_text_nD,
        # Widened first: times the unit, of about 1 / 2B, fp16 would flush them.
        next((x.to(dtype).mul_(unit) for x in d_negatives if x is not None), None),
        next(iter(d_scales), None), statistics_5=statistics_5,
    )  # fmt: skip


def _differentiated(
    task: CrossEntropies, inputs: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return this rank's part of the loss, and its gradients of what needs one."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    with torch.set_grad_enabled(any(needs)):
        part = task.loss(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    # With no negatives of an image (k = 0), theirs have no part in the loss.
    has_graph = part.requires_grad
    found = iter(torch.autograd.grad(part, wanted, allow_unused=True) if has_graph else ())
    gradients = [next(found, None) if need else None for need in needs]
    return part.detach(), [
        torch.zeros_like(x) if need and gradient is None else gradient
        for x, need, gradient in zip(inputs, needs, gradients, strict=True)
    ]


def shifted(lse: Tensor, cotangent: Tensor | None) -> Tensor:
    """Return `lse - log(cotangent)`, infinite where there is no gradient at all."""
    if cotangent is None:
        return lse
    # Without negatives it is -inf, and -inf less log(0) would be NaN.
    return (lse - cotangent.log()).masked_fill_(cotangent == 0, torch.inf)
