"""Formulas for memory and time of a contrastive training step.

Legend: ``B`` global batch, ``b`` batch of a rank, ``W`` ranks, ``D`` feature width. GB of the
paper are GiB: its four matrices of 65,536^2 fp32 values are "66.11 GB".

The peak of a rank is the paper's Eq. 10, M_data + max(M_loss, M_backbone), plus two terms that the
equation omits, the features that gradient caching stores and the weights:

    peak = data + features + static + max(loss, backbone)

While the loss is computed there are no activations of the towers, and while the towers are replayed
the loss is freed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

__all__ = [
    "CLIP_PRODUCTS", "DENSE", "FP32", "FP64", "GIB", "INF_CL", "INF_CL_PRODUCTS",
    "LOCAL", "OURS", "OUR_PRODUCTS", "epoch_hours", "largest_batch", "loss_bytes",
]  # fmt: skip

GIB = 2**30
FP32, FP64 = 4, 8
DENSE, LOCAL, INF_CL, OURS = "dense (CLIP)", "local (OpenCLIP)", "Inf-CL", "lightning-mp"

# Matrix products of `2 b B D` FLOPs in a loss and its backward. CLIP's code computes the logits of
# both directions, Inf-CL's kernels recompute them for each gradient, and ours computes them once,
# and a second time for tiles that the workspace cannot keep.
CLIP_PRODUCTS = 6
INF_CL_PRODUCTS = 10
OUR_PRODUCTS = 4

# Coefficients of the other losses, in fp32 values, fitted to the cells of the paper's Table 1 that
# the comments name; tests solve for them again.
DENSE_MATRICES, DENSE_FEATURES = 4.096, 3.04  # CLIP at 32k and 64k on 8 GPUs
LOCAL_MATRICES, LOCAL_OWN_FEATURES = 4.095, 2.8  # OpenCLIP at 64k and 128k on 8 GPUs
LOCAL_GATHERED_FEATURES = 2.0  # counted: the features of all ranks, both towers
INF_CL_FEATURES = 15.4  # Inf-CL at 128k on 8 GPUs
# From 128k pairs a rank on, every cell has two more copies of the features.
INF_CL_FEATURES_LARGE = 17.41  # Inf-CL with offload at 1024k on 8 GPUs
INF_CL_LARGE_RANK_BATCH = 131072

OUR_FEATURES = 8.0  # at most; tests hold `ContrastiveLoss` to it
OUR_VECTORS = 16  # at most; 1/24 of the features at D = 768


def loss_bytes(
    method: str, batch: float, ranks: int, width: int, workspace_bytes: int = 0
) -> float:
    """Return the bytes of a loss on a rank beyond the features, including their gradients.

    CLIP's loss has logits and softmax of both directions on every rank, OpenCLIP's `local_loss` the
    rows of the rank's pairs and the features of all ranks, and Inf-CL copies of its features. Ours
    has at most `8 b D` fp32 values (gradients of both towers, blocks of the exchange and their
    sums), the workspace of tiles, and float64 vectors of length b (positives, log-sum-exps, margins
    and temporaries).
    """
    rank_batch = batch / ranks
    if method == OURS:
        vectors = OUR_VECTORS * FP64 * rank_batch
        return OUR_FEATURES * FP32 * rank_batch * width + vectors + workspace_bytes
    if method == DENSE:
        return FP32 * (DENSE_MATRICES * batch**2 + DENSE_FEATURES * batch * width)
    if method == LOCAL:
        features = LOCAL_GATHERED_FEATURES + LOCAL_OWN_FEATURES / ranks
        return FP32 * (LOCAL_MATRICES * batch * rank_batch + features * batch * width)
    large = rank_batch >= INF_CL_LARGE_RANK_BATCH
    features = INF_CL_FEATURES_LARGE if large else INF_CL_FEATURES
    return FP32 * features * rank_batch * width


def largest_batch(peak: Callable[[int], float], budget: float, step: int) -> int:
    """Return the largest multiple of `step` whose peak fits, or 0; peaks must not decrease."""
    # Few evaluations, because a caller may measure each peak with a run.
    if peak(step) > budget:
        return 0
    fits = 1
    while peak(2 * fits * step) <= budget:
        fits *= 2
        if fits * step > 2**50:  # a method whose memory does not grow
            return fits * step
    between = range(fits + 1, 2 * fits)
    return step * (fits + bisect.bisect(between, budget, key=lambda n: peak(n * step)))


def epoch_hours(pairs: int, batch: int, step_seconds: float) -> float:
    """Return the duration of an epoch in hours."""
    return pairs / batch * step_seconds / 3600
