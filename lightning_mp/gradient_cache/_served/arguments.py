"""Opens the arguments of a tower's call and tells which of them have the rows of the batch."""

import contextlib
import dataclasses
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lightning_mp._nested import open_container
from lightning_mp.gradient_cache._served.roles import ROWS, WHOLE, DeclaredRoles, Role
from lightning_mp.gradient_cache._served.towers import Tower

__all__ = [
    "Arguments",
    "EarlierCalls",
    "Tree",
    "describe_value",
    "has_rows_of_numbers",
    "is_array",
    "is_same",
    "open_tree",
    "prune_lists_of_rows",
    "rows_of",
]


@dataclasses.dataclass(slots=True)
class Tree:
    """A nested value: a container with its children, or a leaf."""

    path: str  # such as `batch.pixel_values` or `images[0]`
    value: Any
    children: "list[Tree] | None" = None  # `None` for a leaf
    close: Callable[[list[Any]], Any] = list  # returns a container of the same type

    @property
    def leaves(self) -> "list[Tree]":
        if self.children is None:
            return [self]
        return [leaf for child in self.children for leaf in child.leaves]

    def prune(self, is_leaf: "Callable[[Tree], bool]") -> "Tree":
        """Turn the containers for which `is_leaf` holds into leaves; return the tree itself."""
        if self.children is not None and is_leaf(self):
            self.children = None
        for child in self.children or ():
            child.prune(is_leaf)
        return self

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return containers of the same types with other leaves; the original is unchanged."""
        remaining = iter(leaves)  # of an iterator, `iter` returns the iterator itself
        if self.children is None:
            return next(remaining)
        return self.close([child.rebuild(remaining) for child in self.children])


class Arguments:
    """The leaves of the arguments of one call, each with its role.

    Tensors and numpy arrays whose first dimension is the batch are split into micro-batches, and so
    are lists with one item per row: strings, numbers, images of different sizes. Every micro-batch
    gets all other values whole: parameters, buffers, attention masks of shape (L, L), flags.

    `expected` is the number of rows of the step's batch, and of the call if an argument has them.
    """

    def __init__(
        self,
        tower: Tower,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        declared: DeclaredRoles,
        earlier: "EarlierCalls",
        expected: int | None,
    ) -> None:
        tree = open_call(_argument_names(tower.signature_of, len(args)), args, kwargs)
        # Buffers are no data. By identity, because `==` compares the values of tensors.
        buffers = () if tower.module is None else tower.module.buffers()
        self._constants = {id(tensor) for tensor in buffers}
        self.declared, self.earlier = declared, earlier
        self._least_rows_per_sample = 1  # among the declared roles
        tree.prune(lambda each: each.path in earlier.lists_of_rows)
        self.batch_size = self._find_batch_size(tree, expected) or 0
        tree.prune(self._has_one_item_per_row)
        self.rebuild = tree.rebuild  # returns args and kwargs with other leaves
        self._leaves = tree.leaves
        self.leaves = [leaf.value for leaf in self._leaves]
        self.roles = [self._role(leaf.path, leaf.value) for leaf in self._leaves]
        if not any(role.has_rows for role in self.roles):
            raise ValueError(
                f"Passed no batch to a tower ({self}). At least one argument "
                "must be a tensor or a list whose first dimension is the batch. Pass the batch as "
                "an argument, not as an attribute, and pad nested, sparse and packed tensors."
            )

    @property
    def paths(self) -> list[str]:
        return [leaf.path for leaf in self._leaves]

    def __str__(self) -> str:
        """Return the roles of all arguments, for messages."""
        words: dict[str, list[str]] = {}
        for leaf, role in zip(self._leaves, self.roles, strict=True):
            taken = "whole" if role == WHOLE else f"as {role} of the batch"
            words.setdefault(taken, []).append(f"`{leaf.path}` {describe_value(leaf.value)}")
        parts = [f"taken {taken}: {', '.join(words[taken])}" for taken in sorted(words)]
        return "; ".join(parts) or "no arguments"

    def _find_batch_size(self, tree: Tree, expected: int | None) -> int | None:
        lists = lists_in(tree)
        arrays = [leaf for leaf in tree.leaves if is_array(leaf.value)]
        declared = [
            (each.value, role)
            # Lists first, because a declared name of a list also matches the tensors in it.
            for each in [*lists, *arrays]
            if (role := self._declared_role(each.path)) is not None and role.has_rows
        ]
        unknown = [
            each
            for each in [*arrays, *lists]
            if self._declared_role(each.path) is None and not self._is_constant(each.value)
        ]
        guessed = [len(each.value) for each in unknown]
        if declared:
            value, role = min(declared, key=lambda pair: pair[1].rows_per_sample)
            rows: int = len(value) // role.rows_per_sample
            # If only "5 rows" per image are passed, these rows are the batch of the call.
            if rows not in guessed:
                self._least_rows_per_sample = role.rows_per_sample
                return rows * role.rows_per_sample
            return rows
        # The rows of the step take precedence: the first tensor may be a prompt or class weights.
        if expected in guessed or _has_list_of(tree, expected):
            return expected
        # Without other evidence the first tensor decides, as towers take their data first.
        if unknown:
            _check_order(unknown[0], expected)
        return guessed[0] if guessed else None

    def _has_one_item_per_row(self, tree: Tree) -> bool:
        """Return whether a list has one item per row and is not a collection of batches."""
        role = self._declared_role(tree.path) or ROWS
        rows = self.batch_size * role.rows_per_sample // self._least_rows_per_sample
        if type(tree.value) not in (list, tuple) or len(tree.value) != rows:
            return False
        lengths = lengths_in(tree)
        # A list of B tensors with B rows each is a collection of batches.
        if set(lengths) == {self.batch_size}:
            return False
        if lengths:
            self.earlier.lists_of_rows.add(tree.path)
        return True

    def _role(self, path: str, value: Any) -> Role:
        # A declared role takes precedence over all inference.
        role = self._declared_role(path)
        is_list = type(value) in (list, tuple)  # a leaf with one item per row
        if not is_list and not is_array(value):
            return WHOLE
        if role is not None:
            return self._checked(path, value, role)
        if is_list:
            return ROWS
        if self._is_constant(value) or not self.earlier.has_rows(path, value, self.batch_size):
            return WHOLE
        # Integer vectors hold labels or lengths, one per row; float vectors are ambiguous.
        if value.ndim == 1 and isinstance(value, Tensor) and value.is_floating_point():
            self._check_vector(path, value)
        return ROWS

    def _declared_role(self, path: str) -> Role | None:
        return self.declared.role(path, "argument") if self.declared.texts else None

    def _checked(self, path: str, value: Any, role: Role) -> Role:
        """Return a declared role relative to the rows of this call."""
        if not role.has_rows:
            return role
        rows_per_sample = role.rows_per_sample // self._least_rows_per_sample
        role = dataclasses.replace(role, rows_per_sample=rows_per_sample)
        if len(value) != rows_per_sample * self.batch_size:
            raise ValueError(
                f"Passed `{path}`, {describe_value(value)}, which is declared as {str(role)!r}, to "
                f"a tower called with {self.batch_size} rows. Correct it in `roles`."
            )
        return role

    def _check_vector(self, path: str, value: Tensor) -> None:
        """Raise if a vector may hold one value per row or one value per feature."""
        others = [
            leaf
            for leaf in self._leaves
            if not self._is_constant(leaf.value)
            and isinstance(leaf.value, (list, tuple, Tensor))
            and (not isinstance(leaf.value, Tensor) or leaf.value.ndim > 1)
        ]
        # Without other arguments, the vector is the batch.
        if others:
            name = path.split(".")[-1]
            raise ValueError(
                f"Passed `{path}` of shape {list(value.shape)} to a tower, for a batch of as many "
                "rows. The vector may hold one value per row, which is split with the batch, or be "
                f"shared by all rows. Declare its role: `roles={{{name!r}: 'rows'}}` or "
                f"`roles={{{name!r}: 'whole'}}`."
            )

    def _is_constant(self, value: Any) -> bool:
        # The first dimension of a parameter or buffer may equal the batch size by chance.
        return isinstance(value, nn.Parameter) or id(value) in self._constants


class EarlierCalls:
    """What earlier calls of a tower have shown: whether its outputs have rows, and lengths.

    A prompt of 8 rows is whole beside a batch of 12, and stays whole beside a last batch of 8. So
    does a causal mask of changing length L, (L, L), once L happens to be that of the batch.
    """

    def __init__(self) -> None:
        self.has_checked_outputs = False
        self.lists_of_rows: set[str] = set()
        """Paths of lists with one array per row: two images of 3 channels look like 3 rows."""
        # Lengths by path: of arrays that were whole, and of those that were split.
        self._whole: defaultdict[str, set[int]] = defaultdict(set)
        self._split: defaultdict[str, set[int]] = defaultdict(set)

    def has_rows(self, path: str, value: Any, batch_size: int) -> bool:
        """Return whether an array has the rows of the batch."""
        length = len(value)
        has_batch_length = length == batch_size
        if length == 1:  # broadcast
            return has_batch_length
        whole, split = self._whole[path], self._split[path]
        if length in whole or (len(whole) > 1 and not split):
            return False
        if not has_batch_length and length in split:
            raise ValueError(
                f"Passed `{path}` of shape {list(value.shape)} to a tower called with {batch_size} "
                f"rows. An earlier call with {length} rows split it with the batch. Declare its "
                f"role: `roles={{{path!r}: 'whole'}}`, or 'rows' if it has one item per row."
            )
        (split if has_batch_length else whole).add(length)
        return has_batch_length


def _check_order(first: Tree, rows: int | None) -> None:
    """Raise for a sequence of shape (L, B, D), whose micro-batches would be parts of sequences."""
    shape = list(getattr(first.value, "shape", ()))
    # Of several views per row, or of one sound per five captions, a width may be that number.
    if rows and len(shape) == 3 and shape[1] == rows and shape[0] % rows and rows % shape[0]:
        raise ValueError(
            f"Passed `{first.path}` of shape {shape} to a tower, in a step with {rows} rows. Pass "
            "sequences as (rows, length, width), with `batch_first=True`. If the first dimension "
            f"is the batch, declare `roles={{{first.path!r}: 'rows'}}`."
        )


def rows_of(batch: Any) -> int | None:
    """Return the number of rows of a batch: the most frequent length of its tensors or lists."""
    tree = prune_lists_of_rows(open_tree(batch))
    sizes = lengths_in(tree) or [len(each.value) for each in lists_in(tree) if each.value]
    # Not the first length: a batch may contain a prompt or class weights besides its rows.
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def prune_lists_of_rows(tree: Tree) -> Tree:
    """Turn lists with one item per row, such as images of different sizes, into leaves.

    A list is one of rows if it is as long as an array or list outside of it, and if arrays or lists
    in it have different lengths or are shorter than it: a list of two views with 8 rows each is
    none.
    """
    lengths = Counter(lengths_in(tree) + [len(each.value) for each in lists_in(tree)])

    def is_list_of_rows(each: Tree) -> bool:
        if type(each.value) not in (list, tuple):
            return False
        rows, arrays = len(each.value), lengths_in(each)
        inside = arrays or [len(x) for x in each.value if isinstance(x, (list, tuple))]
        is_unlike = len(set(inside)) > 1 or rows > max(inside, default=0)
        own = arrays + [len(found.value) for found in lists_in(each)]
        return is_unlike and lengths[rows] > own.count(rows)

    return tree.prune(is_list_of_rows)


def lengths_in(tree: Tree) -> list[int]:
    return [len(leaf.value) for leaf in tree.leaves if is_array(leaf.value)]


def _has_list_of(tree: Tree, count: int | None) -> bool:
    """Return whether there is a list of as many items, such as of the texts of each row."""
    is_list = type(tree.value) in (list, tuple) and len(tree.value) == count
    return is_list or any(_has_list_of(child, count) for child in tree.children or ())


def _argument_names(signature_of: Callable[..., Any], count: int) -> list[str]:
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # C functions have no signature
        parameters = list(inspect.signature(signature_of).parameters.values())
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
    more = (f"{rest}[{index}]" for index in range(count - len(positional)))
    return [*positional[:count], *more]


def describe_value(value: Any) -> str:
    if isinstance(value, Tensor) and value.ndim and not is_array(value):
        return "(nested or sparse)"  # may have no shape
    if isinstance(value, (Tensor, np.ndarray)):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"


def lists_in(tree: Tree) -> list[Tree]:
    """Return the lists and tuples in a tree that contain no other lists but rows of numbers."""
    # Exact types only: a named tuple is a batch of fields, not a list of rows.
    is_plain = type(tree.value) in (list, tuple)
    is_flat = is_plain and not any(isinstance(x, (list, tuple)) for x in tree.value)
    if is_flat or has_rows_of_numbers(tree):
        return [tree]
    return [found for child in tree.children or () for found in lists_in(child)]


def has_rows_of_numbers(tree: Tree) -> bool:
    """Return whether a list holds lists of numbers, as a tokenizer returns token ids."""
    # Columns of numbers would be tensors; but a batch itself is a list of columns.
    return (
        bool(tree.path)
        and type(tree.value) in (list, tuple)
        and all(type(x) is list and isinstance((x or [0])[0], (int, float)) for x in tree.value)
    )


def is_array(value: Any) -> bool:
    """Return whether a value can be sliced along its first dimension."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.layout is torch.strided and not value.is_nested
    return isinstance(value, np.ndarray) and value.ndim > 0


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    if one is other:
        return True
    is_tensor = isinstance(one, Tensor) and one.ndim > 0
    if isinstance(one, PackedSequence) or (is_tensor and not is_array(one)):  # nested or sparse
        return False
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    are_same = (one == other) | ((one != one) & (other != other))
    return bool(torch.as_tensor(are_same).all())


def open_tree(value: Any, path: str = "") -> Tree:
    """Open the containers that torch's pytrees or `open_container` know, recursively."""
    # The first dimension of a packed sequence is not the batch.
    opened = None if isinstance(value, (Tensor, PackedSequence)) else _open(value)
    if opened is None:
        return Tree(path, value)
    steps, items, close = opened
    paths = [f"{path}{step}" if path else step.lstrip(".") for step in steps]
    return Tree(path, value, [*map(open_tree, items, paths)], close)


def open_call(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tree:
    """Open the arguments of a call; `rebuild` of the tree returns args and kwargs."""
    keywords, count = list(kwargs), len(names)
    values = zip([*names, *keywords], [*args, *kwargs.values()], strict=True)

    def close(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(values[:count]), dict(zip(keywords, values[count:], strict=True))

    return Tree("", None, [open_tree(value, name) for name, value in values], close)


def _open(value: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]] | None:
    """Return the path steps, the items and the `close` of a container; `None` for a leaf."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is not None:  # built-in containers, and also Hugging Face's `ModelOutput`s
        items, context = node.flatten_fn(value)
        keys = list(value) if isinstance(value, Mapping) else range(len(items))
        return _path_steps(keys), list(items), lambda items: node.unflatten_fn(items, context)
    opened = open_container(value)
    return None if opened is None else (_path_steps(opened.keys), opened.items, opened.close)


def _path_steps(keys: Iterable[Any]) -> list[str]:
    return [f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in keys]
