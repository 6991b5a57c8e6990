"""Joins loader batches into the batch of a step, field by field, by what each field is.

Shapes:
    N: rows of all loader batches of a step.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_mp._argument_values import shown
from lightning_mp.gradient_cache._served.arguments import (
    Tree,
    described,
    is_array,
    open_tree,
    rows_of,
)
from lightning_mp.gradient_cache._served.roles import ROWS, WHOLE, Declared, Role, is_named

__all__ = ["JoinedBatch", "field_roles", "local_ids", "open_batch"]

_ROWS_AN_ID = 8  # at most, where rows are numbered; fewer ids are classes
_LIKELY_LABELS = 8  # rows; of 8 classes, 8 rows have each once in 1 batch of 400


def open_batch(batch: Any) -> Tree:
    """Take a batch apart into fields; lists with one thing a row stay closed."""

    def is_list_of_rows(tree: Tree) -> bool:
        return type(tree.value) in (list, tuple) and not any(
            isinstance(x, (Tensor, np.ndarray, list, tuple, Mapping)) for x in tree.value
        )

    return open_tree(batch).prune(is_list_of_rows)


def field_roles(batch: Any, declared: Declared) -> dict[str, Role]:
    """Return what each field of a loader batch is.

    What is not declared has rows where it is as long as what was declared, or most of the batch.
    """
    leaves = open_batch(batch).leaves
    lengths = _lengths(leaves, declared)
    return {
        leaf.path: declared.role(leaf.path, "field")
        or (ROWS if _has_length(leaf.value) and len(leaf.value) in lengths else WHOLE)
        for leaf in leaves
    }


class JoinedBatch:
    """A batch under construction: memory for all rows at the first of its parts.

    Args:
        first: The first loader batch.
        count: Loader batches that there is room for.
        roles: What its fields are.
        declared: The roles that were declared.
        pin: Whether to join in pinned memory.
    """

    def __init__(
        self, first: Any, count: int, roles: Mapping[str, Role], declared: Declared, pin: bool
    ) -> None:
        self._tree = open_batch(first)
        self._declared = declared
        self._fields = {
            leaf.path: _Field(leaf.path, roles.get(leaf.path, WHOLE), count, pin)
            for leaf in self._tree.leaves
        }
        self._first_lengths = {
            leaf.path: len(leaf.value) for leaf in self._tree.leaves if _has_length(leaf.value)
        }
        self._rows = self._batches = 0
        # Fields that number something of every loader batch so far from 0 on.
        self._numbering = {path for path, field in self._fields.items() if field.role == ROWS} - {
            path for path in self._fields if declared.role(path, "field")
        }

    def add(self, batch: Any) -> None:
        """Copy a loader batch to its place; it may be freed then.

        Raises:
            ValueError: It does not fit to those before.
        """
        leaves = open_batch(batch).leaves
        values = {leaf.path: leaf.value for leaf in leaves}
        # By paths, not by number: parts in another order would be joined crosswise.
        if list(values) != list(self._fields):
            raise ValueError(
                f"Gathered loader batches of {list(values)} and of {list(self._fields)} into one. "
                "All must have the same parts. Let `collate_fn` return the same things for every "
                "batch."
            )
        rows = self._check_lengths(leaves)
        self._numbering = {p for p in self._numbering if numbers_rows(p, values[p], rows)}
        self._batches += 1
        if self._batches > 1:
            self._refuse_numbers()
        for path, field in self._fields.items():
            if field.role.kind == "row numbers":
                values[path] = self._shifted(field, values, rows)
        for path, field in self._fields.items():
            field.add(values[path])
        self._rows += rows

    def whole(self) -> Any:
        """Return all loader batches as one."""
        for field in self._fields.values():
            if field.other is not None:
                self._refuse_different(field)
        return self._tree.rebuild([field.joined() for field in self._fields.values()])

    def _check_lengths(self, leaves: Sequence[Tree]) -> int:
        """Return the rows of a loader batch, and refuse fields with another number of them."""
        expected = _lengths(leaves, self._declared)
        rows = min(expected, default=0)
        for leaf in leaves:
            role = self._fields[leaf.path].role
            if not role.has_rows or role.kind == "row numbers":
                continue
            length = len(leaf.value) if _has_length(leaf.value) else 0
            is_own = role.each == 1 and self._declared.role(leaf.path, "field") is not None
            if is_own or length in {each * role.each for each in expected}:
                continue
            raise ValueError(
                f"Gathered `{leaf.path}`, taken as {str(role)!r} of a loader batch, with {length} "
                f"of them beside {rows} rows. Say what it is: `roles={{{leaf.path!r}: 'rows'}}` if "
                "it has its own number of rows, or 'whole'."
            )
        return rows

    def _shifted(self, field: "_Field", values: Mapping[str, Any], rows: int) -> Any:
        """Return row numbers of one loader batch as those of the whole batch."""
        start, count = self._rows, rows
        if field.role.of:
            others = (f for path, f in self._fields.items() if is_named(path, [field.role.of]))
            target = next((other for other in others if other.role.has_rows), None)
            if target is None:
                raise ValueError(
                    f"Gathered `{field.path}`, declared as '{field.role}', but no field with rows "
                    f"is named {field.role.of!r}. The fields are {list(self._fields)}."
                )
            start, count = target.filled, len(values[target.path])
        value = values[field.path]
        numbers = torch.as_tensor(value)
        if numbers.is_floating_point() or not ((numbers >= -1) & (numbers < count)).all():
            raise ValueError(
                f"Gathered `{field.path}`, declared as '{field.role}', of which a loader batch has "
                f"{count}, with numbers that are not from 0 to {count - 1}, nor -1, which pads. "
                "Declare 'rows' for numbers that hold in all loader batches."
            )
        # In 64 bits, as a batch has more rows than a loader batch.
        numbers = torch.where(numbers < 0, -1, numbers.to(torch.int64) + start)
        if isinstance(value, Tensor):
            return numbers
        return numbers.numpy() if isinstance(value, np.ndarray) else type(value)(numbers.tolist())

    def _refuse_numbers(self) -> None:
        for path in sorted(self._numbering):
            if _last(path) == "ids":
                raise ValueError(
                    f"Gathered `{path}` of several loader batches into one. It numbers from 0 on "
                    "in each of them, so equal ids of two would not mean the same thing. Take ids "
                    "of the data set, such as indices of its rows. If they are classes, say so: "
                    f"`roles={{{path!r}: 'rows'}}`."
                )
            said = (
                f"Gathered `{path}` of several loader batches into one. It numbers the rows of "
                "each loader batch from 0 on, so after the first one it would name rows of "
                f"another. Declare what it numbers: `roles={{{path!r}: 'row numbers of text'}}`, "
                "by the name of that field."
            )
            if _last(path) == "positives":
                raise ValueError(said)
            # Labels of which each batch has every class once are numbered so, too.
            warnings.warn(f"{said} If these are labels: 'rows'.", stacklevel=2)

    def _refuse_different(self, field: "_Field") -> NoReturn:
        lengths = self._first_lengths
        least = min(lengths.values(), default=1)
        roles = {
            path: f"{length // least} rows" if length % least == 0 and length > least else "rows"
            for path, length in lengths.items()
            if path == field.path or length == least
        }
        raise ValueError(
            f"Gathered `{field.path}`, which differs between loader batches: "
            f"{_described(field.first)} and {_described(field.other)}. Only what has one thing a "
            "row is put together. Return one value a row, or say what has rows, as with several "
            f"texts an image: `roles={roles}`."
        )


class _Field:
    """One field of all loader batches of a step."""

    def __init__(self, path: str, role: Role, count: int, pin: bool) -> None:
        self.path, self.role, self._count, self._pin = path, role, count, pin
        self.filled = 0
        """Rows so far."""
        self.first: Any = None
        """The value of the first loader batch if it is whole."""
        self.other: Any = None
        """Another one that differs."""
        self._memory: Tensor | None = None
        self._lists: list[Any] = []

    def add(self, value: Any) -> None:
        if self.role == WHOLE:
            if self.first is None:
                self.first = value
            elif self.other is None and not _is_same(value, self.first):
                self.other = value
            return
        if isinstance(value, Tensor):
            self._copy(value)
        elif self.role.padding is not None:
            raise ValueError(
                f"Gathered `{self.path}`, declared as '{self.role}', {described(value)}. Only "
                "tensors are padded. Let `collate_fn` return a tensor."
            )
        else:
            self._lists.append(value)
        self.filled += len(value)

    def joined(self) -> Any:
        """Return the rows of all loader batches."""
        if self._memory is not None:
            return self._memory[: self.filled]
        if self.role == WHOLE:
            return self.first
        if isinstance(self._lists[0], np.ndarray):
            return np.concatenate(self._lists)
        return type(self._lists[0])(x for value in self._lists for x in value)

    def _copy(self, value: Tensor) -> None:
        """Copy at once, so that the loader's batch is freed before the next one is asked for."""
        memory, filled = self._memory, self.filled + len(value)
        if memory is None:
            # Room for all at once: batches joined at the end would be in memory twice.
            memory = self._allocate(value, self._count * len(value), value.shape[1:])
        shape = list(value.shape[1:])
        if self.role.padding is not None and shape:
            shape[0] = max(shape[0], memory.shape[1])
        fits = shape[1:] == list(memory.shape[2:]) and value.ndim == memory.ndim
        fits = fits and (self.role.padding is not None or shape == list(memory.shape[1:]))
        if not fits or memory.dtype != value.dtype:
            raise ValueError(
                f"Gathered `{self.path}` of {value.dtype} {list(value.shape)} with rows of "
                f"{memory.dtype} {list(memory.shape[1:])} into one batch. All rows must have one "
                "shape. Pad to a fixed length in the data set or `collate_fn`, or declare what "
                f"fills shorter rows: `roles={{{self.path!r}: 'rows padded with 0'}}`."
            )
        if filled > len(memory) or shape != list(memory.shape[1:]):
            # Twice what is needed, so that not every further batch copies all that is there.
            rows = 2 * filled if filled > len(memory) else len(memory)  # loader batches may grow
            grown = self._allocate(value, rows, shape)
            _part(grown, slice(0, self.filled), memory).copy_(memory[: self.filled])
            memory = grown
        _part(memory, slice(self.filled, filled), value).copy_(value)
        self._memory = memory

    def _allocate(self, like: Tensor, rows: int, shape: Sequence[int]) -> Tensor:
        # Only memory of the host can be pinned; a loader may yield tensors of the device.
        memory = torch.empty(
            rows,
            *shape,
            dtype=like.dtype,
            device=like.device,
            pin_memory=self._pin and like.device.type == "cpu",
        )
        return memory if self.role.padding is None else memory.fill_(self.role.padding)


def numbers_rows(path: str, value: Any, rows: int) -> bool:
    """Return whether a field holds numbers of its own batch, as `positives` of a loss do.

    `ids` do if they number distinct rows from 0 on without a gap, and there are not just a few of
    them, as of classes. Under other names only what has each number once, in batches that no labels
    are likely to fill so by chance.
    """
    if isinstance(value, (list, tuple)) and all(isinstance(x, int) for x in value):
        value = np.asarray(value)
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim not in (1, 2):
        return False
    numbers = torch.as_tensor(value)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        return False
    numbers = numbers[numbers != -1]  # which pads rows of several numbers
    if not numbers.numel() or numbers.min() < 0:
        return False
    count = len(numbers.unique())
    if _last(path) == "ids":
        return bool(numbers.max() == count - 1) and count >= max(2, len(value) / _ROWS_AN_ID)
    if count != numbers.numel():
        return False
    is_each_once = len(numbers) == len(value) >= _LIKELY_LABELS
    is_in_range = bool(numbers.max() < max(rows, numbers.numel()))
    return is_in_range and (_last(path) == "positives" or is_each_once)


def local_ids(batch: Any, declared: Declared) -> str | None:
    """Return the name of undeclared `ids` that number from 0 on; `None`: there are none."""
    leaves = [leaf for leaf in open_batch(batch).leaves if _last(leaf.path) == "ids"]
    found = (
        leaf.path
        for leaf in leaves
        if declared.role(leaf.path, "field") is None and numbers_rows(leaf.path, leaf.value, 0)
    )
    return next(found, None)


def _lengths(leaves: Sequence[Tree], declared: Declared) -> set[int]:
    """Return how many rows fields of a loader batch have that have one a row."""
    lengths = set()
    for leaf in leaves:
        role = declared.role(leaf.path, "field")
        if role is not None and role.kind in ("rows", "mask") and _has_length(leaf.value):
            lengths.add(len(leaf.value) // role.each)
    if not lengths and (rows := rows_of([leaf.value for leaf in leaves])):
        lengths.add(rows)
    return lengths


def _has_length(value: Any) -> bool:
    return is_array(value) or isinstance(value, (list, tuple))


def _last(path: str) -> str:
    return path.split(".")[-1]


def _part(memory: Tensor, rows: slice, like: Tensor) -> Tensor:
    part = memory[rows]
    return part[:, : like.shape[1]] if like.ndim > 1 else part


def _is_same(one: Any, other: Any) -> bool:
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    if isinstance(one, (list, tuple)):
        return bool(one == other)
    return bool(torch.as_tensor(one == other).all())


def _described(value: Any) -> str:
    # A message holds no values of a data set, but for a number or a flag.
    shape = getattr(value, "shape", ())
    if len(shape):
        return f"{value.dtype} of shape {list(shape)}"
    return shown(value) if isinstance(value, (bool, int, float)) else described(value)
