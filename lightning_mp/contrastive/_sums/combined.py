"""The contrastive loss of several directions in one softmax, and with weighted negatives.

Shapes:
    P: log-sum-exps of a pair.

For pair i, the negatives of each direction p have a log-sum-exp `neg_i^p`: texts for its image,
images for its text, other images for its image, other texts for its text. If c directions contain
the positive,

    joint: log(c exp(pos_i) + sum_p exp(neg_i^p)) - pos_i = log(c + sum_p exp(neg_i^p - pos_i)),
    each:  the mean over p of softplus(neg_i^p - pos_i).

The log-sum-exps come from up to four matrices of logits, with two sweeps for each. Autograd's
gradients of the log-sum-exps, between 0 and 1, enter the second sweep, as in `targeted`. Hardness
`a` adds `a` times the similarity, without gradient, to the negatives of image to text: their
exponentials have the scale `s + a`, their gradients the scale `s`.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Ring
from lightning_mp.contrastive._sums.products import positive_logits
from lightning_mp.contrastive._sums.softmax import negatives
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan, SweepResult
from lightning_mp.contrastive._sums.targeted import LogitMatrix, differentiated_loss

__all__ = ["combined_loss"]


def combined_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients: up to four units of work for each matrix."""
    matrices = _matrices(plan)
    lses: list[Tensor] = []
    for matrix in matrices:
        row_neg_b, column_neg_Rn = negatives(matrix.plan)
        lses += [row_neg_b, column_neg_Rn.logsumexp(0)]
    has_terms = [has_term for matrix in matrices for has_term in matrix.plan.has_terms]

    def part_of(image_bD: Tensor, text_nD: Tensor, scale: Tensor, _: None, *lses: Tensor) -> Tensor:
        b = len(image_bD)
        pos_b = positive_logits(image_bD, text_nD[:b], scale)
        used = [lse[:b] for lse, has_term in zip(lses, has_terms, strict=True) if has_term]
        margin_Pb = torch.stack(used) - pos_b
        if plan.request.partition == "each":
            return torch.logaddexp(margin_Pb, margin_Pb.new_zeros(())).mean(0).sum()
        positives_1b = torch.full_like(margin_Pb[:1], math.log(sum(plan.has_terms)))
        # The finite first term gives rows without negatives a gradient of 0.
        return torch.cat([positives_1b.detach(), margin_Pb]).logsumexp(0).sum()

    no_memory = plan.request.image.new_empty(0)
    return differentiated_loss(plan, matrices, lses, part_of, 1 / plan.pairs, no_memory)


def _matrices(plan: Plan) -> list[LogitMatrix]:
    """Return the matrices of logits; the directions of each are those that the loss uses."""
    request, b = plan.request, len(plan.request.image)
    # The scale's gradient is a sum over gradients of the rows.
    rows = dataclasses.replace(plan, needs_grad=plan.needs_grad._replace(image=True))

    def of(plan: Plan = rows, **changed: Any) -> Plan:
        return dataclasses.replace(plan, request=dataclasses.replace(request, **changed))

    if request.hardness:
        # In the state dtype, because a scale of 100 in bf16 would round a hardness of 0.1 away.
        harder = plan.scale + request.hardness
        matrices = [LogitMatrix(of(scale=harder, directions="image_to_text"))]
        if plan.has_terms.columns:
            matrices.append(LogitMatrix(of(directions="text_to_image")))
    else:
        matrices = [LogitMatrix(rows)]
    if request.within in ("image", "both"):
        of_images = dataclasses.replace(
            plan,
            exchange=plan.image_exchange or Ring([b]),
            needs_grad=NeedsGrad(True, plan.needs_grad.image, plan.needs_grad.scale),
        )
        ids_b = None if request.ids is None else request.ids[:b]
        of_images = of(of_images, text=request.image, ids=ids_b, directions="image_to_text")
        matrices.append(LogitMatrix(of_images, columns_are_images=True))
    if request.within in ("text", "both"):
        of_texts = of(image=request.text[:b].contiguous(), directions="image_to_text")
        matrices.append(LogitMatrix(of_texts, rows_are_images=False))
    return matrices
