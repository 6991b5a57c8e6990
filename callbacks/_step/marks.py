"""Checkpoints to rewind to: in memory where they fit, else on disk, where none leaks."""

import inspect
import io
import shutil
import uuid
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_mp.callbacks._rules.sentences import usage
from lightning_mp.callbacks._step.training_state import is_sharded

try:
    import fcntl
except ImportError:  # Windows: what a killed run leaves there is left alone
    fcntl = None  # type: ignore[assignment]

__all__ = ["Mark", "MarkStore"]

_PREFIX = "spike_guard-"
_LOCK = "in_use"


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

    On disk they are in a folder that is locked while its run lives: the next run in the place of
    that one, or in a folder beside it, removes what nobody has locked.
    """

    def __init__(self, *, dirpath: str | None, storage: str, memory_gb: float) -> None:
        self.dirpath, self.storage, self.memory_gb = dirpath, storage, memory_gb
        self.bytes = 0  # of the newest
        self.is_in_memory = storage != "disk"
        self._held: dict[str, io.BytesIO] = {}
        self._rng: dict[str, Any] = {}  # of this rank, by path
        self._folder = Path()
        self._lock: IO[str] | None = None

    def start(self, trainer: pl.Trainer, marks: list[Mark]) -> list[Mark]:
        """Find a folder, remove what killed runs have left; return the marks that are there."""
        if self.storage == "memory" and is_sharded(trainer):
            name = type(trainer.strategy).__name__
            raise MisconfigurationException(usage("shards_in_memory", strategy=name))
        parent = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        before = next((Path(m.path).parent for m in reversed(marks) if Path(m.path).exists()), None)
        self._folder = parent / f"{_PREFIX}{uuid.uuid4().hex[:8]}"
        if trainer.is_global_zero:
            if before is not None:
                self._lock = _locked(before)
            self._folder = before if before and self._lock else self._folder  # go on in it
            kept = {Path(m.path) for m in marks if Path(m.path).parent == self._folder}
            beside = () if self.dirpath else parent.parent.glob(f"*/{_PREFIX}*")
            self._clean([*parent.glob(f"{_PREFIX}*"), *beside], kept)
        self._folder = trainer.strategy.broadcast(self._folder)
        return [mark for mark in marks if Path(mark.path).parent == self._folder]

    def _clean(self, folders: Iterable[Path], kept: set[Path]) -> None:
        for folder in folders:
            if folder == self._folder:
                for path in folder.iterdir():
                    if path not in kept and path.name != _LOCK:
                        _delete(path)
            else:
                lock = _locked(folder)
                if lock is not None:
                    _delete(folder)
                    lock.close()

    def path_of(self, step: int) -> str:
        return str(self._folder / f"step={step}.ckpt")

    def write(self, trainer: pl.Trainer, mark: Mark, most: int) -> None:
        """Take a checkpoint, of which there are `most` at a time."""
        if self.storage == "auto" and self.is_in_memory:
            fits = most * _bytes_of(trainer) <= self.memory_gb * 1e9 and not is_sharded(trainer)
            self.is_in_memory = trainer.strategy.reduce_boolean_decision(fits, all=True)
        if self.is_in_memory:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            # Nothing goes back to them, and they may refuse to be pickled.
            checkpoint.pop(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, None)
            # Pickled, as the optimizer goes on to write into the tensors of its state.
            held = self._held[mark.path] = io.BytesIO()
            torch.save(checkpoint, held)
            self.bytes = held.tell()
        else:
            if (
                trainer.is_global_zero and self._lock is None
            ):  # a run without marks leaves no folder
                self._folder.mkdir(parents=True, exist_ok=True)
                self._lock = _locked(self._folder)
            trainer.save_checkpoint(mark.path, weights_only=False)  # written whole or not at all
            # With shards it is a folder.
            files = [Path(mark.path), *Path(mark.path).rglob("*")]
            self.bytes = sum(file.stat().st_size for file in files if file.is_file())
        self._rng[mark.path] = _collect_rng_states()

    def read(self, trainer: pl.Trainer, mark: Mark) -> tuple[dict[str, Any] | None, Any]:
        """Return a checkpoint and random states, `None` for what some rank cannot read."""
        checkpoint: dict[str, Any] | None = None
        with suppress(Exception):  # of any kind, where a file is not whole
            if held := self._held.get(mark.path):
                held.seek(0)
                checkpoint = torch.load(held, map_location="cpu", weights_only=False)
            elif trainer.strategy.reduce_boolean_decision(Path(mark.path).exists(), all=True):
                checkpoint = _load(trainer, mark.path)
        # A mark that one rank cannot read is none: ranks must go back to the same one.
        is_read = trainer.strategy.reduce_boolean_decision(checkpoint is not None, all=True)
        return checkpoint if is_read else None, self._rng.get(mark.path)

    def remove(self, trainer: pl.Trainer, mark: Mark) -> None:
        self._rng.pop(mark.path, None)
        if self._held.pop(mark.path, None) is None and Path(mark.path).exists():
            trainer.strategy.remove_checkpoint(mark.path)

    def close(self, *, is_over: bool) -> None:
        """Let go of memory and folder; remove that unless a resumed run may go on with it."""
        self._held.clear()
        self._rng.clear()
        if self._lock is not None:
            if is_over:
                _delete(self._folder)
            self._lock.close()
            self._lock = None


def _bytes_of(trainer: pl.Trainer) -> int:
    module = trainer.lightning_module
    states = tree_leaves([list(each.state.values()) for each in trainer.optimizers])
    tensors = [*module.parameters(), *module.buffers(), *states]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _load(trainer: pl.Trainer, path: str) -> dict[str, Any]:
    load = trainer.strategy.load_checkpoint
    # Lightning 2.6 reads weights only, unless told; before, it could not be told.
    is_told = "weights_only" in inspect.signature(load).parameters
    checkpoint: dict[str, Any] = load(path, weights_only=False) if is_told else load(path)
    return checkpoint


def _locked(folder: Path) -> IO[str] | None:
    """Return a lock on a folder, `None` where a living process has it or it is gone."""
    if fcntl is None:
        return None
    # It lasts as long as the file is open, so that a process that was killed has none.
    with ExitStack() as stack, suppress(OSError):  # also where the file system has no locks
        lock = stack.enter_context((folder / _LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.pop_all()
        return lock
    return None


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
