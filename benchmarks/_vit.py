"""A pre-norm Vision Transformer in the usual sizes, and a timed training of it by Lightning.

The layout says how activations lie in memory, not what is computed: weights of one layout give the
same outputs in the other. With the batch second, all tokens of one position are neighbours.

Shapes:
    N: images. L: tokens, with a class token where there is one. D: width. H: heads.
    d: width of a head, D / H.

References:
    An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

__all__ = [
    "LAYOUTS",
    "OPTIMIZERS",
    "POOLS",
    "SIZES",
    "Batches",
    "Outcome",
    "Problem",
    "ViT",
    "ViTSize",
    "fit",
]

Layout = Literal["nld", "lnd"]
Pool = Literal["cls", "mean"]
LAYOUTS: tuple[Layout, ...] = ("nld", "lnd")
POOLS: tuple[Pool, ...] = ("cls", "mean")
_SAFE = "safe"
# Kernels of torch's AdamW, and SafeAdamW, where this version has it.
OPTIMIZERS = (
    "fused",
    "foreach",
    *([_SAFE] if importlib.util.find_spec("lightning_mp.optim.safe_adamw") else []),
)
# Adam's first steps move every weight by the learning rate: all of them, as one vector, by this.
# So a step, taken or skipped, changes the loss by about as much in all sizes, and by little.
_STEP_NORM = 0.03


@dataclass(frozen=True)
class ViTSize:
    """Numbers of one size; the MLP is four times as wide as the tokens."""

    patch: int
    width: int
    depth: int
    heads: int

    def patches(self, image: int) -> int:
        """Return the number of patches of a square image.

        Raises:
            ValueError: Patches do not tile the image.
        """
        if image < self.patch or image % self.patch:
            raise ValueError(
                f"Passed images of {image} pixels with patches of {self.patch}. Patches must tile "
                f"the image. Pass {max(image // self.patch, 1) * self.patch} pixels."
            )
        return (image // self.patch) ** 2


SIZES = {
    "tiny": ViTSize(patch=8, width=64, depth=2, heads=2),  # for rehearsals
    "S16": ViTSize(patch=16, width=384, depth=12, heads=6),
    "B16": ViTSize(patch=16, width=768, depth=12, heads=12),
    "L16": ViTSize(patch=16, width=1024, depth=24, heads=16),
    "H16": ViTSize(patch=16, width=1280, depth=32, heads=16),
    "H14": ViTSize(patch=14, width=1280, depth=32, heads=16),
}


class ViT(nn.Module):
    """A Vision Transformer with a linear head.

    Args:
        size: Its numbers.
        image: Edge of the square images in pixels.
        classes: Outputs of the head.
        pool: `"cls"` reads a class token; `"mean"` has none and averages the tokens.
        layout: `"nld"` keeps tokens as (N, L, D), `"lnd"` as (L, N, D): the batch second.

    Shapes:
        Images (N, 3, image, image) to logits (N, classes).

    Raises:
        ValueError: Patches do not tile the image.
    """

    def __init__(
        self, size: ViTSize, *, image: int, classes: int, pool: Pool, layout: Layout
    ) -> None:
        super().__init__()
        self.pool, self.batch_first = pool, layout == "nld"
        tokens = size.patches(image) + (pool == "cls")
        self.patches = nn.Conv2d(3, size.width, size.patch, stride=size.patch)
        self.class_token = nn.Parameter(torch.zeros(size.width)) if pool == "cls" else None
        self.positions = nn.Parameter(torch.empty(tokens, size.width))
        self.blocks = nn.Sequential(
            *(_Block(size.width, size.heads, self.batch_first) for _ in range(size.depth))
        )
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, classes)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        patches_NDL = self.patches(images).flatten(2)
        # Without a copy here, additions would keep the strides of the convolution's output.
        order = (0, 2, 1) if self.batch_first else (2, 0, 1)
        x = patches_NDL.permute(order).contiguous()
        token_dim = 1 if self.batch_first else 0
        if self.class_token is not None:
            shape = (len(images), 1, -1) if self.batch_first else (1, len(images), -1)
            x = torch.cat([self.class_token.expand(shape), x], token_dim)
        x = self.blocks(x + self.positions.unsqueeze(1 - token_dim))
        # The norm comes after pooling: of many tokens it would take a pass over memory.
        pooled = x.select(token_dim, 0) if self.pool == "cls" else x.mean(token_dim)
        return self.head(self.norm(pooled))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.attention = _Attention(width, heads, batch_first)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.heads, self.batch_first = heads, batch_first
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        order = (2, 0, 3, 1, 4) if self.batch_first else (2, 1, 3, 0, 4)
        q_NHLd, k_NHLd, v_NHLd = qkv.permute(order).unbind(0)
        mixed_NHLd = F.scaled_dot_product_attention(q_NHLd, k_NHLd, v_NHLd)
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        return self.out(mixed_NHLd.permute(order).flatten(2))


@dataclass(frozen=True)
class Problem:
    """What is trained, and where."""

    size: str
    image: int
    batch: int
    classes: int
    pool: Pool
    layout: Layout
    device: str

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device)


@dataclass(frozen=True)
class Outcome:
    """What one fit left behind.

    Args:
        step_seconds: Of timed steps that were not skipped.
        losses: Of all steps, before their updates.
        updates: How many updates the last of these losses had behind it.
        loss_scale: After the last step; `None` without.
        skipped_steps: Steps without an update.
        peak_bytes: Of the allocator; `None` on a CPU.
        parameters: Of the model.
    """

    step_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    updates: int
    loss_scale: float | None
    skipped_steps: int
    peak_bytes: int | None
    parameters: int

    @property
    def final_loss(self) -> float:
        """The loss of the last step."""
        return self.losses[-1]


class Classifier(pl.LightningModule):
    """A ViT that learns random labels with AdamW."""

    def __init__(self, model: ViT, optimizer: str) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy, and remember it on the device."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SafeAdamW, or AdamW in the kernels asked for."""
        lr = _STEP_NORM / math.sqrt(sum(p.numel() for p in self.parameters()))
        if self.optimizer == _SAFE:
            from lightning_mp.optim.safe_adamw import SafeAdamW

            return SafeAdamW(self.parameters(), lr=lr)
        return torch.optim.AdamW(self.parameters(), lr=lr, **{self.optimizer: True})


class Clock(pl.Callback):
    """Takes the time of every step after the warm-up that was not skipped."""

    def __init__(self, warm_up: int, device: torch.device) -> None:
        self.warm_up, self.device = warm_up, device
        self.step_seconds: list[float] = []
        self.steps = self.skipped_steps = self.updates_before = 0
        self.loss_scale: float | None = None
        self.peak_bytes: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start with what the model, its weights converted, takes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.loss_scale = scale_of(trainer.precision_plugin)
        self._start = self._now()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Note a step."""
        took = self._now() - self._start
        self.updates_before = self.steps - self.skipped_steps
        scale = scale_of(trainer.precision_plugin)
        if scale is not None and self.loss_scale is not None and scale < self.loss_scale:
            self.skipped_steps += 1  # no precision here lowers its scale for another reason
        elif self.steps >= self.warm_up:
            self.step_seconds.append(took)
        self.steps += 1
        self.loss_scale = scale
        self._start = self._now()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the peak before the model leaves the device."""
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def scale_of(plugin: Precision) -> float | None:
    """Return the loss scale of Lightning's plugin or ours; `None` without."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return None
    return scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else scaler.scale


class Batches:
    """One random batch on the device, again and again.

    As it is the same one, the loss depends only on the updates taken: a run that skipped some can
    be compared with one that did not.
    """

    def __init__(self, problem: Problem, count: int) -> None:
        self.count = count
        place = problem.place
        random = torch.Generator(place).manual_seed(1)
        shape = problem.batch, 3, problem.image, problem.image
        self.batch = (
            torch.randn(shape, generator=random, device=place),
            torch.randint(problem.classes, (problem.batch,), generator=random, device=place),
        )

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.repeat(self.batch, self.count)


def fit(
    problem: Problem, plugin: Precision, optimizer: str, batches: Batches, warm_up: int
) -> Outcome:
    """Train for all batches, every time from the same weights."""
    torch.manual_seed(0)
    place = problem.place
    with place:
        model = ViT(
            SIZES[problem.size],
            image=problem.image,
            classes=problem.classes,
            pool=problem.pool,
            layout=problem.layout,
        )
    classifier, clock = Classifier(model, optimizer), Clock(warm_up, place)
    with warnings.catch_warnings():
        # Advice about loops and data, and what Lightning 2.6 says of itself; it names places, too.
        warnings.filterwarnings("ignore", module=r"lightning\.")
        trainer = pl.Trainer(
            accelerator="gpu" if place.type == "cuda" else place.type,
            devices=1 if place.index is None else [place.index],
            max_epochs=1,
            limit_train_batches=len(batches),
            plugins=plugin,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(classifier, train_dataloaders=batches)
    return Outcome(
        tuple(clock.step_seconds),
        tuple(float(loss) for loss in classifier.losses),
        clock.updates_before,
        clock.loss_scale,
        clock.skipped_steps,
        clock.peak_bytes,
        sum(p.numel() for p in model.parameters()),
    )
