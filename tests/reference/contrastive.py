"""The dense contrastive loss in float64 with autograd; positives are separate from negatives."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

HARD = ("plain", "logits to 1e4", "converged", "rows far apart")


@dataclass
class Reference:
    loss: Tensor
    d_image: Tensor
    d_text: Tensor
    d_scale: Tensor


def dense_loss(image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
    return loss_of_logits(scale * image @ text.T)


def loss_of_logits(logits: Tensor) -> Tensor:
    """Return `mean softplus(LSE of negatives - positive)`, which is accurate for tiny losses."""
    positive = logits.diagonal()
    negatives = logits.masked_fill(torch.eye(len(logits), dtype=torch.bool), -torch.inf)
    terms = [
        torch.logaddexp(negatives.logsumexp(dim) - positive, positive.new_zeros(()))
        if len(logits) > 1
        else positive * 0
        for dim in (1, 0)
    ]
    return (terms[0] + terms[1]).mean() / 2


def dense_sigmoid_loss(
    image: Tensor, text: Tensor, scale: Tensor | float, bias: Tensor | float
) -> Tensor:
    return sigmoid_loss_of_logits(scale * image @ text.T + bias)


def sigmoid_loss_of_logits(logits: Tensor) -> Tensor:
    """Return open_clip's `SigLipLoss` on one process: the sum over pairs over the batch size."""
    labels = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
    return -torch.nn.functional.logsigmoid(labels * logits).sum() / len(logits)


def reference(image: Tensor, text: Tensor, scale: float) -> Reference:
    """Return loss and gradients in float64 for features of any dtype."""
    image, text = (features.detach().double().requires_grad_() for features in (image, text))
    scale_64 = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    loss = dense_loss(image, text, scale_64)
    loss.backward()
    return Reference(loss.detach(), image.grad, text.grad, scale_64.grad)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected value."""
    difference = (value.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


def hard_features(b: int, width: int, case: str) -> tuple[Tensor, Tensor, float]:
    """Return features and a scale for one of the `HARD` cases of logits."""
    image, text = (normalize(torch.randn(b, width), dim=1) for _ in range(2))
    if case == "logits to 1e4":
        return image, text, 1e4
    if case == "converged":  # each pair 40 above its negatives, which are about 1 apart
        own = math.sqrt(0.4) * torch.eye(b)
        return torch.cat([0.3 * image, own], 1), torch.cat([0.3 * text, own], 1), 100.0
    if case == "rows far apart":  # outside the range of one reference
        return image * torch.logspace(-1, 1, b)[:, None], text, 100.0
    return image, text, 100.0
