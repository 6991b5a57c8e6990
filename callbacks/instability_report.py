"""`InstabilityReport`: one HTML page of all curves, heat maps and alarms, even of a killed run."""

import contextlib
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from typing_extensions import override

from lightning_mp._arguments import PATH, Check, explains_arguments
from lightning_mp._files import Failures, claim, touch, write
from lightning_mp.callbacks._report.data import parts_of, report_data
from lightning_mp.callbacks._report.outlets import Alerts, log_report
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks._report.run_facts import now, preflight_page_of, run_facts
from lightning_mp.callbacks._rules.records import Sample, Verdict
from lightning_mp.callbacks._step.batches import loss_in
from lightning_mp.callbacks._step.training_state import gather_objects, scaler_of, step_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
from lightning_mp.callbacks.monitor import Alarm, InstabilityMonitor

__all__ = ["InstabilityReport"]

# Names of logged metrics that are the loss of a validation, such as `val_loss` and `loss/valid`.
_WORD = r"[_/.-]val(id(ation)?)?[_/.-]"  # not `loss_value`
_VALIDATION = re.compile(rf"{_WORD}.*loss|loss.*{_WORD}", re.IGNORECASE)
_REST = 20  # times the duration of the last write: at most 5% of a run


@explains_arguments(
    checks={
        "dirpath": PATH,
        "filename": Check(
            test=lambda name: Path(name).name == name and Path(name).suffix in (".html", ".htm"),
            words="a file's name that ends in .html, without a folder",
            fix="Pass the folder as `dirpath`.",
        ),
        "every_n_seconds": "(0, inf]",
        "max_tensors": "[1, 500]",
        "alert": Check(
            test=lambda alert: callable(alert) or alert.startswith(("http://", "https://")),
            words="a function, or a URL that begins with http:// or https://",
            is_secret=True,  # an invalid URL may contain a secret, too
        ),
    }
)
class InstabilityReport(InstabilityMonitor):
    """Writes one HTML page: time lines, tensors by steps, alarms with remedies.

    A run that fails at night leaves a traceback and hundreds of metrics; no logger shows which of
    300 tensors began to fail 2000 steps before. The page is written at alarms and at intervals, so
    that a killed run has a page too. More: docs/callbacks/instability-report.md.

    Example: `Trainer(callbacks=[SpikeGuard(), InstabilityReport()])`

    Args:
        dirpath: The folder to write to; by default the logger's folder, or `default_root_dir`.
        filename: Name of the page; its data are in a file of the same name with `.json`. If another
            run has these files, `-v1` or a higher number is appended.
        every_n_seconds: Seconds between two writes. Alarms are written at once; a run spends at
            most 5% of its time on writing.
        max_tensors: Largest number of rows of a heat map, at most 500. Tensors with an alarm come
            first, then tensors with the largest rise in zeros, the least headroom, or the largest
            update RMS.
        alert: Receiver of every warning and error on rank zero: a function that takes an `Alarm`,
            or a URL that gets a POST of JSON with `text` and `alarm`.
        log_artifact: Whether loggers get the page when training ends: W&B, MLflow and Comet as a
            file, TensorBoard as text.

    Raises:
        ValueError: An argument is out of range.
    """

    every_step = True
    keeps = ("_starts", "_path", "_validated", "_skips")

    def __init__(
        self,
        *,
        dirpath: str | None = None,
        filename: str = "instability.html",
        every_n_seconds: float = 30.0,
        max_tensors: int = 100,
        alert: Callable[[Alarm], object] | str | None = None,
        log_artifact: bool = True,
    ) -> None:
        super().__init__()
        self.dirpath = dirpath
        self.filename = filename
        self.every_n_seconds = every_n_seconds
        self.max_tensors = max_tensors
        self.log_artifact = log_artifact
        self.path: Path | None = None  # path of the page, on rank zero, once training has begun
        self._alerts = Alerts(alert)  # a URL may be secret, so it is not in the checkpoint key
        self._pace = _Pace(every_n_seconds)
        self._failures = Failures(usage)
        self._wanted: Path | None = None  # path of the page unless another run has it
        self._path: str | None = None  # `path`, or the page of the run that is resumed
        self._validation: list[Tensor] = []  # losses of validation batches
        self._validated = -1  # last training step before the newest validation
        self._skips = -1  # last skipped step; several optimizers may share it
        self._starts: list[dict[str, Any]] = []  # when the run was started and resumed
        self._is_started = False  # whether `_starts` contains this start
        self._steps = 0
        self._end: dict[str, str] = {"how": "running"}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.path = None
        self._wanted = self.page_path(trainer)
        self._end, self._is_started, self._validation = {"how": "running"}, False, []
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        samplers = [c for c in callbacks if isinstance(c, GradientUnderflowMonitor)]
        self.needs_gradient_norm = not samplers  # they record the norm for the page
        # After monitors, before checkpoints. A new list, because Lightning iterates over the old.
        ordered = sorted(callbacks, key=lambda c: (isinstance(c, Checkpoint), c is self))
        trainer.callbacks = ordered  # type: ignore[attr-defined]

    def page_path(self, trainer: pl.Trainer) -> Path:
        """Return the path of the page unless another run has a page there."""
        # `log_dir` is broadcast, so equal on all ranks.
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir
        return Path(folder).absolute() / self.filename

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._is_started:
            self._write(trainer)

    def _claim(self, wanted: Path) -> Path:
        """Return the path of the page; keep alarms that only the earlier run has written."""
        start = self._starts[-1]["step"]
        # A new run continues no earlier run, even if this callback has seen one.
        earlier = self._path if start else None
        parts = parts_of(Path(earlier).with_suffix(".json"), "alarms") if earlier else None
        known = {(a.step, a.kind, a.tensor) for a in self.history.alarms}
        names, before = {each.name for each in dataclasses.fields(Alarm)}, usage("before_resuming")
        for fields in [] if parts is None else parts.get("alarms", [{}]):
            # Data may be damaged or from a later version, so unreadable alarms are left out.
            with self._failures.forgiven("report_read_in_part", path=earlier):
                alarm = Alarm(**{name: fields[name] for name in fields if name in names})
                if alarm.step >= start and (alarm.step, alarm.kind, alarm.tensor) not in known:
                    said = f"{alarm.message.removeprefix(before).strip()} {alarm.remedy}".strip()
                    text = f"{alarm.place}: {before} {said}"
                    self.history.add_alarm(dataclasses.replace(alarm, message=text))
        return claim(wanted, lambda page: touch(page.with_suffix(".json"), page), earlier)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._steps = step_of(trainer) + 1
            if self._pace.is_due():
                self._write(trainer)
        self._alerts.check()

    @override
    def on_alarm(self, trainer: pl.Trainer, alarm: Alarm) -> None:
        if alarm.severity != "info" and trainer.is_global_zero:
            self._alerts.send(type(trainer.lightning_module).__name__, alarm)
        self._pace.has_news = True
        if self._pace.is_due():
            self._write(trainer)

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        """Record every step; return no verdicts."""
        facts = sample.facts
        suffix = f"_{facts.optimizer}" if facts.optimizer else ""
        numbers = {
            f"loss{suffix}": facts.loss,
            f"gradient_norm{suffix}": facts.gradient_norm,
            "loss_scale": facts.next_loss_scale,
        }
        known = {name: value for name, value in numbers.items() if value is not None}
        for name, value in known.items():
            self.history.add_point(name, facts.step, value)
            # A history of 4 million steps keeps every 1024th, so a single NaN would be lost.
            if not math.isfinite(value):
                self.history.add_point(f"{name}_not_finite", facts.step, value)
        if facts.skipped and facts.loss_scale is not None and facts.step != self._skips:
            self._skips = facts.step
            self.history.add_point("skipped", facts.step, self.history.count("skipped") + 1)
        return []

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        loss = loss_in(outputs)
        if loss is not None and not trainer.sanity_checking:
            self._validation.append(loss.detach().float().mean())

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the loss that `validation_step` returned or logged, and its gap to training."""
        of_rank = torch.stack(self._validation).tolist() if self._validation else []
        self._validation = []
        if trainer.sanity_checking or self._wanted is None:
            return
        losses = [loss for each in gather_objects(trainer, of_rank) for loss in each]
        named = trainer.callback_metrics.items()
        logged = (value for name, value in named if _VALIDATION.search(f"/{name}/"))
        loss = statistics.fmean(losses) if losses else next(logged, None)
        points = self.history.curves.get("loss", [])
        trained = [value for step, value in points if step > self._validated]
        if points:
            self._validated = points[-1][0]
        if loss is not None:
            step, value = step_of(trainer), float(loss)
            self.history.add_point("validation_loss", step, value)
            if trained:
                gap = value - statistics.fmean(trained)
                self.history.add_point("validation_gap", step, gap)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end = {"how": "interrupted" if trainer.interrupted else "finished", "time": now()}
        self._finish(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, _: Any, exception: BaseException) -> None:
        if self._wanted is None or self._end["how"] != "running":
            return
        how = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        # After a SIGTERM, any exception means preemption: Lightning's, a handler's, a lost rank's.
        how = "preempted" if trainer.received_sigterm else how  # type: ignore[attr-defined]
        text = f"{type(exception).__name__}: {str(exception).strip().partition(chr(10))[0][:500]}"
        self._end = {"how": how, "time": now(), "exception": text.removesuffix(": ")}
        self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        path = self._write(trainer)
        if path is not None and self.log_artifact:
            data = self._data(trainer)
            for logger in trainer.loggers:
                with self._failures.forgiven("report_not_logged", logger=type(logger).__name__):
                    log_report(logger, path, data)
        self._alerts.finish()

    def write(self, trainer: pl.Trainer) -> Path | None:
        """Write page and data now, on all ranks; return the page's path, `None` without one."""
        with contextlib.suppress(RuntimeError):  # a failed device returns nothing
            self.recorder.catch_up()  # include the steps whose copies are pending
        return self._write(trainer, is_wanted=True)

    def _write(self, trainer: pl.Trainer, *, is_wanted: bool = False) -> Path | None:
        if not self._is_started:
            self._is_started = True
            self._steps = step = step_of(trainer)
            # Starts of an earlier run do not belong to a new run.
            earlier = [each for each in self._starts if each["step"] < step]
            self._starts = [*earlier, {"step": step, "time": now()}]
        is_trial = bool(trainer.fast_dev_run) and not is_wanted  # type: ignore[attr-defined]
        if is_trial or not trainer.is_global_zero:
            return None
        wanted = self.path or self._wanted or self.page_path(trainer)
        failures = self._failures.forgiven("report_not_written", path=str(wanted))
        with failures, self._pace.measured():
            path = self.path = self.path or self._claim(wanted)
            self._path = str(path)
            data = self._data(trainer)
            # Data first, because `lightning-mp report` can rebuild the page from them.
            write(path.with_suffix(".json"), json.dumps(data, allow_nan=False))
            write(path, report_page(data))
            return path
        return None

    def _data(self, trainer: pl.Trainer) -> dict[str, Any]:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        watching = [c for c in callbacks if isinstance(c, InstabilityMonitor)]
        monitors = [c for c in watching if not isinstance(c, InstabilityReport)]
        run: dict[str, Any] = {
            "title": type(trainer.lightning_module).__name__,
            "steps": self._steps,
            "starts": self._starts,
            "written": now(),
            "end": self._end,
            "has_loss_scale": scaler_of(trainer) is not None,
            "facts": run_facts(trainer, self.recorder.highest_rates),
            "monitors": [type(monitor).__name__ for monitor in monitors],
            "preflight": preflight_page_of(trainer, self.path),
        }
        return report_data(self.history, [each.history for each in monitors], run, self.max_tensors)


class _Pace:
    """Decides when to write: at intervals, and at once after an alarm."""

    def __init__(self, every_n_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_n_seconds = every_n_seconds
        self.has_news = False  # an alarm since the last report
        self._clock = clock
        self._ended = self._took = 0.0

    def is_due(self) -> bool:
        elapsed = self._clock() - self._ended
        wait = 0.0 if self.has_news else self.every_n_seconds
        return elapsed >= max(wait, _REST * self._took)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        self.has_news = False
        began = self._clock()
        try:
            yield
        finally:
            # Also after a failed write, which must not be repeated at every step.
            self._ended = self._clock()
            self._took = self._ended - began
