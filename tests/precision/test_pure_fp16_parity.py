"""PureFP16 learns from updates below half a ULP, and where 16-true fails."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_mp.precision.pure_fp16 import PureFP16
from tests.parity import Parity
from tests.precision.models import Regression, fit, loader, perceptron

# --- updates below half a ULP of the weights -----------------------------------------------------

STEPS, LR = 150, 5e-5  # smaller than half a ULP of fp16 weights above 1/8


class Slow(Regression):
    """Takes many small steps per batch, because Lightning's overhead per batch is larger."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)),
            lambda parameters: AdamW(parameters, lr=LR),
            seed=seed,
        )
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(STEPS):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        pass


def noisy() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 8, generator=generator)
    noise = 0.3 * torch.randn(64, generator=generator)
    return [x, torch.tanh(x[:, 0] * x[:, 1]) + 0.5 * x[:, 2] + noise]


def train_slowly(seed: int, plugin: Any) -> float:
    """Return the final loss in fp32 with the weights after teardown."""
    model, batch = Slow(seed), noisy()
    fit(model, plugin, DataLoader([batch], batch_size=None))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        return model.loss(batch).item()


SLOW = Parity(train_slowly, references=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["kahan", pytest.param("stochastic", marks=pytest.mark.sweep), "nearest"]
)
def test_small_steps_reach_the_loss_of_fp32_unless_rounded_to_nearest(way: Any) -> None:
    write = "stochastic" if way == "stochastic" else "fp32"
    verdict = SLOW.judge(lambda: PureFP16(write_back=way), "fp16", write=write)
    assert verdict.holds == (way != "nearest"), verdict


# --- 16-true of Lightning ------------------------------------------------------------------------


@pytest.mark.slow
def test_plugin_learns_where_16_true_makes_every_weight_non_finite() -> None:
    """The failure of 16-true is Lightning#20619."""

    def make() -> Regression:
        return Regression(perceptron, lambda p: Adam(p, lr=1e-2))

    stock, model = make(), make()
    fit(stock, None, loader(3), precision="16-true")
    assert not any(p.isfinite().any() for p in stock.parameters())
    fit(model, PureFP16(), loader(3), max_epochs=20)
    assert all(p.isfinite().all() for p in model.parameters())
    assert math.fsum(model.losses[-3:]) < 0.5 * math.fsum(model.losses[:3])
