"""Metrics built on torchmetrics; usable from any training loop."""

from lightning_mp.metrics.retrieval import ContrastiveRecall
from lightning_mp.metrics.zero_shot import ZeroShotAccuracy

__all__ = ["ContrastiveRecall", "ZeroShotAccuracy"]
