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

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.sweep import Plan, SweepResult, sweep
from lightning_mp.contrastive._tiles.tile_backend import (
    Derivatives,
    PairTerms,
    StoredTiles,
    Vectors,
    row_dots,
)
from lightning_mp.numerics.floats import accumulation_dtype

__all__ = ["prefixes_loss"]

_LEAST_NORM = 1e-12  # the epsilon of torch's `normalize`


class _Features(NamedTuple):
    """Features of one prefix, and their norms before normalization; `None` without one."""

    features_nd: Tensor
    norm_n1: Tensor | None


class _Prefix:
    """One prefix, the weight of its loss in the sum, and the results of its sweeps."""

    terms: PairTerms

    def __init__(self, plan: Plan, width: int, weight: float) -> None:
        request = plan.request
        self.width, self.weight, self._is_normalized = width, weight, request.normalize
        self.image = self.of(request.image)
        image_bd, text_nd = self.image.features_nd, self.of(request.text).features_nd
        self.prepared = plan.tiles.prepare(image_bd, text_nd, request.scale)
        self.d_image_bd: Tensor | None = None

    def of(self, features_nD: Tensor) -> _Features:
        """Return the prefix of each row."""
        part_nd = features_nD[:, : self.width]
        if not self._is_normalized:
            return _Features(part_nd.contiguous(), None)
        wide_nd = part_nd.to(accumulation_dtype(part_nd.dtype))
        norm_n1 = torch.linalg.vector_norm(wide_nd, dim=1, keepdim=True).clamp_min(_LEAST_NORM)
        return _Features((wide_nd / norm_n1).to(part_nd.dtype), norm_n1)

    def add_gradient(self, total_nD: Tensor, features: _Features, grad_nd: Tensor) -> None:
        """Add the gradient of a prefix to the gradient of the full features, in place."""
        if features.norm_n1 is not None:
            # The component along the feature changes the norm only, which normalization removes.
            unit_nd = features.features_nd.to(grad_nd.dtype)
            along_n1 = (grad_nd * unit_nd).sum(1, keepdim=True)
            grad_nd = grad_nd.addcmul(along_n1, unit_nd, value=-1.0).div_(features.norm_n1)
        total_nD[:, : self.width].add_(grad_nd, alpha=self.weight)


def prefixes_loss(plan: Plan) -> SweepResult:
    """Return the weighted sum of the losses of all prefixes, and its gradients."""
    request = plan.request
    image_bD, text_nD = request.image, request.text
    memory = plan.memory_for_tiles(len(request.widths))
    weights = zip(request.widths, request.width_weights, strict=True)
    prefixes = [_Prefix(plan, width, weight) for width, weight in weights]
    lses = _negatives(plan, prefixes, StoredTiles(memory))
    totals = lses[0].new_zeros(2)  # the scale's gradient, and the loss
    for index, prefix in enumerate(prefixes):
        # Kernels require contiguous vectors.
        row_b, column_n = (x[:, index].contiguous() for x in lses)
        loss = totals.new_empty(())
        prefix.terms = plan.tiles.pair_terms(
            row_b, column_n[None], prefix.prepared.pos_b, plan.has_terms, plan.terms, loss
        )
        totals[1] += prefix.weight * loss
    # Equal on all ranks, so all of them return here or none.
    if not plan.trains:
        return SweepResult(plan.exchange.all_reduce(totals)[1])
    d_text_nD = _gradients(plan, prefixes, StoredTiles(memory))
    d_image_bD = torch.zeros_like(image_bD, dtype=plan.dtype) if plan.needs_grad.image else None
    for prefix in prefixes:
        image = prefix.image
        weight_b1 = prefix.terms.weight_b.to(plan.dtype)[:, None]
        # Recomputed, because storing it would take a copy of the texts for each prefix.
        text = prefix.of(text_nD[: len(weight_b1)])
        if d_text_nD is not None:
            own_bd = image.features_nd.to(plan.dtype) * -weight_b1
            prefix.add_gradient(d_text_nD[: len(own_bd)], text, own_bd)
        if prefix.d_image_bd is not None:
            grad_bd = prefix.d_image_bd.addcmul_(text.features_nd, weight_b1, value=-1.0)
            # Before `add_gradient`, which removes this component.
            along_b = row_dots(image.features_nd, grad_bd, totals.dtype)
            totals[0] += prefix.weight * along_b.sum() / plan.terms
            if d_image_bD is not None:
                prefix.add_gradient(d_image_bD, image, grad_bd)
    factor = plan.scale * (plan.exchange.world_size / plan.terms)
    for grad in (d_image_bD, d_text_nD):
        if grad is not None:
            grad.mul_(factor)
    d_scale, loss = plan.exchange.all_reduce(totals)
    return SweepResult(loss, None, d_image_bD, d_text_nD, d_scale)


def _negatives(plan: Plan, prefixes: list[_Prefix], stored: StoredTiles) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of the negatives per prefix: of rows, (b, k), and columns, (n, k)."""
    image_bD = plan.request.image
    rows_kb = image_bD.new_empty(len(prefixes), len(image_bD), dtype=plan.state)
    columns = plan.exchange.home("logsumexp")
    for block in sweep(plan):
        part_km = rows_kb.new_empty(len(prefixes), len(block.text_mD))
        for prefix, row_b, column_m in zip(prefixes, rows_kb, part_km, strict=True):
            # Taken from the block, so that prefixes are not exchanged.
            text_md = prefix.of(block.text_mD).features_nd
            logits = block.logits(prefix.image.features_nd, text_md, stored)
            plan.tiles.lse_sweep(logits, Vectors(row_b, column_m), prefix.prepared)
        # The first dimension of all exchanged tensors is the batch.
        columns.add(part_km.T.contiguous())
    return rows_kb.T, columns.result()


def _gradients(plan: Plan, prefixes: list[_Prefix], stored: StoredTiles) -> Tensor | None:
    """Add the negatives' part of the gradient of each image prefix; return that of full texts."""
    dtype = plan.dtype
    # The scale's gradient is computed from that of the images' normalized prefixes.
    if plan.needs_grad.image or plan.needs_grad.scale:
        for prefix in prefixes:
            prefix.d_image_bd = torch.empty_like(prefix.image.features_nd, dtype=dtype)
    d_text = plan.exchange.home("sum") if plan.needs_grad.text else None
    for block in sweep(plan, torch.stack([x.terms.column_lse_n for x in prefixes], 1)):
        text_mD = block.text_mD
        total_mD = None if d_text is None else d_text.empty(text_mD, dtype).zero_()
        for index, prefix in enumerate(prefixes):
            text, part_md = prefix.of(text_mD), None
            if total_mD is not None:
                part_md = torch.empty_like(text.features_nd, dtype=dtype)
            plan.tiles.grad_sweep(
                block.logits(prefix.image.features_nd, text.features_nd, stored),
                Vectors(prefix.terms.row_lse_b, block.values[:, index].contiguous()),
                Derivatives(prefix.d_image_bd, part_md),
            )
            if total_mD is not None and part_md is not None:
                prefix.add_gradient(total_mD, text, part_md)
        if d_text is not None and total_mD is not None:
            d_text.add(total_mD)
    return None if d_text is None else d_text.result()
