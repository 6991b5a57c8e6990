"""Prefixes of features, their normalization, and its gradient.

Shapes:
    n: rows. D: full width. d: width of a prefix.

The gradient of the normalization `x_d = prefix / |prefix|` is linear in dL/dx_d,

    dL/dprefix = (dL/dx_d - <dL/dx_d, x_d> x_d) / |prefix|,

so it applies to each part of dL/dx_d, and the gradients of several prefixes add up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.numerics.floats import accumulation_dtype

__all__ = ["Prefix", "PrefixFeatures"]

_LEAST_NORM = 1e-12  # the epsilon of torch's `normalize`


class Prefix(NamedTuple):
    """A prefix and the weight of its loss in the sum."""

    width: int
    weight: float
    is_normalized: bool

    def of(self, features_nD: Tensor) -> "PrefixFeatures":
        """Return the prefix of each row."""
        part_nd = features_nD[:, : self.width]
        if not self.is_normalized:
            return PrefixFeatures(part_nd.contiguous(), None)
        wide_nd = part_nd.to(accumulation_dtype(part_nd.dtype))
        norm_n1 = torch.linalg.vector_norm(wide_nd, dim=1, keepdim=True).clamp_min(_LEAST_NORM)
        return PrefixFeatures((wide_nd / norm_n1).to(part_nd.dtype), norm_n1)


class PrefixFeatures(NamedTuple):
    """Features of one prefix, and their norms before normalization."""

    features_nd: Tensor
    norm_n1: Tensor | None

    def add_gradient(self, total_nD: Tensor, grad_nd: Tensor, weight: float) -> None:
        """Add the gradient of the prefix to the gradient of the full features, in place."""
        if self.norm_n1 is not None:
            # The component along the feature changes the norm only, which normalization removes.
            unit_nd = self.features_nd.to(grad_nd.dtype)
            along_n1 = (grad_nd * unit_nd).sum(1, keepdim=True)
            grad_nd = grad_nd.addcmul(along_n1, unit_nd, value=-1.0).div_(self.norm_n1)
        total_nD[:, : grad_nd.shape[1]].add_(grad_nd, alpha=weight)
