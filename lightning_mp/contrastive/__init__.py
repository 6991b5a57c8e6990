"""Contrastive losses over batches that do not fit in memory."""

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
