"""The problems that contenders are given: pairs of unit features and a logit scale.

Shapes:
    b: batch. D: feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POSITIVE_COSINE = 0.2
UNITS = 4  # of 2 b^2 D FLOP: the logits, the logits once more, and two gradients
# Without a loss scale, the gradients of fp16 features at b = 8192 are below fp16's smallest number.
FP16_LOSS_SCALE = 8192.0

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def unit_pairs(
    batch: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draw pairs with a cosine of about 0.2 on the device; then no loss vanishes at scale 100."""
    generator = torch.Generator(device).manual_seed(0)
    image_bD, noise_bD = (
        F.normalize(torch.randn(batch, width, generator=generator, device=device), dim=1)
        for _ in range(2)
    )
    noise_bD.mul_((1 - POSITIVE_COSINE**2) ** 0.5).add_(image_bD, alpha=POSITIVE_COSINE)
    return image_bD.to(dtype), F.normalize(noise_bD, dim=1).to(dtype)


@dataclass
class Inputs:
    """Pairs of unit features and a scale, all of which need gradients."""

    image_bD: Tensor
    text_bD: Tensor
    scale: Tensor
    loss_scale: float

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """What gets gradients."""
        return self.image_bD, self.text_bD, self.scale

    def run(self, loss: LossFunction) -> Tensor:
        """Run forward and backward; the gradients stay on the inputs."""
        for leaf in self.leaves:
            leaf.grad = None
        value = loss(*self.leaves)
        value.backward(torch.full_like(value, self.loss_scale))
        return value.detach()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclass(frozen=True)
class Case:
    """One problem: what is asked of all contenders."""

    batch: int
    width: int
    dtype: str
    scale: float
    device: torch.device
    objective: str = "softmax"

    @property
    def flop(self) -> float:
        """FLOP of four units."""
        return UNITS * 2.0 * self.batch**2 * self.width

    def inputs(self, storage: torch.dtype | None = None) -> Inputs:
        """Return new leaves of the same values every time.

        Args:
            storage: Dtype to hold the features in; `None` is the dtype of the case. Either way
                they have the values of the case's dtype.
        """
        dtype = DTYPES[self.dtype]
        pairs = unit_pairs(self.batch, self.width, dtype, self.device)
        image_bD, text_bD = (side_bD.to(storage or dtype).requires_grad_() for side_bD in pairs)
        scale = torch.tensor(self.scale, device=self.device, requires_grad=True)
        return Inputs(image_bD, text_bD, scale, FP16_LOSS_SCALE if dtype == torch.float16 else 1.0)
