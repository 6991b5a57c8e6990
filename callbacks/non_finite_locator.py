"""`NonFiniteLocator`: names the module that produced the first NaN or inf of a failing step."""

import inspect
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._locate.replay import Record, find_in_batches
from lightning_mp.callbacks._rules.records import StepFacts
from lightning_mp.callbacks._step.batches import copy_containers
from lightning_mp.callbacks._step.recorder import facts_of
from lightning_mp.callbacks._step.skipping import StepSkipper
from lightning_mp.callbacks._step.training_state import (
    advised_plugin,
    gather_objects,
    loss_scale_of,
)
from lightning_mp.callbacks.monitor import InstabilityError, InstabilityMonitor
from lightning_mp.numerics.replay_state import RngState, own_generators
from lightning_mp.numerics.tensor_stats import StatField, tensor_stats
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision.loss_scaler import all_reduce_found_inf

__all__ = ["NonFiniteLocator"]


@dataclass(eq=False)
class _Step:
    """The current training step: its batches and the results so far."""

    facts: StepFacts
    scale: float | Tensor | None
    records: list[Record] = field(default_factory=list)
    backwards: int = 0
    optimizer_steps: int = 0  # in manual optimization there may be several
    bad: list[int] = field(default_factory=list)  # indices of records with a non-finite loss
    located: bool = False


@explains_arguments(checks={"repeated max_replays": "[1, inf)", "near_limit": "(0, 1)"})
class NonFiniteLocator(InstabilityMonitor):
    """Replays a failing step with hooks and names the module that produced the first NaN or inf.

    A NaN loss does not show its origin, because NaN spreads to every later module within one
    forward. The replay does not change the training state. docs/callbacks/non-finite-locator.md
    explains costs and limits.

    Example: `Trainer(callbacks=NonFiniteLocator(action="stop"))`

    Args:
        repeated: Number of consecutive skipped steps after which the last one is replayed.
        near_limit: Modules with values above this share of the dtype's largest value are suspects.
        check_gradients: Without a loss scale, check the gradients of every step in addition to the
            loss. The host then waits for each backward.
        action: `"warn"`, `"stop"` training before the step, or `"raise"` an `InstabilityError`.
        max_replays: Maximum number of replayed steps in a run.
        save_batch: Whether alarms of all monitors save the batches of their step as
            `bad_batches/*.pt` in the log folder, at most 20 files; see `Alarm.batch_path`. Keeps
            the latest batches in memory.
        repeat_after_steps: Minimum number of steps between two equal alarms.

    Raises:
        ValueError: An argument is invalid.
        InstabilityError: With `action="raise"`, after the source was located.
    """

    keeps = ("replays", "_skips", "_newest_named")

    def __init__(
        self,
        *,
        repeated: int = 3,
        near_limit: float = 0.125,
        check_gradients: bool = True,
        action: Literal["warn", "stop", "raise"] = "warn",
        max_replays: int = 3,
        save_batch: bool = False,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(repeat_after_steps=repeat_after_steps)
        self.save_batch = save_batch
        self.repeated = repeated
        self.near_limit = near_limit
        self.check_gradients = self.needs_gradient_norm = check_gradients
        self.action = action
        self.max_replays = max_replays
        self.replays = 0
        self._skips = 0  # consecutive
        self._newest_named: int | None = None  # latest step whose source was found
        self._step: _Step | None = None
        self._unjudged: _Step | None = None  # until its outcome has arrived
        self._skipper = StepSkipper()
        self._generators: list[Any] = []

    # --- healthy steps ---------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._newest_named = None  # here, because a checkpoint is loaded after `setup`

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()
        # Collected once, because the search visits all modules.
        self._generators = own_generators(pl_module)
        if self.action == "stop":
            self._skipper.attach(trainer)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        if self.replays >= self.max_replays:
            self._forget()
            return
        facts = self.recorder.now or facts_of(trainer, batch_idx)
        if self._step is None or self._step.facts.step != facts.step or _is_manual(trainer):
            scale = loss_scale_of(trainer)
            # Cloned for the replay, because the scaler updates the scale in place.
            scale = scale.clone() if isinstance(scale, Tensor) else scale
            self._step = _Step(facts, scale)
        rng = RngState(trainer.strategy.root_device, generators=self._generators)
        # Containers are copied, because `training_step` may remove items from its batch.
        self._step.records.append(Record(copy_containers(batch), batch_idx, rng))

    @override
    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        step, seen = self._step, self.recorder.newest_loss
        if step is None or seen is None:
            return
        step.backwards += 1
        losses = [seen]
        if step.scale is None and trainer.world_size > 1:
            # Ranks replay together, so all must agree before the step.
            is_bad = all_reduce_found_inf(torch.isfinite(seen).logical_not().float())
            losses.append(torch.where(is_bad > 0, torch.nan, seen))
        # Sent before the backward is queued, so that the host does not wait for the backward.
        take = partial(self._take_loss, step, len(step.records) - 1)
        self.recorder.send(torch.stack(losses), take)

    def _take_loss(self, step: _Step, index: int, losses: npt.NDArray[Any]) -> None:
        step.records[index].loss = float(losses[0])
        step.bad += [index] * (not math.isfinite(losses[-1]))

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, _: Any, optimizer: Optimizer) -> None:
        step = self._step
        if step is None:
            return
        self._judge_late(trainer)
        step.optimizer_steps += 1
        if self._has_bad_loss(trainer, step):
            self._locate(trainer, step, step.bad)
        elif self._has_bad_gradient(step):
            self._locate(trainer, step, [], "gradients")
        if trainer.should_stop and step.located:
            self._skipper.skip(trainer, optimizer)

    @override
    def _before_error(self) -> None:
        trainer, step = self.recorder.trainer, self._step
        if trainer is not None and step is not None and step.scale is not None:
            self.recorder.drain()
            self._judge(trainer, step, is_skipped=True)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = self._step
        if step is None:
            return
        if step.optimizer_steps == 0:
            if _is_manual(trainer) and self._has_bad_loss(trainer, step):
                self._locate(trainer, step, step.bad)
            return  # batches are being accumulated
        self._step = None
        if step.scale is not None and step.backwards:
            now = self.recorder.now
            if now is None or now.skipped is None:  # on a GPU, torch's scaler tells a step later
                self._unjudged = step
            else:
                self._judge(trainer, step, now.skipped)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._judge_late(trainer)
        self._forget()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._forget()
        self._skipper.detach()

    def _forget(self) -> None:
        self._step = self._unjudged = None

    # --- failing steps ---------------------------------------------------------------------------

    def _has_bad_loss(self, trainer: pl.Trainer, step: _Step) -> bool:
        """Wait for the losses of a step; return whether all ranks know of a non-finite loss."""
        self.recorder.drain()
        # With a loss scale, ranks agree only in `_judge` after the step.
        return bool(step.bad) and (step.scale is None or trainer.world_size == 1)

    def _has_bad_gradient(self, step: _Step) -> bool:
        """Return whether any rank has a non-finite gradient; a collective."""
        seen = self.recorder.step
        is_checked = self.check_gradients and step.scale is None
        if not is_checked or seen is None or seen.signals is None:
            return False
        norms: list[npt.NDArray[Any]] = []
        self.recorder.send(seen.signals[1], norms.append)
        self.recorder.drain()
        if math.isfinite(norms[0]):
            return False
        # The norm of finite gradients may overflow, so count non-finite values.
        stats_NK = tensor_stats(seen.found.gradients)
        count = stats_NK[:, StatField.NON_FINITE].sum().float()
        return bool(all_reduce_found_inf(count) != 0)

    def _judge_late(self, trainer: pl.Trainer) -> None:
        """Judge the last step under torch's scaler, whose outcome was not known at its end."""
        step, self._unjudged = self._unjudged, None
        if step is not None:
            self.recorder.drain()
            facts = self.recorder.newest
            self._judge(trainer, step, facts is not None and bool(facts.skipped))

    def _judge(self, trainer: pl.Trainer, step: _Step, is_skipped: bool) -> None:
        """Count skipped steps, which are equal on all ranks, and locate the source if due."""
        if not is_skipped:
            self._skips = 0
            return
        self._skips += 1
        if step.located:
            return
        bad = {index for each in gather_objects(trainer, step.bad) for index in each}
        if bad:
            self._locate(trainer, step, sorted(bad))
        elif self._skips >= self.repeated:  # a dynamic scale finds its level by single overflows
            self._locate(trainer, step, [], "overflows" if self._skips > 1 else "overflow")

    def _locate(self, trainer: pl.Trainer, step: _Step, indices: list[int], *tags: str) -> None:
        """Replay a step, or its failed batches, and raise the alarm."""
        if step.located or self.replays >= self.max_replays:
            return
        self.replays += 1
        if not _is_manual(trainer):  # hooks of other monitors would measure the replay
            self.recorder.hooks.close()
        skips, self._skips = self._skips, 0
        step.located = True
        records = [step.records[i] for i in dict.fromkeys(indices)] or step.records
        scale, steps = None if step.scale is None else float(step.scale), step.optimizer_steps
        index, rank, found = find_in_batches(trainer, records, scale, steps, self.near_limit)
        facts = replace(step.facts, batch_idx=records[index].batch_idx, rank=rank)
        # A bad step writes NaN to parameters, which the next step finds: one alarm for both.
        follows = "parameter" in found.tags and self._newest_named == facts.step - 1
        if found.tensor:
            self._newest_named = facts.step
        if follows:
            return
        eps = _lost_epsilon(trainer, found.numbers.get("dtype", ""))
        tags += ("unchecked",) * (not self.check_gradients) + ("epsilon",) * (eps is not None)
        tags += ("zero",) * (eps == 0)
        # Plugins for sharded models take no `inf_clamp`.
        taken = inspect.signature(advised_plugin(trainer).__init__).parameters
        tags += ("nan",) * ("inf_clamp" not in taken)
        found = replace(found, tags=(*found.tags, *tags)).given(eps=eps, skips=skips)
        alarm = self.say(trainer, found, facts)
        if self.action == "raise":
            # `say` returns `None` if the same alarm was raised recently.
            raise InstabilityError(alarm or self.alarms[-1])
        # Not `=`, because another callback may have requested the stop.
        trainer.should_stop |= self.action == "stop"


def _lost_epsilon(trainer: pl.Trainer, dtype: str) -> float | None:
    """Return the epsilon of a plain Adam that is 0 in the dtype of its weights, or `None`."""
    if not dtype:
        return None
    zero = torch.zeros((), dtype=getattr(torch, dtype))
    is_guarded = isinstance(trainer.precision_plugin, ScaledPrecision)  # only against rounding
    groups = [group for each in trainer.optimizers for group in each.param_groups]
    used = [g.get("eps") for g in groups if any(p.dtype == zero.dtype for p in g["params"])]
    lost = (eps for eps in used if isinstance(eps, float) and zero + eps == 0)
    return next((eps for eps in lost if eps == 0 or not is_guarded), None)


def _is_manual(trainer: pl.Trainer) -> bool:
    return not trainer.lightning_module.automatic_optimization
