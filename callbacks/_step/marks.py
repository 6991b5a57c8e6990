"""Checkpoints to rewind to: in memory where they fit, else on disk, where none leaks."""

import inspect
import io
import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_mp._files import Failures, SignedFolder, save
from lightning_mp._nested import tensors_in
from lightning_mp.callbacks._step.training_state import is_sharded
from lightning_mp.callbacks._words.usage import usage

__all__ = ["Mark", "MarkStore"]

_NAME = re.compile("spike_guard-[0-9a-f]{8}")
# A checkpoint is a file or, with shards, a folder as torch and DeepSpeed fill it. A killed run may
# leave a temporary file.
_OWN = re.compile(
    r"\.step=\d+\.ckpt\.\d+"
    r"|step=\d+\.ckpt(/checkpoint)?(/[^/]+\.(distcp|pt)|/\.metadata(\.tmp)?|/latest|/zero_to_fp32\.py)?"
)


@dataclass
class Mark:
    """A place to go back to."""

    path: str  # of the checkpoint; in memory, no file has it
    step: int  # the loggers' step that was next
    global_step: int  # optimizer steps completed by then
    schedule_steps: int  # and steps of LR schedules
    position: int  # batches taken from the data, over all epochs; after a rewind, where it went on
    lr_factor: float = 1.0  # what rewinds had multiplied learning rates by


class MarkStore:
    """Writes, reads and removes the checkpoints of marks; all methods on all ranks.

    On disk they are in a folder that is signed, and locked while its run lives: the next run in the
    place of that one removes what nobody has locked.
    """

    def __init__(self, *, dirpath: str | None, storage: str, memory_gb: float) -> None:
        self.dirpath, self.storage, self.memory_gb = dirpath, storage, memory_gb
        self.bytes = 0  # of the newest
        self.is_in_memory = storage != "disk"
        self._held: dict[str, io.BytesIO] = {}
        self._rng: dict[str, Any] = {}  # of this rank, by path
        self._folder = SignedFolder(Path(), _OWN)  # rank zero has the lock
        self._failures = Failures(usage)

    def start(self, trainer: pl.Trainer, marks: list[Mark]) -> list[Mark]:
        """Find a folder, remove what killed runs have left; return the marks that are there."""
        if self.storage == "memory" and is_sharded(trainer):
            name = type(trainer.strategy).__name__
            raise MisconfigurationException(usage("shards_in_memory", strategy=name))
        root = self.dirpath or trainer.log_dir or trainer.default_root_dir
        parent = Path(os.path.abspath(root))
        folder = SignedFolder(parent / f"spike_guard-{uuid.uuid4().hex[:8]}", _OWN)
        if trainer.is_global_zero:
            with self._failures.forgiven("marks_not_removed", path=str(parent)):
                folder = self._earlier(marks) or folder
                for path in parent.iterdir() if parent.is_dir() else ():
                    left = SignedFolder(path, _OWN)
                    if _NAME.fullmatch(path.name) and left.take():
                        left.close()
        path = trainer.strategy.broadcast(folder.path)
        self._folder = folder if trainer.is_global_zero else SignedFolder(path, _OWN)
        return [mark for mark in marks if Path(mark.path).parent == path]

    def _earlier(self, marks: list[Mark]) -> SignedFolder | None:
        """Return the folder of the run that is resumed, with no files but its marks."""
        paths = [Path(mark.path) for mark in marks if Path(mark.path).exists()]
        if not paths or not _NAME.fullmatch(paths[-1].parent.name):
            return None
        folder = SignedFolder(paths[-1].parent, _OWN)
        if not folder.take():
            return None
        folder.remove({*os.listdir(folder.path)} - {path.name for path in paths})
        return folder

    def path_of(self, step: int) -> str:
        return str(self._folder.path / f"step={step}.ckpt")

    def write(self, trainer: pl.Trainer, mark: Mark, most: int) -> bool:
        """Take a checkpoint, of which there are `most` at a time; `False` where a rank cannot."""
        if self.storage == "auto" and self.is_in_memory:
            fits = most * _bytes_of(trainer) <= self.memory_gb * 1e9 and not is_sharded(trainer)
            self.is_in_memory = trainer.strategy.reduce_boolean_decision(fits, all=True)
        # Before ranks write together, as one that fails then may leave the others waiting.
        if not self._done(trainer, partial(self._prepare, trainer)):
            return False
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if self._done(trainer, partial(self._put, trainer, mark.path, checkpoint)):
            return True
        self.remove(mark)
        return False

    def _done(self, trainer: pl.Trainer, effect: Callable[[], None]) -> bool:
        """Return whether an effect has come about on all ranks."""
        is_done = self._failures.tried("mark_not_written", effect, path=str(self._folder.path))
        return trainer.strategy.reduce_boolean_decision(is_done, all=True)

    def _prepare(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and not self.is_in_memory:  # a run without marks has no folder
            self._folder.make()
        elif is_sharded(trainer):  # every rank writes, maybe on a host of its own
            self._folder.path.mkdir(parents=True, exist_ok=True)

    def _put(self, trainer: pl.Trainer, path: str, checkpoint: dict[str, Any]) -> None:
        if self.is_in_memory:
            # Nothing goes back to them, and they may refuse to be pickled.
            checkpoint.pop(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, None)
            # Pickled, as the optimizer goes on to write into the tensors of its state.
            held = io.BytesIO()
            torch.save(checkpoint, held)
            self._held[path], self.bytes = held, held.tell()
        else:
            self._save(trainer, path, checkpoint)
        self._rng[path] = _collect_rng_states()

    def _save(self, trainer: pl.Trainer, path: str, checkpoint: dict[str, Any]) -> None:
        strategy, theirs = trainer.strategy, trainer.strategy.checkpoint_io
        if type(theirs) is TorchCheckpointIO:  # what another one writes, only that can read
            strategy.checkpoint_io = _WholeFiles()
        try:
            strategy.save_checkpoint(checkpoint, path)
        except CheckpointException as error:  # of all ranks together; it is no `Exception`
            raise next(iter(error.failures.values()))[0] from None
        finally:
            strategy.checkpoint_io = theirs
        # With shards it is a folder.
        files = [Path(path), *Path(path).rglob("*")]
        self.bytes = sum(file.stat().st_size for file in files if file.is_file())

    def read(self, trainer: pl.Trainer, mark: Mark) -> tuple[dict[str, Any] | None, Any]:
        """Return a checkpoint and random states, `None` for what some rank cannot read."""
        checkpoint: dict[str, Any] | None = None
        with suppress(Exception, CheckpointException):  # of any kind, where a file is not whole
            if held := self._held.get(mark.path):
                held.seek(0)
                checkpoint = torch.load(held, map_location="cpu", weights_only=False)
            elif trainer.strategy.reduce_boolean_decision(Path(mark.path).exists(), all=True):
                checkpoint = _load(trainer, mark.path)
        # A mark that one rank cannot read is none: ranks must go back to the same one.
        is_read = trainer.strategy.reduce_boolean_decision(checkpoint is not None, all=True)
        return checkpoint if is_read else None, self._rng.get(mark.path)

    def remove(self, mark: Mark) -> None:
        self._rng.pop(mark.path, None)
        if self._held.pop(mark.path, None) is None:
            with self._failures.forgiven("marks_not_removed", path=str(self._folder.path)):
                self._folder.remove([Path(mark.path).name])

    def close(self, *, is_over: bool) -> None:
        """Let go of memory and folder; remove that unless a resumed run may go on with it."""
        self._held.clear()
        self._rng.clear()
        with self._failures.forgiven("marks_not_removed", path=str(self._folder.path)):
            if is_over:
                self._folder.close()
        self._folder.release()


class _WholeFiles(TorchCheckpointIO):
    """Says what fails, where Lightning takes no permission for success, and leaves no half file."""

    @override
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        # Not durable: the disk would hold up training, and a mark that is cut off is skipped.
        save(Path(path), lambda file: torch.save(checkpoint, file), is_durable=False)


def _bytes_of(trainer: pl.Trainer) -> int:
    module = trainer.lightning_module
    states = tensors_in([list(each.state.values()) for each in trainer.optimizers])
    tensors = [*module.parameters(), *module.buffers(), *states]
    return sum(t.numel() * t.element_size() for t in tensors)


def _load(trainer: pl.Trainer, path: str) -> dict[str, Any]:
    load = trainer.strategy.load_checkpoint
    # Lightning 2.6 reads weights only, unless told; before, it could not be told.
    is_told = "weights_only" in inspect.signature(load).parameters
    checkpoint: dict[str, Any] = load(path, weights_only=False) if is_told else load(path)
    return checkpoint
