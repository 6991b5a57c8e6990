"""What a loss does with its pairs beside the sweeps over negatives, in plain torch.

Shapes:
    b: rows, the images of one rank. n: its texts, of which the first b belong to them. D: width.
    R: parts of a sum.

`triton_tiles` has kernels for the same; the formulas are those of `infonce`.
"""

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import HEADER
from lightning_mp.contrastive._tiles.tile_backend import Finished, PairTerms
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["finish", "pair_terms"]


def pair_terms(
    row_neg_b: Tensor,
    column_neg_Rn: Tensor,
    pos_b: Tensor,
    wanted: tuple[bool, bool],
    terms: int,
) -> PairTerms:
    """Return what the pairs make of their negatives, see `TileBackend.pair_terms`."""
    pairs = slice(0, len(pos_b))
    column_neg_n = column_neg_Rn[0] if len(column_neg_Rn) == 1 else column_neg_Rn.logsumexp(0)
    column_neg_b = column_neg_n[pairs]
    margin_2b = torch.stack([row_neg_b - pos_b, column_neg_b - pos_b])
    # A positive of +inf is an overflow, not a loss of 0.
    margin_2b.masked_fill_(pos_b == torch.inf, torch.nan)
    softplus_2b = torch.logaddexp(margin_2b, margin_2b.new_zeros(()))
    if False in wanted:  # what does not count weighs nothing
        unwanted = wanted.index(False)
        softplus_2b, margin_2b[unwanted] = softplus_2b[1 - unwanted], -torch.inf
    row_lse_b = torch.logaddexp(row_neg_b, pos_b)
    # Texts without an image have no term: an infinite sum leaves them a softmax of zero.
    published = column_neg_n.new_full((HEADER + len(column_neg_n),), torch.inf)
    if wanted[1]:
        published[HEADER:][pairs] = torch.logaddexp(column_neg_b, pos_b)
    published[0] = softplus_2b.sum() / terms
    return PairTerms(
        row_lse_b if wanted[0] else torch.full_like(row_lse_b, torch.inf),
        published,
        margin_2b.sigmoid().sum(0),
    )


def finish(
    image_bD: Tensor,
    text_nD: Tensor,
    d_image_bD: Tensor | None,
    d_text_nD: Tensor | None,
    weight_b: Tensor,
    scale: Tensor,
    cotangent: Tensor,
    terms: int,
    ranks: int,
    wants_scale: bool,
) -> Finished:
    """Add the positives to the gradients and scale them, see `TileBackend.finish`."""
    unit = cotangent.to(weight_b.dtype) / terms
    factor = scale.to(unit.dtype).reshape(()) * unit * ranks
    d_scale = None
    sides: list[Tensor | None] = []
    for own, other, grad in ((image_bD, text_nD, d_image_bD), (text_nD, image_bD, d_text_nD)):
        if grad is None:
            sides.append(None)
            continue
        b = len(weight_b)
        grad[:b].addcmul_(other[:b], weight_b.to(grad.dtype)[:, None], value=-1.0)
        if wants_scale and (own is image_bD or d_image_bD is None):
            # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway.
            d_scale = row_dots(own, grad, unit.dtype).sum() * unit
        sides.append(grad.mul_(factor).to(own.dtype))
    return Finished(sides[0], sides[1], d_scale)
