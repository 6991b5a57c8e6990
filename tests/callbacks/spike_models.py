"""A small model with planted spikes, and a callback that records its training."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.callbacks.spike_guard import SpikeGuard

NAN = float("nan")
PLANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda loss: loss * NAN,
    "spike": lambda loss: loss * 10,
    "explosion": lambda loss: loss * 1000,
    "loss only": lambda loss: loss + 9 * loss.detach(),
    "gradient only": lambda loss: loss + 9 * (loss - loss.detach()),
    "nan gradient": lambda loss: _with_nan_gradient(loss),
}


def _with_nan_gradient(loss: Tensor) -> Tensor:
    loss = loss * 1
    loss.register_hook(lambda gradient: gradient * NAN)
    return loss


def make_batches(count: int, size: int = 64, seed: int = 0) -> list[list[Tensor]]:
    """Return batches of noisy regression."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, 8, generator=generator)
    y = x[..., :4].sum(-1, keepdim=True).tanh()
    y = y + 0.3 * torch.randn(count, size, 1, generator=generator)
    return [list(batch) for batch in zip(x, y, strict=True)]


def make_loader(batches: list[list[Tensor]]) -> DataLoader[Any]:
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    # Without a generator, each epoch would draw a seed from the global one.
    return DataLoader(
        TensorDataset(x, y),
        batch_size=len(batches[0][0]),
        generator=torch.Generator(),
    )


class PlantedModel(pl.LightningModule):
    """Noisy regression whose loss is modified in some batches.

    Args:
        planted: Maps the number of a batch, counted over epochs, to a key of `PLANTS`.
        make_optimizer: Makes the optimizer from the parameters.
        make_schedule: Makes the LR schedule, which is stepped after each step.
        dropout: Dropout probability between the layers.
    """

    def __init__(
        self,
        planted: dict[int, str] | None = None,
        make_optimizer: Callable[[Any], Optimizer] | None = None,
        make_schedule: Callable[[Optimizer], Any] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 1))
        self.planted = planted or {}
        self.make_optimizer = make_optimizer or (lambda p: torch.optim.AdamW(p, lr=3e-3))
        self.make_schedule = make_schedule
        self.seen: list[int] = []

    def compute_loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y.float())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        count = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        self.seen.append(count)
        loss = self.compute_loss(batch)
        return PLANTS[self.planted[count]](loss) if count in self.planted else loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_schedule(optimizer), "interval": "step"}]

    @property
    def optimizer(self) -> Optimizer:
        optimizers = self.optimizers(use_pl_optimizer=False)
        return optimizers[0] if isinstance(optimizers, list) else optimizers


class StepRecorder(pl.Callback):
    """Records which steps changed the weights, and `global_step` and learning rate after each."""

    def __init__(self) -> None:
        self.moved: list[bool] = []
        self.global_steps: list[int] = []
        self.lrs: list[float] = []
        self._before = torch.zeros(0)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._before = self._everything(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.moved.append(not torch.equal(self._before, self._everything(pl_module)))
        self.global_steps.append(trainer.global_step)
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def _everything(self, pl_module: Any) -> Tensor:
        """Return weights and optimizer states in one vector."""
        tensors = [p.detach() for p in pl_module.parameters()]
        for state in pl_module.optimizer.state.values():
            tensors += [v for v in state.values() if isinstance(v, Tensor)]
        return torch.cat([t.double().flatten() for t in tensors])


def fit(
    model: pl.LightningModule,
    batches: list[list[Tensor]],
    *callbacks: pl.Callback,
    **options: Any,
) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(callbacks=list(callbacks), **(defaults | options))
    loaded = {"ckpt_path": ckpt_path} if ckpt_path else {}
    if ckpt_path and "weights_only" in inspect.signature(trainer.fit).parameters:
        loaded["weights_only"] = False  # Lightning 2.5 has no such argument and loads everything
    trainer.fit(model, make_loader(batches), **loaded)
    return trainer


def kinds(guard: SpikeGuard) -> list[tuple[int, str]]:
    return [(alarm.step, alarm.kind) for alarm in guard.alarms]
