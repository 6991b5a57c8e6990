"""The similarity above which a negative is taken for a false one, for each image and text.

Shapes:
    b: images of this rank. n: its texts. D: feature width.
"""

import math

import torch
from torch import Tensor

from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._tiles.exclusions import Thresholds
from lightning_mp.contrastive._tiles.tile_backend import TileBackend, row_dots
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["thresholds_of"]


@torch.no_grad()
def thresholds_of(request: Request, tiles: TileBackend) -> Thresholds:
    """Return what each image and each text takes for a false negative, by its own positive.

    A limit is raised by what rounding moves a similarity: without a margin a copy of the positive
    would be left out by chance, in one sweep and not in the other.

    Args:
        request: Features, the rule, its margin, and guides if they judge; texts beyond the images'
            own have no limit.
        tiles: What works the similarities out.
    """
    image_bD, text_nD = request.image, request.text
    b, state = len(image_bD), state_dtype(image_bD.device)
    dtype = accumulation_dtype(image_bD.dtype)
    guides = [_as_multiplied(x, dtype) for x in request.guides or ()]
    left, right = guides or (image_bD, text_nD)
    threshold_b = row_dots(left, right[:b], state)
    if request.false_negatives == "absolute":
        threshold_b = threshold_b - request.margin
    else:
        # Of its magnitude: the limit of a negative similarity is below it too.
        threshold_b = threshold_b - threshold_b.abs() * request.margin
    # The constant is that of maxima, which no limit is compared with.
    rounding, _ = tiles.rounding(left.shape[1], left.dtype, of_guides=bool(guides))
    norms_b = (torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (left, right[:b]))
    # The positive's own norms are also those of its copies.
    threshold_b = threshold_b + rounding * math.prod(norms_b)
    # No similarity is above infinity: texts without an image leave nothing out.
    threshold_n = threshold_b.new_full((len(text_nD),), torch.inf)
    threshold_n[:b] = threshold_b
    return Thresholds(threshold_b, threshold_n, (left, right) if guides else None)


def _as_multiplied(guide_nG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return guides whose products the tiles sum in `dtype`, as they stand in memory."""
    is_double = torch.float64 in (guide_nG.dtype, dtype)
    return (guide_nG.to(dtype) if is_double else guide_nG).contiguous()
