"""`Planted` failures, and the small model in which most are planted."""

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


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A failure, where and when it must be found, and the remedy that cures it.

    Args:
        name: Of the test.
        model: The class of the model.
        settings: What it fails with.
        precision: Makes the precision plugin of the failing run.
        monitor: The class that must find it; `ANY_MONITOR` where any may.
        kind: Of the alarm; `None` where there are several ways to see it.
        tensors: Names of which the alarm must have one; none for a failure of the whole.
        from_step: The step at which the failure is planted; no monitor may say a word before.
        step: The step at which it must be found.
        advises: What the remedy in the alarm must hold.
        cure: What is done about it, in words.
        remedy: The same as settings that take the place of those above.
        cured_precision: The same as a precision plugin, where it is one.
        callbacks: The same as callbacks, where it is some.
        options: The same as options of the Trainer.
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
        return train(self.model(**self.settings), self.precision())

    def cured(self) -> Outcome:
        """Train with the remedy."""
        plugin = (self.cured_precision or self.precision)()
        model = self.model(**{**self.settings, **self.remedy})
        return train(model, plugin, *self.callbacks(), **self.options)

    def found(self, outcome: Outcome) -> Alarm | None:
        """Return the first alarm that names the failure."""
        return next(
            (
                alarm
                for alarm in outcome.alarms
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
    """Fits a smooth function of 8 numbers, and can be broken in many places.

    Args:
        network: What to fit.
        steps: How long.
        lr: The learning rate, without a warm-up.
        optimizer: Parameters and learning rate -> optimizer.
        schedule: Step -> factor of the learning rate.
        corrupt: Index, inputs and targets of a batch -> those that are trained on.
        before: Called with the model before each batch, and its index.
        criterion: Outputs and targets -> loss.
        factor: Multiplies the loss of every batch.
        share: Of its first losses, which its last ones must be below for a run that learned.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] = perceptron,
        *,
        steps: int = 200,
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
