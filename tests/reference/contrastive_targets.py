"""Cross entropies of dense logits against dense targets, by autograd: what options stand for."""

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
    left_out: Tensor | None = None,
    column_left_out: Tensor | None = None,
    smoothing: float = 0.0,
    negatives: Tensor | None = None,
    negatives_left_out: Tensor | None = None,
    directions: str = "both",
) -> Tensor:
    """Return the loss of one process with the whole batch.

    Args:
        image: (B, D).
        text: (N, D).
        scale: One value.
        match: (B, N), what belongs to what; targets are spread evenly over it.
        row_weights: (B,); without them all with a text count alike.
        column_weights: (N,); without them all with an image count alike.
        left_out: (B, N), pairs that are in no sum.
        column_left_out: Those of the columns, if they are others.
        smoothing: As in `torch.nn.functional.cross_entropy`, over what is not left out.
        negatives: (B, k, D), which one row alone sees.
        negatives_left_out: (B, k).
        directions: Which terms count.
    """
    logits = scale * image @ text.T
    left_out = torch.zeros_like(match) if left_out is None else left_out
    column_left_out = left_out if column_left_out is None else column_left_out
    losses = []
    for name, scores, pairs, out, weights in (
        ("image_to_text", logits, match, left_out, row_weights),
        ("text_to_image", logits.T, match.T, column_left_out.T, column_weights),
    ):
        kept = ~out | pairs
        if negatives is not None and name == "image_to_text":
            scores = torch.cat([scores, scale * torch.einsum("id,ikd->ik", image, negatives)], 1)
            none = torch.zeros(negatives.shape[:2], dtype=torch.bool)
            more = ~none if negatives_left_out is None else ~negatives_left_out
            kept, pairs = torch.cat([kept, more], 1), torch.cat([pairs, none], 1)
        target = pairs.double() / pairs.sum(1, keepdim=True).clamp_min(1)
        target = (1 - smoothing) * target + smoothing * kept.double() / kept.sum(1, keepdim=True)
        log_softmax = scores.masked_fill(~kept, -torch.inf).log_softmax(1)
        terms = -(target * log_softmax.masked_fill(~kept, 0.0)).sum(1)
        weights = torch.ones(1) if weights is None else weights
        weights = weights.double() * pairs.any(1)
        if directions in ("both", name):
            losses.append((weights * terms).sum() / weights.sum())
    return sum(losses) / len(losses)
