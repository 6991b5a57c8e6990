"""Planted failures of the course of training: divergence, explosion, stalls, stagnation."""

import functools
import math
import statistics
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_mp import BalancedAMP, SafeAdamW
from lightning_mp.callbacks import SpikeGuard
from tests.monitors.language_models import GPT2, VOCABULARY
from tests.monitors.planted import Fit, Planted


class Quadratic(Fit):
    """Linear regression on one batch, whose highest stable learning rate is 2 / lambda.

    Args:
        times: The learning rate divided by the highest stable learning rate.
    """

    def __init__(self, times: float) -> None:
        super().__init__(lambda: nn.Linear(8, 1, bias=False), steps=600, optimizer=SGD)
        x, _ = self.batch(0, torch.Generator())
        nn.init.zeros_(self.network.weight)
        highest = torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1]
        self.lr = times * 2 / float(highest)

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        same = torch.Generator().manual_seed(0)
        x = torch.randn(32, 8, generator=same)
        return [x, x.sum(dim=1) / 4 + 0.1 * torch.randn(32, generator=same)]


class HotGPT2(GPT2):
    """A GPT-2 at a constant learning rate, compared with the loss of a uniform prediction.

    Args:
        lr: The learning rate.
    """

    def __init__(self, lr: float) -> None:
        super().__init__(160, lr)
        self.decays = False

    def progress(self) -> tuple[float, float]:
        return statistics.fmean(self.losses[-20:]), 0.9 * math.log(VOCABULARY)


class Recurrent(nn.Module):
    """A recurrent ReLU network, whose state grows with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(8, 24, nonlinearity="relu"), nn.Linear(24, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=1.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.expand(24, -1, -1))[0][-1])


def deep(gain: float = 3.0) -> nn.Module:
    """Return 21 layers, each of which multiplies its input by gain / sqrt(2)."""
    layers: list[nn.Module] = [nn.Linear(8, 24)]
    for _ in range(20):
        layers += [nn.ReLU(), nn.Linear(24, 24)]
        nn.init.normal_(layers[-1].weight, std=gain / 24**0.5)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(24, 1))


class Words(Fit):
    """Fits a number to each of 64 words; from `CHANGE` on, the loss is a sum instead of a mean."""

    CHANGE, BATCH = 298, 1024

    def __init__(self, **changes: Any) -> None:
        super().__init__(
            lambda: nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 1)),
            steps=400, lr=0.1, **changes,
        )  # fmt: skip

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        word = torch.randint(64, (self.BATCH,), generator=generator)
        noise = 0.3 * torch.randn(self.BATCH, generator=generator)
        return [word, word.float().sin() + noise]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * (self.BATCH if self.is_sum else 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.is_sum = batch_idx >= self.CHANGE
        loss = super().training_step(batch, batch_idx)
        self.losses[-1] /= self.BATCH if self.is_sum else 1
        return loss

    def progress(self) -> tuple[float, float]:
        """Return the highest loss since the change and three times the mean loss before it."""
        before = self.losses[self.CHANGE - 50 : self.CHANGE]
        return max(self.losses[self.CHANGE :]), 3 * statistics.fmean(before)


def mislabel(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the targets of every eighth batch from batch 150 on."""
    return x, (100 - 300 * y if index >= 150 and index % 8 == 6 else y)


class Mislabeled(Fit):
    """Has learned if the loss of correctly labeled batches has halved."""

    def progress(self) -> tuple[float, float]:
        good = [x for i, x in enumerate(self.losses) if i < 150 or i % 8 != 6]
        return statistics.fmean(good[-20:]), 0.5 * statistics.fmean(good[:5])


def kill_units(model: Fit, index: int) -> None:
    if index == 100:
        with torch.no_grad():
            model.network[0].bias.fill_(-100.0)


def units(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), *norm, nn.ReLU(), nn.Linear(32, 1))


def rises(step: int) -> float:
    return 1.02 ** max(step - 60, 0)


def rises_and_falls(step: int) -> float:
    """Raise the learning rate 340-fold from step 60 to 160, and lower it again until step 260."""
    return 1.06 ** min(max(step - 60, 0), max(260 - step, 0))


def constant(step: int) -> float:
    return 1.0


FAILURES = [
    Planted(
        name="learning rate 1% above the stable maximum",
        model=Quadratic, settings={"times": 1.01},
        monitor="SpikeGuard", kind="divergence", step=55,
        advises="learning rate of",
        cure="half the learning rate", remedy={"times": 0.5},
    ),
    Planted(
        name="learning rate at which GPT-2 does not learn",
        model=HotGPT2, settings={"lr": 0.3},
        monitor="SpikeGuard", kind="stalled_loss", step=95,
        advises="learning rate of",
        cure="a lower learning rate", remedy={"lr": 3e-3},
    ),
    Planted(
        name="learning rate at which GPT-2 diverges in its first steps",
        model=HotGPT2, settings={"lr": 1.0},
        monitor="ParameterMonitor", kind="weight_growth",
        tensors=("network.transformer.wte.weight",), step=20,
        advises="Lower the learning rate",
        cure="a lower learning rate", remedy={"lr": 3e-3},
    ),
    Planted(
        name="rising learning rate",
        settings={"steps": 400, "schedule": rises},
        monitor="SpikeGuard", kind="divergence", from_step=60, step=295,
        advises="lower the learning rate",
        cure="a constant learning rate", remedy={"schedule": constant},
    ),
    Planted(
        name="plateau after divergence",
        settings={"steps": 500, "schedule": rises_and_falls},
        monitor="SpikeGuard", kind="divergence", from_step=60, step=175,
        advises="lower the learning rate",
        cure="a constant learning rate", remedy={"schedule": constant},
    ),
    Planted(
        name="exploding hidden state of a recurrent network",
        settings={"network": Recurrent, "lr": 0.5, "optimizer": SGD},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.rnn",), step=4,
        advises="`gradient_clip_val`",
        cure="Trainer(gradient_clip_val=0.1)", options={"gradient_clip_val": 0.1},
    ),
    Planted(
        name="exploding activations of a deep network",
        settings={"network": deep, "steps": 200, "lr": 1e-2, "optimizer": SGD},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.10",), step=1,
        advises="Smaller initial weights",
        cure="smaller initial weights",
        remedy={"network": functools.partial(deep, 2**0.5)},
    ),
    Planted(
        name="sudden growth of the gradient of an embedding",
        model=Words,
        monitor="AdamStateMonitor", kind="update_rms", tensors=("network.0.weight",),
        from_step=Words.CHANGE, step=Words.CHANGE + 3,
        advises="SafeAdamW(clip_update_rms=1.0)",
        cure="SafeAdamW(clip_update_rms=1.0)",
        remedy={"optimizer": functools.partial(SafeAdamW, clip_update_rms=1.0)},
    ),
    Planted(
        name="mislabeled batches",
        model=Mislabeled,
        settings={
            "steps": 300, "lr": 1e-2, "corrupt": mislabel,
            "optimizer": functools.partial(AdamW, fused=True),
        },
        monitor="SpikeGuard", kind="loss_spike", from_step=150, step=150,
        advises="SpikeGuard(action='skip')",
        cure="SpikeGuard(action='skip')", callbacks=lambda: [SpikeGuard(action="skip")],
    ),
    Planted(
        name="dead units",
        settings={"network": units, "steps": 620, "before": kill_units},
        monitor="AdamStateMonitor", kind="zero_run", tensors=("network.0.weight",),
        from_step=100, step=600,
        advises="put a norm before them",
        cure="a norm before the activation", remedy={"network": lambda: units(nn.LayerNorm(32))},
    ),
    Planted(
        name="updates too small to change a weight",
        settings={"lr": 1e-11},
        monitor="AdamStateMonitor", kind="update_to_weight", tensors=("network.0.weight",),
        step=20,
        advises="Raise the learning rate",
        cure="a higher learning rate", remedy={"lr": 3e-3},
    ),
    Planted(
        name="updates below half a ULP of bf16 weights",
        precision=lambda: HalfPrecision("bf16-true"),
        settings={"lr": 1e-5, "steps": 400, "share": 0.95},
        monitor="AdamStateMonitor", kind="stagnant_weights",
        step=20,
        advises="Keep weights in fp32",
        cure="BalancedAMP, which keeps fp32 weights",
        cured_precision=lambda: BalancedAMP(half="bf16"),
    ),
    Planted(
        name="epsilon above all gradients from the start",
        settings={"factor": 1e-4, "optimizer": functools.partial(AdamW, eps=1.0)},
        monitor="AdamStateMonitor", kind="below_epsilon", tensors=("network.0.weight",),
        step=1,
        advises="Lower epsilon to 1e-09",
        cure="eps=1e-8", remedy={"optimizer": AdamW},
    ),
]  # fmt: skip
