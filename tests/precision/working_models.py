"""Models for tests of half copies, and functions that run them under autocast."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.precision._weights.working_copies import WorkingCopies
from lightning_mp.precision.op_policy import OpPolicy

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Seen(nn.Linear):
    """A layer that records the dtype of its weight in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype
        return super().forward(x)


def run(module: nn.Module, *args: Any, half: torch.dtype = torch.float16, **kwargs: Any) -> Any:
    with OpPolicy().context("cpu", half):
        return module(*args, **kwargs)


def gradients(module: nn.Module, *args: Any, half: torch.dtype = torch.float16) -> list[Tensor]:
    module.zero_grad()
    loss = run(module, *args, half=half).float().square().mean()
    with OpPolicy().recompute_context("cpu"):
        loss.backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def assert_close(values: list[Tensor], expected: list[Tensor], half: torch.dtype) -> None:
    """Compare the norm of all errors with the rounding of a few consecutive products."""
    assert len(values) == len(expected)
    one = torch.cat([v.double().flatten() for v in values])
    other = torch.cat([v.double().flatten() for v in expected])
    assert (one - other).norm() < 8 * torch.finfo(half).eps * other.norm()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


X = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))


def bytes_held(working: WorkingCopies) -> int:
    """Return the size of all half copies in bytes."""
    return sum(entry.beside.nbytes for _, entry in working._ledger if entry.beside is not None)
