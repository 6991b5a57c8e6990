"""Training of precision plugins on two gloo ranks."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_mp.precision._weights import working_copies
from tests.precision.models import fit, loader

RANKS, STEPS = 2, 8


def momentum(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9)


def batches(rank: int | None = None) -> DataLoader:
    """Return global batches, or the rank's half of each batch."""
    rows = slice(None) if rank is None else slice(rank, None, RANKS)
    parts = [[part[rows] for part in batch] for batch in loader(STEPS)]
    return DataLoader(parts, batch_size=None)


def fit_on_ranks(model: Any, plugin: Any, data: Any, strategy: Any = None) -> Any:
    working_copies._SMALL = 0  # fixtures of `conftest.py` do not run on ranks
    options = {"devices": RANKS, "use_distributed_sampler": False}
    return fit(model, plugin, data, strategy=strategy or DDPStrategy(), **options)
