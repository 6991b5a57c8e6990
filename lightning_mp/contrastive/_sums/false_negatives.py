"""The similarity above which a negative is taken for a false one, for each image and text.

Shapes:
    b: images of this rank. n: its texts. D: feature width.
"""

import math

import torch
from torch import Tensor

from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._tiles.tile_backend import Limits, TileBackend
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype
from lightning_mp.numerics.row_dots import row_dots

__all__ = ["limits_of"]


@torch.no_grad()
def limits_of(
    pairs: PairOptions, image_bD: Tensor, text_nD: Tensor, tiles: TileBackend
) -> Limits | None:
    """Return what each image and each text takes for a false negative, by its own positive.

    A limit is raised by what rounding moves a similarity: without a margin a copy of the positive
    would be left out by chance, in one sweep and not in the other.

    Args:
        pairs: The rule, its margin, and guides if they judge.
        image_bD: The images.
        text_nD: The texts; those beyond the images' own have no limit.
        tiles: What works the similarities out.
    """
    if pairs.false_negatives == "keep":
        return None
    b, state = len(image_bD), state_dtype(image_bD.device)
    dtype = accumulation_dtype(image_bD.dtype)
    guides = [_as_multiplied(x, dtype) for x in pairs.guides or ()]
    left, right = guides or (image_bD, text_nD)
    limit_b = row_dots(left, right[:b], state)
    if pairs.false_negatives == "absolute":
        limit_b = limit_b - pairs.margin
    else:
        limit_b = limit_b * (1 - pairs.margin)
    # The constant is that of maxima, which no limit is compared with.
    rounding, _ = tiles.rounding(left.shape[1], left.dtype, of_guides=bool(guides))
    norms_b = (torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (left, right[:b]))
    # The positive's own norms are also those of its copies.
    limit_b = limit_b + rounding * math.prod(norms_b)
    # No similarity is above infinity: texts without an image leave nothing out.
    limit_n = limit_b.new_full((len(text_nD),), torch.inf)
    limit_n[:b] = limit_b
    return Limits(limit_b, limit_n, (left, right) if guides else None)


def _as_multiplied(guide_nG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return guides whose products the tiles sum in `dtype`, as they stand in memory."""
    is_double = torch.float64 in (guide_nG.dtype, dtype)
    return (guide_nG.to(dtype) if is_double else guide_nG).contiguous()
