"""The contrastive loss against targets: two sweeps as in `infonce`, and a task beside them.

Shapes:
    b: this rank's images. n: its texts. D: feature width.

The first sweep adds up the negatives, the task makes a loss of their log-sum-exps and of O(b D)
products, and autograd differentiates it there and then. What it returns for the log-sum-exps of
rows, `g_i`, and of columns, `h_j`, is between 0 and 1, and

    dL/dS_ij = g_i exp(S_ij - row_neg_i) + h_j exp(S_ij - column_neg_j)
             = exp(S_ij - (row_neg_i - log g_i)) + exp(S_ij - (column_neg_j - log h_j)):

the second sweep is that of `infonce` with other numbers in place of its log-sum-exps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._exchange.exchange import HEADER
from lightning_mp.contrastive._sums.infonce import (
    NO_SECOND_DERIVATIVE,
    Plan,
    memory_for_tiles,
    negatives_gradients,
    negatives_sweep,
    not_differentiable,
)
from lightning_mp.contrastive._sums.targets import Task, make_task
from lightning_mp.contrastive._tiles.tile_backend import Maxima
from lightning_mp.contrastive.statistics import measure, softmax_probabilities
from lightning_mp.numerics.first_derivatives import first_derivatives_only
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["TargetedInfoNCE", "TargetedSwept", "differentiate_targets", "sweep_targets"]


class TargetedSwept(NamedTuple):
    """What the forward leaves for the backward, and its statistics.

    Args:
        loss: In the accumulation dtype of the features.
        unit: What the gradients are to be multiplied by, besides the cotangent.
        kept: Tiles for the backward, see `tile_backend.Kept`; may be empty.
        row_lse_b: What stands for the rows' log-sum-exps in the second sweep.
        column_lse: For the columns', as `Exchange.publish` returned it.
        d_image_bD: The task's gradients, of what needs one.
        d_text_nD: Likewise.
        d_scale: Likewise.
        d_negatives_bkD: Likewise.
        block_mD: See `infonce.Swept`, as the next.
        statistics_5: The values of `LossStatistics`; `None` where no rank wants them.
    """

    loss: Tensor
    unit: Tensor
    kept: Tensor
    row_lse_b: Tensor
    column_lse: Tensor
    d_image_bD: Tensor | None
    d_text_nD: Tensor | None
    d_scale: Tensor | None
    d_negatives_bkD: Tensor | None
    block_mD: Tensor | None = None
    statistics_5: Tensor | None = None


class TargetedInfoNCE(torch.autograd.Function):
    """The loss over the batches of all ranks with `PairOptions`, the same value on each of them.

    Gradients are scaled for a mean over ranks, as those of `InfoNCE` are. Those of the task wait
    for the backward as two (b, D) matrices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image_bD: Tensor,
        text_nD: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        negatives_bkD: Tensor | None,
        plan: Plan,
        options: PairOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """Sweep once over all columns, then work out the task with its gradients."""
        needs = ctx.needs_input_grad[4]
        swept = sweep_targets(image_bD, text_nD, scale, bias, negatives_bkD, plan, options, needs)
        ctx.save_for_backward(image_bD, text_nD, scale, bias, *swept[:-1])
        ctx.plan = plan
        return swept.loss, not_differentiable(ctx, swept.statistics_5)

    @staticmethod
    @first_derivatives_only(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, cotangent: Tensor, _: object) -> tuple[Tensor | None, ...]:
        """Sweep once more over all columns, and add the gradients of the task."""
        image_bD, text_nD, scale, bias, *swept = ctx.saved_tensors
        inputs = (image_bD, text_nD, scale, bias)
        d_inputs = differentiate_targets(cotangent, *inputs, TargetedSwept(*swept), ctx.plan)
        return (*d_inputs, None, None)


def sweep_targets(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negatives_bkD: Tensor | None,
    plan: Plan,
    options: PairOptions,
    negatives_need_grad: bool,
) -> TargetedSwept:
    """Return the loss, and what its gradients need; one unit of work."""
    state, dtype = state_dtype(image_bD.device), accumulation_dtype(image_bD.dtype)
    with torch.autocast(image_bD.device.type, enabled=False):
        kept = memory_for_tiles(image_bD, plan)
        row_neg_b, column_neg_Rn, block_mD, maxima = negatives_sweep(
            image_bD, text_nD, scale, kept, plan
        )
        lses = [row_neg_b, column_neg_Rn.logsumexp(0)]
        task = make_task(options, image_bD, text_nD, plan)
        inputs = [image_bD.to(dtype), text_nD.to(dtype), scale.to(state).reshape(()), *lses]
        needs = [plan.image_needs_grad, plan.text_needs_grad, plan.scale_needs_grad]
        needs += [any(needs)] * 2
        if negatives_bkD is not None:
            inputs, needs = [*inputs, negatives_bkD], [*needs, negatives_need_grad]
        part, gradients = _differentiated(task, inputs, needs)
        row_lse_b = _shifted(lses[0], gradients[3])
        values = lses[1].new_zeros(HEADER + len(lses[1]))
        values[HEADER:] = _shifted(lses[1], gradients[4])
        statistics_5 = None
        if maxima is not None:
            statistics_5 = _measure(image_bD, text_nD, scale, bias, lses, maxima, plan, options)
    unit = task.shares.unit
    values[0] = part * unit
    loss, column_lse = plan.exchange.publish(values, to_visits=plan.trains)
    if bias is not None:
        loss = loss + 0.0 * bias.to(state).reshape(())  # NaN and inf are not to vanish
    d_image_bD, d_text_nD, d_scale, _, _, *of_negatives = gradients
    return TargetedSwept(
        loss.to(dtype, copy=True), unit, kept, row_lse_b, column_lse, d_image_bD, d_text_nD,
        d_scale, of_negatives[0] if of_negatives else None, block_mD, statistics_5,
    )  # fmt: skip


def _measure(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    lses: Sequence[Tensor],
    maxima: Maxima,
    plan: Plan,
    options: PairOptions,
) -> Tensor:
    """Return the values of `LossStatistics` of the pairs, each of which has one positive."""
    q = len(image_bD) if plan.matched is None else plan.matched
    pos_q = row_dots(image_bD[:q], text_nD[:q], lses[0].dtype)
    pos_q.mul_(scale.to(pos_q.dtype).reshape(()))
    weights = None if options.weights is None else options.weights[:q]
    return measure(
        image_bD, text_nD, scale, bias, pos_q, softmax_probabilities(pos_q, lses), maxima,
        plan.exchange, plan.tiles, weights,
    )  # fmt: skip


def _differentiated(
    task: Task, inputs: Sequence[Tensor], needs: Sequence[bool]
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


def _shifted(lse: Tensor, cotangent: Tensor | None) -> Tensor:
    """Return `lse - log(cotangent)`, infinite where there is no gradient at all."""
    if cotangent is None:
        return lse
    return (lse - cotangent.log()).masked_fill_(cotangent == 0, torch.inf)


def differentiate_targets(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: TargetedSwept,
    plan: Plan,
) -> list[Tensor | None]:
    """Return the gradients of images, texts, scale, bias and negatives."""
    unit = swept.unit * cotangent.to(swept.unit.dtype)
    with torch.autocast(image_bD.device.type, enabled=False):
        found = negatives_gradients(
            image_bD, text_nD, scale, swept.row_lse_b, swept.column_lse, swept.kept,
            swept.block_mD, plan,
        )  # fmt: skip
        d_scale = swept.d_scale
        if d_scale is not None:
            # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway.
            side = 0 if found[0] is not None else 1
            features = (image_bD, text_nD)[side]
            grad = found[side]
            if grad is not None:
                d_scale = d_scale + row_dots(features, grad, d_scale.dtype).sum()
            d_scale = plan.exchange.all_reduce(d_scale)
            d_scale = (d_scale * unit).to(scale.dtype).reshape(scale.shape)
        unit = unit * plan.exchange.world_size
        factor = scale.to(unit.dtype).reshape(()) * unit
        d_features = [
            None
            if grad is None or task is None
            else grad.mul_(factor).addcmul_(task, unit.to(task.dtype)).to(image_bD.dtype)
            for grad, task in zip(found, (swept.d_image_bD, swept.d_text_nD), strict=True)
        ]
    d_bias = None
    if bias is not None:
        d_bias = (0.0 * swept.loss * cotangent).to(bias.dtype).reshape(bias.shape)
    d_negatives_bkD = swept.d_negatives_bkD
    if d_negatives_bkD is not None:
        d_negatives_bkD = d_negatives_bkD * unit.to(d_negatives_bkD.dtype)
    return [*d_features, d_scale, d_bias, d_negatives_bkD]
