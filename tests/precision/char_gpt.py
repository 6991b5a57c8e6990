"""A small character GPT on generated sentences, trained to compare precisions.

Legend: `B` sequences, `T` characters per sequence, `C` width, `V` size of the vocabulary.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.precision.models import Optimizers, fit

__all__ = ["CharGPT", "char_batches", "held_out_loss", "train_char_gpt", "vocabulary"]

TEXT_LENGTH = 200_000  # characters
CONTEXT, WIDTH, BLOCKS, HEADS = 32, 32, 2, 2
HELD_OUT = 0.1  # fraction of the text, at its end

DETERMINERS = ("The", "A", "This", "Every", "Our", "No")
ADJECTIVES = ("small", "large", "quick", "frozen", "exact", "wide", "joint", "zero", "Gaussian")
NOUNS = ("model", "batch", "gradient", "weight", "query", "tile", "kernel", "FIFO", "JSON file")
VERBS = ("reads", "keeps", "moves", "joins", "checks", "halves", "writes", "zips", "BUILDS")
ENDS = (".", "!", "?", "; see [#]", " (step #)", ' = "#"', " + #", " * # / #")


@functools.cache
def sentences() -> str:
    """Return random sentences of a small grammar, equal on every machine.

    The source of this package is not used as text because every edit would change the data.
    """
    # Python guarantees the sequence of `random()` for a seed, but not that of `choice()`.
    uniform = random.Random(0).random

    def pick(words: Sequence[str]) -> str:
        return words[int(uniform() ** 2 * len(words))]  # frequent and rare words, as in prose

    text = ""
    while len(text) < TEXT_LENGTH:
        end = pick(ENDS).replace("#", str(int(uniform() * 1000)))
        subject = f"{pick(DETERMINERS)} {pick(ADJECTIVES)} {pick(NOUNS)}"
        text += f"{subject} {pick(VERBS)} {int(uniform() * 90)} {pick(NOUNS)}s{end}\n"
    return text[:TEXT_LENGTH]


@functools.cache
def vocabulary() -> str:
    return "".join(sorted(set(sentences())))


@functools.cache
def _encoded() -> Tensor:
    index = {character: number for number, character in enumerate(vocabulary())}
    return torch.tensor([index[character] for character in sentences()])


def _windows(starts_B: Tensor) -> list[Tensor]:
    """Return characters and their successors, both of shape [B, T]."""
    text = _encoded()[starts_B[:, None] + torch.arange(CONTEXT + 1)]
    return [text[:, :-1], text[:, 1:]]


def char_batches(count: int, batch_size: int = 16, seed: int = 0) -> DataLoader:
    """Return batches from random places of the text before its held-out end."""
    last = int(len(_encoded()) * (1 - HELD_OUT)) - CONTEXT - 1
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(last, (count, batch_size), generator=generator)
    return DataLoader([_windows(each) for each in starts], batch_size=None)


class Block(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTC: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x_BTC)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTC = x_BTC + self.out_proj(attended.transpose(1, 2).flatten(2))
        return x_BTC + self.fc2(F.gelu(self.fc1(self.norm2(x_BTC))))


class CharGPT(pl.LightningModule):
    """Predicts the next character; embedding and head share their weight.

    Args:
        make_optimizer: Returns the optimizer of the parameters.
        steps: Length of the learning rate schedule.
        seed: Seed of the initial weights.
    """

    def __init__(
        self,
        make_optimizer: Optimizers = lambda p: AdamW(p, lr=3e-3),
        *,
        steps: int = 200,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(len(vocabulary()), WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(vocabulary()), bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.make_optimizer, self.steps = make_optimizer, steps
        self.losses: list[float] = []

    def forward(self, text_BT: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(text_BT) + self.position)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        text_BT, next_BT = batch
        return F.cross_entropy(self(text_BT).float().flatten(0, 1), next_BT.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 20) * max(0.05, 1 - step / self.steps)

        return [optimizer], [{"scheduler": LambdaLR(optimizer, factor), "interval": "step"}]


@torch.no_grad()
def held_out_loss(model: CharGPT) -> float:
    """Return the loss over the held-out text in nats per character, in the dtype of the model."""
    text = _encoded()
    starts = torch.arange(int(len(text) * (1 - HELD_OUT)), len(text) - CONTEXT - 1, CONTEXT)
    return model.loss(_windows(starts)).item()


def train_char_gpt(seed: int, plugin: Any, *, steps: int = 200, **options: Any) -> float:
    """Train from a seed, and return the held-out loss in fp32.

    Args:
        seed: Seed of weights and batches.
        plugin: A precision plugin; `None` for fp32.
        steps: Number of batches.
        options: Further arguments of `CharGPT`, such as `make_optimizer`.
    """
    model = CharGPT(steps=steps, seed=seed, **options)
    fit(model, plugin, char_batches(steps, seed=seed))
    return held_out_loss(model)
