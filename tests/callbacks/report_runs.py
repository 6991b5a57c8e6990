"""Models and monitors for tests of reports, and functions that read a report."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.callbacks.monitor import InstabilityMonitor
from tests.callbacks.models import Watched


class RecordsCourse(Watched):
    """Records its losses, and the norms of its gradients in float64."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        squares = [p.grad.double().square().sum() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


def values_of(data: dict[str, Any], name: str) -> dict[int, float]:
    curve = data["curves"][name]
    return dict(zip(curve["steps"], curve["values"], strict=True))


class AlarmAt(InstabilityMonitor):
    """Raises an alarm at some steps."""

    def __init__(self, *steps: int, value: float = 2.5) -> None:
        super().__init__(repeat_after_steps=1)
        self.steps, self.value = steps, value

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, *rest: Any) -> None:
        if rest[-1] in self.steps:
            self.alarm(trainer, "odd", "It is odd.", "Look.", value=self.value)


def read_data(path: Path) -> dict[str, Any]:
    """Return the data of a report, given the JSON file or its folder."""
    return json.loads((path / "instability.json" if path.is_dir() else path).read_text())
