"""A cache for the towers of a loss over the whole batch: activations of one micro-batch."""

from lightning_mp.gradient_cache.gradient_cache import GradientCache

__all__ = ["GradientCache"]
