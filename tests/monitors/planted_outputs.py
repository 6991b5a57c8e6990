"""Planted failures of outputs: drifting logits, starved experts, an unchanged tower."""

import functools
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from tests.monitors.planted import Fit, Planted
from tests.monitors.planted_numbers import STEP, Attends, WithBatchNorm
from tests.monitors.planted_training import Pairs
from tests.monitors.running import Learner


class Drifts(Learner):
    """Classifies points with a term that rewards large logits, like a wrong sign in a loss.

    A constant that is added to all logits does not change the softmax, so only `z_loss` limits
    log Z. The model has learned if log Z (RMS) is below 30.

    Args:
        z_loss: The factor of the squared log Z in the loss.
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__(800, 3e-2)
        self.network, self.z_loss = (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)),
            z_loss,
        )
        self.log_z: list[float] = []

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(64, 8, generator=generator)
        return [x, x.argmax(dim=1)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.network(batch[0])
        log_z = logits.logsumexp(dim=1)
        self.log_z.append(float(log_z.detach().square().mean().sqrt()))
        drift = -0.1 * logits.mean()
        return F.cross_entropy(logits, batch[1]) + drift + self.z_loss * log_z.square().mean()

    def progress(self) -> tuple[float, float]:
        return statistics.fmean(self.log_z[-20:]), 30.0


class Grows(Drifts):
    """Classifies points with a term that lowers the smallest logit without bound.

    The term does not change log Z. The model has learned if no logit exceeds 30.
    """

    def __init__(self, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.weight_decay = weight_decay

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=6e-3, weight_decay=self.weight_decay)

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.network(batch[0])
        self.log_z.append(float(logits.detach().abs().max()))
        return F.cross_entropy(logits, batch[1]) + 0.1 * logits.amin(dim=1).mean()


class Narrows(Fit):
    """Attention becomes one-hot while its logits stay below 50.

    The model has learned if the mean entropy is above 0.1.
    """

    def __init__(self, has_norm: bool = False) -> None:
        super().__init__(functools.partial(Attends, has_norm), steps=400, before=narrow)

    def progress(self) -> tuple[float, float]:
        attention = self.network.attention
        with torch.no_grad():
            x = self.batch(0, torch.Generator().manual_seed(0))[0]
            x = self.network.embed(x[..., None]) + self.network.position
            query, key = attention.query(x), attention.key(x)
            if attention.has_norm:
                query, key = 4 * F.normalize(query, dim=-1), 4 * F.normalize(key, dim=-1)
            p = (query @ key.mT / 4).softmax(dim=-1)
            entropy = -(p * (p + 1e-30).log()).sum(dim=-1).mean()
        return -float(entropy), -0.1


def narrow(model: Fit, index: int) -> None:
    attention = model.network.attention
    if attention.largest < 48:
        with torch.no_grad():
            for layer in (attention.query, attention.key):
                layer.weight.mul_(1.01)


class Sparse(nn.Module):
    """Eight experts, one of which a router chooses for each sample."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(8)
        )
        nn.init.zeros_(self.gate.bias)
        with torch.no_grad():
            self.gate.bias[3] = bias

    def forward(self, x: Tensor) -> Tensor:
        probability = self.gate(x).softmax(dim=-1)
        weight, chosen = probability.topk(1, dim=-1)
        share = F.one_hot(chosen[:, 0], 8).float().mean(dim=0)
        self.balance = 8 * (share * probability.mean(dim=0)).sum()
        self.highest = float(share.max())
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return weight * outputs.gather(1, chosen[..., None])[:, 0]


class Routed(Fit):
    """Has learned if the busiest expert gets less than half of the samples.

    Args:
        balance: The weight of the load-balancing loss.
    """

    def __init__(self, balance: float = 0.0) -> None:
        super().__init__(functools.partial(Sparse, 4.0), steps=200, lr=1e-2)
        self.balance = balance

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(512, 8, generator=generator)
        return [x, (x[:, 0] + x[:, 1] * x[:, 2]).tanh()]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.balance * self.network.balance

    def progress(self) -> tuple[float, float]:
        return self.network.highest, 0.5


class Halved(Pairs):
    """Aligns two towers, one of which gets no gradient; has learned if its weights moved by 10%."""

    def __init__(self, is_detached: bool = True) -> None:
        super().__init__(has_negatives=True, lr=3e-3)
        self.is_detached = is_detached
        self.first = self.text[0].weight.detach().clone()

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(256, 16, generator=generator)
        return [x, x + torch.randn(256, 16, generator=generator)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        image, text = self.image(batch[0]), self.text(batch[1])
        text = text.detach() if self.is_detached else text
        image, text = F.normalize(image, dim=1), F.normalize(text, dim=1)
        return self.contrastive(image, text, 10.0)

    def progress(self) -> tuple[float, float]:
        return -float((self.text[0].weight.detach() - self.first).norm() / self.first.norm()), -0.1


def units(*norm: nn.Module) -> nn.Module:
    """Return a network in which the units of the third layer can die."""
    layers = [layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.ReLU())]
    middle = (nn.Linear(32, 32), *norm, nn.ReLU())
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *layers, *middle, *layers, nn.Linear(32, 1))


def kill_the_middle(model: Fit, index: int) -> None:
    if index == 100:
        with torch.no_grad():
            model.network[6].bias.fill_(-100.0)


def scaled_between_samples(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Give one batch, between two samples of the monitors, a variance of 1e6."""
    return (1e3 * x if index == STEP + 3 else x), y


def clamped_between_samples(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = scaled_between_samples(index, x, y)
    return x.clamp(-10, 10), y


FAILURES = [
    Planted(
        name="drift of log Z of the output logits",
        model=Drifts,
        monitor="ActivationRangeMonitor", kind="output_log_z", tensors=("training_step",), step=500,
        advises="z-loss",
        cure="a z-loss", remedy={"z_loss": 1e-2},
    ),
    Planted(
        name="output logits that grow without bound",
        model=Grows,
        monitor="ActivationRangeMonitor", kind="output_logit", tensors=("training_step",), step=500,
        advises="`weight_decay` for the last layer",
        cure="a weight decay for the last layer", remedy={"weight_decay": 3.0},
    ),
    Planted(
        name="attention that becomes one-hot",
        model=Narrows,
        monitor="ActivationRangeMonitor", kind="attention_entropy",
        tensors=("network.attention",), step=180,
        advises="Normalize queries and keys",
        cure="normalized queries and keys", remedy={"has_norm": True},
    ),
    Planted(
        name="router that sends all tokens to one expert",
        model=Routed,
        monitor="ActivationRangeMonitor", kind="expert_overloaded",
        tensors=("network[3]",), step=140,
        advises="load-balancing loss",
        cure="a load-balancing loss", remedy={"balance": 0.1},
    ),
    Planted(
        name="experts without tokens",
        model=Routed,
        monitor="ActivationRangeMonitor", kind="expert_dead",
        tensors=("network[0]",), step=140,
        advises="load-balancing loss",
        cure="a load-balancing loss", remedy={"balance": 0.1},
    ),
    Planted(
        name="tower that does not change",
        model=Halved,
        monitor="RepresentationMonitor", kind="tower_unchanged", tensors=("text",), step=72,
        advises=".detach()",
        cure="no `.detach()`", remedy={"is_detached": False},
    ),
    Planted(
        name="jump of BatchNorm's running variance between two samples",
        model=WithBatchNorm, settings={"corrupt": scaled_between_samples, "steps": 100},
        monitor="ActivationRangeMonitor", kind="buffer_jump",
        tensors=("network.1.running_var",), from_step=STEP, step=80,
        advises="far out of range",
        cure="clamped inputs", remedy={"corrupt": clamped_between_samples},
    ),
    Planted(
        name="dead units in the middle of a network",
        settings={
            "network": units, "steps": 400, "before": kill_the_middle, "share": 0.6,
        },
        monitor="GradientUnderflowMonitor", kind="gradient_underflow",
        tensors=("network.6.weight", "network.6.bias"), from_step=100, step=350,
        advises="if its activations have died",
        cure="a norm before the activation",
        remedy={"network": functools.partial(units, nn.BatchNorm1d(32, affine=False))},
    ),
]  # fmt: skip
