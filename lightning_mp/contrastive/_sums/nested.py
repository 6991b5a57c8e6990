"""The contrastive losses of nested prefixes of the features, added up in one pass over all ranks.

Shapes:
    b: this rank's images. n: its texts, of which the first b belong to the images. D: full width.
    m: columns that are visiting. k: prefixes. d: width of one of them.

The texts of other ranks travel once, at full width. While a block of them visits, every prefix is
swept in turn, as in `infonce`, with the same workspace. Log-sum-exps travel k to a column.
Gradients go home once, at full width, for what normalisation makes of them is linear: with
`x_d = prefix / |prefix|`,

    dL/dprefix = (dL/dx_d - <dL/dx_d, x_d> x_d) / |prefix|,

of any part of dL/dx_d, and prefixes of other widths are added to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Visit
from lightning_mp.contrastive._sums.plan import Found, Plan
from lightning_mp.contrastive._tiles.tile_backend import Kept, PairTerms, Prepared
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["Prefix", "nested_infonce"]

_LEAST_NORM = 1e-12  # as in torch's `normalize`


class Prefix(NamedTuple):
    """A prefix, and how much its loss counts in the sum."""

    width: int
    weight: float
    is_normalized: bool

    def of(self, features_nD: Tensor) -> "_Cut":
        """Return the prefixes of features."""
        part_nd = features_nD[:, : self.width]
        if not self.is_normalized:
            return _Cut(part_nd.contiguous(), None)
        wide_nd = part_nd.to(accumulation_dtype(part_nd.dtype))
        norm_n1 = torch.linalg.vector_norm(wide_nd, dim=1, keepdim=True).clamp_min(_LEAST_NORM)
        return _Cut((wide_nd / norm_n1).to(part_nd.dtype), norm_n1)


class _Cut(NamedTuple):
    """Features of one prefix, and the norms that they had."""

    features_nd: Tensor
    norm_n1: Tensor | None

    def add_gradient(self, total_nD: Tensor, grad_nd: Tensor, weight: float) -> None:
        """Add a gradient for the prefix's features to that of the full ones, in place."""
        if self.norm_n1 is not None:
            # What points along the feature changes its norm alone, which normalising takes away.
            unit_nd = self.features_nd.to(grad_nd.dtype)
            along_n1 = (grad_nd * unit_nd).sum(1, keepdim=True)
            grad_nd = grad_nd.addcmul(along_n1, unit_nd, value=-1.0).div_(self.norm_n1)
        total_nD[:, : grad_nd.shape[1]].add_(grad_nd, alpha=weight)


def nested_infonce(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, plan: Plan, prefixes: tuple[Prefix, ...]
) -> Found:
    """Return the weighted sum of `infonce` of all prefixes, and its gradients."""
    memory = plan.memory_for_tiles(image_bD, len(prefixes))
    images = [prefix.of(image_bD) for prefix in prefixes]
    prepared = [
        plan.tiles.prepare(image.features_nd, prefix.of(text_nD).features_nd, scale)
        for image, prefix in zip(images, prefixes, strict=True)
    ]
    lses = _sweep(images, text_nD, scale, memory, plan, prefixes, prepared)
    totals = lses[0].new_zeros(2)  # the scale's gradient, and the loss
    losses_k, found = lses[0].new_empty(len(prefixes)), []
    for index, (prefix, loss) in enumerate(zip(prefixes, losses_k, strict=True)):
        # Kernels go by vectors without strides.
        row_b, column_n = (x[:, index].contiguous() for x in lses)
        found.append(
            plan.tiles.pair_terms(
                row_b, column_n[None], prepared[index].pos_b, plan.wanted, plan.terms, loss
            )
        )
        totals[1] += prefix.weight * loss
    # All ranks return here, or none: needs are agreed.
    if not plan.trains:
        return Found(plan.exchange.all_reduce(totals)[1])

    dtype = accumulation_dtype(image_bD.dtype)
    # The scale's is in that of the images; normalisation takes it out of that of the texts.
    d_images = None
    if plan.image_needs_grad or plan.scale_needs_grad:
        d_images = [torch.empty_like(image.features_nd, dtype=dtype) for image in images]
    d_text_nD = _gradient_sweep(
        images, d_images, text_nD, scale, found, memory, plan, prefixes
    )  # fmt: skip
    d_image_bD = torch.zeros_like(image_bD, dtype=dtype) if plan.image_needs_grad else None
    for index, (prefix, image) in enumerate(zip(prefixes, images, strict=True)):
        weight_b1 = found[index].weight_b.to(dtype)[:, None]
        # Cut once more: to keep it would take a copy of the texts for each prefix.
        text = prefix.of(text_nD[: len(weight_b1)])
        if d_text_nD is not None:
            own_bd = image.features_nd.to(dtype) * -weight_b1
            text.add_gradient(d_text_nD[: len(own_bd)], own_bd, prefix.weight)
        if d_images is not None:
            grad_bd = d_images[index].addcmul_(text.features_nd, weight_b1, value=-1.0)
            # Of what is not projected yet: the projection takes just this out.
            along_b = row_dots(image.features_nd, grad_bd, totals.dtype)
            totals[0] += prefix.weight * along_b.sum() / plan.terms
            if d_image_bD is not None:
                image.add_gradient(d_image_bD, grad_bd, prefix.weight)
    factor = scale.to(totals.dtype).reshape(()) * (plan.exchange.world_size / plan.terms)
    for grad in (d_image_bD, d_text_nD):
        if grad is not None:
            grad.mul_(factor)
    d_scale, loss = plan.exchange.all_reduce(totals)
    return Found(loss, d_image_bD, d_text_nD, d_scale=d_scale)


def _sweep(
    images: list[_Cut],
    text_nD: Tensor,
    scale: Tensor,
    memory: Tensor,
    plan: Plan,
    prefixes: tuple[Prefix, ...],
    prepared: list[Prepared],
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of the negatives of this rank's rows and columns, (b, k), (n, k)."""
    b, state = len(images[0].features_nd), state_dtype(text_nD.device)
    row_neg_kb = text_nD.new_empty(len(prefixes), b, dtype=state)
    column_neg, kept = plan.exchange.home("logsumexp"), Kept(memory)

    # A function, so that what a block takes is free before the next one arrives.
    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD = visit.columns[0]
        part_km = row_neg_kb.new_empty(len(prefixes), len(text_mD))
        for index, prefix in enumerate(prefixes):
            # Cut from the block here: prefixes would travel beside the features otherwise.
            image_bd, text_md = images[index].features_nd, prefix.of(text_mD).features_nd
            logits = plan.logits(visit, image_bd, text_md, scale, kept, is_first=is_first)
            plan.tiles.lse_sweep(logits, row_neg_kb[index], part_km[index], prepared[index])
        # The batch comes first in all that travels.
        column_neg.add(part_km.T.contiguous())

    for index, visit in enumerate(plan.exchange.visit([text_nD, *plan.travelling])):
        sweep_block(visit, index == 0)
    return row_neg_kb.T, column_neg.result()


def _gradient_sweep(
    images: list[_Cut],
    d_images: list[Tensor] | None,
    text_nD: Tensor,
    scale: Tensor,
    found: list[PairTerms],
    memory: Tensor,
    plan: Plan,
    prefixes: tuple[Prefix, ...],
) -> Tensor | None:
    """Add the negatives' part to the images' gradients; return that of the texts, full width."""
    dtype = accumulation_dtype(text_nD.dtype)
    d_text = plan.exchange.home("sum") if plan.text_needs_grad else None
    # Counted from its start: tiles take their places in the order of the first sweep.
    kept = Kept(memory)

    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD, column_lse_mk = visit.columns[0], visit.columns[-1]
        total_mD = None if d_text is None else torch.zeros_like(text_mD, dtype=dtype)
        for index, prefix in enumerate(prefixes):
            image_bd, text = images[index].features_nd, prefix.of(text_mD)
            part_md = None
            if total_mD is not None:
                part_md = torch.empty_like(text.features_nd, dtype=dtype)
            plan.tiles.grad_sweep(
                plan.logits(visit, image_bd, text.features_nd, scale, kept, is_first=is_first),
                found[index].row_lse_b,
                column_lse_mk[:, index].contiguous(),
                None if d_images is None else d_images[index],
                part_md,
            )
            if total_mD is not None and part_md is not None:
                text.add_gradient(total_mD, part_md, prefix.weight)
        if d_text is not None and total_mD is not None:
            d_text.add(total_mD)

    column_lse_nk = torch.stack([terms.column_lse_n for terms in found], 1)
    for index, visit in enumerate(plan.exchange.visit([text_nD, *plan.travelling, column_lse_nk])):
        sweep_block(visit, index == 0)
    return None if d_text is None else d_text.result()
