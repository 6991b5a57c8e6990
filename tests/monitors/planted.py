"""`Planted` failures, and the small model in which most are planted."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_mp.callbacks import Alarm
from tests.monitors.running import Learner, Outcome, train

ANY_MONITOR = ""


class EndsLostRun(pl.Callback):
    """Ends a run after 40 steps without a finite loss, because its weights do not recover."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if not any(map(math.isfinite, pl_module.losses[-40:])):
            trainer.should_stop = True


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A failure, the alarm that must report it, and the remedy that cures it.

    Args:
        name: Name of the failure in the table and in the test's id.
        model: Class of the model.
        settings: Arguments of the model in the failing run.
        precision: Creates the precision plugin of the failing run.
        monitor: Class that must raise the alarm; `ANY_MONITOR` accepts every class.
        kind: Kind of the alarm; `None` accepts every kind.
        tensors: Names that the alarm may have; an empty tuple accepts every name.
        from_step: Step at which the failure begins; no alarm may come before it.
        step: Step at which the alarm must come.
        advises: Text that the remedy in the alarm must contain.
        cure: The remedy in words.
        remedy: The remedy as arguments of the model, which override `settings`.
        cured_precision: Creates the precision plugin of the remedy, if it has one.
        callbacks: Creates the callbacks of the remedy, if it has any.
        options: The remedy as arguments of the Trainer.
    """

    name: str
    model: Callable[..., Learner] = field(default_factory=lambda: Fit)
    settings: dict[str, Any] = field(default_factory=dict)
    precision: Callable[[], Any] = lambda: None
    monitor: str
    kind: str | None = None
    tensors: tuple[str, ...] = ()
    from_step: int = 0
    step: int
    advises: str
    cure: str
    remedy: dict[str, Any] = field(default_factory=dict)
    cured_precision: Callable[[], Any] | None = None
    callbacks: Callable[[], list[pl.Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)

    def fail(self) -> Outcome:
        """Train without the remedy."""
        return train(self.model(**self.settings), self.precision(), EndsLostRun())

    def cured(self) -> Outcome:
        """Train with the remedy."""
        plugin = (self.cured_precision or self.precision)()
        model = self.model(**{**self.settings, **self.remedy})
        return train(model, plugin, *self.callbacks(), **self.options)

    def found(self, outcome: Outcome) -> Alarm | None:
        """Return the first alarm, or else the first note, that names the failure."""
        return next(
            (
                alarm
                for alarm in (*outcome.alarms, *outcome.notes)
                if self.monitor in (ANY_MONITOR, alarm.monitor)
                and self.kind in (None, alarm.kind)
                and (not self.tensors or alarm.tensor in self.tensors)
            ),
            None,
        )


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


class Fit(Learner):
    """Fits a smooth function of 8 numbers; its arguments can break each part of the training.

    Args:
        network: Creates the network.
        steps: Number of steps.
        lr: Learning rate, without a warm-up.
        optimizer: Creates the optimizer from parameters and learning rate.
        schedule: Maps the step to a factor of the learning rate.
        corrupt: Maps index, inputs and targets of a batch to inputs and targets for the training.
        before: Called before each batch with the model and the index of the batch.
        criterion: Maps outputs and targets to the loss.
        factor: Multiplies the loss of every batch.
        share: A run has learned if its last losses are below this share of its first losses.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] = perceptron,
        *,
        steps: int = 120,
        lr: float = 3e-3,
        optimizer: Callable[..., Optimizer] = AdamW,
        schedule: Callable[[int], float] = lambda step: 1.0,
        corrupt: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda i, x, y: (x, y),
        before: Callable[[Any, int], None] = lambda model, index: None,
        criterion: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
        factor: float = 1.0,
        share: float = 0.9,
    ) -> None:
        super().__init__(steps, lr)
        self.network = network()
        self.optimizer, self.schedule = optimizer, schedule
        self.corrupt, self.before = corrupt, before
        self.criterion, self.factor, self.share = criterion, factor, share

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator)
        y = (x[:, 0] + x[:, 1] * x[:, 2]).tanh() + 0.1 * torch.randn(32, generator=generator)
        return list(self.corrupt(index, x, y))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return self.factor * self.criterion(self.network(x).float().flatten(), y.float())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before(self, batch_idx)

    def rate(self, step: int) -> float:
        return self.schedule(step)

    def make_optimizer(self) -> Optimizer:
        return self.optimizer(self.parameters(), lr=self.lr)

    def progress(self) -> tuple[float, float]:
        measured, bound = super().progress()
        return measured, self.share / 0.9 * bound
