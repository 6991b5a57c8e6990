"""Moments and histograms of tensors, which merge exactly over blocks, micro-batches and ranks.

Legend: `N` tensors, `R` parts to merge, `K` columns: count, mean, M2, M3, M4, absmax, non-finite,
and optionally `B` bins of a histogram. `Mp = sum (x - mean)^p`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_mp.numerics.tensor_stats import local_shard, stored_values

__all__ = ["EXPONENTS", "Reduction", "merge_moments", "reduced", "tensor_moments"]

Reduction = Literal["norm", "rms", "mean", "std", "absmax", "kurtosis", "histogram"]
_MOMENTS = 7
_LOWEST, _HIGHEST = -149, 127  # exponents of fp32, including subnormals
EXPONENTS: npt.NDArray[np.float64] = np.array([-np.inf, *range(_LOWEST, _HIGHEST + 1)])
"""floor(log2 |x|) of each bin; the first bin counts zeros and values that underflow fp32."""
# Number of values that are cast to float64 at a time: 32 MB, or the cache of a CPU.
_BLOCK = {"cpu": 1 << 16}
_LARGE_BLOCK = 1 << 22


@torch.no_grad()
def tensor_moments(
    tensor: Tensor, *, unscale: float | Tensor = 1.0, histogram: bool = False
) -> Tensor:
    """Return moments_K of `tensor * unscale` without a host sync, in float64.

    The local shard of a DTensor and the stored values of a sparse tensor are measured. Non-finite
    values are counted and otherwise ignored. The result of a tensor on MPS is on the CPU.
    """
    # In float64, because the fourth power of a gradient of 1e-12 underflows in fp32.
    values = stored_values(local_shard(tensor).detach()).reshape(-1)
    if values.device.type == "mps":
        values = values.cpu()
    if not values.numel():
        columns = _MOMENTS + len(EXPONENTS) * histogram
        return torch.zeros(columns, dtype=torch.float64, device=values.device)
    blocks = values.split(_BLOCK.get(values.device.type, _LARGE_BLOCK))
    return merge_moments(torch.stack([_block_moments(b, unscale, histogram) for b in blocks]))


def _block_moments(values: Tensor, unscale: float | Tensor, histogram: bool) -> Tensor:
    x = values.to(torch.float64) * unscale
    is_finite = x.isfinite()
    x = torch.where(is_finite, x, 0)
    count = is_finite.sum()
    mean = x.sum() / count.clamp(min=1)
    # About the mean, because E[x^2] - mean^2 cancels for a large mean.
    apart = torch.where(is_finite, x - mean, 0)
    square = apart.square()
    powers = [square.sum(), torch.dot(square, apart), torch.dot(square, square)]
    parts = [count, mean, *powers, x.abs().amax(), values.numel() - count]
    row = torch.stack([part.to(torch.float64) for part in parts])
    if not histogram:
        return row
    exponent = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023  # from the 64 bits of float64
    place = exponent.clamp_(_LOWEST - 1, _HIGHEST).sub_(_LOWEST - 1)
    # `bincount` would wait for a GPU.
    bins = torch.zeros(len(EXPONENTS), dtype=torch.int64, device=x.device)
    bins.scatter_add_(0, place, torch.ones_like(place))
    bins[0] -= values.numel() - count  # non-finite values were replaced by zeros
    return torch.cat([row, bins.to(torch.float64)])


def merge_moments(parts_RK: Tensor) -> Tensor:
    """Return the moments of the union of several parts (Chan 1979; Pebay, SAND2008-6212).

    With `d = mean_r - mean`, `M2 = sum M2_r + n_r d^2`, `M3 = sum M3_r + 3 d M2_r + n_r d^3` and
    `M4 = sum M4_r + 4 d M3_r + 6 d^2 M2_r + n_r d^4`, no large sums are subtracted. There may be
    dimensions between R and K.
    """
    if len(parts_RK) == 1:  # most tensors are one block
        return parts_RK[0]
    merged_K = parts_RK.sum(dim=0)
    n, mean, m2, m3, m4, absmax = parts_RK[..., :6].unbind(-1)
    merged_K[..., 1] = (n * mean).sum(dim=0) / n.sum(dim=0).clamp(min=1)
    d = torch.where(n > 0, mean - merged_K[..., 1], 0)
    merged_K[..., 2] = (m2 + n * d**2).sum(dim=0)
    merged_K[..., 3] = (m3 + 3 * d * m2 + n * d**3).sum(dim=0)
    merged_K[..., 4] = (m4 + 4 * d * m3 + 6 * d**2 * m2 + n * d**4).sum(dim=0)
    merged_K[..., 5] = absmax.amax(dim=0)
    return merged_K


def reduced(moments_NK: Tensor, names: Sequence[str]) -> dict[str, npt.NDArray[np.float64]]:
    """Return reductions of moments on the host: one value per tensor, NaN without values."""
    moments = moments_NK.numpy()
    n, mean, m2, _, m4, absmax, _ = moments[:, :_MOMENTS].T
    with np.errstate(divide="ignore", invalid="ignore"):
        of = {
            "norm": np.sqrt(m2 + n * mean**2) + 0 / n,  # NaN without values
            "rms": np.sqrt(m2 / n + mean**2),
            "mean": mean + 0 / n,
            "std": np.sqrt(m2 / n),
            "absmax": absmax + 0 / n,
            "kurtosis": n * m4 / m2**2,
            "histogram": moments[:, _MOMENTS:],
        }
    return {name: of[name] for name in names}
