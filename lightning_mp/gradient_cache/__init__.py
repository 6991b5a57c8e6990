"""Gradient caching: a loss over the whole batch with the activations of one micro-batch.

Shapes, in all modules of this package:
    B: batch size of one call. m: rows of one micro-batch. L: length of the rows of a padded batch.
    D: feature width. F: values per row of an output.
"""

from lightning_mp.gradient_cache.gradient_cache import GradientCache

__all__ = ["GradientCache"]
