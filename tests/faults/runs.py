"""Small runs for the injection of faults, and their results."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    BalancedAMP,
    GradientUnderflowMonitor,
    InfCLStrategy,
    InstabilityReport,
    LossScaleMonitor,
    NonFiniteLocator,
    PureFP16,
    SafeAdamW,
    SpikeGuard,
)
from tests.precision.models import Regression, one_thread, rows
from tests.quiet import QUIET
from tests.strategies.models import TinyCLIP, pairs

__all__ = ["CHECKPOINT_EVERY", "KINDS", "STEPS", "Run", "newest_checkpoint"]

BATCHES, EPOCHS, ROWS = 6, 2, 8
STEPS = BATCHES * EPOCHS
CHECKPOINT_EVERY = 3  # steps between two checkpoints, and between two marks of `SpikeGuard`


def _regression(plugin: Callable[..., Any]) -> dict[str, Any]:
    model = Regression(make_optimizer=lambda p: SafeAdamW(p, lr=1e-2), interval="step")
    # With this loss scale, at least one step overflows and is skipped.
    return {"model": model, "data": rows(BATCHES * ROWS), "plugins": plugin(loss_scale=2.0**8)}


def _clip() -> dict[str, Any]:
    strategy = InfCLStrategy(micro_batch_size=4)
    model = TinyCLIP(dropout=0.0, optimizer=torch.optim.AdamW)
    return {"model": model, "data": pairs(BATCHES * ROWS), "strategy": strategy}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "BalancedAMP": lambda: _regression(BalancedAMP),
    "PureFP16": lambda: _regression(PureFP16),
    "InfCLStrategy": _clip,
}


class Resumed(DataLoader[Any]):
    """A loader with a state, so that a resumed run continues at the batch of the checkpoint."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        first, batches = self.taken % len(self), super().__iter__()
        for index, batch in enumerate(batches):
            if index >= first:
                self.taken = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Run:
    """A run of one kind under all monitors; `SpikeGuard` keeps its marks on disk.

    Args:
        kind: A key of `KINDS`.
        folder: Folder of all files.
        before: Callbacks before the monitors.
        after: Callbacks after the monitors and before Lightning's checkpoints.
        has_checkpoints: Whether Lightning writes checkpoints.
        options: Further arguments of the Trainer.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        before: Sequence[pl.Callback] = (),
        after: Sequence[pl.Callback] = (),
        *,
        has_checkpoints: bool = True,
        **options: Any,
    ) -> None:
        parts = KINDS[kind]()
        self.folder, self.model = folder, parts.pop("model")
        data: TensorDataset = parts.pop("data")
        self.data = Resumed(data, batch_size=ROWS)
        self.held_out = DataLoader(torch.utils.data.Subset(data, range(ROWS)), batch_size=ROWS)
        often = {"every_n_steps": CHECKPOINT_EVERY}
        self.guard = SpikeGuard(
            action="rewind", rewind_storage="disk", checkpoint_every_n_steps=CHECKPOINT_EVERY
        )
        # Written at start and end only; with a time interval, disk operations would vary.
        self.report = InstabilityReport(every_n_seconds=math.inf)
        checkpoints = ModelCheckpoint(
            folder / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_top_k=-1
        )
        self.callbacks = [
            *before,
            *(LossScaleMonitor(), GradientUnderflowMonitor(**often), NonFiniteLocator()),
            *(ActivationRangeMonitor(**often), AdamStateMonitor(**often), self.guard, self.report),
            *after,
            *([checkpoints] if has_checkpoints else []),
        ]
        self.options = {"max_epochs": EPOCHS, "default_root_dir": folder, **QUIET, **parts}
        self.options |= {"enable_checkpointing": has_checkpoints, "gradient_clip_val": 1.0}
        self.options |= options

    def make_trainer(self) -> None:
        """Make the Trainer now, for access to its strategy and plugin before `fit`."""
        self.trainer = pl.Trainer(**self.options, callbacks=self.callbacks)

    def fit(self, checkpoint: Path | None = None) -> pl.Trainer:
        """Train from the start, or from a checkpoint."""
        if not hasattr(self, "trainer"):
            self.make_trainer()
        was_there = dist.is_initialized()
        try:
            with one_thread():
                path = None if checkpoint is None else str(checkpoint)
                self.trainer.fit(self.model, self.data, self.held_out, ckpt_path=path)
        finally:
            if dist.is_initialized() and not was_there:  # Lightning keeps the group
                dist.destroy_process_group()
                os.environ.pop("MASTER_PORT", None)
        return self.trainer

    def end(self) -> list[Tensor]:
        """Return weights, states of optimizers and the loss scale."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        states = tree_leaves([each.state_dict()["state"] for each in self.trainer.optimizers])
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        states += [] if scaler is None else [scaler.scale]
        return [torch.as_tensor(each).detach().clone() for each in (*weights, *states)]

    def alarms(self) -> list[str]:
        """Return the messages of all warnings and errors of the monitors."""
        watching = [each for each in self.callbacks if hasattr(each, "alarms")]
        return [a.message for each in watching for a in each.alarms if a.severity != "info"]

    def page(self) -> dict[str, Any]:
        """Return the data of the newest page, which must exist and be complete."""
        data = max(self.folder.glob("instability*.json"), key=lambda path: path.stat().st_mtime_ns)
        page = data.with_suffix(".html").read_text()
        assert page.startswith("<!doctype html>"), page[:50]
        assert page.rstrip().endswith("</html>")
        return dict(json.loads(data.read_text()))


_ENDS: dict[str, list[Tensor]] = {}


def end_without_fault(kind: str) -> list[Tensor]:
    """Return weights, states and loss scale of a run without a fault."""
    if kind not in _ENDS:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(kind, Path(folder))
            run.fit()
            _ENDS[kind] = run.end()
            assert run.alarms() == []
    return _ENDS[kind]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Compare two ends of runs bit for bit."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def newest_checkpoint(folder: Path) -> Path | None:
    """Return Lightning's checkpoint of the latest step."""
    found = folder.glob("checkpoints/*.ckpt")
    return max(found, key=lambda path: int(path.stem.rpartition("step=")[2]), default=None)
