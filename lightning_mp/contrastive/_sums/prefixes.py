"""The sum of the contrastive losses of several prefixes, computed in one pass over all ranks.

Shapes:
    n: rows. k: prefixes. d: width of a prefix.

Texts are exchanged once, at full width. For each block of texts, all prefixes are swept in turn, as
in `softmax`, with the same workspace. There are k log-sum-exps per column. Gradients are returned
once, at full width: the gradient of the normalization `x_d = prefix / |prefix|` is linear in
dL/dx_d,

    dL/dprefix = (dL/dx_d - <dL/dx_d, x_d> x_d) / |prefix|,

so it applies to each part of dL/dx_d, and the gradients of several prefixes add up.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.sweep import Plan, SweepResult, sweep
from lightning_mp.contrastive._tiles.tile_backend import (
    Derivatives,
    PairTerms,
    Prepared,
    StoredTiles,
    Vectors,
    row_dots,
)
from lightning_mp.numerics.floats import accumulation_dtype

__all__ = ["prefixes_loss"]

_LEAST_NORM = 1e-12  # the epsilon of torch's `normalize`


class _Prefix(NamedTuple):
    """A prefix and the weight of its loss in the sum."""

    width: int
    weight: float
    is_normalized: bool

    def of(self, features_nD: Tensor) -> "_Features":
        """Return the prefix of each row."""
        part_nd = features_nD[:, : self.width]
        if not self.is_normalized:
            return _Features(part_nd.contiguous(), None, self.weight)
        wide_nd = part_nd.to(accumulation_dtype(part_nd.dtype))
        norm_n1 = torch.linalg.vector_norm(wide_nd, dim=1, keepdim=True).clamp_min(_LEAST_NORM)
        return _Features((wide_nd / norm_n1).to(part_nd.dtype), norm_n1, self.weight)


class _Features(NamedTuple):
    """Features of one prefix, their norms before normalization, and the weight of the prefix."""

    features_nd: Tensor
    norm_n1: Tensor | None
    weight: float

    def add_gradient(self, total_nD: Tensor, grad_nd: Tensor) -> None:
        """Add the gradient of the prefix to the gradient of the full features, in place."""
        if self.norm_n1 is not None:
            # The component along the feature changes the norm only, which normalization removes.
            unit_nd = self.features_nd.to(grad_nd.dtype)
            along_n1 = (grad_nd * unit_nd).sum(1, keepdim=True)
            grad_nd = grad_nd.addcmul(along_n1, unit_nd, value=-1.0).div_(self.norm_n1)
        total_nD[:, : grad_nd.shape[1]].add_(grad_nd, alpha=self.weight)


@dataclasses.dataclass(eq=False)
class _Part:
    """The loss of one prefix: features of the images, and results of the sweeps."""

    prefix: _Prefix
    image: _Features
    prepared: Prepared
    terms: PairTerms = dataclasses.field(init=False)
    d_image_bd: Tensor | None = None


def prefixes_loss(plan: Plan) -> SweepResult:
    """Return the weighted sum of the losses of all prefixes, and its gradients."""
    request, tiles = plan.request, plan.tiles
    image_bD, text_nD, scale = request.image, request.text, request.scale
    memory, parts = plan.memory_for_tiles(len(request.widths)), list[_Part]()
    for width, weight in zip(request.widths, request.width_weights, strict=True):
        prefix = _Prefix(width, weight, request.normalize)
        image = prefix.of(image_bD)
        prepared = tiles.prepare(image.features_nd, prefix.of(text_nD).features_nd, scale)
        parts.append(_Part(prefix, image, prepared))
    lses = _negatives(plan, parts, StoredTiles(memory))
    totals = lses[0].new_zeros(2)  # the scale's gradient, and the loss
    for index, part in enumerate(parts):
        # Kernels require contiguous vectors.
        row_b, column_n = (x[:, index].contiguous() for x in lses)
        loss = totals.new_empty(())
        part.terms = tiles.pair_terms(
            row_b, column_n[None], part.prepared.pos_b, plan.has_terms, plan.terms, loss
        )
        totals[1] += part.prefix.weight * loss
    # Equal on all ranks, so all of them return here or none.
    if not plan.trains:
        return SweepResult(plan.exchange.all_reduce(totals)[1])
    d_text_nD = _gradients(plan, parts, StoredTiles(memory))
    d_image_bD = torch.zeros_like(image_bD, dtype=plan.dtype) if plan.needs_grad.image else None
    for part in parts:
        prefix, image = part.prefix, part.image
        weight_b1 = part.terms.weight_b.to(plan.dtype)[:, None]
        # Recomputed, because storing it would take a copy of the texts for each prefix.
        text = prefix.of(text_nD[: len(weight_b1)])
        if d_text_nD is not None:
            own_bd = image.features_nd.to(plan.dtype) * -weight_b1
            text.add_gradient(d_text_nD[: len(own_bd)], own_bd)
        if part.d_image_bd is not None:
            grad_bd = part.d_image_bd.addcmul_(text.features_nd, weight_b1, value=-1.0)
            # Before `add_gradient`, which removes this component.
            along_b = row_dots(image.features_nd, grad_bd, totals.dtype)
            totals[0] += prefix.weight * along_b.sum() / plan.terms
            if d_image_bD is not None:
                image.add_gradient(d_image_bD, grad_bd)
    factor = plan.scale * (plan.exchange.world_size / plan.terms)
    for grad in (d_image_bD, d_text_nD):
        if grad is not None:
            grad.mul_(factor)
    d_scale, loss = plan.exchange.all_reduce(totals)
    return SweepResult(loss, None, d_image_bD, d_text_nD, d_scale)


def _negatives(plan: Plan, parts: list[_Part], stored: StoredTiles) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of the negatives per prefix: of rows, (b, k), and columns, (n, k)."""
    image_bD = plan.request.image
    rows_kb = image_bD.new_empty(len(parts), len(image_bD), dtype=plan.state)
    columns = plan.exchange.home("logsumexp")
    for block in sweep(plan):
        part_km = rows_kb.new_empty(len(parts), len(block.text_mD))
        for part, row_b, column_m in zip(parts, rows_kb, part_km, strict=True):
            # Taken from the block, so that prefixes are not exchanged.
            text_md = part.prefix.of(block.text_mD).features_nd
            logits = block.logits(part.image.features_nd, text_md, stored)
            plan.tiles.lse_sweep(logits, Vectors(row_b, column_m), part.prepared)
        # The first dimension of all exchanged tensors is the batch.
        columns.add(part_km.T.contiguous())
    return rows_kb.T, columns.result()


def _gradients(plan: Plan, parts: list[_Part], stored: StoredTiles) -> Tensor | None:
    """Add the negatives' part of the gradient of each image prefix; return that of full texts."""
    dtype = plan.dtype
    # The scale's gradient is computed from that of the images' normalized prefixes.
    if plan.needs_grad.image or plan.needs_grad.scale:
        for part in parts:
            part.d_image_bd = torch.empty_like(part.image.features_nd, dtype=dtype)
    d_text = plan.exchange.home("sum") if plan.needs_grad.text else None
    for block in sweep(plan, torch.stack([part.terms.column_lse_n for part in parts], 1)):
        text_mD = block.text_mD
        total_mD = None if d_text is None else d_text.empty(text_mD, dtype).zero_()
        for index, part in enumerate(parts):
            text, part_md = part.prefix.of(text_mD), None
            if total_mD is not None:
                part_md = torch.empty_like(text.features_nd, dtype=dtype)
            plan.tiles.grad_sweep(
                block.logits(part.image.features_nd, text.features_nd, stored),
                Vectors(part.terms.row_lse_b, block.values[:, index].contiguous()),
                Derivatives(part.d_image_bd, part_md),
            )
            if total_mD is not None and part_md is not None:
                text.add_gradient(total_mD, part_md)
        if d_text is not None and total_mD is not None:
            d_text.add(total_mD)
    return None if d_text is None else d_text.result()
