"""Memory and time of a contrastive training step, as functions of numbers: bytes in, bytes out.

Legend: ``B`` global batch, ``b`` batch of a rank, ``W`` ranks, ``D`` feature width, ``m``
micro-batch. GB of the paper are GiB: its four matrices of 65,536^2 fp32 values are "66.11 GB".

What a rank holds at its peak, after the paper's Eq. 10 (M_data + max(M_loss, M_backbone)), with the
two terms that Eq. 10 leaves out, namely the features that gradient caching keeps and the weights
beside the loss:

    peak = data + features + static + max(loss, backbone)

The loss needs no activations of the towers, as gradient caching has dropped them, and while the
towers are replayed the loss is gone: so one or the other.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

__all__ = [
    "CLIP_PRODUCTS",
    "CROSS_GPU",
    "DENSE",
    "FP32",
    "GIB",
    "INF_CL",
    "INF_CL_PRODUCTS",
    "LOCAL",
    "OURS",
    "OUR_PRODUCTS",
    "epoch_hours",
    "exchange_bytes",
    "host_bytes",
    "largest_batch",
    "loss_bytes",
    "loss_flops",
    "our_features_bytes",
]

GIB = 2**30
FP32 = 4
DENSE, LOCAL, INF_CL, OURS = "dense (CLIP)", "local (OpenCLIP)", "Inf-CL", "lightning-mp"
CROSS_GPU = "cross-GPU"
FP64 = 8

# Matrix products of `2 b B D` FLOPs that a loss takes with its backward. CLIP's code makes the
# logits of both directions; Inf-CL's kernels recompute them for each gradient; ours makes them
# once, and once more what tiles its workspace cannot keep.
CLIP_PRODUCTS = 6
INF_CL_PRODUCTS = 10
OUR_PRODUCTS = 4

# Coefficients of the peers' losses. Each is fitted to cells of the paper's Table 1, in units of
# fp32 values, and predicts all others; tests solve for them again from those cells.
DENSE_MATRICES, DENSE_FEATURES = 4.096, 3.04  # CLIP at 32k and 64k on 8 GPUs
LOCAL_MATRICES, LOCAL_OWN_FEATURES = 4.095, 2.8  # OpenCLIP at 64k and 128k on 8 GPUs
LOCAL_GATHERED_FEATURES = 2.0  # counted: the features of all ranks, both sides
CROSS_GPU_MATRICES = 4.0  # Table 4's cross-GPU cell less the one below it, at 64k on 4 GPUs
INF_CL_FEATURES = 15.4  # Inf-CL at 128k on 8 GPUs
# From 128k pairs a rank on, every cell has two copies of the features more.
INF_CL_FEATURES_LARGE = 17.41  # Inf-CL with offload at 1024k on 8 GPUs
INF_CL_LARGE_RANK_BATCH = 131072

OUR_FEATURES = 8.0  # at most, by the docstring of `ContrastiveLoss`, which tests hold it to
OUR_VECTORS = 16  # at most; 1/24 of the features at D = 768


def our_features_bytes(rank_batch: float, width: int, itemsize: int = FP32) -> float:
    """Return the features of both towers, as towers return them and normalised.

    They live from the first tower's call to the end of the loss's backward; their gradients, of
    which there are as many, from there on.
    """
    return 4.0 * rank_batch * width * itemsize


def loss_bytes(
    method: str, batch: float, ranks: int, width: int, workspace_bytes: int = 0
) -> float:
    """Return what a loss holds on a rank beyond the features, their gradients included.

    CLIP's has logits and softmax of both directions on every rank, OpenCLIP's `local_loss` the rows
    of the rank's own pairs and the features of all ranks, a ring without tiles the logits of one
    shard, and Inf-CL copies of its features. Ours promises to hold at most gradients of both sides,
    blocks of the exchange and sums of theirs: `8 b D` values of fp32 on any number of ranks; the
    workspace, in which tiles lie and where what fits is kept; and float64 vectors of length b:
    positives, log-sum-exps, margins and their temporaries.
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
    matrices = CROSS_GPU_MATRICES * rank_batch**2 if method == CROSS_GPU else 0.0
    return FP32 * (matrices + features * rank_batch * width)


def host_bytes(
    *, rank_batch: float, pair_bytes: float, ranks: int, workers: int, loader_batches: int = 1
) -> float:
    """Return the data that the ranks of a node hold in host memory.

    Every worker of a `DataLoader` has two batches ready, its `prefetch_factor`, besides the batch
    in use. With several loader batches a step, workers hold those and the host one whole batch.
    """
    ready = workers * 2 * rank_batch / loader_batches
    return ranks * pair_bytes * (rank_batch + ready)


def largest_batch(peak: Callable[[int], float], budget: float, step: int) -> int:
    """Return the largest multiple of `step` whose peak fits, 0 if none; peaks must not fall."""
    # Doubled first and then halved, as a peak may be one that ranks measure, in seconds.
    if peak(step) > budget:
        return 0
    fits = 1
    while peak(2 * fits * step) <= budget:
        fits *= 2
        if fits * step > 2**50:  # a method whose memory does not grow
            return fits * step
    between = range(fits + 1, 2 * fits)
    return step * (fits + bisect.bisect(between, budget, key=lambda n: peak(n * step)))


def loss_flops(batch: int, ranks: int, width: int, products: float) -> float:
    """Return the FLOPs of a rank in a loss of so many products of `2 b B D`, and its backward."""
    return 2.0 * products * batch * batch / ranks * width


def exchange_bytes(rank_batch: float, ranks: int, width: int, itemsize: int = FP32) -> float:
    """Return what a rank sends for the loss: a ring and an exchange by slices send the same.

    Forward, the texts of a shard to every other rank, and its columns' sums; backward the same
    texts once more with their log-sum-exps, and their gradients in fp32.
    """
    return (ranks - 1) * rank_batch * (2 * width * itemsize + width * FP32 + 2 * FP64)


def epoch_hours(pairs: int, batch: int, step_seconds: float) -> float:
    """Return the hours of an epoch."""
    return pairs / batch * step_seconds / 3600
