"""Retrieval ranks from a similarity matrix that is computed one tile at a time.

Shapes: `N` images, `M` texts, `D` feature width; `n` and `m` are the rows and columns of a tile.
`ContrastiveRecall` defines the rank. The first pass over the tiles finds the best match of each
query; the second pass counts the candidates that are not below it. Both passes serve both
directions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_mp.numerics.floats import accumulation_dtype, sum_rounding

__all__ = ["full_precision", "retrieval_ranks", "unit_rows"]


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply without gradients, autocast and tf32, which would round beyond `sum_rounding`."""
    backends: Any = torch.backends
    products = backends.cuda.matmul, backends.mkldnn.matmul
    before = [each.fp32_precision for each in products]
    try:
        for each in products:
            each.fp32_precision = "ieee"
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for each, precision in zip(products, before, strict=True):
            each.fp32_precision = precision


def unit_rows(features_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of norm 1 and the original norms; a row with inf or NaN becomes all NaN."""
    # Always a copy, because the in-place divisions must not change stored features.
    unit_RD = features_RD.detach().to(accumulation_dtype(features_RD.dtype), copy=True)
    # Dividing by the largest entry first keeps squares of 1e20 or 1e-30 inside fp32.
    peak_R1 = unit_RD.abs().amax(dim=1, keepdim=True)
    # A row of zeros has the score 0, not NaN from 0 / 0.
    peak_R1 = torch.where(peak_R1 == 0, 1, peak_R1)
    unit_RD /= peak_R1
    norm_R1 = torch.linalg.vector_norm(unit_RD, dim=1, keepdim=True)
    unit_RD /= norm_R1.clamp(min=1)  # below 1 only for a row of zeros
    return unit_RD, norm_R1 * peak_R1


def _times_norm(score_nm: Tensor, norm: Tensor | None) -> Tensor:
    return score_nm if norm is None else score_nm * norm


def _best(score_nm: Tensor, match_nm: Tensor, dim: int) -> Tensor:
    """Return the best finite score of each query among its matches, -inf without a match."""
    # NaN and inf must not be the best score, because they would hide all finite scores.
    lowest = -math.inf
    masked_nm = score_nm.masked_fill(~match_nm, lowest)
    return masked_nm.nan_to_num_(nan=lowest, posinf=lowest, neginf=lowest).amax(dim)


def _count_not_below(score_nm: Tensor, best: Tensor, match_nm: Tensor, dim: int) -> Tensor:
    """Count the candidates that do not match and are not strictly below; NaN is never below."""
    return (~((score_nm < best) | match_nm)).sum(dim)


# Slices of images and texts, cosines (n, m), norms of images (n, 1) and texts (m,) or `None` for
# cosine similarity, matches (n, m).
_Tile = tuple[slice, slice, Tensor, Tensor | None, Tensor | None, Tensor]


def _tile_edge(width: int, dtype: torch.dtype, workspace_bytes: int) -> int:
    """Return the edge length of a tile whose temporaries fit into the workspace."""
    # edge^2 elements: cosines, weighted and masked copies, and four masks. edge x D elements: unit
    # images, unit texts and a temporary.
    per_area, per_edge = 3 * dtype.itemsize + 4, 3 * dtype.itemsize * width
    root = math.isqrt(per_edge**2 + 4 * per_area * workspace_bytes)
    return max(1, (root - per_edge) // (2 * per_area))


def retrieval_ranks(
    image_ND: Tensor,
    text_MD: Tensor,
    image_ids_N: Tensor,
    text_ids_M: Tensor,
    *,
    normalize: bool,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return text ranks of images and image ranks of texts, for queries with a match."""
    dtype, width = accumulation_dtype(image_ND.dtype), image_ND.shape[1]
    rounding, edge = sum_rounding(width, dtype), _tile_edge(width, dtype, workspace_bytes)

    def tiles() -> Iterator[_Tile]:
        # Equal tiles in both passes, so that both compute the same bits for a score.
        for n in range(0, len(image_ND), edge):
            images = slice(n, n + edge)
            unit_nD, norm_n1 = unit_rows(image_ND[images])
            for m in range(0, len(text_MD), edge):
                texts = slice(m, m + edge)
                unit_mD, norm_m1 = unit_rows(text_MD[texts])
                norms = (None, None) if normalize else (norm_n1, norm_m1[:, 0])
                match_nm = image_ids_N[images, None] == text_ids_M[texts]
                yield images, texts, unit_nD @ unit_mD.T, *norms, match_nm

    best_text_N = image_ND.new_full((len(image_ND),), -math.inf, dtype=dtype)
    best_image_M = text_MD.new_full((len(text_MD),), -math.inf, dtype=dtype)
    matched_N = torch.zeros_like(best_text_N, dtype=torch.bool)
    matched_M = torch.zeros_like(best_image_M, dtype=torch.bool)
    # Matches count with the lower end and other candidates with the upper end of the rounding
    # interval of their score, so scores within rounding error are ties. The norm of the query is
    # a common factor and is left out.
    for images, texts, cosine_nm, norm_n1, norm_m, match_nm in tiles():
        cosine_nm -= rounding
        row_best_n = _best(_times_norm(cosine_nm, norm_m), match_nm, dim=1)
        column_best_m = _best(_times_norm(cosine_nm, norm_n1), match_nm, dim=0)
        best_text_N[images] = torch.maximum(best_text_N[images], row_best_n)
        best_image_M[texts] = torch.maximum(best_image_M[texts], column_best_m)
        matched_N[images] |= match_nm.any(dim=1)
        matched_M[texts] |= match_nm.any(dim=0)
    text_rank_N = torch.ones_like(best_text_N, dtype=torch.int64)
    image_rank_M = torch.ones_like(best_image_M, dtype=torch.int64)
    for images, texts, cosine_nm, norm_n1, norm_m, match_nm in tiles():
        # The upper end: scores that differ by less than twice the rounding are ties.
        cosine_nm += rounding
        text_rank_N[images] += _count_not_below(
            _times_norm(cosine_nm, norm_m), best_text_N[images, None], match_nm, dim=1
        )
        image_rank_M[texts] += _count_not_below(
            _times_norm(cosine_nm, norm_n1), best_image_M[texts], match_nm, dim=0
        )
    # Otherwise a NaN query would be a hit if fewer than k candidates do not match.
    text_rank_N[best_text_N == -math.inf] = len(text_MD) + 1
    image_rank_M[best_image_M == -math.inf] = len(image_ND) + 1
    return text_rank_N[matched_N], image_rank_M[matched_M]
