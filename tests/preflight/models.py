"""Models with a planted weakness, data, plugins and Trainers for tests of the preflight."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import BalancedAMP, PureFP16
from tests.quiet import QUIET

WIDTH, TOKENS, WORDS, ROWS = 32, 12, 40, 8


class Cancellation(nn.Module):
    """Adding and subtracting a constant loses the low bits of the input in half precision."""

    def __init__(self, constant: float = 300.0) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.constant) - self.constant


class HandWrittenNorm(nn.Module):
    """The squares overflow in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 400
        return y / (y * y).mean(-1, keepdim=True).sqrt()


class Overflow(nn.Module):
    """The intermediate value overflows in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e5) * 1e-5


class LostGradients(nn.Module):
    """The intermediate gradient underflows in fp16 at any usual loss scale."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e-6) * 1e6


class Shifts(nn.Module):
    """Five modules add and subtract 30; fp32 in any four of them is not enough."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Sequential(*(Cancellation(30.0) for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        for shift in self.shifts:
            x = shift(x)
        return x


class LayerScale(nn.Module):
    """Scales a branch by 1e-5, like ConvNeXt at initialization, so gradients shrink as much."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor(1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


WEAK: dict[str, Callable[[], nn.Module]] = {
    "cancellation": Cancellation,
    "hand-written norm": HandWrittenNorm,
    "overflow": Overflow,
    "lost gradients": LostGradients,
}


class Block(nn.Module):
    """A residual block.

    Args:
        weak: A module between the first layer and the activation.
        dropout: Dropout probability of the output.
    """

    def __init__(self, weak: nn.Module | None, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.weak = nn.Linear(WIDTH, 4 * WIDTH), weak or nn.Identity()
        self.down, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.weak(self.up(self.norm(x))))))


class Words(pl.LightningModule):
    """Predicts the next word.

    Args:
        weak: Key of `WEAK` for the second of three blocks, or `None`.
        dropout: Dropout probability of the blocks.
    """

    def __init__(self, weak: str | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        makes = [None, WEAK[weak] if weak else None, None]
        self.blocks = nn.ModuleList(Block(make() if make else None, dropout) for make in makes)
        self.running = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        x = self.running(x.flatten(0, 1)).view_as(x)
        loss = F.cross_entropy(self.head(x).float().flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sentences(pl.LightningDataModule):
    """Random words."""

    def train_dataloader(self) -> DataLoader[Any]:
        torch.manual_seed(2)
        words = torch.randint(0, WORDS, (6 * ROWS, TOKENS))
        return DataLoader(TensorDataset(words, words.roll(-1, 1)), ROWS, shuffle=True)


def plugin(name: str) -> Any:
    """Return the precision plugin with a name such as `"BalancedAMP fp16"`."""
    if name == "16-mixed":
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    if name == "bf16-true":
        return HalfPrecision(name)
    kind, half = name.split()
    return {"BalancedAMP": BalancedAMP, "PureFP16": PureFP16}[kind](half=half)


def trainer(name: str, callbacks: Any, **kwargs: Any) -> pl.Trainer:
    """Return a Trainer with the precision plugin of a name."""
    kwargs = {**QUIET, "max_steps": 4, **kwargs, "callbacks": callbacks}
    return pl.Trainer(**kwargs, plugins=plugin(name))
