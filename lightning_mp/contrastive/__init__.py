"""Contrastive losses over batches that do not fit in memory.

Shapes, as suffixes of tensors in all modules of this package:
    B: global batch. b: images of this rank. n: its texts; text i belongs to image i for i < b.
    q: images with a positive text, b without `positives`; text i then belongs to image i for i < q.
    k: negatives, or most positives, of an image. e: positive pairs. m: visiting columns.
    D: feature width. G: guide width. W: ranks. R: parts of a sum, 1 or W.
"""

from lightning_mp.contrastive.loss import ContrastiveLoss
from lightning_mp.contrastive.matryoshka import MatryoshkaLoss
from lightning_mp.contrastive.open_clip import ClipLoss, SigLipLoss
from lightning_mp.contrastive.sigmoid import SigmoidContrastiveLoss
from lightning_mp.contrastive.statistics import LossStatistics

__all__ = [
    "ClipLoss",
    "ContrastiveLoss",
    "LossStatistics",
    "MatryoshkaLoss",
    "SigLipLoss",
    "SigmoidContrastiveLoss",
]
