"""`AdamStateMonitor` with two optimizers, of which one must not hide the alarms of the other."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor
from torch.optim import Adam

from lightning_mp.callbacks import AdamStateMonitor
from tests.callbacks.models import Watched, watch

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


class Pair(Watched):
    """Has two optimizers with different learning rates."""

    def __init__(self, lr: float, **options: Any) -> None:
        super().__init__(**options)
        self.lr, self.automatic_optimization = lr, False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        network: Any = self.network
        halves = ((network[:2], self.lr), (network[2:], 4 * self.lr))
        return [Adam(half.parameters(), lr=lr) for half, lr in halves]


def test_stagnant_weights_of_both_of_two_optimizers_raise_an_alarm() -> None:
    watcher = AdamStateMonitor(every_n_steps=5, baseline_samples=5)
    watch(Pair(1e-6, steps=20), [watcher], HalfPrecision("bf16-true"))
    stagnant = {a.tensor for a in watcher.alarms if a.kind == "stagnant_weights"}
    assert {str(name).partition(".weight")[0] for name in stagnant} == {"network.0", "network.2"}


def test_growth_in_both_of_two_optimizers_raises_update_rms() -> None:
    def grow(module: Any, step: int) -> None:
        for p in module.parameters() if step == 0 else []:
            p.register_hook(lambda g: torch.full_like(g, 10.0 if module.now >= 160 else 1.0))
        module.now = step

    watcher = AdamStateMonitor(every_n_steps=5, baseline_samples=5)
    watch(Pair(1e-6, steps=175, sabotage=grow), [watcher])
    names = [str(alarm.tensor) for alarm in watcher.alarms if alarm.kind == "update_rms"]
    assert {name.startswith("network.0") for name in names} == {True, False}
