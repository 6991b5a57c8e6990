"""AdamW in float64, with clipping of the update's RMS, and with atan2 instead of the division."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AdamWReference:
    """One weight tensor that is stepped in float64."""

    weight: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    clip_update_rms: float | None = None
    rule: str = "adam"
    steps: int = 0

    def __post_init__(self) -> None:
        self.weight = self.weight.detach().double().clone()
        self.exp_avg = torch.zeros_like(self.weight)
        self.exp_avg_sq = torch.zeros_like(self.weight)

    def step(self, gradient: Tensor) -> None:
        gradient = gradient.double()
        beta1, beta2 = self.betas
        self.steps += 1
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * gradient
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * gradient**2
        mean = self.exp_avg / (1 - beta1**self.steps)
        square = self.exp_avg_sq / (1 - beta2**self.steps)
        lr = self.lr
        if self.clip_update_rms is not None:
            floor = torch.full_like(square, self.eps**2)
            rms = (gradient**2 / torch.maximum(square, floor)).mean().sqrt().item()
            lr /= max(1.0, rms / self.clip_update_rms)
        if self.rule == "adam":
            update = mean / (square.sqrt() + self.eps)
        else:
            update = 1.27 * torch.atan2(mean, square.sqrt())
        self.weight = self.weight * (1 - self.lr * self.weight_decay) - lr * update


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest expected value, which is at least `floor`."""
    scale = expected.double().abs().max().clamp_min(max(floor, torch.finfo(torch.float64).tiny))
    return ((value.double() - expected.double()).abs().max() / scale).item()
