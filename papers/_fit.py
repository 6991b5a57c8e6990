"""Trains with a stock Trainer and records step times, losses and peak memory."""

import gc
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.benchmark.utils.timer import timer
from torch.utils.data import DataLoader

from lightning_mp.optim.safe_adamw import SafeAdamW

__all__ = ["OPTIMIZERS", "Batch", "Classifier", "Outcome", "fit", "scale_of", "train"]

OPTIMIZERS = "fused", "foreach", "safe"
"""Kernels of torch's AdamW, and SafeAdamW."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The result of one fit."""

    step_seconds: tuple[float, ...]  # times of timed steps that were not skipped
    losses: tuple[float, ...]  # losses of all steps, before their updates
    updates: int  # number of updates before the last loss
    loss_scale: float | None  # after the last step; `None` without
    skipped_steps: int  # steps without an update
    peak_bytes: int | None  # by the allocator; `None` on a CPU
    parameters: int  # number of parameters of the model


class Classifier(pl.LightningModule):
    """A model that learns labels with AdamW."""

    def __init__(self, model: nn.Module, *, lr: float, optimizer: str) -> None:
        super().__init__()
        self.model, self.lr, self.optimizer = model, lr, optimizer
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images).float(), labels)
        self.losses.append(loss.detach())  # kept on the device, so that a step does not wait for it
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "safe":
            return SafeAdamW(self.parameters(), lr=self.lr)
        kind: dict[str, Any] = {self.optimizer: True}
        return torch.optim.AdamW(self.parameters(), lr=self.lr, **kind)


class _Clock(pl.Callback):
    """Times every step after the warm-up that was not skipped."""

    def __init__(self, warm_up: int, device: torch.device) -> None:
        self.warm_up, self.device = warm_up, device
        self.step_seconds: list[float] = []
        self.steps = self.skipped_steps = self.updates_before = 0
        self.loss_scale: float | None = None
        self.peak_bytes: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.device.type == "cuda":  # by now the weights are converted
            torch.accelerator.reset_peak_memory_stats(self.device)
        self.loss_scale = scale_of(trainer.precision_plugin)
        self._start = timer()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        # The time of this hook belongs to no step: the next step starts at its end.
        took = timer() - self._start  # waits for the device
        self.updates_before = self.steps - self.skipped_steps
        scale = scale_of(trainer.precision_plugin)
        if scale is not None and self.loss_scale is not None and scale < self.loss_scale:
            self.skipped_steps += 1  # here nothing else lowers a scale
        elif self.steps >= self.warm_up:
            self.step_seconds.append(took)
        self.steps += 1
        self.loss_scale = scale
        self._start = timer()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Read here, because after the fit the model has left the device.
        if self.device.type == "cuda":
            self.peak_bytes = torch.accelerator.max_memory_allocated(self.device)


def scale_of(plugin: Precision) -> float | None:
    """Return the loss scale of a precision plugin, `None` if it has none."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return None
    return float(scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else scaler.scale)


def train(model: pl.LightningModule, data: Any, **options: Any) -> None:
    """Fit with a stock Trainer that prints, logs and saves nothing."""
    for package in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.ERROR)
    off = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    options |= dict.fromkeys(off, False)
    with warnings.catch_warnings():
        # Advice about loops and data, and warnings that these runs provoke on purpose.
        warnings.simplefilter("ignore")
        pl.Trainer(**options).fit(model, data)


def fit(
    classifier: Classifier,
    batches: Sequence[Batch],
    *,
    device: torch.device,
    plugin: Precision | None = None,
    strategy: Any = "auto",
    devices: int = 1,
    warm_up: int = 1,
) -> Outcome:
    """Train on all batches once."""
    gc.collect()  # the last model and its Trainer refer to each other
    if device.type == "cuda":
        torch.accelerator.empty_cache()
    clock = _Clock(warm_up, device)
    train(
        classifier,
        # The elements are batches already.
        DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=devices if device.index is None else [device.index],
        strategy=strategy,
        max_epochs=1,
        plugins=plugin,
        callbacks=[clock],
        use_distributed_sampler=False,  # every rank has its own batches
    )
    return Outcome(
        tuple(clock.step_seconds),
        tuple(float(loss) for loss in classifier.losses),
        clock.updates_before,
        clock.loss_scale,
        clock.skipped_steps,
        clock.peak_bytes,
        sum(p.numel() for p in classifier.parameters()),
    )
