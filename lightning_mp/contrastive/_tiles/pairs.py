"""What a loss does with its pairs beside the sweeps over negatives, in plain torch.

Shapes:
    b: rows, the images of one rank. n: its texts, of which the first b belong to them. D: width.
    R: parts of a sum.

`triton_tiles` has kernels for the same; the formulas are those of `infonce`.
"""

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import PairTerms
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["finish", "pair_terms"]


def pair_terms(
    row_neg_b: Tensor,
    column_neg_Rn: Tensor,
    pos_b: Tensor,
    wanted: tuple[bool, bool],
    terms: int,
    loss: Tensor,
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
    column_lse_n = torch.full_like(column_neg_n, torch.inf)
    if wanted[1]:
        column_lse_n[pairs] = torch.logaddexp(column_neg_b, pos_b)
    torch.div(softplus_2b.sum(), terms, out=loss)
    return PairTerms(
        row_lse_b if wanted[0] else torch.full_like(row_lse_b, torch.inf),
        column_lse_n,
        margin_2b.sigmoid().sum(0),
    )


def finish(
    image_bD: Tensor,
    text_nD: Tensor,
    d_image_bD: Tensor | None,
    d_text_nD: Tensor | None,
    weight_b: Tensor,
    scale: Tensor,
    terms: int,
    ranks: int,
    d_scale: Tensor | None,
) -> None:
    """Add the positives to the gradients and scale them, see `TileBackend.finish`."""
    b = len(weight_b)
    factor = scale.to(weight_b.dtype).reshape(()) * (ranks / terms)
    for own, other, grad in ((image_bD, text_nD, d_image_bD), (text_nD, image_bD, d_text_nD)):
        if grad is None:
            continue
        grad[:b].addcmul_(other[:b], weight_b.to(grad.dtype)[:, None], value=-1.0)
        if d_scale is not None and (own is image_bD or d_image_bD is None):
            # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway.
            torch.div(row_dots(own, grad, weight_b.dtype).sum(), terms, out=d_scale)
        grad.mul_(factor)
