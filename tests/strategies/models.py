"""Small CLIP-like modules, and the same modules split into micro-batches by hand."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import ContrastiveLoss
from lightning_mp.gradient_cache._served.roles import DeclaredRoles
from lightning_mp.strategies._inf_cl.loader_batches import GatheredLoader
from tests.quiet import QUIET

WIDTH_IN, WIDTH = 12, 24


class InMicroBatches(nn.Module):
    """Runs a tower in micro-batches and keeps the whole graph, without a gradient cache."""

    def __init__(self, tower: nn.Module, rows: int) -> None:
        super().__init__()
        self.tower, self.rows = tower, rows

    def forward(self, batch: Tensor, *args: Any) -> Tensor:
        return torch.cat([self.tower(part, *args) for part in batch.split(self.rows)])


def make_tower(dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH_IN, 32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.LayerNorm(32),
        nn.Linear(32, WIDTH),
    )


class TinyCLIP(pl.LightningModule):
    """Two towers with dropout, a scale, and a head outside of the towers."""

    def __init__(
        self,
        dropout: float = 0.2,
        rows: int | None = None,
        automatic: bool = True,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.visual: nn.Module = make_tower(dropout)
        self.text: nn.Module = make_tower(dropout)
        if rows is not None:
            self.visual, self.text = (InMicroBatches(t, rows) for t in (self.visual, self.text))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.log_scale = nn.Parameter(torch.tensor(2.0))
        self.loss = ContrastiveLoss()
        self.automatic_optimization = automatic
        self.make_optimizer = optimizer
        self.losses: list[float] = []

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        return (
            F.normalize(self.head(self.visual(image)), dim=-1),
            F.normalize(self.text(text).to(self.head.weight.dtype), dim=-1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        image, text = self.features(batch)
        text = text.to(image.dtype)
        loss = self.loss(image, text, self.log_scale.exp())
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(*self.features(batch), self.log_scale.exp()), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), lr=0.1)


def pairs(count: int, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, WIDTH_IN, generator=generator)
    return TensorDataset(image, image + 0.3 * torch.randn(count, WIDTH_IN, generator=generator))


def loader(count: int, batch_size: int) -> DataLoader:
    return DataLoader(pairs(count), batch_size=batch_size)


def gather_batches(loader: Any, count: int, **roles: str) -> Any:
    """Gather loader batches on the host, with declared roles of fields."""
    return GatheredLoader(loader, count, DeclaredRoles(roles), pin=False)


def make_trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, **kwargs}, strategy=strategy)
