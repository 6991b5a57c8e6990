"""Watches loss and gradient norm; warns, skips, stops or rewinds where they jump."""

import math
from collections import deque
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules import spike_sentences as spike_report
from lightning_mp.callbacks._rules.robust_window import Column, RobustWindow, Verdict
from lightning_mp.callbacks._rules.spike_sentences import Finding, Scene
from lightning_mp.callbacks._step.rewinding import Rewinder
from lightning_mp.callbacks._step.signals import LossSum, measure
from lightning_mp.callbacks._step.skipping import StepSkipper
from lightning_mp.callbacks._step.training_state import gradients_of, parameter_names, step_of
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.numerics.async_readback import AsyncReadback, Readback

__all__ = ["SpikeGuard"]

_ACTIONS = ("warn", "skip", "stop", "rewind")
_FLOORS = (0.05, 0.12)  # noise below these is none: of the loss, of the gradient norm


@explains_arguments()
class SpikeGuard(InstabilityMonitor):
    """Warns of loss spikes, gradient spikes and NaN; on request skips, stops or rewinds.

    One bad batch can undo days: a step with 10 times the gradient moves Adam's weights at full
    speed in a direction of no use, and one NaN ends the run. Every step is held against the last
    128 healthy ones:

        z = (log x - median) / max(1.4826 MAD, reach, floor), a spike where z > 6

    one-sided, in logarithms. With a floor of 0.05 for the loss and 0.12 for the gradient norm
    nothing below 1.35 and 2.05 times the median is a spike; the reach is a third of the distance
    to the highest healthy value. A spike of 10 times is 6 deviations where noise is below 38%;
    with batches of a few samples it may be none. Raise `z_threshold` where noise has heavy tails.
    Non-finite values are events of their own; neither they nor spikes enter the window. Spikes in a
    row are one event; after `patience` of them the level has shifted (other data, another learning
    rate): that is said, and the window starts anew.

    **Cost.** Every optimizer step: one multi-tensor norm of the gradients, some dozen kernels on
    [2, 128] numbers, with several ranks one collective of 8 bytes a rank. No host sync, except for
    checkpoints. Alarms are raised at the end of the step on the CPU, a step or two later on a GPU.

    **Metrics**, under the step that they come from, every `Trainer(log_every_n_steps)` steps:
    `instability/loss`, `instability/loss_z`, `instability/gradient_norm`,
    `instability/gradient_norm_z` (of a second optimizer: `instability/loss_1` and so on); and at
    events `instability/loss_spike`, `instability/gradient_spike`, `instability/non_finite_loss`,
    `instability/non_finite_gradient`, `instability/non_finite_run`, `instability/level_shift`,
    `instability/rewind_to_step`.

    **Actions.** Nothing but `"warn"` changes the training.

    - `"skip"`: decided on the device, before the step. With the precision plugins of this package
      the plugin skips, and `global_step` and LR schedule stand still (in bf16 for one sync a step).
      With `fused=True` optimizers and `SafeAdamW` the optimizer skips; the host does not know, so
      `global_step` and LR schedule go on. With all other optimizers the host reads one flag a step,
      a host sync, warned of once; `global_step` and step-wise LR schedules stand still.
    - `"stop"`: sets `trainer.should_stop`, after the step.
    - `"rewind"`: goes back to a checkpoint of its own that is at least `rewind_steps` before the
      spike, and goes on behind the data that led to it. Weights, optimizers, step-wise LR
      schedules, loss scale, random numbers, `global_step` and other callbacks go back; data, epochs
      and the step of loggers go on. `ModelCheckpoint` and `Timer` stay as they are. The batches
      seen since the checkpoint count towards `skip_batches`. LR schedules with a `frequency` above
      1 count batches, so that their next step is due up to `frequency` batches off; those by epoch
      lag by the epochs that were undone.

    In manual optimization the losses of all backwards since the last step of any optimizer are
    what an optimizer's step is judged by, each optimizer in a window of its own. Under a loss
    scale, non-finite gradients at a finite loss are overflows: noted, left to the scaler.

    Args:
        action: `"warn"`, `"skip"`, `"stop"` or `"rewind"`.
        z_threshold: Robust deviations above the median that make a spike. Default 6.
        window_steps: Healthy steps that a step is held against. Default 128.
        judge_after_steps: Healthy steps before the first spike is called. Default 64.
        patience: Spikes in a row after which the new level is accepted. Default 16.
        rewind_steps: How many optimizer steps to go back at the least. Default 100.
        skip_batches: How many batches to leave out, from the checkpoint on. Default 200; with
            `accumulate_grad_batches` rounded up to whole steps.
        max_rewinds: How often to rewind; spikes after that are only warned of. Default 3.
        checkpoint_every_n_steps: Optimizer steps between two checkpoints to rewind to. Default 50.
        dirpath: Where these are kept while training; the Trainer's log folder by default. They are
            removed when training ends.
        repeat_after_steps: Steps until an alarm of one kind about one tensor is raised again.

    Raises:
        ValueError: An argument is out of range.
        MisconfigurationException: `"rewind"` with a `training_step` that takes the data iterator;
            two guards that both skip or rewind.

    References:
        PaLM, section 5.1 (arXiv:2204.02311): rewind 100 steps, skip 200 to 500 batches.
    """

    def __init__(
        self,
        *,
        action: Literal["warn", "skip", "stop", "rewind"] = "warn",
        z_threshold: float = 6.0,
        window_steps: int = 128,
        judge_after_steps: int = 64,
        patience: int = 16,
        rewind_steps: int = 100,
        skip_batches: int = 200,
        max_rewinds: int = 3,
        checkpoint_every_n_steps: int = 50,
        dirpath: str | None = None,
        repeat_after_steps: int = 1,
    ) -> None:
        super().__init__(repeat_after_steps=repeat_after_steps)
        if action not in _ACTIONS:
            raise ValueError(
                f"Passed `SpikeGuard(action={action!r})`. `action` must be one of "
                f"{', '.join(map(repr, _ACTIONS))}."
            )
        if isinstance(z_threshold, bool) or not 0 < z_threshold < math.inf:
            raise ValueError(
                f"Passed `SpikeGuard(z_threshold={z_threshold!r})`. `z_threshold` must be a "
                "positive number. Leave it out for 6."
            )
        self._check_at_least(2, window_steps=window_steps, judge_after_steps=judge_after_steps)
        self._check_at_least(1, patience=patience, rewind_steps=rewind_steps)
        self._check_at_least(1, checkpoint_every_n_steps=checkpoint_every_n_steps)
        self._check_at_least(0, skip_batches=skip_batches, max_rewinds=max_rewinds)
        if judge_after_steps > window_steps:
            raise ValueError(
                f"Passed `SpikeGuard(judge_after_steps={judge_after_steps!r}, "
                f"window_steps={window_steps!r})`. `judge_after_steps` must be at most "
                f"`window_steps`. Pass `judge_after_steps={max(2, window_steps // 2)}`."
            )
        self.action = action
        self.z_threshold = float(z_threshold)
        self.window_steps = window_steps
        self.judge_after_steps = judge_after_steps
        self.patience = patience
        self.max_rewinds = max_rewinds
        self.rewinds = 0
        self._rewinder = Rewinder(
            dirpath=dirpath,
            every_n_steps=checkpoint_every_n_steps,
            rewind_steps=rewind_steps,
            skip_batches=skip_batches,
        )
        self._skipper = StepSkipper()
        self._losses = LossSum()
        self._readback = AsyncReadback()
        self._windows: list[RobustWindow] = []
        self._runs: dict[str, int] = {}  # bad steps in a row, by optimizer and kind
        self._lrs: deque[float] = deque(maxlen=window_steps)  # of the first optimizer
        self._names: dict[int, str] = {}
        self._arrived: list[Readback] = []

    # --- every step, on the device ---------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look up names; with `"rewind"`, take the first checkpoint."""
        self._names = parameter_names(pl_module)
        self._add_windows(len(trainer.optimizers))
        self._losses.take()
        if self.action == "skip":
            self._skipper.attach(trainer)
        if self.action == "rewind":
            self._rewinder.start(trainer)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Add up the loss of the step."""
        self._losses.add(trainer, loss)

    @override
    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge the step; with `"skip"`, have it skipped."""
        loss = self._losses.take()
        found = gradients_of(trainer, optimizer, self._names)
        if not found.gradients and trainer.world_size == 1:
            return  # `training_step` returned None
        index = next((i for i, each in enumerate(trainer.optimizers) if each is optimizer), 0)
        self._add_windows(index + 1)
        signals = measure(trainer, found, loss)
        report = self._windows[index].judge(signals.values, signals.judged)
        if self.action == "skip":
            is_bad = (report[:, Column.IS_SPIKE] != 0) | (report[:, Column.IS_FINITE] == 0)
            self._skipper.skip(pl_module, optimizer, is_bad.any().to(report.dtype))
        if self._must_agree(trainer):
            # On several ranks Lightning waits for the device at the start of each batch, so that
            # all steps before this one have arrived and nothing is waited for here.
            self._arrived += self._readback.drain()
        self._readback.submit(
            step_of(trainer),
            torch.cat([report.flatten(), signals.largest]),
            names=found.names,
            global_step=trainer.global_step,
            optimizer=index,
            lr=optimizer.param_groups[0].get("lr"),
        )

    def _add_windows(self, count: int) -> None:
        while len(self._windows) < count:
            window = RobustWindow(
                _FLOORS,
                size=self.window_steps,
                min_values=self.judge_after_steps,
                z_threshold=self.z_threshold,
                patience=self.patience,
            )
            self._windows.append(window)

    def _must_agree(self, trainer: pl.Trainer) -> bool:
        """Return whether reports must reach all ranks at the same step: they act on them."""
        is_late = trainer.world_size > 1 and trainer.strategy.root_device.type != "cpu"
        return is_late and self.action in ("stop", "rewind")

    # --- later, on the host ----------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Raise alarms for the steps that have arrived, and act."""
        arrived, self._arrived = self._arrived, []
        if not self._must_agree(trainer):
            arrived += self._readback.ready()
        is_eventful = self._read(trainer, arrived)
        if self.action == "rewind" and not is_eventful and self._rewinder.is_due(trainer):
            # A checkpoint waits for the device anyway, and none is taken of a step gone wrong.
            is_eventful = self._read(trainer, self._readback.drain())
            if not is_eventful and not any(self._runs.values()):
                position = trainer.fit_loop.epoch_loop.batch_progress.total.ready
                self._rewinder.save(trainer, step_of(trainer) + 1, position)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Skip what a rewind has left to skip."""
        self._rewinder.on_epoch_start(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the data back."""
        self._rewinder.on_epoch_end(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last steps, and remove checkpoints."""
        for readback in self._arrived + self._readback.drain():
            self._report(trainer, readback)
        self._arrived = []
        self._rewinder.clear(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Report the last steps; checkpoints stay for a resume."""
        for readback in self._readback.ready():
            self._report(trainer, readback)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove hooks from optimizers."""
        self._skipper.detach()

    def _read(self, trainer: pl.Trainer, arrived: list[Readback]) -> bool:
        """Report steps, act on the first event, and return whether there was one."""
        for at, readback in enumerate(arrived):
            finding = self._report(trainer, readback)
            if finding is None or finding.severity == "info":
                continue
            if self.action == "stop":
                trainer.should_stop = True
            elif self.action == "rewind":
                # What came after belongs to weights about to be undone.
                for later in arrived[at + 1 :] + self._readback.drain():
                    self._report(trainer, later)
                self._rewind(trainer, readback)
            return True
        return False

    def _report(self, trainer: pl.Trainer, readback: Readback) -> Finding | None:
        """Log a step and raise its alarms; return the event that begins with it, if any does."""
        loss, norm = (Verdict.from_row(row) for row in readback.array[:-2].reshape(-1, len(Column)))
        scene = Scene.of(self, trainer, readback, self._lrs)
        self._log(trainer, scene, {"loss": loss, "gradient_norm": norm})
        is_bad = {
            "non_finite_loss": not loss.is_finite,
            "spike": loss.is_spike or norm.is_spike,
            "non_finite_gradient": loss.is_finite and not norm.is_finite,
        }
        event = None
        for kind, is_so in is_bad.items():
            key = f"{kind} {scene.optimizer}"
            self._runs[key] = self._runs.get(key, 0) + 1 if is_so else 0
            if self._runs[key] == 1 and event is None:
                event = spike_report.describe(scene, loss, norm)
                is_spent = self.rewinds >= self.max_rewinds
                self._raise(
                    trainer, scene, event, spike_report.what_is_done(event, self.action, is_spent)
                )
            if self._runs[key] == self.patience and kind != "spike":
                self._raise(trainer, scene, spike_report.non_finite_run(scene, self.patience))
        for name, verdict in zip(("loss", "gradient norm"), (loss, norm), strict=True):
            if verdict.is_new_level:
                finding = spike_report.level_shift(
                    scene, name, verdict, self.patience, self.judge_after_steps
                )
                self._raise(trainer, scene, finding)
        return event

    def _raise(self, trainer: pl.Trainer, scene: Scene, finding: Finding, done: str = "") -> None:
        self.alarm(
            trainer,
            finding.kind,
            finding.message + done,
            finding.remedy,
            step=scene.step,
            severity=finding.severity,
            **finding.details,
        )

    def _log(self, trainer: pl.Trainer, scene: Scene, verdicts: dict[str, Verdict]) -> None:
        suffix = f"_{scene.optimizer}" if scene.optimizer else ""
        metrics = {}
        for name, verdict in verdicts.items():
            metrics[f"{name}{suffix}"] = verdict.value
            metrics[f"{name}_z{suffix}"] = verdict.z
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, value in metrics.items():
            self.history.add_point(name, scene.step, value)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if metrics and (scene.step + 1) % every == 0:
            named = {f"instability/{name}": value for name, value in metrics.items()}
            self.log_metrics(trainer, named, scene.step)

    def _rewind(self, trainer: pl.Trainer, readback: Readback) -> None:
        if self.rewinds >= self.max_rewinds:
            return
        self.rewinds += 1
        global_step = readback.context["global_step"]
        mark, skipped = self._rewinder.rewind(trainer, global_step)
        self._runs.clear()
        self._losses.take()
        undone = global_step - mark.global_step
        short = undone < self._rewinder.rewind_steps
        self.alarm(
            trainer,
            "rewind_to_step",
            f"went back {undone} steps, to the checkpoint before step {mark.step}, and left out "
            f"{skipped} more batches"
            + (f"; no checkpoint is {self._rewinder.rewind_steps} steps back." if short else "."),
            f"This was rewind {self.rewinds} of {self.max_rewinds}.",
            severity="info",
            value=mark.step,
        )

    # --- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return alarms, windows, and what rewinding needs."""
        return super().state_dict() | {
            "windows": [window.state_dict() for window in self._windows],
            "runs": dict(self._runs),
            "rewinds": self.rewinds,
            "rewinder": self._rewinder.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state_dict)
        self._add_windows(len(state_dict["windows"]))
        for window, state in zip(self._windows, state_dict["windows"], strict=False):
            window.load_state_dict(state)
        self._runs = dict(state_dict["runs"])
        self.rewinds = state_dict["rewinds"]
        self._rewinder.load_state_dict(state_dict["rewinder"])
