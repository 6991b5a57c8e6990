"""`InstabilityReport`: one page that shows what the monitors have seen, also of a run that died."""

import contextlib
import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._report.data import report_data
from lightning_mp.callbacks._report.files import write_atomically
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks._report.run_facts import now, run_facts
from lightning_mp.callbacks._step.recorder import Arrived
from lightning_mp.callbacks._step.training_state import step_of
from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
from lightning_mp.callbacks.monitor import InstabilityMonitor

__all__ = ["InstabilityReport"]


@explains_arguments()
class InstabilityReport(InstabilityMonitor):
    """Writes one HTML page: time lines, tensors by steps, alarms with remedies.

    A run that dies at 3 o'clock leaves a traceback and a wall of metrics; which of 300 tensors
    began to fail 2000 steps before, no logger shows. `lightning-mp report RUN_DIR` makes the page
    of a killed run. What is written when: callbacks/README.md.

    Example: `Trainer(callbacks=[SpikeGuard(), InstabilityReport()])`

    Args:
        dirpath: The folder to write to; the logger's, or `default_root_dir` without a logger.
        filename: Of the page; the data has the same with `.json`.
        every_n_steps: Steps between two times that the data is written.
        max_tensors: Rows of each heat map, at most 500. Tensors with an alarm come first, then
            those with the largest rise in zeros, the least headroom, or the largest update RMS.

    Raises:
        ValueError: An argument is out of range.
        MisconfigurationException: Two reports would write to one file.
    """

    def __init__(
        self,
        *,
        dirpath: str | None = None,
        filename: str = "instability.html",
        every_n_steps: int = 500,
        max_tensors: int = 100,
    ) -> None:
        super().__init__()
        is_name = type(filename) is str and Path(filename).name == filename
        if not is_name or Path(filename).suffix not in (".html", ".htm"):
            raise ValueError(
                f"Passed `InstabilityReport(filename={filename!r})`. `filename` must be a file's "
                "name that ends in .html, without a folder. Pass the folder as `dirpath`."
            )
        self._check_at_least(1, every_n_steps=every_n_steps)
        is_fine = type(max_tensors) is int and 1 <= max_tensors <= 500
        self._check(is_fine, "an integer from 1 to 500", max_tensors=max_tensors)
        self.dirpath = dirpath
        self.filename = filename
        self.every_n_steps = every_n_steps
        self.max_tensors = max_tensors
        self.path: Path | None = None  # of the page, once training has begun
        self._inbox: deque[Arrived] = deque()
        self._skips = -1  # the last step that was skipped, which several optimizers may share
        self._starts: list[dict[str, Any]] = []  # when the run was started and resumed
        self._is_started = False  # whether this start is among them
        self._steps = 0
        self._end: dict[str, str] = {"how": "running"}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.path = self._page_path(trainer)
        self._end, self._is_started = {"how": "running"}, False
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        samplers = [c for c in callbacks if isinstance(c, GradientUnderflowMonitor)]
        self.needs_gradient_norm = not samplers
        others = [c for c in callbacks if isinstance(c, InstabilityReport) and c is not self]
        data = [os.path.abspath(c._page_path(trainer).with_suffix(".json")) for c in others]
        if os.path.abspath(self.path.with_suffix(".json")) in data:
            raise MisconfigurationException(
                f"Passed two `InstabilityReport`s that write to {str(self.path)!r}. Each must have "
                "a file of its own. Pass one of them a `filename` or a `dirpath`."
            )
        before = [c for c in callbacks if c is not self and not isinstance(c, Checkpoint)]
        last = [c for c in callbacks if isinstance(c, Checkpoint)]
        trainer.callbacks = [*before, self, *last]  # type: ignore[attr-defined]

    def _page_path(self, trainer: pl.Trainer) -> Path:
        # `log_dir` is the same on all ranks, as it is broadcast.
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir
        return Path(folder) / self.filename

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._inbox = self.recorder.subscribe()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._is_started:
            self._is_started = True
            step = step_of(trainer)
            # What an earlier run has written beyond the step that this one goes on from.
            for name, points in self.history.curves.items():
                self.history.curves[name] = [point for point in points if point[0] < step]
            # In a run from the start the starts of another one mean nothing.
            self._starts = [each for each in self._starts if each["step"] < step]
            self._starts.append({"step": step, "time": now()})
            self._steps = step
            self._write(trainer, with_page=False)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._record_steps()
        if not trainer.fit_loop._should_accumulate():
            self._steps = step_of(trainer) + 1
            if self._steps % self.every_n_steps == 0:
                self._write(trainer, with_page=False)

    def _record_steps(self) -> None:
        """Write the steps that have arrived into the history.

        A history keeps every 1024th step of a run of 4 million, in which one NaN would be lost:
        values that are not finite go into a curve of their own, named after it. `skipped` has a
        point for each skipped step, whose value is how many there were so far.
        """
        while self._inbox:
            facts = self._inbox.popleft().facts
            suffix = f"_{facts.optimizer}" if facts.optimizer else ""
            numbers = {
                f"loss{suffix}": facts.loss,
                f"gradient_norm{suffix}": facts.gradient_norm,
                "loss_scale": facts.next_loss_scale,
            }
            for name, value in numbers.items():
                if value is not None:
                    self.history.add_point(name, facts.step, value)
                    if not math.isfinite(value):
                        self.history.add_point(f"{name}_not_finite", facts.step, value)
            if facts.skipped and facts.loss_scale is not None and facts.step != self._skips:
                self._skips = facts.step
                skipped = self.history.curves.get("skipped", [])
                self.history.add_point("skipped", facts.step, skipped[-1][1] + 1 if skipped else 1)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end = {"how": "finished", "time": now()}
        if trainer.interrupted:
            self._end["how"] = "interrupted"
        self._write(trainer, with_page=True)

    @override
    def on_exception(self, trainer: pl.Trainer, _: Any, exception: BaseException) -> None:
        if self.path is None or self._end["how"] == "finished":
            return
        text = str(exception).strip()
        first_line = text.splitlines()[0][:500] if text else ""
        self._end = {
            "how": "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed",
            "time": now(),
            "exception": f"{type(exception).__name__}: {first_line}".removesuffix(": "),
        }
        self._write(trainer, with_page=True)

    def write(self, trainer: pl.Trainer) -> Path | None:
        """Write page and data now; to be called on all ranks.

        Args:
            trainer: The trainer that this is a callback of.

        Returns:
            Where the page is, or `None` on other ranks than zero and where it cannot be written.
        """
        if self.path is None:
            self.path = self._page_path(trainer)
        return self._write(trainer, with_page=True, is_wanted=True)

    def _write(
        self, trainer: pl.Trainer, *, with_page: bool, is_wanted: bool = False
    ) -> Path | None:
        is_trial = bool(trainer.fast_dev_run) and not is_wanted  # type: ignore[attr-defined]
        if self.path is None or is_trial or not trainer.is_global_zero:
            return None
        try:
            if with_page:
                with contextlib.suppress(RuntimeError):  # a device that failed gives nothing back
                    self.recorder.drain()
                self._record_steps()
            data = self._data(trainer)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path.with_suffix(".json"), json.dumps(data, allow_nan=False))
            if with_page:
                write_atomically(self.path, report_page(data))
        except Exception as error:  # a report is never worth a run
            rank_zero_warn(
                f"`InstabilityReport` could not write {str(self.path)!r}: {type(error).__name__}: "
                f"{error}. Training goes on. Pass a `dirpath` that can be written to."
            )
            return None
        return self.path

    def _data(self, trainer: pl.Trainer) -> dict[str, Any]:
        run: dict[str, Any] = {
            "title": type(trainer.lightning_module).__name__,
            "steps": self._steps,
            "starts": self._starts,
            "written": now(),
            "end": self._end,
            "has_loss_scale": getattr(trainer.precision_plugin, "scaler", None) is not None,
            "facts": run_facts(trainer),
        }
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [
            c
            for c in callbacks
            if isinstance(c, InstabilityMonitor) and not isinstance(c, InstabilityReport)
        ]
        run["monitors"] = [type(monitor).__name__ for monitor in monitors]
        others = [monitor.history for monitor in monitors]
        return report_data(self.history, others, run, self.max_tensors)

    @override
    def state_dict(self) -> dict[str, Any]:
        self.recorder.drain()
        self._record_steps()
        return {**super().state_dict(), "starts": list(self._starts)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._starts = list(state_dict["starts"])
