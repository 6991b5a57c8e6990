"""Small models that train in fp32 and in half precision and record every step."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.quiet import QUIET, parameters_of

Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]

TOKENS, WIDTH_IN, WIDTH = 5, 6, 16


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A transformer from tokens to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH_IN, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens) + self.position)
        return self.head(self.norm(x).mean(dim=1)).float().squeeze(-1)


def perceptron() -> nn.Module:
    """Return a network with half working weights and a norm in fp32."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))


class Regression(pl.LightningModule):
    """Fits a network and records losses, gradients and weights of every step.

    Args:
        network: Creates the network.
        make_optimizer: Creates the optimizer from the parameters.
        seed: Seed of the initial weights.
        bad_batches: Batches whose loss is multiplied by inf.
        interval: Interval of a schedule that multiplies the learning rate by 0.9; `None` for no
            schedule.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] = perceptron,
        make_optimizer: Optimizers = lambda parameters: SGD(parameters, lr=0.1),
        *,
        seed: int = 0,
        bad_batches: Iterable[int] = (),
        interval: str | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network = network()
        self.make_optimizer = make_optimizer
        self.bad_batches = set(bad_batches)
        self.interval = interval
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.gradient_dtypes: set[torch.dtype] = set()
        self.weights: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens, target = batch
        # In torch 2.10, mse_loss of two dtypes has no backward (pytorch#94086).
        return F.mse_loss(self.network(tokens).float().flatten(), target.float())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss * torch.inf if batch_idx in self.bad_batches else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradients = gradients_of(optimizer)
        self.gradient_dtypes |= {g.dtype for g in gradients}
        self.gradient_norms.append(norm_of(gradients))

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights.append(parameters_of(self))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.interval is None:
            return optimizer
        schedule = {"scheduler": StepLR(optimizer, 1, 0.9), "interval": self.interval}
        return [optimizer], [schedule]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p.grad for p in parameters if p.grad is not None]


def norm_of(tensors: Iterable[Tensor]) -> float:
    return sum(t.detach().double().square().sum().item() for t in tensors) ** 0.5


def rows(count: int, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, torch.tanh(x[:, 0] * x[:, 1]) + 0.5 * x[:, 2])


def loader(batches: int, batch_size: int = 16, seed: int = 5) -> DataLoader:
    return DataLoader(rows(batches * batch_size, seed), batch_size=batch_size)


def sequences(batches: int, batch_size: int = 32, seed: int = 6) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * batch_size, TOKENS, WIDTH_IN, generator=generator)
    target = torch.tanh(x[:, 0, 0] * x[:, 1, 0]) + x[:, :, 1].amax(dim=1)
    return DataLoader(TensorDataset(x, target), batch_size=batch_size)


def make_trainer(plugin: Any = None, **kwargs: Any) -> pl.Trainer:
    plugins = [] if plugin is None else [plugin]
    return pl.Trainer(**{**QUIET, "max_epochs": 1, **kwargs}, plugins=plugins)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread.

    On a busy machine, several threads take up to 30 times as long. Bitwise comparisons also need
    an equal number of threads, because LayerNorm sums gradients per thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fit(model: pl.LightningModule, plugin: Any, data: DataLoader, **kwargs: Any) -> pl.Trainer:
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = make_trainer(plugin, **kwargs)
    with one_thread():
        trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


def relative(model: nn.Module, reference: nn.Module, start: Tensor) -> float:
    """Return the distance of two models relative to how far the reference moved from `start`."""
    moved = parameters_of(reference) - start
    assert moved.norm() > 1e-2
    return ((parameters_of(model) - parameters_of(reference)).norm() / moved.norm()).item()
