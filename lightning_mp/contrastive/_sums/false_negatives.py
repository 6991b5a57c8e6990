"""False-negative thresholds: the similarity above which a pair is masked, per image and text."""

import math

import torch
from torch import Tensor

from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._tiles.masks import Thresholds
from lightning_mp.contrastive._tiles.tile_backend import TileBackend, row_dots
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["thresholds_of"]


@torch.no_grad()
def thresholds_of(request: Request, tiles: TileBackend) -> Thresholds:
    """Return the threshold of each image and text, derived from the similarity of its positive.

    Each threshold is raised by the rounding error of a similarity. Otherwise, without a margin, a
    copy of the positive would be masked by chance, possibly in one of the two sweeps only. Texts
    without an image have an infinite threshold.
    """
    image_bD, text_nD = request.image, request.text
    b, state = len(image_bD), state_dtype(image_bD.device)
    dtype = accumulation_dtype(image_bD.dtype)
    given = (request.guide_image, request.guide_text)
    guides = [_as_multiplied(x, dtype) for x in given if x is not None]
    left, right = guides or (image_bD, text_nD)
    threshold_b = row_dots(left, right[:b], state)
    if request.false_negatives == "absolute":
        threshold_b = threshold_b - request.margin
    else:
        # Relative to the magnitude, so that the threshold of a negative similarity is below it.
        threshold_b = threshold_b - threshold_b.abs() * request.margin
    # The constant part of the error concerns maxima only.
    rounding, _ = tiles.rounding(left.shape[1], left.dtype, of_guides=bool(guides))
    norms_b = (torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (left, right[:b]))
    # Copies of the positive have the same norms.
    threshold_b = threshold_b + rounding * math.prod(norms_b)
    threshold_n = threshold_b.new_full((len(text_nD),), torch.inf)
    threshold_n[:b] = threshold_b
    return Thresholds(threshold_b, threshold_n, (left, right) if guides else None)


def _as_multiplied(guide_nG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous guides whose products tiles accumulate in `dtype`."""
    is_double = torch.float64 in (guide_nG.dtype, dtype)
    return (guide_nG.to(dtype) if is_double else guide_nG).contiguous()
