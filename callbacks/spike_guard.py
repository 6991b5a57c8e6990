"""`SpikeGuard`: watches loss and gradient norm; can skip, stop, raise or rewind at a spike."""

import math
from collections import deque
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import PATH, explains_arguments, refuse_values
from lightning_mp.callbacks._rules.course import CourseRule
from lightning_mp.callbacks._rules.records import Sample, StepFacts, Verdict
from lightning_mp.callbacks._rules.spikes import RobustWindow, SignalVerdict, describe, is_slight
from lightning_mp.callbacks._step.batches import tensors_in
from lightning_mp.callbacks._step.marks import MarkStore
from lightning_mp.callbacks._step.rewinding import Rewinder
from lightning_mp.callbacks._step.skipping import StepSkipper
from lightning_mp.callbacks._step.training_state import (
    TrainingStep,
    gather_objects,
    learning_rate_of,
    loss_scale_of,
    step_of,
)
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.callbacks.monitor import InstabilityError, InstabilityMonitor
from lightning_mp.numerics.tensor_stats import local_shard

__all__ = ["SpikeGuard"]

# Smallest relative noise of the loss and of the gradient norm. With z = 6, no value below 1.35 and
# 2.05 times the median is a spike.
_FLOORS = (0.05, 0.12)


@explains_arguments(
    checks={
        "z_threshold": "(0, inf)",
        "window_steps judge_after_steps": "[2, inf)",
        "patience rewind_steps checkpoint_every_n_steps": "[1, inf)",
        "skip_batches max_rewinds": "[0, inf)",
        "dirpath": PATH,
        "rewind_memory_gb": "(0, inf]",
        "rewind_lr_factor": "(0, 1]",
    }
)
class SpikeGuard(InstabilityMonitor):
    """Warns of loss spikes, gradient spikes and NaN; on request skips, stops, raises or rewinds.

    One bad batch can undo days: a step with 10 times the gradient moves Adam's weights far in a
    useless direction, and one NaN ends the run. Each step is compared with the last healthy steps,
    and the course of the loss with its best and its start; `action` applies to single steps only.
    Actions: docs/callbacks/spike-guard.md.

    Example: `Trainer(callbacks=SpikeGuard(action="skip"))`

    Args:
        action: `"warn"`; `"skip"` the step; `"stop"` before it; `"raise"` an `InstabilityError`
            before it; or `"rewind"`.
        z_threshold: Robust deviations above the median from which on a value is a spike.
        window_steps: Number of healthy steps in the window that a step is compared with.
        judge_after_steps: Number of healthy steps before the first spike can be named.
        patience: Number of spikes in a row after which the new level is accepted.
        rewind_steps: Smallest number of optimizer steps to go back.
        skip_batches: Number of batches to skip from the mark on; with `accumulate_grad_batches`
            rounded up to whole steps.
        max_rewinds: Largest number of rewinds; later spikes raise warnings only.
        checkpoint_every_n_steps: Optimizer steps between two marks.
        dirpath: Folder for marks on disk; the Trainer's log folder by default. Marks are removed
            when training ends; marks of a killed run, when the next run starts in the folder.
        rewind_storage: Storage of marks: `"disk"`, `"memory"` of every rank, or `"auto"`: memory if
            all marks take at most `rewind_memory_gb` and nothing is sharded.
        rewind_memory_gb: Memory limit of a rank for `"auto"`, in 1e9 bytes.
        rewind_lr_factor: Factor by which each rewind multiplies learning rates, including later
            ones of schedules.
        save_batch: Whether alarms, also those of other monitors, save the batches of their step as
            `bad_batches/*.pt` in the log folder, 20 files at most; see `Alarm.batch_path`. Keeps
            the newest batches in memory.
        repeat_after_steps: Steps until an alarm of one kind about one tensor is raised again.

    Raises:
        ValueError: An argument is out of range.
        MisconfigurationException: `"rewind"` with a `training_step` that takes the data iterator;
            two guards that both skip or rewind.
        InstabilityError: At a spike or NaN, with `action="raise"`.
    """

    needs_gradient_norm = True
    keeps = ("rewinds", "_runs", "_skips")

    def __init__(
        self,
        *,
        action: Literal["warn", "skip", "stop", "raise", "rewind"] = "warn",
        z_threshold: float = 6.0,
        window_steps: int = 128,
        judge_after_steps: int = 64,
        patience: int = 16,
        rewind_steps: int = 100,
        skip_batches: int = 200,
        max_rewinds: int = 3,
        checkpoint_every_n_steps: int = 50,
        dirpath: str | None = None,
        rewind_storage: Literal["auto", "memory", "disk"] = "auto",
        rewind_memory_gb: float = 4.0,
        rewind_lr_factor: float = 1.0,
        save_batch: bool = False,
        repeat_after_steps: int = 1,
    ) -> None:
        super().__init__(repeat_after_steps=repeat_after_steps)
        if judge_after_steps > window_steps:
            sizes = {"judge_after_steps": judge_after_steps, "window_steps": window_steps}
            reason = usage("judge_after_steps", fitting=max(2, window_steps // 2))
            refuse_values(self, reason, **sizes)
        self.action = action
        self.z_threshold = float(z_threshold)
        self.window_steps = window_steps
        self.judge_after_steps = judge_after_steps
        self.patience = patience
        self.max_rewinds = max_rewinds
        self.rewinds = 0
        self.save_batch = save_batch
        self.rewind_storage = rewind_storage
        self.rewind_lr_factor = float(rewind_lr_factor)
        self._rewinder = Rewinder(
            store=MarkStore(dirpath=dirpath, storage=rewind_storage, memory_gb=rewind_memory_gb),
            lr_factor=self.rewind_lr_factor,
            every_n_steps=checkpoint_every_n_steps,
            rewind_steps=rewind_steps,
            skip_batches=skip_batches,
        )
        self._skipper = StepSkipper()
        self._windows: list[RobustWindow] = []
        self._courses: list[CourseRule] = []
        self._sizes: deque[int] = deque(maxlen=window_steps)  # number of samples of each step
        self._has_stepped = True
        self._skips = 0  # consecutive steps that a loss scaler has skipped
        self._runs: dict[str, int] = {}  # consecutive bad steps, by optimizer and kind
        # Learning rates of the first optimizer.
        self._lrs: deque[float] = deque(maxlen=window_steps)
        self._is_bad: Tensor | None = None  # whether loss and norm of the next step are bad
        self._is_ending = False  # whether training ends at the current step
        self._is_lost = False  # whether weights are not finite, so that no step ever is
        self._event: tuple[StepFacts, Verdict] | None = None  # bad step to act on

    # --- every step ------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._add_windows(len(trainer.optimizers))
        self._sizes.clear()
        self._lrs.clear()
        self._has_stepped, self._is_ending, self._event = True, False, None
        self._is_lost = False
        if self.action in ("skip", "stop"):
            self._skipper.attach(trainer)
        if self.action == "rewind":
            self._rewinder.start(trainer)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, _: int) -> None:
        if self._has_stepped:  # otherwise another accumulated batch of the same step
            self._has_stepped = False
            self._sizes.append(0)
        self._sizes[-1] += next((len(t) for t in tensors_in(batch) if t.ndim), 0)

    def _spread(self, trainer: pl.Trainer) -> float:
        """Return the relative noise of a step; a smaller last batch has more noise."""
        # The noise of a mean of n samples is proportional to 1 / sqrt(n).
        self._has_stepped = True
        size, usual = self._sizes[-1], sorted(self._sizes)[len(self._sizes) // 2]
        # Ranks decide together, so the batch size of one rank must not matter.
        is_known = trainer.world_size == 1 and size > 0
        return math.sqrt(max(usual / size, 1.0)) if is_known else 1.0

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        self._is_bad = None
        if step.signals is None:
            return None  # `training_step` returned `None`
        values, spread = step.signals[:2], self._spread(step.trainer)
        if self.action in ("warn", "rewind"):  # act after the step, when the host knows the values
            step.context = {"spread": spread}
            return values
        # Judged on the device, so that skipping needs no host sync.
        verdict = self._judged(step.facts.optimizer, values, spread)
        self._is_bad = verdict.is_spike | ~verdict.is_finite
        if self.action in ("stop", "raise") and loss_scale_of(step.trainer) is not None:
            self._is_bad[1] &= verdict.is_finite[1]  # the loss scaler handles overflows
        return torch.stack([part.float() for part in verdict])

    def _judged(self, optimizer: int, values: Any, spread: float) -> SignalVerdict:
        """Return the verdict of loss and gradient norm of a step."""
        window = self._windows[optimizer]
        verdict = window.judge(values, spread)
        # On a device, reading the verdict would be a host sync.
        if isinstance(values, Tensor) or verdict.is_spike[0]:
            verdict.is_spike[0] &= ~is_slight(verdict, window.highest_k[0])
        return verdict

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, _: Any, optimizer: Optimizer) -> None:
        if self._is_bad is None:
            return
        if self.action == "skip":
            self._skipper.skip(trainer, optimizer, self._is_bad.any().float())
        elif self.action in ("stop", "raise"):
            self._is_ending |= bool(self._is_bad.any())  # a host sync
            if self._is_ending:
                self._end(trainer, optimizer)

    def _end(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Raise an error, or skip the optimizer's step, which is the last one of training."""
        self._runs.clear()  # a resumed run must end and raise its alarm again
        self._raised.clear()
        if self.action == "stop":
            self._skipper.skip(trainer, optimizer)
            return
        self.recorder.finish_before_error(self, optimizer)
        if self._event is not None:
            facts, verdict = self._event
            alarms = (a for a in self.alarms if (a.step, a.kind) == (facts.step, verdict.kind))
            raise InstabilityError(next(alarms))

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
            self._courses.append(CourseRule())

    # --- later, on the host ----------------------------------------------------------------------

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._is_ending:  # the alarm must be raised before training stops
            self.recorder.catch_up()
            self._is_ending = False
        is_eventful = self._act(trainer)
        if self.action == "rewind" and not is_eventful and self._rewinder.is_due(trainer):
            # Saving a mark waits for the device anyway, and a bad step must not become a mark.
            self.recorder.catch_up()
            if not self._act(trainer) and not any(self._runs.values()):
                position = trainer.fit_loop.epoch_loop.batch_progress.total.ready
                self._rewinder.save(trainer, step_of(trainer) + 1, position)

    def _act(self, trainer: pl.Trainer) -> bool:
        """Act on the first event among the judged steps; return whether there is an event."""
        event = self._event
        # With lost weights, `max_steps` would not be reached.
        trainer.should_stop |= self._is_lost or (event is not None and self.action == "stop")
        if event is not None and self.action == "rewind":
            self.recorder.catch_up()  # later steps belong to weights that the rewind discards
            self._rewind(trainer, event[0])
        self._event = None
        return event is not None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._rewinder.on_epoch_start(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._rewinder.clear()

    @override
    def on_exception(self, *_: Any) -> None:
        self._rewinder.store.close(is_over=False)  # a resumed run may use the marks on disk

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._skipper.detach()

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        facts, trainer = sample.facts, self.recorder.trainer
        columns = sample.array
        if "spread" in sample.context:
            values = np.asarray(sample.array, np.float32)
            columns = np.stack(self._judged(facts.optimizer, values, sample.context["spread"]))
        loss, norm = (SignalVerdict(*row) for row in columns.T.tolist())
        metrics = {"loss": math.nan if facts.loss is None else loss.value, "loss_z": loss.z}
        metrics |= {"gradient_norm": norm.value, "gradient_norm_z": norm.z}
        self.record(metrics, facts, trainer.log_every_n_steps)
        if facts.optimizer == 0 and facts.lr is not None:
            self._lrs.append(facts.lr)
        is_bad = {
            "non_finite_loss": not loss.is_finite,
            "spike": loss.is_spike or norm.is_spike,
            "non_finite_gradient": loss.is_finite and not norm.is_finite,
        }
        # Clipping by value does not limit the norm.
        is_by_value = trainer.gradient_clip_algorithm == "value"
        clip_val = None if is_by_value else trainer.gradient_clip_val
        verdicts, event = [], None
        self._skips = self._skips + 1 if facts.skipped else 0
        first_bad = facts.step - self.patience + 1
        # The first of several consecutive bad steps is the event.
        for kind, is_so in is_bad.items():
            key = f"{kind} {facts.optimizer}"
            self._runs[key] = self._runs.get(key, 0) + 1 if is_so else 0
            if self._runs[key] == 1 and event is None:
                event = self._described(facts, loss, norm, clip_val)
                verdicts.append(event)
            # Consecutive spikes are a new level; see `is_new_level`.
            if self._runs[key] == self.patience and kind != "spike":
                tags = ("skipped",) if self._skips >= self.patience else ()
                if self.action == "skip" and _are_lost(trainer):
                    tags, self._is_lost = ("lost",), True
                run = Verdict("non_finite_run", self.patience, self.patience, "error", tags=tags)
                verdicts.append(run.given(first_bad=first_bad))
        if event is not None and event.severity != "info" and self._event is None:
            self._event = facts, event
        for name, now in {"loss": loss, "gradient norm": norm}.items():
            if now.is_new_level:
                shift = Verdict("level_shift", now.value, now.limit, tensor=name)
                shift = shift.given(patience=self.patience, again=self.judge_after_steps)
                verdicts.append(shift.given(first_bad=first_bad))
        # Windows follow a slow rise; the course compares the loss with its best level so far.
        course = self._courses[facts.optimizer]
        used = self._courses[: len(trainer.optimizers)]
        course.rivals = [other for other in used if other is not course]
        for found in course.judge(facts.step, facts.loss, facts.gradient_norm):
            # A schedule may have lowered the rate since.
            found = found.given(start_rate=(facts.highest_lr or 0.0) / 2)
            is_clipped = (clip_val or math.inf) <= found.numbers.get("lowest", 0.0)
            verdicts.append(replace(found, tags=("clipped",)) if is_clipped else found)
        return verdicts

    def _described(
        self, facts: StepFacts, loss: SignalVerdict, norm: SignalVerdict, clip_val: float | None
    ) -> Verdict:
        is_spent = self.action == "rewind" and self.rewinds >= self.max_rewinds
        action = "rewinds spent" if is_spent else self.action
        first_lr = self._lrs[0] if self._lrs and facts.optimizer == 0 else None
        found = describe(facts, loss, norm, first_lr=first_lr, clip_val=clip_val, action=action)
        return found.given(window=self.window_steps, z_threshold=self.z_threshold)

    def _rewind(self, trainer: pl.Trainer, facts: StepFacts) -> None:
        if self.rewinds >= self.max_rewinds:
            return
        self.rewinds += 1
        found = self._rewinder.rewind(trainer, facts.global_step)
        if self._rewinder.lost:
            self.say(trainer, Verdict("rewind_lost", self._rewinder.lost))
        if found is None:
            tags = ("changed",) if self._rewinder.outdated else ()
            self.say(trainer, Verdict("rewind_failed", tags=tags))
            return
        mark, left_out = found
        self._runs.clear()
        undone, wanted = facts.global_step - mark.global_step, self._rewinder.rewind_steps
        rate = learning_rate_of(trainer)
        tags, also = () if rate else ("no rate",), () if undone >= wanted else ("no mark",)
        verdict = Verdict("rewind_to_step", mark.step, severity="info", tags=tags, also=also)
        verdict = verdict.given(rewinds=self.rewinds, max_rewinds=self.max_rewinds, rate=rate)
        self.say(trainer, verdict.given(undone=undone, wanted=wanted, left_out=left_out))

    # --- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "windows": [window.state_dict() for window in self._windows],
            "courses": [course.state_dict() for course in self._courses],
            "rewinder": self._rewinder.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Lightning loads the state before `on_train_start`, where the optimizers are counted.
        self._windows.clear()
        self._courses.clear()
        self._add_windows(len(state_dict["windows"]))
        rules: list[Any] = [*self._windows, *self._courses[: len(state_dict["courses"])]]
        for rule, state in zip(rules, state_dict["windows"] + state_dict["courses"], strict=True):
            rule.load_state_dict(state)
        self._rewinder.load_state_dict(state_dict["rewinder"])


def _are_lost(trainer: pl.Trainer) -> bool:
    """Return whether any weight of any rank is NaN or inf; a collective."""
    weights = trainer.lightning_module.parameters()
    lost = any(not local_shard(p.detach()).isfinite().all() for p in weights)
    return any(gather_objects(trainer, lost))  # a shard may be the only one that is lost
