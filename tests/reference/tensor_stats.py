"""Float64 reference of `tensor_stats`, one tensor and one statistic at a time, and data for it.

Legend: `N` tensors, `K` columns of `StatField`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mp.numerics.stats_view import StatField

__all__ = ["assert_stats_agree", "dense_stats", "planted", "planted_tensors"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The last two shapes have many rows of 1024 values and an unfinished row.
SHAPES = ((), (0,), (1,), (37,), (1024,), (3, 5, 411), (2, 1024), (70, 1009), (211, 1033))


def dense_stats(tensors: Sequence[Tensor], scale: float = 1.0, unscale: float = 1.0) -> Tensor:
    """Return the statistics of values that are widened to float64."""
    rows = []
    for tensor in tensors:
        values = tensor.detach().double().flatten() * unscale
        finite = values[values.isfinite()]
        magnitudes = finite.abs()
        scaled = magnitudes[magnitudes > 0] * scale
        row = dict.fromkeys(StatField, 0.0)
        row[StatField.AMAX] = magnitudes.max().item() if len(magnitudes) else 0.0
        row[StatField.ZEROS] = (finite == 0).sum().item()
        row[StatField.SUBNORMALS] = (scaled < 2.0**-14).sum().item()
        row[StatField.NON_FINITE] = len(values) - len(finite)
        row[StatField.SUM_OF_SQUARES] = finite.square().sum().item()
        rows.append([row[field] for field in StatField])
    return torch.tensor(rows, dtype=torch.float64)


def assert_stats_agree(stats_NK: Tensor, tensors: Sequence[Tensor], **scales: float) -> None:
    """Assert that counts are equal and magnitudes are close."""
    expected_NK = dense_stats(tensors, **scales)
    stats_NK = stats_NK.cpu()
    assert stats_NK.dtype == torch.float64
    assert stats_NK.shape == expected_NK.shape
    whole = [StatField.ZEROS, StatField.SUBNORMALS, StatField.NON_FINITE]
    torch.testing.assert_close(stats_NK[:, whole], expected_NK[:, whole], rtol=0, atol=0)
    edges = [StatField.AMAX, StatField.SUM_OF_SQUARES]
    torch.testing.assert_close(stats_NK[:, edges], expected_NK[:, edges], rtol=1e-6, atol=0)


def planted(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, bad: bool = True
) -> Tensor:
    """Return random values of a random magnitude, with zeros, tiny values, bounds, NaN and inf."""
    size = 10.0 ** torch.empty(()).uniform_(-6, 3, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * size
    kind = torch.rand(shape, generator=generator)
    # 2^-14 is the smallest normal number of fp16, and 2^-25 rounds to 0.
    plants = [0.0, -0.0, 2.0**-14, -(2.0**-14) * (1 - 2.0**-7), 2.0**-24, -(2.0**-24), 2.0**-25]
    if torch.finfo(dtype).tiny < 2.0**-40:
        plants += [-(2.0**-25) * (1 + 2.0**-7), 1e-20, -(2.0**-126), 2.0**-130, 2.0**-133]
    if bad:
        plants += [math.nan, math.inf, -math.inf]
    for i, plant in enumerate(plants):
        values[(kind >= i / 50) & (kind < (i + 1) / 50)] = plant
    return values.to(dtype)


def planted_tensors(seed: int, *, bad: bool = True) -> list[Tensor]:
    """Return a tensor of every shape in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [planted(shape, dtype, generator, bad=bad) for shape in SHAPES for dtype in DTYPES]
