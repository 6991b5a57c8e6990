"""Stores the marks of `SpikeGuard`: in memory if they fit, otherwise on disk without leaks."""

import inspect
import io
import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_mp._files import Failures, SignedFolder, save
from lightning_mp._nested import tensors_in
from lightning_mp.callbacks._step.training_state import is_sharded
from lightning_mp.callbacks._words.usage import usage

__all__ = ["Mark", "MarkStore"]

_NAME = re.compile("spike_guard-[0-9a-f]{8}")
# A checkpoint is a file or, with shards, a folder that torch or DeepSpeed writes. A killed run may
# leave a temporary file.
_OWN = re.compile(
    r"\.step=\d+\.ckpt\.\d+"
    r"|step=\d+\.ckpt(/checkpoint)?(/[^/]+\.(distcp|pt)|/\.metadata(\.tmp)?|/latest|/zero_to_fp32\.py)?"
)


@dataclass
class Mark:
    """A checkpoint to rewind to, with the state of the loops before a step."""

    path: str  # path of the checkpoint; only a key if the mark is in memory
    step: int  # optimizer steps attempted before, the axis of loggers
    global_step: int  # optimizer steps completed before
    schedule_steps: int  # steps of LR schedules completed before
    # Batches taken from the data over all epochs; after a rewind, the batch training resumed from.
    position: int
    lr_factor: float = 1.0  # factor by which earlier rewinds had multiplied learning rates
    # Class and sizes of the parameter groups of each optimizer; empty if unknown.
    optimizers: list[list[Any]] = field(default_factory=list)


class MarkStore:
    """Writes, reads and removes the checkpoints of marks. All ranks call all methods.

    On disk, marks are in a signed folder that is locked while its run lives. The next run with the
    same parent folder removes folders that no run has locked.
    """

    def __init__(self, *, dirpath: str | None, storage: str, memory_gb: float) -> None:
        self.dirpath, self.storage, self.memory_gb = dirpath, storage, memory_gb
        self.bytes = 0  # size of the latest checkpoint
        self.is_in_memory = storage != "disk"
        self._held: dict[str, io.BytesIO] = {}
        self._rng: dict[str, Any] = {}  # generator states of this rank, by path
        self._folder = SignedFolder(Path(), _OWN)  # rank zero has the lock
        self._failures = Failures(usage)

    def start(self, trainer: pl.Trainer, marks: list[Mark]) -> list[Mark]:
        """Choose a folder and remove those of killed runs; return the marks that still exist."""
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
        """Return the folder of the resumed run, after removing files other than its marks."""
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
        """Write a checkpoint, of which there are `most` at a time; `False` if a rank fails."""
        if self.storage == "auto" and self.is_in_memory:
            fits = most * _bytes_of(trainer) <= self.memory_gb * 1e9 and not is_sharded(trainer)
            self.is_in_memory = trainer.strategy.reduce_boolean_decision(fits, all=True)
        # A rank that fails while all write would leave the others waiting, so prepare first.
        if not self._done(trainer, partial(self._prepare, trainer)):
            return False
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if self._done(trainer, partial(self._put, trainer, mark.path, checkpoint)):
            return True
        self.remove(mark)
        return False

    def _done(self, trainer: pl.Trainer, effect: Callable[[], None]) -> bool:
        """Return whether `effect` succeeds on all ranks."""
        is_done = False
        with self._failures.forgiven("mark_not_written", path=str(self._folder.path)):
            effect()
            is_done = True
        return trainer.strategy.reduce_boolean_decision(is_done, all=True)

    def _prepare(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and not self.is_in_memory:  # a run without marks has no folder
            self._folder.make()
        elif is_sharded(trainer):  # every rank writes, maybe on another host
            self._folder.path.mkdir(parents=True, exist_ok=True)

    def _put(self, trainer: pl.Trainer, path: str, checkpoint: dict[str, Any]) -> None:
        if self.is_in_memory:
            # A rewind does not restore hyperparameters, and they may fail to pickle.
            checkpoint.pop(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, None)
            # Copied by pickling, because the optimizer updates its state in place.
            held = io.BytesIO()
            torch.save(checkpoint, held)
            self._held[path], self.bytes = held, held.tell()
        else:
            self._save(trainer, path, checkpoint)
        self._rng[path] = _collect_rng_states()

    def _save(self, trainer: pl.Trainer, path: str, checkpoint: dict[str, Any]) -> None:
        strategy, theirs = trainer.strategy, trainer.strategy.checkpoint_io
        # Only another class can read its own format, but a thread would write a mark too late.
        if type(theirs) is TorchCheckpointIO or isinstance(theirs, AsyncCheckpointIO):
            strategy.checkpoint_io = _WholeFiles()
        try:
            strategy.save_checkpoint(checkpoint, path)
        except CheckpointException as error:  # not an `Exception`; holds the errors of all ranks
            raise next(iter(error.failures.values()))[0] from None
        finally:
            strategy.checkpoint_io = theirs
        # With shards, the checkpoint is a folder.
        files = [Path(path), *Path(path).rglob("*")]
        self.bytes = sum(file.stat().st_size for file in files if file.is_file())

    def read(self, trainer: pl.Trainer, mark: Mark) -> tuple[dict[str, Any] | None, Any]:
        """Return a checkpoint and the random state; the checkpoint is `None` if a rank fails."""
        checkpoint: dict[str, Any] | None = None
        with suppress(Exception, CheckpointException):  # a truncated file raises any exception
            if held := self._held.get(mark.path):
                held.seek(0)
                checkpoint = torch.load(held, map_location="cpu", weights_only=False)
            elif trainer.strategy.reduce_boolean_decision(Path(mark.path).exists(), all=True):
                load = trainer.strategy.load_checkpoint
                # Lightning 2.6 loads with `weights_only=True` by default; earlier versions lack
                # the argument.
                is_told = "weights_only" in inspect.signature(load).parameters
                options: Any = {"weights_only": False} if is_told else {}
                checkpoint = load(mark.path, **options)
        # All ranks must rewind to the same mark.
        is_read = trainer.strategy.reduce_boolean_decision(checkpoint is not None, all=True)
        return checkpoint if is_read else None, self._rng.get(mark.path)

    def remove(self, mark: Mark) -> None:
        self._rng.pop(mark.path, None)
        if self._held.pop(mark.path, None) is None:
            with self._failures.forgiven("marks_not_removed", path=str(self._folder.path)):
                self._folder.remove([Path(mark.path).name])

    def close(self, *, is_over: bool) -> None:
        """Release memory and folder; remove the folder if no resumed run will need it."""
        self._held.clear()
        self._rng.clear()
        with self._failures.forgiven("marks_not_removed", path=str(self._folder.path)):
            if is_over:
                self._folder.close()
        self._folder.release()


class _WholeFiles(TorchCheckpointIO):
    """Reports a `PermissionError`, which Lightning ignores, and leaves no partial file."""

    @override
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        # Not durable: a sync would delay training, and a truncated mark is skipped.
        save(Path(path), lambda file: torch.save(checkpoint, file), is_durable=False)


def _bytes_of(trainer: pl.Trainer) -> int:
    module = trainer.lightning_module
    states = tensors_in([list(each.state.values()) for each in trainer.optimizers])
    tensors = [*module.parameters(), *module.buffers(), *states]
    return sum(t.numel() * t.element_size() for t in tensors)
