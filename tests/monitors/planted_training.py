"""Planted failures of parameters and features that do not train, and of distant causes."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.contrastive import ContrastiveLoss
from tests.monitors.planted import Fit, Planted
from tests.monitors.planted_numbers import STEP, WithBatchNorm, at_step, repaired
from tests.monitors.running import Learner


class Detached(nn.Module):
    """Two branches, one of which is detached."""

    def __init__(self, is_detached: bool = True) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Linear(8, 64), nn.Tanh()), nn.Linear(64, 1)
        self.is_detached = is_detached

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x.detach() if self.is_detached else x)


def of_copies(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Return an optimizer for the parameters of a copy of the model."""
    return AdamW([p.detach().clone().requires_grad_() for p in parameters], lr=lr)


def of_last_layer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return AdamW([*parameters][-2:], lr=lr)


def decayed(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 30.0) -> Optimizer:
    return AdamW(parameters, lr=lr, weight_decay=weight_decay)


def deep(activation: Any = nn.Sigmoid) -> nn.Module:
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), activation())]
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1))


def residual() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    return nn.Sequential(nn.Linear(8, 32), *(Residual() for _ in range(12)), nn.Linear(32, 1))


class Frozen(nn.Sequential):
    """Has a first layer that may be frozen and that is too narrow to fit without training."""

    def __init__(self, is_trained: bool = False) -> None:
        super().__init__(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self[0].requires_grad_(is_trained)


class Bounded(Fit):
    """Has learned if the RMS of the first layer's weights, 0.2 at the start, is below 1."""

    def progress(self) -> tuple[float, float]:
        return float(self.network[0].weight.detach().square().mean().sqrt()), 1.0


def one_value(value: float) -> Any:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, 0] = value
        return x

    return change


class Pairs(Learner):
    """Aligns two towers; judged by the distance of features, 0.25 if they fill a sphere.

    Args:
        has_negatives: Whether the loss has negatives; otherwise equal features minimize it.
        lr: The learning rate.
    """

    towers = ("image", "text")

    def __init__(self, has_negatives: bool = False, lr: float = 1e-2) -> None:
        super().__init__(120, lr)
        self.image = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.has_negatives, self.contrastive = has_negatives, ContrastiveLoss()
        self.deviations: list[float] = []

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(64, 16, generator=generator)
        return [x, x + torch.randn(64, 16, generator=generator)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        image, text = self.image(batch[0]), self.text(batch[1])
        image, text = F.normalize(image, dim=1), F.normalize(text, dim=1)
        self.deviations.append(float(image.detach().std(dim=0).mean()))
        if self.has_negatives:
            return self.contrastive(image, text, 10.0)
        return F.mse_loss(image, text)

    def progress(self) -> tuple[float, float]:
        return -sum(self.deviations[-10:]) / 10, -0.125


FAILURES = [
    Planted(
        name="optimizer with the parameters of a copied model",
        settings={"optimizer": of_copies},
        monitor="ParameterMonitor", kind="not_optimized", tensors=("network.0.weight",), step=50,
        advises="self.parameters()",
        cure="an optimizer with the model's parameters", remedy={"optimizer": AdamW},
    ),
    Planted(
        name="optimizer with the parameters of the last layer only",
        settings={"optimizer": of_last_layer, "steps": 200, "share": 0.4},
        monitor="ParameterMonitor", kind="not_optimized", tensors=("network.0.weight",), step=50,
        advises="Pass them to an optimizer",
        cure="an optimizer with all parameters", remedy={"optimizer": AdamW},
    ),
    Planted(
        name="detached tower",
        settings={"network": Detached, "share": 0.45, "steps": 300},
        monitor="ParameterMonitor", kind="no_gradient", tensors=("network.stem.0.weight",), step=50,
        advises=".detach()",
        cure="no `.detach()`", remedy={"network": functools.partial(Detached, False)},
    ),
    Planted(
        name="layer frozen by mistake",
        settings={"network": Frozen, "share": 0.6, "steps": 400},
        monitor="ParameterMonitor", kind="frozen_weights", tensors=("network.0.weight",), step=0,
        advises="requires_grad_(True)",
        cure="`requires_grad=True`", remedy={"network": functools.partial(Frozen, True)},
    ),
    Planted(
        name="learning rate of 0",
        settings={"schedule": lambda step: 0.0},
        monitor="ParameterMonitor", kind="unchanged_weights", tensors=("network.0.weight",),
        step=50,
        advises="a learning rate above 0",
        cure="a learning rate above 0", remedy={"schedule": lambda step: 1.0},
    ),
    Planted(
        name="updates below half a ULP of fp32 weights",
        settings={"optimizer": SGD, "lr": 1e-10},
        monitor="ParameterMonitor", kind="unchanged_weights", tensors=("network.0.weight",),
        step=50,
        advises="Raise the learning rate",
        cure="a learning rate of 0.3", remedy={"lr": 0.3},
    ),
    Planted(
        name="vanishing gradients in a deep network",
        settings={"network": deep, "optimizer": SGD, "lr": 0.1, "share": 0.5},
        monitor="ParameterMonitor", kind="vanishing_gradients", tensors=("network.0.weight",),
        step=40,
        advises="a residual connection",
        cure="residual connections, norms and GELU", remedy={"network": residual, "lr": 0.003},
    ),
    Planted(
        name="weight decay of 30",
        settings={"optimizer": decayed, "steps": 200},
        monitor="ParameterMonitor", kind="weight_collapse", step=150,
        advises="Lower `weight_decay`",
        cure="a weight decay of 0.1",
        remedy={"optimizer": functools.partial(decayed, weight_decay=0.1)},
    ),
    Planted(
        name="weights that grow without bound",
        model=Bounded, settings={"lr": 3.0, "optimizer": Adam},
        monitor="ParameterMonitor", kind="weight_growth", step=20,
        advises="Lower the learning rate",
        cure="a learning rate of 0.003", remedy={"lr": 3e-3},
    ),
    Planted(
        name="features that collapse to one direction",
        model=Pairs,
        monitor="RepresentationMonitor", kind="feature_collapse", tensors=("image",), step=57,
        advises="Check that the loss has negatives",
        cure="a loss with negatives", remedy={"has_negatives": True},
    ),
    Planted(
        name="jump of BatchNorm's running variance to a finite value",
        model=WithBatchNorm, settings={"corrupt": at_step(lambda x: 1e5 * x)},
        monitor="ActivationRangeMonitor", kind="buffer_jump",
        tensors=("network.1.running_var",), from_step=STEP, step=60,
        advises="far out of range",
        cure="clamped inputs", remedy={"corrupt": repaired(lambda x: 1e5 * x)},
    ),
    Planted(
        name="one value of 1e6 in a batch",
        settings={"corrupt": at_step(one_value(1e6), last=200)},
        precision=lambda: BalancedAMP(loss_scale=1.0),
        monitor="NonFiniteLocator", kind="non_finite", tensors=("batch[0]",),
        from_step=STEP, step=STEP + 2,
        advises="Repair or remove such samples",
        cure="clamped inputs", remedy={"corrupt": repaired(one_value(1e6), last=200)},
    ),
    Planted(
        name="fp16 weights with torch's AdamW",
        precision=lambda: HalfPrecision("16-true"),
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.0.weight",), step=1,
        advises="PureFP16",
        cure="PureFP16", cured_precision=PureFP16,
    ),
]  # fmt: skip
