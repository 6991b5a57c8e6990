"""A model with arguments and data, like a user's model."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.quiet import QUIET


class Model(pl.LightningModule):
    def __init__(self, loss: nn.Module | None = None, metric: nn.Module | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.metric = metric
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 4), batch_size=2)


TRAINER = QUIET | {"max_steps": 1}
