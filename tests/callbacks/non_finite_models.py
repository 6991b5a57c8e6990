"""Small modules that fail in one known place, and helpers that train them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.callbacks.non_finite_locator import NonFiniteLocator

WIDTH = 16


def mixed(init_scale: float = 2.0**10) -> MixedPrecision:
    """Return Lightning's `16-mixed` with fp16 and a loss scale on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return MixedPrecision("16-mixed", "cpu", scaler)


class Perceptron(nn.Module):
    """Two layers; the second can be made to overflow in the dropout after it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(torch.sigmoid(self.fc1(x))))

    def overflow(self) -> None:
        """Make `fc2` return 64576, which fp16 can hold, and dropout 71751, which overflows."""
        with torch.no_grad():
            self.fc1.weight.zero_()
            self.fc1.bias.fill_(5.0)
            self.fc2.weight.zero_()
            self.fc2.bias.fill_(5000.0)
            self.fc2.weight[:, 0] = 60000.0


class Model(pl.LightningModule):
    """Fits a body and a linear head.

    Args:
        body: Makes the module between input and head.
        change: Called before each batch with the model and the index of the batch.
        loss_of: Computes the loss from the output of the head and the targets.
        automatic: Whether optimization is automatic.
    """

    def __init__(
        self,
        body: Callable[[], nn.Module] = Perceptron,
        change: Callable[[Any, int], None] = lambda model, index: None,
        loss_of: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
        automatic: bool = True,
        make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = body(), nn.Linear(WIDTH, 1)
        self.change, self.loss_of = change, loss_of
        self.make_optimizer = make_optimizer
        self.automatic_optimization = automatic
        self.runs: list[int] = []
        self.losses: list[Tensor] = []
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).float().flatten()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.runs.append(batch_idx)
        x, y = batch["x"], batch["nested"][0]
        loss = self.loss_of(self(x), y.float())
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change(self, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights.append(torch.cat([p.detach().double().flatten() for p in self.parameters()]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), lr=1e-3)


def data(batches: int = 6, rows: int = 8, bad: Callable[[Tensor], None] | None = None) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * rows, 8, generator=generator)
    if bad is not None:
        bad(x)
    y = torch.randn(batches * rows, generator=generator)

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        x, y = (torch.stack(each) for each in zip(*samples, strict=True))
        return {"x": x, "nested": [y]}

    return DataLoader(TensorDataset(x, y), batch_size=rows, collate_fn=collate)


def fit(model: pl.LightningModule, loader: Any, plugin: Any = None, **kwargs: Any) -> pl.Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    plugins = [] if plugin is None else [plugin]
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **kwargs}
    trainer = pl.Trainer(**options, plugins=plugins)
    trainer.fit(model, loader)
    return trainer


def locate(
    model: pl.LightningModule, plugin: Any = None, loader: Any = None, **kwargs: Any
) -> NonFiniteLocator:
    """Train under a locator and return it."""
    names = ("repeated", "check_gradients", "action", "max_replays", "near_limit")
    locator = NonFiniteLocator(**{k: kwargs.pop(k) for k in names if k in kwargs})
    fit(model, data() if loader is None else loader, plugin, callbacks=[locator], **kwargs)
    return locator
