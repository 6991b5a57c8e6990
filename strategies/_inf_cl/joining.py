"""Concatenates loader batches into the batch of a step, field by field, by their roles.

Shapes:
    N: number of rows of all loader batches of a step.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_mp._argument_values import shown
from lightning_mp.gradient_cache._served.arguments import (
    Tree,
    describe_value,
    has_rows_of_numbers,
    is_array,
    is_same,
    open_tree,
    prune_lists_of_rows,
)
from lightning_mp.gradient_cache._served.roles import ROWS, WHOLE, DeclaredRoles, Role, is_named

__all__ = ["JoinedBatch", "field_roles", "local_ids", "open_batch"]

_ROWS_PER_ID = 8  # with more rows per id, ids are class labels
_LIKELY_LABELS = 8  # fewer rows may be labels: 8 rows of 8 classes are distinct in 1 of 400


def open_batch(batch: Any, fields: Collection[str] = ()) -> Tree:
    """Open a batch into fields; lists with one item per row are fields.

    With `fields` of an earlier batch, these are the fields: a last batch of few rows may be unlike.
    """
    if fields:
        return open_tree(batch).prune(lambda tree: tree.path in fields)

    def is_list_of_rows(tree: Tree) -> bool:
        is_plain = type(tree.value) in (list, tuple) and not any(
            isinstance(x, (Tensor, np.ndarray, list, tuple, Mapping)) for x in tree.value
        )
        return is_plain or has_rows_of_numbers(tree)

    return prune_lists_of_rows(open_tree(batch)).prune(is_list_of_rows)


def field_roles(batch: Any, declared: DeclaredRoles, size: int | None = None) -> dict[str, Role]:
    """Return the role of each field of a loader batch.

    An undeclared field has rows if it is as long as the declared fields, or else as most fields. A
    list of `size` samples that no `collate_fn` has combined is one field.
    """
    leaves = open_batch(batch).leaves
    has_columns = size in [len(leaf.value) for leaf in leaves if _has_length(leaf.value)]
    if type(batch) is list and len(batch) == size and not has_columns and not is_array(batch[0]):
        return {"": ROWS}
    lengths = _lengths(leaves, declared)
    return {
        leaf.path: declared.role(leaf.path, "field")
        or (ROWS if _has_length(leaf.value) and len(leaf.value) in lengths else WHOLE)
        for leaf in leaves
    }


class JoinedBatch:
    """The batch of a step under construction; the first loader batch allocates all memory."""

    def __init__(
        self, first: Any, count: int, roles: Mapping[str, Role], declared: DeclaredRoles, pin: bool
    ) -> None:
        self._tree = open_batch(first, roles)
        self._declared = declared
        self._fields = {
            leaf.path: _Field(leaf.path, roles.get(leaf.path, WHOLE), count, pin)
            for leaf in self._tree.leaves
        }
        self._rows = 0
        # Undeclared fields that number something from 0 in every loader batch so far.
        self._numbering_fields = {
            path for path, field in self._fields.items() if field.role == ROWS
        } - {path for path in self._fields if declared.role(path, "field")}

    def add(self, batch: Any) -> None:
        """Copy a loader batch to its rows; the loader batch may be freed afterwards."""
        leaves = open_batch(batch, self._fields).leaves
        values = {leaf.path: leaf.value for leaf in leaves}
        # Compare names, not the number of fields: fields in another order would be mixed up.
        if list(values) != list(self._fields):
            raise ValueError(
                f"Gathered loader batches with the fields {list(values)} and {list(self._fields)}. "
                "All loader batches must have the same fields in the same order. Make `collate_fn` "
                "return the same fields for every batch."
            )
        rows = self._check_lengths(leaves)
        self._numbering_fields = {
            p for p in self._numbering_fields if numbers_rows(p, values[p], rows)
        }
        if self._rows:
            self._check_numbering()
        for path, field in self._fields.items():
            if field.role.kind == "row numbers":
                values[path] = self._with_offset(field, values, rows)
        for path, field in self._fields.items():
            field.add(values[path])
        self._rows += rows

    def concatenated(self) -> Any:
        """Return the concatenated batch."""
        for field in self._fields.values():
            if field.role == WHOLE and len(field.values) > 1:
                self._raise_for_different_values(field)
        return self._tree.rebuild([field.joined() for field in self._fields.values()])

    def _check_lengths(self, leaves: Sequence[Tree]) -> int:
        """Return the number of rows of a loader batch; raise for fields of another length."""
        expected = _lengths(leaves, self._declared)
        rows = min(expected, default=0)
        for leaf in leaves:
            role = self._fields[leaf.path].role
            if not role.has_rows or role.kind == "row numbers":
                continue
            length = len(leaf.value) if _has_length(leaf.value) else 0
            if length in {samples * role.rows_per_sample for samples in expected}:
                continue
            raise ValueError(
                f"Gathered `{leaf.path}` with {length} rows, but its role is {str(role)!r} and the "
                f"loader batch has {rows} rows. Declare its role: "
                f"`roles={{{leaf.path!r}: 'rows'}}` if it has its own number of rows, or 'whole'."
            )
        return rows

    def _with_offset(self, field: "_Field", values: Mapping[str, Any], rows: int) -> Any:
        """Return the row numbers of a loader batch with the offset of the whole batch."""
        start, count = self._rows, rows
        if field.role.numbered_field:
            others = (
                f for path, f in self._fields.items() if is_named(path, field.role.numbered_field)
            )
            target = next((other for other in others if other.role.has_rows), None)
            if target is None:
                raise ValueError(
                    f"Gathered `{field.path}`, declared as '{field.role}', but no field with rows "
                    f"is named {field.role.numbered_field!r}. The fields are {list(self._fields)}."
                )
            start, count = target.filled, len(values[target.path])
        value = values[field.path]
        # Not `as_tensor`, which copies to torch's default device.
        numbers = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
        is_integer = not numbers.is_floating_point()
        # In int64, because the whole batch may have too many rows for the loader's dtype.
        numbers = numbers.long()
        if not is_integer or not ((numbers >= -1) & (numbers < count)).all():
            raise ValueError(
                f"Gathered `{field.path}`, declared as '{field.role}', with numbers that are "
                f"neither from 0 to {count - 1} nor the padding -1. Declare 'rows' for numbers "
                "that refer to the whole data set."
            )
        numbers = torch.where(numbers < 0, -1, numbers + start)
        if isinstance(value, Tensor):
            return numbers
        return numbers.numpy() if isinstance(value, np.ndarray) else type(value)(numbers.tolist())

    def _check_numbering(self) -> None:
        for path in sorted(self._numbering_fields):
            if _field_name(path) == "ids":
                raise ValueError(
                    f"Gathered `{path}` of several loader batches. Each loader batch numbers its "
                    "ids from 0, so equal ids would not mean the same item. Use ids of the data "
                    f"set, such as row indices. If `{path}` are class labels, declare "
                    f"`roles={{{path!r}: 'rows'}}`."
                )
            message = (
                f"Gathered `{path}` of several loader batches. `{path}` numbers the rows of each "
                "loader batch from 0, so the numbers would refer to rows of the first loader batch "
                f"only. Declare the field that it numbers: `roles={{{path!r}: 'row numbers of "
                "text'}`. If the numbers are labels, declare 'rows'."
            )
            if _field_name(path) == "positives":
                raise ValueError(message)
            # Only a warning, because distinct labels look like row numbers.
            warnings.warn(message, stacklevel=2)

    def _raise_for_different_values(self, field: "_Field") -> NoReturn:
        leaves = self._tree.leaves
        lengths = {leaf.path: len(leaf.value) for leaf in leaves if _has_length(leaf.value)}
        least = min(lengths.values(), default=1)
        roles = {
            path: f"{length // least} rows" if length % least == 0 and length > least else "rows"
            for path, length in lengths.items()
            if path == field.path or length == least
        }
        raise ValueError(
            f"Gathered `{field.path}`, which differs between loader batches: "
            f"{' and '.join(map(_shown_value, field.values))}. Only fields with rows can be "
            "concatenated. Return one value per row, or declare the fields with rows, as for "
            f"several texts per image: `roles={roles}`."
        )


class _Field:
    """One field of all loader batches of a step."""

    def __init__(self, path: str, role: Role, count: int, pin: bool) -> None:
        self.path, self.role, self._count, self._pin = path, role, count, pin
        self.filled = 0  # rows so far
        # Lists and arrays; of a field that is whole, the first value and a different one, if any.
        self.values: list[Any] = []
        self._memory: Tensor | None = None

    def add(self, value: Any) -> None:
        if self.role == WHOLE:
            if not self.values or (len(self.values) == 1 and not is_same(value, self.values[0])):
                self.values.append(value)
            return
        if isinstance(value, Tensor):
            self._copy(value)
        elif self.role.padding is not None:
            raise ValueError(
                f"Gathered `{self.path}`, declared as '{self.role}', {describe_value(value)}. Only "
                "tensors can be padded. Make `collate_fn` return a tensor."
            )
        else:
            self.values.append(value)
        self.filled += len(value)

    def joined(self) -> Any:
        """Return the rows of all loader batches."""
        if self._memory is not None:
            return self._memory[: self.filled]
        first = self.values[0]
        if self.role == WHOLE:
            return first
        if isinstance(first, np.ndarray):
            return np.concatenate(self.values)
        return type(first)(x for value in self.values for x in value)

    def _copy(self, value: Tensor) -> None:
        """Copy now, so that the loader batch can be freed before the loader makes the next."""
        memory, filled = self._memory, self.filled + len(value)
        if memory is None:
            # Allocated for all loader batches: a final `cat` would hold the rows twice.
            memory = self._allocate(value, self._count * len(value), value.shape[1:])
        shape = list(value.shape[1:])
        if self.role.padding is not None and shape:
            shape[0] = max(shape[0], memory.shape[1])
        fits = shape[1:] == list(memory.shape[2:]) and value.ndim == memory.ndim
        fits = fits and (self.role.padding is not None or shape == list(memory.shape[1:]))
        if not fits or memory.dtype != value.dtype:
            raise ValueError(
                f"Gathered `{self.path}` of {value.dtype} and shape {list(value.shape)} after rows "
                f"of {memory.dtype} and shape {list(memory.shape[1:])}. All rows must have one "
                "dtype and shape. Pad to a fixed length in the data set or `collate_fn`, or "
                f"declare the padding value: `roles={{{self.path!r}: 'rows padded with 0'}}`."
            )
        if filled > len(memory) or shape != list(memory.shape[1:]):
            # Twice the size, so that larger loader batches do not cause a copy each time.
            rows = 2 * filled if filled > len(memory) else len(memory)
            grown = self._allocate(value, rows, shape)
            _rows_like(grown, slice(0, self.filled), memory).copy_(memory[: self.filled])
            memory = grown
        _rows_like(memory, slice(self.filled, filled), value).copy_(value)
        self._memory = memory

    def _allocate(self, like: Tensor, rows: int, shape: Sequence[int]) -> Tensor:
        # Only host memory can be pinned, and a loader may yield tensors on the device.
        memory = torch.empty(
            rows,
            *shape,
            dtype=like.dtype,
            device=like.device,
            pin_memory=self._pin and like.device.type == "cpu",
        )
        return memory if self.role.padding is None else memory.fill_(self.role.padding)


def numbers_rows(path: str, value: Any, rows: int) -> bool:
    """Return whether a field numbers rows of its own loader batch, as `positives` of a loss do.

    `ids` do so if they are 0 to n - 1 without a gap and n is too large for class labels. A field of
    another name does so if its numbers are distinct, in a batch so large that distinct labels are
    unlikely.
    """
    numbers = value
    if isinstance(value, (list, tuple)) and all(isinstance(x, int) for x in value):
        numbers = np.asarray(value)
    elif isinstance(value, Tensor) and is_array(value) and not value.is_floating_point():
        # torch computes no minimum of unsigned integers.
        numbers = value.cpu().numpy()
    is_vector = isinstance(numbers, np.ndarray) and numbers.ndim in (1, 2)
    if not is_vector or numbers.dtype.kind not in "iu":
        return False
    numbers = numbers[numbers != -1]  # padding
    if not numbers.size or numbers.min() < 0:
        return False
    count = len(np.unique(numbers))
    if _field_name(path) == "ids":
        return bool(numbers.max() == count - 1) and count >= max(2, len(value) / _ROWS_PER_ID)
    is_likely = _field_name(path) == "positives" or len(numbers) == len(value) >= _LIKELY_LABELS
    is_in_range = bool(numbers.max() < max(rows, numbers.size))
    return count == numbers.size and is_in_range and is_likely


def local_ids(batch: Any, declared: DeclaredRoles) -> str | None:
    """Return the name of undeclared `ids` that number rows from 0; `None` if there are none."""
    leaves = [leaf for leaf in open_batch(batch).leaves if _field_name(leaf.path) == "ids"]
    found = (
        leaf.path
        for leaf in leaves
        if declared.role(leaf.path, "field") is None and numbers_rows(leaf.path, leaf.value, 0)
    )
    return next(found, None)


def _lengths(leaves: Sequence[Tree], declared: DeclaredRoles) -> set[int]:
    """Return the possible numbers of rows of a loader batch."""
    lengths = set()
    for leaf in leaves:
        role = declared.role(leaf.path, "field")
        if role is not None and role.kind in ("rows", "mask") and _has_length(leaf.value):
            lengths.add(len(leaf.value) // role.rows_per_sample)
    if not lengths:
        values = [leaf.value for leaf in leaves if _has_length(leaf.value)]
        sizes = [len(x) for x in values if is_array(x)] or [len(x) for x in values if len(x)]
        lengths.update(size for size, _ in Counter(sizes).most_common(1))
    return lengths


def _has_length(value: Any) -> bool:
    return is_array(value) or type(value) in (list, tuple)


def _field_name(path: str) -> str:
    return path.split(".")[-1]


def _rows_like(memory: Tensor, rows: slice, like: Tensor) -> Tensor:
    part = memory[rows]
    return part[:, : like.shape[1]] if like.ndim > 1 else part


def _shown_value(value: Any) -> str:
    # Messages quote only numbers and flags of a data set, no other values.
    if is_array(value):
        return f"{value.dtype} of shape {list(value.shape)}"
    return shown(value) if isinstance(value, (bool, int, float)) else describe_value(value)
