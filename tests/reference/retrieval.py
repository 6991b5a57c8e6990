"""Dense float64 reference of retrieval ranks: every score, sorted.

Shapes: `Q` queries, `C` candidates, `D` feature width.
"""

import torch
from torch import Tensor


def dense_ranks(
    query_QD: Tensor,
    candidate_CD: Tensor,
    query_ids_Q: Tensor,
    candidate_ids_C: Tensor,
    *,
    normalize: bool,
    margin: float = 0.0,
) -> Tensor:
    """Return the worst rank under ties, for each query that has a match.

    `margin` raises the scores of all other candidates, relative to both norms (for cosine, to one).
    The ranks for a small positive and a small negative margin bound the ranks of rounded scores.
    """
    query_QD, candidate_CD = query_QD.double(), candidate_CD.double()
    if normalize:
        query_QD = query_QD / query_QD.norm(dim=1, keepdim=True)
        candidate_CD = candidate_CD / candidate_CD.norm(dim=1, keepdim=True)
    ranks = []
    for query_D, query_id in zip(query_QD, query_ids_Q, strict=True):
        score_C = candidate_CD @ query_D
        match_C = candidate_ids_C == query_id
        if not match_C.any():
            continue
        slack_C = margin * query_D.norm() * candidate_CD.norm(dim=1)
        rivals = (score_C + slack_C)[~match_C].sort().values
        below = torch.searchsorted(rivals, score_C[match_C].max().reshape(1), right=False)
        ranks.append(1 + len(rivals) - int(below))
    return torch.tensor(ranks)


def dense_summary(ranks: Tensor, top_k: tuple[int, ...]) -> dict[str, float]:
    """Return the values of one direction."""
    return {
        **{f"recall@{k}": float((ranks <= k).double().mean()) for k in top_k},
        "median_rank": float(ranks.double().quantile(0.5)),
        "mean_rank": float(ranks.double().mean()),
        "queries": float(len(ranks)),
    }


def dense_recall(
    image_ND: Tensor,
    text_MD: Tensor,
    image_ids_N: Tensor,
    text_ids_M: Tensor,
    *,
    normalize: bool,
    top_k: tuple[int, ...],
    margin: float = 0.0,
) -> dict[str, float]:
    """Return the values of both directions under the names of the metric."""
    sides = {
        "image_to_text": (image_ND, text_MD, image_ids_N, text_ids_M),
        "text_to_image": (text_MD, image_ND, text_ids_M, image_ids_N),
    }
    return {
        f"{direction}_{name}": value
        for direction, side in sides.items()
        for name, value in dense_summary(
            dense_ranks(*side, normalize=normalize, margin=margin), top_k
        ).items()
    }
