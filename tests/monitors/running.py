"""Helpers for runs of real models: a module that generates its data, precisions, monitors."""

import io
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    Alarm,
    GradientUnderflowMonitor,
    InstabilityMonitor,
    InstabilityReport,
    InstabilityWarning,
    LossScaleMonitor,
    NonFiniteLocator,
    ParameterMonitor,
    RepresentationMonitor,
    SpikeGuard,
)
from tests.precision.models import make_trainer, one_thread


def mixed() -> MixedPrecision:
    """Return Lightning's `16-mixed` with fp16; by name, it would be bf16 on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


PRECISIONS: dict[str, Callable[[], Any]] = {
    "fp32": lambda: None,
    "16-mixed": mixed,
    "BalancedAMP": BalancedAMP,
    "PureFP16": PureFP16,
}


class Batches(Dataset[Any]):
    """Batches that are generated from their index, so that they are equal in every run.

    Args:
        make: Returns a batch, given its index and a generator that is seeded with the index.
        count: Number of batches.
    """

    def __init__(self, make: Callable[[int, torch.Generator], Any], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.make(index, torch.Generator().manual_seed(index))


class Learner(pl.LightningModule):
    """Learns from generated batches; subclasses define `batch` and `loss`.

    Args:
        steps: Number of batches, and length of the schedule.
        lr: Peak learning rate, after a warm-up of a twentieth of the steps.
        decays: Whether the learning rate then falls to a tenth.
        weight_decay: Weight decay of AdamW.
    """

    optimizers_per_batch = 1
    towers: Sequence[str] = ()  # modules whose outputs are features

    def __init__(
        self, steps: int, lr: float = 3e-3, *, decays: bool = False, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.lr = steps, lr
        self.decays, self.weight_decay = decays, weight_decay
        self.losses: list[float] = []

    def batch(self, index: int, generator: torch.Generator) -> Any:
        """Return the batch of an index."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, relative to the highest."""
        warmed = min(1.0, (step + 1) / max(self.steps // 20, 1))
        return warmed * (max(0.1, 1 - step / self.steps) if self.decays else 1.0)

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer of all trainable parameters."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        schedule = {"scheduler": LambdaLR(optimizer, self.rate), "interval": "step"}
        return [optimizer], [schedule]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Batches(self.batch, self.steps), batch_size=None)

    def progress(self) -> tuple[float, float]:
        """Return a final measurement, and the bound below which the run has learned.

        By default, these are the mean loss of the last tenth of the steps, and 90% of the mean loss
        of the first tenth.
        """
        tenth = max(len(self.losses) // 10, 1)
        first, last = self.losses[:tenth], self.losses[-tenth:]
        return statistics.fmean(last), 0.9 * statistics.fmean(first)


def all_monitors(folder: str, towers: Sequence[str] = (), **often: int) -> list[InstabilityMonitor]:
    """Return one of each monitor at its default settings.

    Args:
        folder: Folder of the report.
        towers: Modules whose outputs are features; if empty, the features are those of the loss.
        often: `every_n_steps` of sampling monitors, for runs that are too short for the default.
    """
    return [
        LossScaleMonitor(),
        GradientUnderflowMonitor(**often),
        ActivationRangeMonitor(**often),
        AdamStateMonitor(**often),
        ParameterMonitor(**often),
        RepresentationMonitor(modules=[*towers] or None, **often),
        SpikeGuard(),
        NonFiniteLocator(),
        InstabilityReport(dirpath=folder),
    ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Args:
        model: The trained model.
        alarms: Warnings and errors of all monitors, by step.
        notes: Alarms of severity `info`.
        steps: Number of trained batches.
        error: The error that ended the run early, or an empty string.
        measured: The measurement of `progress`; NaN if weights or losses are not finite.
        bound: The bound of `progress`.
    """

    model: Learner
    alarms: list[Alarm]
    notes: list[Alarm]
    steps: int
    error: str
    measured: float
    bound: float

    @property
    def is_healthy(self) -> bool:
        """Whether the run was completed, is finite, and has learned."""
        return not self.error and math.isfinite(self.measured) and self.measured < self.bound


def _check_states(monitors: Sequence[InstabilityMonitor]) -> None:
    """Raise if `torch.load(weights_only=True)` refuses the state of a monitor."""
    file = io.BytesIO()
    torch.save({type(monitor).__name__: monitor.state_dict() for monitor in monitors}, file)
    file.seek(0)
    torch.load(file, weights_only=True)


def train(
    model: Learner,
    plugin: Any = None,
    *callbacks: pl.Callback,
    often: dict[str, int] | None = None,
    **options: Any,
) -> Outcome:
    """Train a model under all monitors and return the outcome; check states for checkpoints.

    Args:
        model: The model.
        plugin: A precision plugin; `None` for fp32.
        callbacks: Further callbacks, after the monitors.
        often: See `all_monitors`.
        options: Further arguments of the Trainer.
    """
    error = ""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore", InstabilityWarning)
        # All monitors are attached to every model, including models trained by SGD.
        warnings.filterwarnings("ignore", "Passed `AdamStateMonitor`, but no optimizer")
        warnings.filterwarnings("ignore", "`RepresentationMonitor` found no loss")
        # Lightning steps the schedule even if torch's scaler has skipped the first step.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        monitors = all_monitors(folder, model.towers, **(often or {}))
        trainer = make_trainer(plugin, callbacks=[*monitors, *callbacks], **options)
        torch.manual_seed(0)
        try:
            trainer.fit(model)
        except (FloatingPointError, RuntimeError, ValueError) as exception:
            error = f"{type(exception).__name__}: {exception}"
    _check_states(monitors)
    alarms = sorted((a for m in monitors for a in m.alarms), key=lambda alarm: alarm.step)
    measured, bound = model.progress() if model.losses else (math.nan, math.nan)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    is_finite = all(bool(t.isfinite().all()) for t in tensors)
    return Outcome(
        model=model,
        alarms=[alarm for alarm in alarms if alarm.severity != "info"],
        notes=[alarm for alarm in alarms if alarm.severity == "info"],
        steps=trainer.fit_loop.total_batch_idx + 1,
        error=error,
        measured=measured if is_finite else math.nan,
        bound=bound,
    )
