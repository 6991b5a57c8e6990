"""PureFP16 ends where fp32 does: an MLP in 3000 small steps, a T5, the demo's CLIP."""

import functools
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, perceptron
from tests.precision.test_balanced_amp_clip import train as train_clip

HALVES = "fp16", "bf16"
SEEDS = 0, 1, 2

# --- updates below half a step of the weights ----------------------------------------------------

STEPS, STEPS_A_BATCH, LR = 3000, 500, 2e-4


class Slow(Regression):
    """Takes many small steps a batch, by hand: Lightning's own work would take longer than them."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)), AdamW
        )
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for step in range(STEPS_A_BATCH):
            (group,) = optimizer.param_groups
            group["lr"] = LR * (1 - (batch_idx * STEPS_A_BATCH + step) / STEPS)
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


def train_slowly(plugin: Any) -> float:
    """Return the final loss in fp32, with the weights that were handed back."""
    model, batch = Slow(), noisy()
    fit(model, plugin, DataLoader([batch] * (STEPS // STEPS_A_BATCH), batch_size=None))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        return model.loss(batch).item()


@functools.cache
def slow_in_fp32() -> float:
    return train_slowly(None)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kahan", "stochastic", "nearest"])
def test_three_thousand_small_steps_end_at_the_loss_of_fp32_unless_rounded_to_nearest(
    way: Any,
) -> None:
    value = train_slowly(PureFP16(write_back=way))
    gap = value / slow_in_fp32() - 1
    if way == "nearest":
        assert gap > 0.02, f"nearest: {gap:.2%}"
    else:
        assert abs(gap) < 0.005, f"{way}: {gap:.2%}"


# --- what Lightning's own fp16 does --------------------------------------------------------------


def test_16_true_makes_every_weight_non_finite_where_the_plugin_learns() -> None:
    """Lightning#20619."""

    def make() -> Regression:
        return Regression(perceptron, lambda p: Adam(p, lr=1e-2))

    stock, model = make(), make()
    fit(stock, None, loader(3), precision="16-true")
    assert not any(p.isfinite().any() for p in stock.parameters())
    fit(model, PureFP16(), loader(3), max_epochs=20)
    assert all(p.isfinite().all() for p in model.parameters())
    assert math.fsum(model.losses[-3:]) < 0.5 * math.fsum(model.losses[:3])


# --- larger models -------------------------------------------------------------------------------


class Reverses(pl.LightningModule):
    """A tiny T5 that learns to write words backwards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(seed)
        config = T5Config(
            vocab_size=20, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, is_gated_act=True,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        self.network = T5ForConditionalGeneration(config)

    def loss(self, words: Tensor) -> Tensor:
        target = words.flip(1)
        logits = self.network(input_ids=words, labels=target).logits
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-3)


def train_t5(seed: int, plugin: Any) -> tuple[float, float]:
    """Return the loss over all words in fp32, before and after training."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, 20, (128, 6), generator=generator)
    model = Reverses(seed)

    def loss() -> float:
        with torch.no_grad():
            return model.eval().loss(words).item()

    start = loss()
    fit(model, plugin, DataLoader([[w] for w in words.split(32)], batch_size=None), max_epochs=18)
    return start, loss()


TRAINERS = {"t5": train_t5, "clip": train_clip}


@functools.cache
def losses_in_fp32(name: str) -> list[float]:
    pairs = [TRAINERS[name](seed, None) for seed in SEEDS]
    assert all(end < 0.85 * start for start, end in pairs)  # it has learnt
    return [end for _, end in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_mean_loss_of_three_seeds_is_that_of_fp32(name: str, half: Any) -> None:
    values = [TRAINERS[name](seed, PureFP16(half=half))[1] for seed in SEEDS]
    gap = math.fsum(values) / math.fsum(losses_in_fp32(name)) - 1
    assert abs(gap) < 0.01, f"{gap:.2%}: {values} instead of {losses_in_fp32(name)}"
