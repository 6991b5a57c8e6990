"""Rewinds to a checkpoint within `Trainer.fit`, without rewinding the data."""

from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import Checkpoint, ModelPruning, Timer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_mp.callbacks._step.marks import Mark, MarkStore
from lightning_mp.callbacks._step.training_state import is_sharded, step_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.callbacks.monitor import InstabilityMonitor

__all__ = ["Rewinder"]


@dataclass(kw_only=True, eq=False)
class Rewinder:
    """Writes marks and rewinds to them; docs/callbacks/spike-guard.md explains the procedure.

    A mark is valid until optimizers or their parameter groups change, as when layers are unfrozen.
    """

    store: MarkStore
    every_n_steps: int
    rewind_steps: int
    skip_batches: int
    lr_factor: float
    marks: list[Mark] = field(default_factory=list, init=False)
    lost: int = field(default=0, init=False)  # marks that could not be read
    outdated: int = field(default=0, init=False)  # marks of other optimizers
    _total_factor: float = field(default=1.0, init=False)
    _has_told: bool = field(default=False, init=False)
    _missed: int = field(default=-1, init=False)  # the last period whose mark could not be written
    to_skip: int = field(default=0, init=False)  # batches to skip from the next epoch's start

    def start(self, trainer: pl.Trainer) -> None:
        """Write the first mark unless there are marks of a resumed run; call on all ranks."""
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise MisconfigurationException(usage("dataloader_iter"))
        if any(isinstance(each, ModelPruning) for each in trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(usage("pruning"))
        self.marks, self._missed = self.store.start(trainer, self.marks), -1
        # To save optimizer states that do not exist yet, torch makes a step with zero gradients
        # under FSDP2. Adam counts this step, which changes its first update. So with shards the
        # first mark is written after a step.
        has_states = all(optimizer.state for optimizer in trainer.optimizers)
        is_complete = not any(map(is_lazy, trainer.lightning_module.parameters()))
        if not self.marks and is_complete and (has_states or not is_sharded(trainer)):
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self.save(trainer, step_of(trainer), progress.total.completed)

    def is_due(self, trainer: pl.Trainer) -> bool:
        """Return at the end of a batch whether a mark is due."""
        last = self.marks[-1].global_step // self.every_n_steps if self.marks else -1
        period = trainer.global_step // self.every_n_steps
        is_new = period > last or not self._is_valid(self.marks[-1], trainer)
        is_new = is_new and period > self._missed
        return is_new and trainer.global_step > 0 and not trainer.fit_loop._should_accumulate()

    def save(self, trainer: pl.Trainer, step: int, position: int) -> None:
        """Write the mark before a step and remove outdated marks; call on all ranks."""
        mark = Mark(
            path=self.store.path_of(step),
            step=step,
            global_step=trainer.global_step,
            schedule_steps=trainer.fit_loop.epoch_loop.scheduler_progress.total.completed,
            position=position,
            lr_factor=self._total_factor,
            optimizers=_optimizers_of(trainer),
        )
        self.marks.append(mark)  # before it is saved, so that it is in its own checkpoint
        # Marks within `rewind_steps`, one mark before them, and the new mark.
        most = -(-self.rewind_steps // self.every_n_steps) + 2  # marks at a time
        if not self.store.write(trainer, mark, most):
            self.marks.remove(mark)
            self._missed = mark.global_step // self.every_n_steps  # do not try at every step
            return
        # Only the latest of the marks before `rewind_steps` is needed.
        for stale in self._far_from(mark.global_step)[:-1]:
            self._remove(stale)
        if mark.global_step > self.marks[0].global_step and not self._has_told:
            self._has_told = True  # now the size includes the optimizers' states
            key = "kept_in_memory" if self.store.is_in_memory else "kept_on_disk"
            size = self.store.bytes
            rank_zero_info(usage(key, most=most, size=size, total=most * size))

    def _is_valid(self, mark: Mark, trainer: pl.Trainer) -> bool:
        return mark.optimizers in ([], _optimizers_of(trainer))

    def _far_from(self, global_step: int) -> list[Mark]:
        return [m for m in self.marks if global_step - m.global_step >= self.rewind_steps]

    def _remove(self, mark: Mark) -> None:
        self.marks.remove(mark)
        self.store.remove(mark)

    def clear(self) -> None:
        """Remove all marks; call on all ranks."""
        self.marks.clear()
        self.store.close(is_over=True)

    def rewind(self, trainer: pl.Trainer, global_step: int) -> tuple[Mark, int] | None:
        """Rewind to a mark before a step and skip the batches that led to it.

        Call it at the end of a batch on all ranks.

        Returns:
            The mark and the number of batches that remain to be skipped; `None` without a mark.
        """
        outdated = [each for each in self.marks if not self._is_valid(each, trainer)]
        self.outdated = len(outdated)
        for each in outdated:
            self._remove(each)
        far = self._far_from(global_step)
        self.lost, self._missed = 0, -1
        # Try the latest mark before `rewind_steps`, then earlier marks, then later ones.
        for mark in (*reversed(far), *self.marks[len(far) :]):
            checkpoint, rng = self.store.read(trainer, mark)
            if checkpoint is not None:
                break
            self.lost += 1
            self._remove(mark)
        else:
            return None
        for later in self.marks[self.marks.index(mark) + 1 :]:
            self._remove(later)
        self._restore(trainer, mark, checkpoint)
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()  # drops gradients of an incomplete accumulation
        # The mark's learning rates already include the factors of earlier rewinds.
        self._total_factor *= self.lr_factor
        _scale_rates(trainer, self._total_factor / mark.lr_factor)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        batches = trainer.accumulate_grad_batches
        to_skip = max(0, self.skip_batches - (progress.total.ready - mark.position))
        to_skip += -(progress.current.ready + to_skip) % batches  # resume at the start of a step
        # A second rewind to this mark resumes after the batches that are skipped now.
        mark.position = progress.total.ready + to_skip
        fetcher: Any = trainer.fit_loop._data_fetcher
        # Batches that the epoch lacks are skipped in the next epochs, which start with a new step.
        left = _pull(trainer, fetcher, to_skip)
        self.to_skip = left + -left % batches
        if rng is not None:  # `None` in a resumed run
            _set_rng_states(rng)  # last, because datasets draw random numbers
        return mark, to_skip

    def _restore(self, trainer: pl.Trainer, mark: Mark, checkpoint: Any) -> None:
        """Restore a checkpoint except for the loops and the data."""
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_model()
        states = checkpoint.get("callbacks", {})
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # The state of these callbacks belongs to files, time or reports, not to the weights.
            if not isinstance(callback, Checkpoint | Timer | InstabilityMonitor):
                callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
                if callback.state_key in states:
                    callback.load_state_dict(states[callback.state_key])
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        connector._loaded_checkpoint = {}
        trainer.strategy.barrier("SpikeGuard.rewind")
        loop = trainer.fit_loop.epoch_loop
        automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = loop.manual_optimization.optim_step_progress.total
        is_automatic = trainer.lightning_module.automatic_optimization
        _go_back(automatic if is_automatic else manual, mark.global_step)
        _go_back(loop.scheduler_progress.total, mark.schedule_steps)

    def on_epoch_start(self, trainer: pl.Trainer) -> None:
        """Make the data fetcher skip the remaining batches at the start of this epoch."""
        # The first batch is fetched before any hook runs, so no hook could skip it. An epoch whose
        # batches are all skipped ends without validation.
        fetcher: Any = trainer.fit_loop._data_fetcher
        if self.to_skip <= 0:
            return
        rewinder, plain, loop = self, type(fetcher), trainer.fit_loop.epoch_loop

        class Skipping(plain):  # type: ignore[misc, valid-type]
            def __next__(self) -> Any:
                self.__class__ = plain  # only once per epoch
                if loop.batch_progress.current.ready == 0:
                    rng = _collect_rng_states()
                    rewinder.to_skip = _pull(trainer, self, rewinder.to_skip)
                    _set_rng_states(rng)
                    if loop._num_ready_batches_reached():
                        raise StopIteration
                return next(self)

        fetcher.__class__ = Skipping

    def state_dict(self) -> dict[str, Any]:
        marks = [asdict(mark) for mark in self.marks]
        return {"marks": marks, "to_skip": self.to_skip, "lr_factor": self._total_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the marks of the resumed run; `start` drops marks that no longer exist."""
        self.marks = [Mark(**mark) for mark in state_dict["marks"]]
        self.to_skip = state_dict["to_skip"]
        self._total_factor = state_dict.get("lr_factor", 1.0)


def _scale_rates(trainer: pl.Trainer, factor: float) -> None:
    """Multiply learning rates, and the values from which schedules compute them."""
    if factor == 1.0:
        return
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            names = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
            # Hugging Face's `Adafactor` has `lr=None` if it computes the rate itself.
            scaled = {n: group[n] * factor for n in names if group.get(n) is not None}
            if isinstance(
                group.get("lr"), Tensor
            ):  # in place, because a graph may have captured it
                scaled["lr"] = group["lr"].copy_(scaled["lr"])
            group.update(scaled)
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for schedule in schedules:
        schedules += getattr(schedule, "_schedulers", ())  # `SequentialLR`, `ChainedScheduler`
        for name in ("base_lrs", "max_lrs", "min_lrs", "_last_lr"):
            if isinstance(getattr(schedule, name, None), list):
                setattr(schedule, name, [rate * factor for rate in getattr(schedule, name)])
        if hasattr(schedule, "eta_min"):
            schedule.eta_min *= factor


def _optimizers_of(trainer: pl.Trainer) -> list[list[Any]]:
    return [
        [type(each).__name__, *(len(group["params"]) for group in each.param_groups)]
        for each in trainer.optimizers
    ]


def _go_back(tracker: Any, completed: int) -> None:
    steps_undone = tracker.completed - completed
    tracker.ready -= steps_undone
    tracker.completed -= steps_undone


def _pull(trainer: pl.Trainer, fetcher: _DataFetcher, to_skip: int) -> int:
    """Skip batches of this epoch and count them as Lightning does; return how many are missing."""
    loop = trainer.fit_loop.epoch_loop
    is_over = loop._num_ready_batches_reached()
    while to_skip > 0 and not loop._num_ready_batches_reached():
        try:
            next(fetcher)
        except StopIteration:
            loop.batch_progress.is_last_batch = True
            break
        to_skip -= 1
        loop.batch_progress.increment_by(1, is_last_batch=fetcher.done)
    if loop._num_ready_batches_reached() and not is_over:
        # Lightning does this after the last batch, but the last batch was skipped.
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    return to_skip
