"""The contrastive loss of several directions in one softmax, and with weighted negatives.

Shapes:
    B: global batch. b: images of this rank. n: its texts; text i belongs to image i for i < b.
    D: feature width. W: ranks. P: log-sum-exps of a pair.

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
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp.contrastive._sums.products import dots
from lightning_mp.contrastive._sums.softmax import gradients, negatives
from lightning_mp.contrastive._sums.sweep import NeedsGrad, OneRank, Plan, SweepResult
from lightning_mp.contrastive._sums.targeted import weighted_lse
from lightning_mp.contrastive._tiles.tile_backend import row_dots

__all__ = ["combined_loss"]


class _LogitMatrix(NamedTuple):
    """Logits of rows and columns, and which of their log-sum-exps the loss uses.

    Rows that are no images are the texts of the images; columns that are none are all texts.
    """

    plan: Plan
    has_rows: bool
    has_columns: bool
    rows_are_images: bool = True
    columns_are_images: bool = False


def combined_loss(plan: Plan) -> SweepResult:
    """Return the loss and its gradients: up to four units of work for each matrix."""
    request, state, b = plan.request, plan.state, len(plan.request.image)
    image_bD, text_bD = request.image, request.text[: len(request.image)]
    matrices = _matrices(plan)
    lses: list[tuple[Tensor, Tensor]] = []
    for matrix in matrices:
        row_neg_b, column_neg_Rn = negatives(matrix.plan)
        lses.append((row_neg_b, column_neg_Rn.logsumexp(0)))
    trained = [image_bD.to(plan.dtype), text_bD.to(plan.dtype), plan.scale]
    leaves = [x.detach().requires_grad_(plan.trains) for x in trained]
    negs = [[neg[:b].detach().requires_grad_(plan.trains) for neg in pair] for pair in lses]
    used = [
        neg
        for matrix, pair in zip(matrices, negs, strict=True)
        for neg, is_used in zip(pair, (matrix.has_rows, matrix.has_columns), strict=True)
        if is_used
    ]
    with torch.set_grad_enabled(plan.trains):
        total = _terms(plan, leaves[0], leaves[1], leaves[2], used).sum()
    unit = 1 / plan.pairs
    if not plan.trains:
        return SweepResult(plan.exchange.all_reduce(total * unit))
    found = torch.autograd.grad(total, [*leaves, *itertools.chain(*negs)], allow_unused=True)
    d_image_bD, d_own_bD, d_scale, *d_negs = found
    d_text_nD = torch.cat([d_own_bD, d_own_bD.new_zeros(len(request.text) - b, d_own_bD.shape[1])])
    for matrix, pair, *d_pair in zip(matrices, lses, d_negs[::2], d_negs[1::2], strict=True):
        padded = [
            # Texts without an image have no term, and a gradient of 0.
            None if d_neg is None else F.pad(d_neg, (0, len(neg) - b))
            for neg, d_neg in zip(pair, d_pair, strict=True)
        ]
        row_lse_b, column_lse_n = map(weighted_lse, pair, padded)
        of_rows, of_columns = gradients(matrix.plan, row_lse_b, column_lse_n)
        if of_rows is not None:
            d_scale = d_scale + row_dots(matrix.plan.request.image, of_rows, state).sum()
            target = d_image_bD if matrix.rows_are_images else d_text_nD[:b]
            target.addcmul_(of_rows, plan.scale.to(plan.dtype))
        if of_columns is not None:
            target = d_image_bD if matrix.columns_are_images else d_text_nD
            target.addcmul_(of_columns, plan.scale.to(plan.dtype))
    d_scale, loss = plan.exchange.all_reduce(torch.stack([d_scale, total.detach()]) * unit).unbind()
    factor = unit * plan.exchange.world_size
    # No views, because outputs of an operator must not share memory.
    return SweepResult(
        loss.clone(), d_image_bD.mul_(factor), d_text_nD.mul_(factor), d_scale=d_scale.clone()
    )


def _matrices(plan: Plan) -> list[_LogitMatrix]:
    request, (to_text, to_image) = plan.request, plan.has_terms
    images_need_grad = plan.needs_grad.image
    # The scale's gradient is a sum over gradients of the rows.
    plan = dataclasses.replace(plan, needs_grad=plan.needs_grad._replace(image=True))
    if request.hardness and to_text:
        harder = dataclasses.replace(request, scale=request.scale + request.hardness)
        matrices = [_LogitMatrix(dataclasses.replace(plan, request=harder), True, False)]
        matrices += [_LogitMatrix(plan, False, True)] if to_image else []
    else:
        matrices = [_LogitMatrix(plan, to_text, to_image)]
    b = len(request.image)
    if request.within in ("image", "both"):
        ids_b = None if request.ids is None else request.ids[:b]
        of_images = dataclasses.replace(
            plan,
            request=dataclasses.replace(request, text=request.image, ids=ids_b),
            exchange=plan.image_exchange or OneRank(b),
            needs_grad=NeedsGrad(True, images_need_grad, plan.needs_grad.scale),
        )
        matrices.append(_LogitMatrix(of_images, True, False, columns_are_images=True))
    if request.within in ("text", "both"):
        of_texts = dataclasses.replace(
            plan, request=dataclasses.replace(request, image=request.text[:b].contiguous())
        )
        matrices.append(_LogitMatrix(of_texts, True, False, rows_are_images=False))
    return matrices


def _terms(
    plan: Plan, image_bD: Tensor, text_bD: Tensor, scale: Tensor, negs: Sequence[Tensor]
) -> Tensor:
    """Return the term of each pair, B times its part of the loss."""
    pos_b = dots(image_bD, text_bD, scale.dtype) * scale
    # A positive of +inf is an overflow, not a loss of 0.
    pos_b = pos_b.masked_fill(pos_b == torch.inf, torch.nan)
    margin_Pb = torch.stack(list(negs)) - pos_b
    if plan.request.partition == "joint":
        positives_1b = torch.full_like(margin_Pb[:1], math.log(sum(plan.has_terms)))
        # The finite first term gives rows without negatives a gradient of 0.
        return torch.cat([positives_1b.detach(), margin_Pb]).logsumexp(0)
    return torch.logaddexp(margin_Pb, margin_Pb.new_zeros(())).mean(0)
