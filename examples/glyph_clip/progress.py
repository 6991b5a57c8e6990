"""Prints lines instead of a progress bar if the output is a log file."""

import sys
import time
from typing import Any

from lightning.pytorch import Callback, Trainer


class LineProgress(Callback):
    """Prints step, loss and seconds regularly if standard output is not a terminal.

    Args:
        every_n_seconds: Seconds between two lines.
    """

    def __init__(self, *, every_n_seconds: float = 20.0) -> None:
        self.every_n_seconds = every_n_seconds
        self._start = self._last = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._start = self._last = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        now, step = time.monotonic(), trainer.global_step
        is_last = step == trainer.estimated_stepping_batches
        # On a terminal, Lightning shows its own bar.
        if sys.stdout.isatty() or (now - self._last < self.every_n_seconds and not is_last):
            return
        self._last = now
        loss = float(outputs["loss"])
        print(
            f"Step {step} of {trainer.estimated_stepping_batches:.0f}: loss {loss:.3f}, "
            f"{now - self._start:.0f} s",
            flush=True,
        )
