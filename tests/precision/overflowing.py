"""An fp16 model whose residual stream overflows in every block."""

import torch
from torch import Tensor, nn

__all__ = ["Block", "batch", "overflowing"]


class Block(nn.Module):
    """Writes to a residual stream: x + fc2(norm(x))."""

    def __init__(self, width: int = 8, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.fc2 = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.norm(x))


def overflowing(blocks: int = 2, width: int = 8) -> nn.Sequential:
    """Return an fp16 model in which every block writes inf."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    for block in model:
        block.fc2.weight.data = torch.randn(width, width).mul(4e4).clamp(-6e4, 6e4)
    return model.half()


def batch(rows: int = 5, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).half()
