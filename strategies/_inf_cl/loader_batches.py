"""Gathers small batches of a loader into the batch of a step, in host memory."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mp._argument_values import shown
from lightning_mp.gradient_cache._served.arguments import Tree, open_tree, rows_of

__all__ = ["gather_batches"]

_LIKELY_LABELS = 8  # rows; of 8 classes, 8 rows have each once in 1 batch of 400


def gather_batches(loader: Any, count: int, *, pin: bool) -> Any:
    """Return a loader that yields `count` batches of another as one.

    With N loader batches a step, workers hold loader batches, and the host one whole batch, where a
    loader of whole batches holds `prefetch_factor` of them a worker besides.

    Args:
        loader: What yields small batches, such as a `DataLoader`; attributes are its own.
        count: Batches in one. The last one has what is left; with `drop_last`, what does not fill
            it is dropped, as by a loader of whole batches.
        pin: Whether to gather in pinned memory.
    """
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    # Not one class with both methods: Lightning would ask every loader for a state it lacks.
    return (_StatefulGathered if is_stateful else _Gathered)(loader, count, pin)


class _Gathered:
    _OWN = ("_loader", "_count", "_pin")

    def __init__(self, loader: Any, count: int, pin: bool) -> None:
        self._loader, self._count, self._pin = loader, count, pin

    def __len__(self) -> int:
        batches: int = len(self._loader)
        return batches // self._count if self._drops_last() else -(-batches // self._count)

    def __iter__(self) -> Iterator[Any]:
        # At once, as it moves generators: samplers then draw as those of a loader of whole batches.
        return self._gather(iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            # Set here alone, it would not reach the loader's own iterator.
            setattr(self._loader, name, value)

    def _gather(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            gathered: _Batch | None = None
            taken = 0
            for batch in batches:
                gathered = gathered or _Batch(batch, self._count, self._pin)
                gathered.add(batch)
                taken += 1
                del batch
                if taken == self._count:
                    break
            if gathered is None or (taken < self._count and self._drops_last()):
                return
            whole, gathered = gathered.whole(), None
            yield whole
            del whole  # before the next one is begun

    def _drops_last(self) -> bool:
        return bool(getattr(self._loader, "drop_last", False))


# Lightning asks by `isinstance` of a protocol, which from Python 3.12 on sees no `__getattr__`.
class _StatefulGathered(_Gathered):
    """Stands between two steps where its loader does, as no batch is gathered ahead."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


class _Batch:
    """A batch under construction: memory for all rows at the first of its parts."""

    def __init__(self, first: Any, count: int, pin: bool) -> None:
        self._rows = rows_of(first) or 0
        self._tree = _open(first)
        self._paths = [leaf.path for leaf in self._tree.leaves]
        self._pin = pin
        # Room for all at once: batches joined at the end would be in memory twice.
        self._memory = [
            self._allocate(leaf.value, count * self._rows) if self._has_rows(leaf.value) else None
            for leaf in self._tree.leaves
        ]
        self._others: list[list[Any]] = [[] for _ in self._paths]
        self._filled = 0
        # Leaves that number the rows of every loader batch so far from 0 on.
        self._numbering = set(range(len(self._paths)))

    def add(self, batch: Any) -> None:
        leaves = _open(batch).leaves
        # By paths, not by number: parts in another order would be joined crosswise.
        if [leaf.path for leaf in leaves] != self._paths:
            raise ValueError(
                f"Gathered loader batches of {[leaf.path for leaf in leaves]} and of "
                f"{self._paths} into one. All must have the "
                "same parts. Let `collate_fn` return the same things for every batch."
            )
        rows = rows_of(batch) or 0
        self._numbering = {i for i in self._numbering if _numbers_rows(leaves[i], rows)}
        filled = self._filled + rows
        if self._filled:
            self._refuse_numbers()
        for index, leaf in enumerate(leaves):
            path, value = leaf.path, leaf.value
            memory = self._memory[index]
            if memory is None:
                self._others[index].append(value)
                continue
            if memory.shape[1:] != value.shape[1:] or memory.dtype != value.dtype:
                raise ValueError(
                    f"Gathered `{path}` of {value.dtype} {list(value.shape)} with rows of "
                    f"{memory.dtype} {list(memory.shape[1:])} into one batch. All rows must have "
                    "one shape. Pad to a fixed length in the data set or `collate_fn`."
                )
            # Twice what is needed, so that not every further batch copies all that is there.
            if filled > len(memory):  # batches of a sampler of its own may grow
                memory = self._memory[index] = self._allocate(value, 2 * filled, memory)
            # Copied at once, so that the loader's batch is freed before the next one is asked for.
            memory[self._filled : filled] = value
        self._filled = filled

    def _refuse_numbers(self) -> None:
        for path in (self._paths[index] for index in self._numbering):
            said = (
                f"Gathered `{path}` of several loader batches into one. It numbers the rows of "
                "each loader batch from 0 on, so after the first one it would name rows of "
                "another. Number rows in `training_step`, where the batch is whole, or pass "
                "`loader_batches_per_step=1` and let the loader make the whole batch."
            )
            if path.split(".")[-1] == "positives":
                raise ValueError(said)
            # Labels of which each batch has every class once are numbered so, too.
            warnings.warn(f"{said} If these are labels, this is as it should be.", stacklevel=2)

    def whole(self) -> Any:
        leaves = [
            self._join(index) if memory is None else memory[: self._filled]
            for index, memory in enumerate(self._memory)
        ]
        return self._tree.rebuild(leaves)

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == self._rows

    def _allocate(self, like: Tensor, rows: int, old: Tensor | None = None) -> Tensor:
        # Only memory of the host can be pinned; a loader may yield tensors of the device.
        pin = self._pin and like.device.type == "cpu"
        memory = torch.empty(
            rows, *like.shape[1:], dtype=like.dtype, device=like.device, pin_memory=pin
        )
        if old is not None:
            memory[: self._filled] = old[: self._filled]
        return memory

    def _join(self, index: int) -> Any:
        """Return lists and arrays of rows in a row, and what is the same everywhere once."""
        values = self._others[index]
        if all(isinstance(value, (list, tuple)) for value in values):
            return type(values[0])(x for value in values for x in value)
        if all(isinstance(value, np.ndarray) and value.ndim for value in values):
            return np.concatenate(values)
        other = next((value for value in values if not _is_same(value, values[0])), None)
        if other is not None:
            raise ValueError(
                f"Gathered `{self._paths[index]}`, which differs between loader batches: "
                f"{_described(values[0])} and {_described(other)}, for {self._rows} rows. Only "
                "tensors, arrays and lists with one thing a row are put together. Return one "
                "value a row; with several texts an image, pass `loader_batches_per_step=1` and "
                "let the loader make the whole batch."
            )
        return values[0]


def _is_same(one: Any, other: Any) -> bool:
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    return bool(torch.as_tensor(one == other).all())


def _described(value: Any) -> str:
    # A message holds no values of a data set.
    shape = getattr(value, "shape", ())
    return f"{value.dtype} of shape {list(shape)}" if len(shape) else shown(value)


def _open(batch: Any) -> Tree:
    def is_list_of_rows(tree: Tree) -> bool:
        return type(tree.value) in (list, tuple) and not any(
            isinstance(x, (Tensor, np.ndarray, list, tuple, Mapping)) for x in tree.value
        )

    return open_tree(batch).prune(is_list_of_rows)


def _numbers_rows(leaf: Tree, rows: int) -> bool:
    """Return whether a leaf holds row numbers of its batch, as `positives` of a loss do.

    Under another name only what has each number once, in batches that no labels are likely to fill
    so by chance.
    """
    value = leaf.value
    if isinstance(value, (list, tuple)) and all(isinstance(x, int) for x in value):
        value = np.asarray(value)
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim not in (1, 2):
        return False
    numbers = torch.as_tensor(value)
    if len(numbers) != rows or numbers.is_floating_point() or numbers.dtype == torch.bool:
        return False
    numbers = numbers[numbers != -1]  # which pads rows of several numbers
    if not numbers.numel() or numbers.min() < 0 or len(numbers.unique()) != numbers.numel():
        return False
    is_named = leaf.path.split(".")[-1] == "positives"
    is_each_once = len(numbers) == rows >= _LIKELY_LABELS
    return bool(numbers.max() < max(rows, numbers.numel())) and (is_named or is_each_once)
