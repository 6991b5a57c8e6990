"""Small healthy and failing models, and helpers that train them under monitors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_mp.callbacks import Alarm, InstabilityMonitor
from tests.precision.models import make_trainer

Sabotage = Callable[[pl.LightningModule, int], None]


class Watched(pl.LightningModule):
    """Fits noisy targets, which are generated for every batch from its index.

    Args:
        network: Makes the network, which is called with `inputs(generator)`.
        make_optimizer: Makes the optimizer.
        steps: Number of batches.
        sabotage: Called before each training step with the module and the index of the batch.
        factor: Multiplies the loss of a batch, by its index.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] | None = None,
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        *,
        steps: int = 100,
        sabotage: Sabotage | None = None,
        factor: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = (network or perceptron)()
        self.make_optimizer = make_optimizer or (lambda p: AdamW(p, lr=1e-3))
        self.steps = steps
        self.sabotage = sabotage
        self.factor = factor

    def inputs(self, generator: torch.Generator) -> Tensor:
        # Drawn in fp32 under every plugin, because torch 2.10 draws other numbers in fp16.
        x = torch.randn(32, 16, generator=generator, dtype=torch.float32)
        return x.to(next(self.parameters()).dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.sabotage is not None:
            self.sabotage(self, batch_idx)
        generator = torch.Generator().manual_seed(batch_idx)
        x = self.inputs(generator)
        noise = torch.randn(32, generator=generator, dtype=torch.float32)
        target = torch.sin(3 * x[:, 0].float()) + 0.3 * noise
        loss = F.mse_loss(self.network(x).float().flatten(), target)
        return loss * self.factor(batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(self.steps), batch_size=1)  # type: ignore[arg-type]


class SparseWatched(Watched):
    """Embeds tokens, of which each batch contains few."""

    def inputs(self, generator: torch.Generator) -> Tensor:
        return (torch.randn(32, 4, generator=generator).abs() * 300).long().clamp(max=1999)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
    )


def dying() -> nn.Module:
    """Return a network in which many ReLUs are dead or nearly dead."""
    network = perceptron()
    with torch.no_grad():
        network[0].bias[:24] -= torch.linspace(0, 6, 24)
    return network


def bag_of_tokens() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(2000, 16), nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 1)
    )


def watch(
    model: pl.LightningModule,
    callbacks: Sequence[InstabilityMonitor],
    plugin: Any = None,
    **kwargs: Any,
) -> pl.Trainer:
    """Fit a model on one thread, under monitors."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = make_trainer(plugin, callbacks=list(callbacks), **kwargs)
        trainer.fit(model, ckpt_path=ckpt_path)
    finally:
        torch.set_num_threads(threads)
    return trainer


def kinds(callback: InstabilityMonitor) -> list[tuple[int, str, str | None]]:
    """Return step, kind and tensor of each alarm."""
    return [(a.step, a.kind, a.tensor) for a in callback.alarms]


def first(callback: InstabilityMonitor, kind: str) -> Alarm:
    """Return the first alarm of a kind."""
    return next(alarm for alarm in callback.alarms if alarm.kind == kind)
