"""The problems that contenders are given: pairs of unit features and a logit scale.

Shapes:
    b: batch. D: feature width. r: rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POSITIVE_COSINE = 0.2
TOY_BATCH = 64
UNITS = 4  # of 2 b^2 D FLOP: the logits, the logits once more, and two gradients
# Without a loss scale, the gradients of fp16 features at b = 8192 are below fp16's smallest number.
FP16_LOSS_SCALE = 8192.0
_CHUNK_ROWS = 2**18  # a GiB in fp32 at D = 1024

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def unit_pairs(
    batch: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    chunk_rows: int = _CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Draw pairs with a cosine of about 0.2 on the device; then no loss vanishes at scale 100.

    Features are drawn in fp32, `chunk_rows` at a time, and rounded to `dtype`.
    """
    generator = torch.Generator(device).manual_seed(0)
    image_bD, text_bD = (torch.empty(batch, width, dtype=dtype, device=device) for _ in range(2))
    for start in range(0, batch, chunk_rows):
        rows = slice(start, min(start + chunk_rows, batch))
        shape = rows.stop - start, width
        image_rD, noise_rD = (
            F.normalize(torch.randn(shape, generator=generator, device=device), dim=1)
            for _ in range(2)
        )
        image_bD[rows] = image_rD
        noise_rD.mul_((1 - POSITIVE_COSINE**2) ** 0.5).add_(image_rD, alpha=POSITIVE_COSINE)
        text_bD[rows] = F.normalize(noise_rD, dim=1)
    return image_bD, text_bD


@dataclass
class Inputs:
    """Pairs of unit features and a scale, all of which need gradients."""

    image_bD: Tensor
    text_bD: Tensor
    scale: Tensor
    loss_scale: float = 1.0

    @classmethod
    def make(
        cls, batch: int, width: int, dtype: torch.dtype, scale: float, device: torch.device
    ) -> Inputs:
        """Draw features and make leaves of them."""
        leaves = [value.requires_grad_() for value in unit_pairs(batch, width, dtype, device)]
        scale_leaf = torch.tensor(scale, device=device, requires_grad=True)
        return cls(*leaves, scale_leaf, FP16_LOSS_SCALE if dtype == torch.float16 else 1.0)

    def to(self, dtype: torch.dtype | None) -> Inputs:
        """Return new leaves of the same values in `dtype`, or these inputs themselves."""
        if dtype is None or dtype == self.image_bD.dtype:
            return self
        leaves = [
            x.detach().clone().to(to or x.dtype).requires_grad_()
            for x, to in ((self.image_bD, dtype), (self.text_bD, dtype), (self.scale, None))
        ]
        return Inputs(*leaves, self.loss_scale)

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
    device: str

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    @property
    def flop(self) -> float:
        """FLOP of four units."""
        return UNITS * 2.0 * self.batch**2 * self.width

    def inputs(self, storage: torch.dtype | None = None, *, rounded: bool = True) -> Inputs:
        """Return the same features every time.

        Args:
            storage: Dtype to hold them in; `None` is the dtype of the case.
            rounded: Round them to the dtype of the case before they are held in `storage`.
        """
        dtype = DTYPES[self.dtype]
        if rounded or storage is None:
            return Inputs.make(self.batch, self.width, dtype, self.scale, self.place).to(storage)
        exact = Inputs.make(self.batch, self.width, storage, self.scale, self.place)
        return replace(exact, loss_scale=FP16_LOSS_SCALE if dtype == torch.float16 else 1.0)
