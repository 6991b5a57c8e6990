"""Cross entropies of dense logits with dense targets and masks, differentiated by autograd."""

import torch
from torch import Tensor


def dense_targets(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    match: Tensor,
    *,
    row_weights: Tensor | None = None,
    column_weights: Tensor | None = None,
    masked: Tensor | None = None,
    column_masked: Tensor | None = None,
    smoothing: float = 0.0,
    negatives: Tensor | None = None,
    negatives_masked: Tensor | None = None,
    directions: str = "both",
) -> Tensor:
    """Return the loss of one process with the global batch.

    Args:
        image: (B, D).
        text: (N, D).
        scale: One value.
        match: (B, N), the positive pairs; targets are spread evenly over the positives of a row.
        row_weights: (B,); by default, all images with a text have the same weight.
        column_weights: (N,); by default, all texts with an image have the same weight.
        masked: (B, N), pairs that are in no sum.
        column_masked: The masked pairs of the columns, if they differ from those of the rows.
        smoothing: As in `torch.nn.functional.cross_entropy`, over all pairs that are not masked.
        negatives: (B, k, D), texts that are negatives of one image only.
        negatives_masked: (B, k), masked `negatives`.
        directions: The terms of the loss, as in `ContrastiveLoss`.
    """
    logits = scale * image @ text.T
    masked = torch.zeros_like(match) if masked is None else masked
    column_masked = masked if column_masked is None else column_masked
    losses = []
    for name, scores, pairs, is_masked, weights in (
        ("image_to_text", logits, match, masked, row_weights),
        ("text_to_image", logits.T, match.T, column_masked.T, column_weights),
    ):
        candidates = ~is_masked | pairs
        if negatives is not None and name == "image_to_text":
            scores = torch.cat([scores, scale * torch.einsum("id,ikd->ik", image, negatives)], 1)
            none = torch.zeros(negatives.shape[:2], dtype=torch.bool)
            more = ~none if negatives_masked is None else ~negatives_masked
            candidates, pairs = torch.cat([candidates, more], 1), torch.cat([pairs, none], 1)
        target = pairs.double() / pairs.sum(1, keepdim=True).clamp_min(1)
        spread = candidates.double() / candidates.sum(1, keepdim=True)
        target = (1 - smoothing) * target + smoothing * spread
        log_softmax = scores.masked_fill(~candidates, -torch.inf).log_softmax(1)
        terms = -(target * log_softmax.masked_fill(~candidates, 0.0)).sum(1)
        weights = torch.ones(1) if weights is None else weights
        weights = weights.double() * pairs.any(1)
        if directions in ("both", name):
            losses.append((weights * terms).sum() / weights.sum())
    return sum(losses) / len(losses)
