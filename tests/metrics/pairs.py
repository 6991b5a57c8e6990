"""Pairs with ids, and the values of a metric for them."""

import torch
from torch import Tensor

from lightning_mp.metrics import ContrastiveRecall

TOP_K = (1, 5, 10)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make_pairs(
    n_images: int, n_texts: int, width: int, *, seed: int = 0, grid: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return correlated features with several texts per image, in shuffled order.

    With `grid`, all entries are small integers, so dot products are exact in every dtype and many
    scores are tied.
    """
    generator = torch.Generator().manual_seed(seed)
    image_ids = torch.randperm(n_images, generator=generator) * 7 + 3
    owner = torch.randint(n_images, (n_texts,), generator=generator)
    owner[torch.randperm(n_texts, generator=generator)[:n_images]] = torch.arange(n_images)
    image = torch.randn(n_images, width, generator=generator)
    text = image[owner] + 1.5 * torch.randn(n_texts, width, generator=generator)
    if grid:
        image, text = image.mul(1.5).round().clamp(-3, 3), text.round().clamp(-3, 3)
    return image, text, image_ids, image_ids[owner]


def as_floats(values: dict[str, Tensor]) -> dict[str, float]:
    assert all(v.shape == () and v.dtype == torch.float32 for v in values.values())
    return {name: float(value) for name, value in values.items()}


def compute_once(*batch: Tensor, **options: object) -> dict[str, float]:
    metric = ContrastiveRecall(**options)
    metric.update(*batch)
    return as_floats(metric.compute())
