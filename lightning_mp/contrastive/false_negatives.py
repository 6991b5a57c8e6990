"""Negatives that are nearer than the positive, and so hardly negatives: above which similarity.

Shapes:
    b: images of this rank. n: its texts. D: feature width.
"""

import torch
from torch import Tensor

from lightning_mp.contrastive.pair_options import PairOptions
from lightning_mp.contrastive.tile_backend import Limits
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["limits_of"]


@torch.no_grad()
def limits_of(pairs: PairOptions, image_bD: Tensor, text_nD: Tensor) -> Limits | None:
    """Return what each image and each text takes for a false negative, by its own positive.

    Args:
        pairs: The rule, its margin, and guides if they judge.
        image_bD: The images.
        text_nD: The texts; those beyond the images' own look for nothing, and judge nothing.
    """
    if pairs.false_negatives == "keep":
        return None
    b, state = len(image_bD), state_dtype(image_bD.device)
    guides = pairs.guides
    left, right = (image_bD, text_nD) if guides is None else guides
    limit_b = row_dots(left, right[:b], state)
    if pairs.false_negatives == "absolute":
        limit_b = limit_b - pairs.margin
    else:
        limit_b = limit_b * (1 - pairs.margin)
    limit_n = limit_b.new_full((len(text_nD),), torch.inf)
    limit_n[:b] = limit_b
    return Limits(limit_b, limit_n, *(guides or ()))
