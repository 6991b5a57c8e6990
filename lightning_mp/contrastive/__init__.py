"""Contrastive losses for batches whose logit matrix would not fit; usable from any loop."""

from lightning_mp.contrastive.loss import ContrastiveLoss

__all__ = ["ContrastiveLoss"]
