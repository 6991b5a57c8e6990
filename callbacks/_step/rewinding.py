"""Goes back to a checkpoint inside `Trainer.fit`, while the data goes on."""

import dataclasses
import inspect
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher

from lightning_mp.callbacks._step.training_state import step_of
from lightning_mp.callbacks.monitor import InstabilityMonitor

__all__ = ["Mark", "Rewinder"]


@dataclass
class Mark:
    """A place to go back to.

    Args:
        path: Of the checkpoint.
        step: The loggers' step that was next.
        global_step: Optimizer steps completed by then.
        schedule_steps: Steps of LR schedules completed by then.
        position: Batches that had been taken from the data by then, over all epochs. After a rewind
            to this place: where the data went on from.
    """

    path: str
    step: int
    global_step: int
    schedule_steps: int
    position: int


class Rewinder:
    """Keeps checkpoints of the last steps, and goes back to one of them.

    Weights, optimizer states, LR schedules, loss scale, `global_step`, random number generators
    (each rank's own) and other callbacks (averaged weights, early stopping) go back. The data, the
    epoch and the loggers' step go on.

    Args:
        dirpath: Where checkpoints are kept, in a folder of their own; the log folder if `None`.
        every_n_steps: Optimizer steps between two checkpoints.
        rewind_steps: How far back a checkpoint is at the least, in optimizer steps.
        skip_batches: Batches that are not trained on, counted from the checkpoint.
    """

    def __init__(
        self, *, dirpath: str | None, every_n_steps: int, rewind_steps: int, skip_batches: int
    ) -> None:
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.rewind_steps = rewind_steps
        self.skip_batches = skip_batches
        self.marks: list[Mark] = []
        self._folder: Path | None = None
        self._to_skip = 0  # batches, from the start of the next epoch
        self._fetcher: _SkippingFetcher | None = None

    # --- taking checkpoints ----------------------------------------------------------------------

    def start(self, trainer: pl.Trainer) -> None:
        """Take the first checkpoint, unless those of an earlier run go on; on all ranks."""
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise MisconfigurationException(
                "Passed `SpikeGuard(action='rewind')` with a `training_step` that takes a "
                "`dataloader_iter`. Batches can only be skipped where Lightning fetches them. Take "
                "a `batch` in `training_step`, or pass `action='skip'`."
            )
        parent = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        # Of its own, so that two runs in one folder leave each other's files alone.
        name = trainer.strategy.broadcast(f"spike_guard-{uuid.uuid4().hex[:8]}")
        self._folder = parent / name
        found = [Path(mark.path).exists() for mark in self.marks]
        found = trainer.strategy.broadcast(found)
        self.marks = [mark for mark, is_there in zip(self.marks, found, strict=True) if is_there]
        if not self.marks:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self.save(trainer, step_of(trainer), progress.total.completed)

    def is_due(self, trainer: pl.Trainer) -> bool:
        """Return, at the end of a batch, whether it is time for a checkpoint."""
        last = self.marks[-1].global_step if self.marks else -1
        is_between_steps = not trainer.fit_loop._should_accumulate()
        return is_between_steps and trainer.global_step - last >= self.every_n_steps

    def save(self, trainer: pl.Trainer, step: int, position: int) -> None:
        """Take a checkpoint, and remove those that are older than needed; on all ranks.

        Args:
            trainer: The trainer.
            step: The loggers' step that is next.
            position: Batches taken from the data so far.
        """
        path = str(self._folder_of(trainer) / f"step={step}.ckpt")
        schedules = trainer.fit_loop.epoch_loop.scheduler_progress.total.completed
        mark = Mark(path, step, trainer.global_step, schedules, position)
        self.marks.append(mark)  # before it is saved, so that it is in its own checkpoint
        trainer.save_checkpoint(path, weights_only=False)
        rng_path = self._rng_path(mark, trainer)
        rng_path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_collect_rng_states(), rng_path)
        is_far = [mark.global_step - m.global_step >= self.rewind_steps for m in self.marks]
        for stale in self.marks[: max(is_far.count(True) - 1, 0)]:
            self._remove(trainer, stale)

    def _folder_of(self, trainer: pl.Trainer) -> Path:
        if self._folder is None:
            raise RuntimeError("Called `Rewinder.save` before `start`. Call `start` first.")
        return self._folder

    def _rng_path(self, mark: Mark, trainer: pl.Trainer) -> Path:
        path = Path(mark.path)
        return path.with_name(f"{path.stem}.rng-{trainer.global_rank}")

    def _remove(self, trainer: pl.Trainer, mark: Mark) -> None:
        self.marks.remove(mark)
        trainer.strategy.remove_checkpoint(mark.path)
        rng_path = self._rng_path(mark, trainer)
        rng_path.unlink(missing_ok=True)
        if rng_path.parent.is_dir() and not any(rng_path.parent.iterdir()):
            try:
                rng_path.parent.rmdir()
            except OSError:  # another rank was quicker
                return

    def clear(self, trainer: pl.Trainer) -> None:
        """Remove all checkpoints; on all ranks."""
        for mark in list(self.marks):
            self._remove(trainer, mark)

    # --- going back ------------------------------------------------------------------------------

    def rewind(self, trainer: pl.Trainer, global_step: int) -> tuple[Mark, int]:
        """Go back, at the end of a batch and on all ranks, to before a step; skip what led to it.

        Args:
            trainer: The trainer.
            global_step: Optimizer steps completed before the one that went wrong.

        Returns:
            The checkpoint, and the number of batches still to be skipped. The newest checkpoint
            that is far enough back is taken; the oldest, where none is.
        """
        far = [m for m in self.marks if global_step - m.global_step >= self.rewind_steps]
        mark = far[-1] if far else self.marks[0]
        for later in self.marks[self.marks.index(mark) + 1 :]:
            self._remove(trainer, later)
        self._restore(trainer, mark)
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()  # of a step that accumulation has not finished
        progress = trainer.fit_loop.epoch_loop.batch_progress
        to_skip = max(0, self.skip_batches - (progress.total.ready - mark.position))
        to_skip = self._round_up(trainer, to_skip)
        mark.position = progress.total.ready + to_skip
        self._skip(trainer, to_skip)
        rng_path = self._rng_path(mark, trainer)
        if rng_path.exists():  # on another machine than before a resume it may not
            # Last, because data sets draw random numbers.
            _set_rng_states(torch.load(rng_path, weights_only=False))
        return mark, to_skip

    def _restore(self, trainer: pl.Trainer, mark: Mark) -> None:
        """Put back what a checkpoint holds, other than the loops and the data."""
        connector = trainer._checkpoint_connector
        users_path = connector._ckpt_path
        accepted = inspect.signature(connector.resume_start).parameters
        # Lightning 2.6 reads weights only, unless told; before, it could not be told.
        options = {"weights_only": False} if "weights_only" in accepted else {}
        connector.resume_start(mark.path, **options)
        connector._ckpt_path = users_path
        connector.restore_model()
        self._restore_callbacks(trainer, connector._loaded_checkpoint)
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

    @staticmethod
    def _restore_callbacks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Put back callbacks whose state belongs to the weights, not to files, time or reports."""
        states = checkpoint.get("callbacks", {})
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(callback, Checkpoint | Timer | InstabilityMonitor):
                callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
                if callback.state_key in states:
                    callback.load_state_dict(states[callback.state_key])

    # --- skipping data ---------------------------------------------------------------------------

    @staticmethod
    def _round_up(trainer: pl.Trainer, to_skip: int) -> int:
        """Return a number of batches after which a step starts, not the middle of one."""
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return to_skip + -(ready + to_skip) % trainer.accumulate_grad_batches

    def _skip(self, trainer: pl.Trainer, to_skip: int) -> None:
        """Take batches from the data without training on them; at the end of a batch.

        What the epoch cannot give is taken from the next ones, when they start.
        """
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is None:
            raise RuntimeError("Called `Rewinder.rewind` outside of `Trainer.fit`.")
        self._to_skip = _pull(trainer, fetcher, to_skip)
        # An epoch starts with a step of its own.
        self._to_skip += -self._to_skip % trainer.accumulate_grad_batches

    def on_epoch_start(self, trainer: pl.Trainer) -> None:
        """Skip at the start of this epoch what is left to be skipped."""
        fetcher = trainer.fit_loop._data_fetcher
        if self._to_skip > 0 and fetcher is not None:
            self._fetcher = _SkippingFetcher(trainer, fetcher, self._to_skip)
            trainer.fit_loop._data_fetcher = self._fetcher

    def on_epoch_end(self, trainer: pl.Trainer) -> None:
        """Hand the data back to Lightning."""
        if self._fetcher is not None:
            self._to_skip = self._fetcher.to_skip
            trainer.fit_loop._data_fetcher = self._fetcher.inner
            self._fetcher = None

    # --- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on."""
        to_skip = self._to_skip if self._fetcher is None else self._fetcher.to_skip
        return {"marks": [dataclasses.asdict(mark) for mark in self.marks], "to_skip": to_skip}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the checkpoints of an earlier run, those that are still there."""
        self.marks = [Mark(**mark) for mark in state_dict["marks"]]
        self._to_skip = state_dict["to_skip"]


def _go_back(tracker: Any, completed: int) -> None:
    steps_undone = tracker.completed - completed
    tracker.ready -= steps_undone
    tracker.completed -= steps_undone


def _pull(trainer: pl.Trainer, fetcher: _DataFetcher, to_skip: int) -> int:
    """Take batches of this epoch, and count them as Lightning does; return how many are missing."""
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
        # Lightning does this after the last batch, which it did not see.
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    return to_skip


class _SkippingFetcher(_DataFetcher):
    """Skips batches at the start of an epoch, where no hook could: the first is fetched before.

    An epoch of which all batches are skipped ends without validation.

    Args:
        trainer: The trainer.
        inner: What fetches.
        to_skip: Batches.
    """

    def __init__(self, trainer: pl.Trainer, inner: _DataFetcher, to_skip: int) -> None:
        self.trainer = trainer
        self.inner = inner
        self.to_skip = to_skip

    def __getattribute__(self, name: str) -> Any:
        if name in ("fetched", "done", "length", "iterator", "_combined_loader"):
            return getattr(self.inner, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("trainer", "inner", "to_skip"):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def __iter__(self) -> "_SkippingFetcher":
        iter(self.inner)
        return self

    def __next__(self) -> Any:
        if self.to_skip > 0 and self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            rng = _collect_rng_states()
            self.to_skip = _pull(self.trainer, self.inner, self.to_skip)
            _set_rng_states(rng)
            if self.trainer.fit_loop.epoch_loop._num_ready_batches_reached():
                raise StopIteration
        return next(self.inner)

    def reset(self) -> None:
        self.inner.reset()

    def teardown(self) -> None:
        self.inner.teardown()

    def setup(self, combined_loader: Any) -> None:
        self.inner.setup(combined_loader)
