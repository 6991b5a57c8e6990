"""Metrics built on torchmetrics; usable from any training loop."""

from lightning_mp.metrics.retrieval import ContrastiveRecall

__all__ = ["ContrastiveRecall"]
