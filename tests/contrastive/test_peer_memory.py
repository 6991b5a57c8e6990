"""Peak memory of a loss over local rows, as stated in `docs/exactness.md`.

Shapes:
    b: global batch. r: batch of one of W ranks. D: feature width.
"""

import pytest
import torch
import torch.nn.functional as F

from papers.allocation import peak_allocated


@pytest.mark.parametrize(("keeps_logits", "matrices"), [(False, 4), (True, 6)])
@pytest.mark.parametrize(("batch", "width", "ranks"), [(512, 32, 1), (1024, 16, 4)])
def test_peak_memory_is_matrices_and_scaled_features(
    batch: int, width: int, ranks: int, keeps_logits: bool, matrices: int
) -> None:
    """The peak is two log-softmaxes, their gradients and, if they are kept, two matrices of logits.

    The loss of one rank is computed without a process group, from the features of this rank and of
    all ranks, with the same rows as OpenCLIP's `ClipLoss(local_loss=True, gather_with_grad=True)`
    and DisCo-CLIP. OpenCLIP's loss frees the logits when it returns, before the backward. The
    example of DisCo-CLIP keeps the logits until after the backward.
    """
    rows = batch // ranks
    image_bD, text_bD = (torch.randn(batch, width, requires_grad=True) for _ in range(2))
    labels_r = torch.arange(rows)

    def run() -> None:
        image_logits_rb = 100.0 * image_bD[:rows] @ text_bD.T
        text_logits_rb = 100.0 * text_bD[:rows] @ image_bD.T
        loss = F.cross_entropy(image_logits_rb, labels_r) / 2
        loss = loss + F.cross_entropy(text_logits_rb, labels_r) / 2
        if not keeps_logits:
            del image_logits_rb, text_logits_rb
        loss.backward()

    unit, scaled_features = 4 * batch**2 / ranks, 2 * rows * width * 4
    others = peak_allocated(run) - matrices * unit - scaled_features
    assert 0 <= others <= 64 * 8  # scalars, which torch aligns to 64 bytes
