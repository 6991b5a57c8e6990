"""`NonFiniteLocator`: names the module that made the first NaN or inf of a failing step."""

from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._locate.remedy import remedy_for
from lightning_mp.callbacks._locate.replay import Record
from lightning_mp.callbacks._locate.search import gather_objects, search
from lightning_mp.callbacks._step.skipped_steps import SkippedSteps
from lightning_mp.callbacks._step.training_state import loss_scale_of, step_of
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.replay_state import RngState
from lightning_mp.numerics.stat_fields import StatField
from lightning_mp.numerics.tensor_stats import tensor_stats
from lightning_mp.precision.loss_scaler import all_reduce_found_inf

__all__ = ["NonFiniteLocator"]


@dataclass(eq=False)
class _Step:
    """A training step that is under way: its batches, and what is known of it."""

    number: int
    scale: float | Tensor | None
    records: list[Record] = field(default_factory=list)
    backwards: int = 0
    optimizer_steps: int = 0  # in manual optimization there may be several
    bad: list[int] = field(default_factory=list)  # records whose loss was not finite
    located: bool = False


@explains_arguments()
class NonFiniteLocator(InstabilityMonitor):
    """Replays a failing step once, with hooks, and names the first producer of NaN or inf.

    A loss of NaN says nothing of where it began: within one forward it has spread to every module
    behind. Here the step is run again from the same random state, under the same precision and loss
    scale, and the first module is named that takes finite inputs, with finite parameters, and gives
    an output (or in the backward, a gradient) that is not finite. Looked into are tuples, lists,
    dicts and dataclasses. Named too are modules that came near the limit of their dtype before it:
    where a dropout of 0.1 takes 60000 to 66667, which fp16 cannot hold, the layer before is to
    blame. A batch or parameter that was bad from the start is named as such, and where no submodule
    was the first, code of the LightningModule is.

    **When**: at a loss that is not finite, before the optimizer steps; and where a loss scale has
    skipped `repeated` steps in a row, as one overflow is how a dynamic scale finds its height.
    Training then goes on bit for bit as without the callback: random state, buffers, gradients,
    torchmetrics and logged values are put back. Code of `training_step` that keeps Python state or
    writes to a logger by itself runs twice.

    **Cost** in healthy steps: a copy of the states of the random generators, a reference to the
    batches of one optimizer step, and one number for each loss, copied without blocking. The host
    waits for it before the optimizer step, when the backward has been queued, so the device does
    not idle; a loss scale makes the host wait there anyway. With several ranks and no loss scale,
    that number is all-reduced in each backward, as no rank can replay alone. With a loss scale,
    ranks talk when a step was skipped only; there a loss that is not finite on one rank, while all
    gradients are, stays unnoticed. A replay costs a step with hooks, and gradients a second time
    in memory. For gradients that overflow at a loss scale, up to eight more find one that fits.

    **Limits.** Buffers are those after the step, where it changed them. Random numbers that the
    LightningModule draws in `on_train_batch_start` are not drawn again. What the compiler fuses
    runs eagerly and may round differently. In manual optimization a replay ends before the
    optimizer step that the run stands at and uses the weights that earlier ones of the batch have
    left; only the batch of the step itself is replayed. Nothing is replayed for
    `training_step(dataloader_iter)`, and no backward with DeepSpeed or where hooks of gradients
    step the optimizers.

    It logs `instability/non_finite`: the largest magnitude that went into the producer.

    Args:
        repeated: Skipped steps in a row until the last of them is replayed.
        near_limit: The share of a dtype's largest number from which on modules are suspects.
        check_gradients: Without a loss scale, look at gradients as well, in every step, not only at
            losses. The host then waits for each backward.
        action: `"warn"`, or `"stop"` to end training after the step.
        max_replays: Steps to replay in a run; afterwards the callback does nothing.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is not of these.

    References:
        - Hugging Face's `DebugUnderflowOverflow` reports at a forward's end, and no gradients.

    Example: `Trainer(callbacks=NonFiniteLocator(action="stop"))`
    """

    def __init__(
        self,
        *,
        repeated: int = 3,
        near_limit: float = 0.125,
        check_gradients: bool = False,
        action: Literal["warn", "stop"] = "warn",
        max_replays: int = 3,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(repeat_after_steps=repeat_after_steps)
        for name, count in (("repeated", repeated), ("max_replays", max_replays)):
            if type(count) is not int or count < 1:
                self._refuse(name, count, "an integer of at least 1", "3")
        if isinstance(near_limit, bool) or not 0 < near_limit < 1:
            self._refuse("near_limit", near_limit, "a number between 0 and 1", "0.125")
        if not isinstance(check_gradients, bool):
            self._refuse("check_gradients", check_gradients, "True or False", "False")
        if action not in ("warn", "stop"):
            self._refuse("action", action, "'warn' or 'stop'", "'warn'")
        self.repeated = repeated
        self.near_limit = near_limit
        self.check_gradients = check_gradients
        self.action = action
        self.max_replays = max_replays
        self.replays = 0
        self._skips = 0  # in a row
        self._step: _Step | None = None
        self._unjudged: _Step | None = None  # until its outcome has arrived
        self._losses = AsyncReadback()
        self._skipped = SkippedSteps()
        self._is_replaying = False

    def _refuse(self, name: str, value: object, accepted: str, fix: str) -> None:
        raise ValueError(
            f"Passed `NonFiniteLocator({name}={value!r})`. `{name}` must be {accepted}. Pass {fix}."
        )

    # --- healthy steps ---------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()
        self._skipped.attach(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.replays >= self.max_replays:
            self._forget()
            return
        number, is_manual = step_of(trainer), not pl_module.automatic_optimization
        if self._step is None or self._step.number != number or is_manual:
            scale = loss_scale_of(trainer)
            scale = scale.clone() if isinstance(scale, Tensor) else scale
            self._step = _Step(number, scale)
        rng = RngState(trainer.strategy.root_device)
        self._step.records.append(Record(batch, batch_idx, rng))

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        step = self._step
        if step is None or self._is_replaying:
            return
        step.backwards += 1
        is_bad = torch.isfinite(loss.detach()).all().logical_not().float()
        if step.scale is None:
            all_reduce_found_inf(is_bad)
        self._losses.submit(len(step.records) - 1, is_bad)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = self._step
        if step is None or self._is_replaying:
            return
        self._judge_late(trainer)
        step.optimizer_steps += 1
        if step.backwards:
            self._skipped.expect(optimizer)
        self._take_losses(step)
        if step.bad and (step.scale is None or trainer.world_size == 1):
            self._locate(trainer, step, step.bad, "The loss is not finite")
        elif self.check_gradients and step.scale is None and _has_bad_gradient(optimizer):
            self._locate(trainer, step, [], "The loss is finite, gradients are not")

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = self._step
        if step is None:
            return
        if step.optimizer_steps == 0:
            if not pl_module.automatic_optimization:
                self._take_losses(step)
                if step.bad and (step.scale is None or trainer.world_size == 1):
                    self._locate(trainer, step, step.bad, "The loss is not finite")
            return  # batches are being accumulated
        self._step = None
        is_skipped = self._skipped.outcome(trainer, step.scale)
        if is_skipped is None:
            self._unjudged = step
        elif step.scale is not None and step.backwards:
            self._judge(trainer, step, is_skipped)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._judge_late(trainer)
        self._forget()
        self._skipped.detach()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._forget()
        self._skipped.detach()

    def _forget(self) -> None:
        self._losses.drain()
        self._step = self._unjudged = None

    # --- failing steps ---------------------------------------------------------------------------

    def _take_losses(self, step: _Step) -> None:
        step.bad += [arrived.step for arrived in self._losses.drain() if arrived.array != 0]

    def _judge_late(self, trainer: pl.Trainer) -> None:
        """Judge a step of a fused optimizer, whose weights are as they were if it was skipped."""
        step, self._unjudged = self._unjudged, None
        if step is not None:
            self._judge(trainer, step, self._skipped.late())

    def _judge(self, trainer: pl.Trainer, step: _Step, is_skipped: bool) -> None:
        """Count skipped steps; ranks agree on them."""
        if not is_skipped:
            self._skips = 0
            return
        self._skips += 1
        if step.located:
            return
        bad = {index for each in gather_objects(trainer, step.bad) for index in each}
        if bad:
            self._locate(trainer, step, sorted(bad), "The loss is not finite")
        elif self._skips >= self.repeated:
            steps = f"{self._skips} steps in a row" if self._skips > 1 else "this step"
            cause = f"Gradients overflowed in {steps},"
            self._locate(trainer, step, [], cause)

    def _locate(self, trainer: pl.Trainer, step: _Step, indices: list[int], cause: str) -> None:
        """Replay a step, or the batches of it that failed, and raise the alarm."""
        if step.located or self.replays >= self.max_replays:
            return
        self.replays += 1
        self._skips = 0
        step.located = self._is_replaying = True
        records = [step.records[i] for i in dict.fromkeys(indices)] or step.records
        try:
            index, rank, finding = search(
                trainer,
                records,
                scale=None if step.scale is None else float(step.scale),
                optimizer_steps=step.optimizer_steps,
                near_limit=self.near_limit,
            )
        finally:
            self._is_replaying = False
        where = f" in batch {records[index].batch_idx}"
        where += f" of rank {rank}" if trainer.world_size > 1 else ""
        is_measured = bool(finding.dtype)
        self.alarm(
            trainer,
            "non_finite",
            f"{cause}{where}: {finding.sentence}.",
            remedy_for(finding, trainer),
            step=step.number,
            severity="error",
            tensor=finding.name or None,
            value=finding.amax if is_measured else None,
            threshold=finding.limit if is_measured else None,
        )
        if self.action == "stop":
            trainer.should_stop = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "replays": self.replays, "skips": self._skips}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.replays, self._skips = state_dict["replays"], state_dict["skips"]


def _has_bad_gradient(optimizer: Optimizer) -> bool:
    """Return whether a rank has a gradient that is not finite; waits for the device."""
    groups = (group["params"] for group in optimizer.param_groups)
    gradients = [p.grad for params in groups for p in params if p.grad is not None]
    if not gradients:
        return False
    count = tensor_stats(gradients)[:, StatField.NON_FINITE].sum()
    return bool(all_reduce_found_inf(count.float()) != 0)
