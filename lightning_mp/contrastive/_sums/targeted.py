"""The contrastive loss with general targets: the two sweeps of `softmax` and cross entropies.

Shapes:
    b: images of this rank. n: its texts. D: feature width.

The first sweep computes the log-sum-exps of the negatives. `CrossEntropies` computes the loss from
them and from O(b D) products, and autograd differentiates it. Its gradients with respect to the
log-sum-exps of rows, `g_i`, and of columns, `h_j`, are between 0 and 1, and

    dL/dS_ij = g_i exp(S_ij - row_neg_i) + h_j exp(S_ij - column_neg_j)
             = exp(S_ij - (row_neg_i - log g_i)) + exp(S_ij - (column_neg_j - log h_j)):

so the second sweep is that of `softmax` with shifted log-sum-exps.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.cross_entropies import CrossEntropies
from lightning_mp.contrastive._sums.softmax import gradients, negatives
from lightning_mp.contrastive._sums.statistics import LargestNegatives, softmax_statistics
from lightning_mp.contrastive._sums.sweep import Plan, SweepResult
from lightning_mp.contrastive._sums.targets import cross_entropies_of
from lightning_mp.contrastive._tiles.tile_backend import StoredTiles, row_dots

__all__ = ["targeted_loss", "weighted_lse"]


def targeted_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients: one unit of work, and up to three for the gradients."""
    request, state, dtype = plan.request, plan.state, plan.dtype
    image_bD, text_nD = request.image, request.text
    memory = plan.memory_for_tiles()
    largest = LargestNegatives(plan) if plan.statistics else None
    row_neg_b, column_neg_Rn = negatives(plan, StoredTiles(memory), largest=largest)
    lses = [row_neg_b, column_neg_Rn.logsumexp(0)]
    statistics_5 = None
    if largest is not None:  # statistics require one positive per row
        q = plan.matched
        pos_q = row_dots(image_bD[:q], text_nD[:q], state).mul_(plan.scale)
        statistics_5 = softmax_statistics(plan, pos_q, lses, largest)
    cross_entropies = cross_entropies_of(plan)
    # Widened, because autograd accumulates gradients in the dtype of the leaves.
    inputs = [image_bD.to(dtype), text_nD.to(dtype), plan.scale, *lses]
    # Equal on all ranks, because the graph may contain collectives.
    needs = [*plan.needs_grad, plan.trains, plan.trains]
    if request.negatives is not None:
        inputs, needs = [*inputs, request.negatives], [*needs, request.needs_grad[-1]]
    part, derivatives = _differentiated(cross_entropies, inputs, needs)
    d_image_bD, d_text_nD, d_scale, d_row_b, d_column_n, *d_negatives = derivatives
    from_sweeps: tuple[Tensor | None, Tensor | None] = (None, None)
    if plan.trains:
        shifted = weighted_lse(row_neg_b, d_row_b), weighted_lse(lses[1], d_column_n)
        from_sweeps = gradients(plan, *shifted, StoredTiles(memory))
    if d_scale is not None:
        # sum <I, dL/dS T> = sum <T, dL/dS^T I>: either gradient serves.
        towers = zip((image_bD, text_nD), from_sweeps, strict=True)
        features, grad = next((x, grad) for x, grad in towers if grad is not None)
        d_scale = d_scale + row_dots(features, grad, state).sum()
    # One tensor for one collective.
    parts = [part] if d_scale is None else [d_scale, part]
    *d_scales, loss = plan.exchange.all_reduce(torch.stack(parts) * cross_entropies.shares.unit)
    # W for features only, since the scale's gradient was summed over ranks.
    unit = cross_entropies.shares.unit * plan.exchange.world_size
    for from_autograd, from_sweep in zip((d_image_bD, d_text_nD), from_sweeps, strict=True):
        if from_autograd is not None and from_sweep is not None:
            # Autograd's part contains the scale, the sweep's part does not.
            from_autograd.addcmul_(from_sweep, request.scale.to(dtype).reshape(())).mul_(unit)
    return SweepResult(
        loss, d_image_bD, d_text_nD,
        # Widened first, because fp16 underflows after the product with `unit`, about 1 / 2B.
        next((x.to(dtype).mul_(unit) for x in d_negatives if x is not None), None),
        next(iter(d_scales), None), statistics_5=statistics_5,
    )  # fmt: skip


def _differentiated(
    cross_entropies: CrossEntropies, inputs: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return this rank's part of the loss and the gradients of the inputs that need one."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    with torch.set_grad_enabled(any(needs)):
        part = cross_entropies.loss(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    found: Iterable[Tensor] = map(torch.zeros_like, wanted)
    # With k = 0, `negatives` are not part of the graph.
    if part.requires_grad:
        found = torch.autograd.grad(part, wanted, materialize_grads=True)
    remaining = iter(found)
    return part.detach(), [next(remaining) if need else None for need in needs]


def weighted_lse(lse: Tensor, cotangent: Tensor | None) -> Tensor:
    """Return `lse - log(cotangent)`, infinite where the cotangent is 0; `None` stands for zeros."""
    if cotangent is None:
        return torch.full_like(lse, torch.inf)
    # Without negatives, `lse` is -inf, and -inf - log(0) would be NaN.
    return (lse - cotangent.log()).masked_fill_(cotangent == 0, torch.inf)
