"""Gradient caching: a loss over the whole batch with the activations of one micro-batch."""

from lightning_mp.gradient_cache.gradient_cache import GradientCache

__all__ = ["GradientCache"]
