"""Finds the tensors of batches and outputs; keeps and saves the batches of the latest steps."""

import copy
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils import _pytree

from lightning_mp._files import Failures, save_new
from lightning_mp._nested import open_container
from lightning_mp.callbacks._rules.records import StepFacts
from lightning_mp.callbacks._words.usage import usage

__all__ = ["BatchKeeper", "copy_containers", "loss_in", "named_tensors", "tensors_in"]

_MOST_FILES = 20  # per run, because batches of images fill a disk
_PATIENCE = timedelta(seconds=20)  # for the rank that writes the file


# Lightning's `apply_to_collection` does not copy objects of other classes, such as PyG's.
def copy_containers(value: Any) -> Any:
    """Return a batch with copied containers, because a step may call `batch.pop("labels")`."""
    if isinstance(value, Tensor | str | bytes | int | float | None):
        return value
    try:
        opened = open_container(value)
        if opened is not None:
            return opened.close([copy_containers(item) for item in opened.items])
        copied = copy.copy(value)
        vars(copied).update({k: copy_containers(each) for k, each in vars(value).items()})
    except Exception:  # the object cannot be copied; return the object itself
        return value
    return copied


class BatchKeeper:
    """Holds the batches of the latest steps and saves those of a step to a file."""

    # All ranks must construct it together, because `log_dir` and the key are broadcast.
    def __init__(self, trainer: pl.Trainer) -> None:
        self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "bad_batches"
        self._key = trainer.strategy.broadcast(uuid.uuid4().hex)
        self._held: dict[int, list[Any]] = {}
        # By step and rank; `None` if the file could not be written.
        self._paths: dict[tuple[int, int], str | None] = {}
        self._failures, self._patience = Failures(usage), _PATIENCE

    def hold(self, step: int, batch: Any, oldest: int) -> None:
        """Keep a batch of a step, and drop batches of steps before `oldest`."""
        self._held = {at: each for at, each in self._held.items() if at >= oldest}
        self._held.setdefault(step, []).append(copy_containers(batch))

    def save(self, trainer: pl.Trainer, facts: StepFacts) -> str | None:
        """Save the batches of a step on the rank that `facts` name; return the path, if any."""
        key = facts.step, facts.rank
        if key not in self._paths:
            if facts.step not in self._held or len(self._paths) >= _MOST_FILES:
                return None
            is_mine = trainer.global_rank == facts.rank
            path = self._write(facts) if is_mine else None
            self._paths[key] = path if trainer.world_size == 1 else self._tell(key, is_mine, path)
        return self._paths[key]

    def _write(self, facts: StepFacts) -> str | None:
        content = {"step": facts.step, "epoch": facts.epoch, "rank": facts.rank}
        with self._failures.forgiven("batch_not_saved", path=str(self._folder)):
            content["batches"] = move_data_to_device(self._held[facts.step], torch.device("cpu"))
            path = self._folder / f"step={facts.step}-rank={facts.rank}.pt"
            return str(save_new(path, lambda file: torch.save(content, file)))
        return None

    def _tell(self, key: tuple[int, int], is_mine: bool, path: str | None) -> str | None:
        """Share the path with the other ranks, or wait for it; return the path."""
        # If only one rank raises the alarm, a collective would wait forever.
        name = f"{self._key} {key}"
        with suppress(Exception):  # no rank has shared a path in time, or there is no store
            store = dist.distributed_c10d._get_default_store()
            if is_mine:
                store.set(name, path or "")
                return path
            store.wait([name], self._patience)
            return store.get(name).decode() or None
        self._patience = timedelta(milliseconds=1)  # do not wait again
        return path


def loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.is_floating_point() else None


_DEEPEST = 8  # highest level of nesting, because objects may contain themselves


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in containers, under names such as `batch[0]["image"]`."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _DEEPEST:
        for step, each in _members(value):
            yield from named_tensors(each, path + step, depth + 1)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    opened = open_container(value)
    if opened is not None:
        words = ".{}" if opened.has_fields else "[{!r}]"
        yield from zip(map(words.format, opened.keys), opened.items, strict=True)
    elif hasattr(value, "to") and not isinstance(value, nn.Module):
        yield from ((f".{key}", each) for key, each in getattr(value, "__dict__", {}).items())
    else:
        leaves = [leaf for leaf in _pytree.tree_leaves(value) if leaf is not value]
        yield from ((f"[{index}]", leaf) for index, leaf in enumerate(leaves))
