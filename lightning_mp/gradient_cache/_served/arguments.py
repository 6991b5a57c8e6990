"""The arguments of a tower's call, taken apart: which are cut with the batch, which go whole.

Shapes:
    B: the batch of one call.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_mp._nested import open_container
from lightning_mp.gradient_cache._served.roles import ROWS, WHOLE, Declared, Role

__all__ = ["Arguments", "EarlierCalls", "Tree", "described", "is_array", "open_tree", "rows_of"]


@dataclasses.dataclass(slots=True)
class Tree:
    """A value, and what it is made of if it is a container; a leaf otherwise.

    Args:
        path: Where it stands, such as `batch.pixel_values` or `images[0]`.
        value: What it is.
        parts: What it contains; `None`: it is not opened.
        close: Makes a container of the same type of other parts.
    """

    path: str
    value: Any
    parts: "list[Tree] | None" = None
    close: Callable[[list[Any]], Any] = list

    @property
    def leaves(self) -> "list[Tree]":
        """What is not opened further, in order."""
        if self.parts is None:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves]

    def prune(self, is_leaf: "Callable[[Tree], bool]") -> "Tree":
        """Make leaves of some containers, the outermost first; return the tree itself."""
        if self.parts is not None and is_leaf(self):
            self.parts = None
        for part in self.parts or ():
            part.prune(is_leaf)
        return self

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return containers of the same types around other leaves; these stay as they are."""
        return self._filled(iter(leaves))

    def _filled(self, leaves: Iterator[Any]) -> Any:
        if self.parts is None:
            return next(leaves)
        return self.close([part._filled(leaves) for part in self.parts])


class Arguments:
    """The arguments of one call, taken apart, each with its role.

    Cut are tensors and numpy arrays whose first dimension is the batch, and lists with one thing a
    row: strings, numbers, images of different sizes. All else is whole: parameters and buffers,
    masks, flags.

    Args:
        signature_of: Whose parameters name the arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.
        constants: Tensors that are not data, such as buffers of the tower.
        declared: The roles that were declared.
        earlier: What arguments of the tower were in earlier calls.
        expected: The rows that the batch of the step has; they are taken for the batch of the call
            where an argument has as many. `None`: unknown.

    Raises:
        ValueError: There is no batch, it is empty, or the role of an argument cannot be told.
    """

    def __init__(
        self,
        signature_of: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        constants: Collection[Tensor] = (),
        declared: Declared | None = None,
        earlier: "EarlierCalls | None" = None,
        expected: int | None = None,
    ) -> None:
        tree = open_call(_names(signature_of, len(args)), args, kwargs)
        # By identity, as `==` of tensors compares their values.
        self._constants = {id(tensor) for tensor in constants}
        self._declared = declared or Declared({})
        self._earlier = earlier or EarlierCalls()
        self._fewest = 1  # rows for each of the batch
        self.batch_size = self._find_batch_size(tree.parts or [], expected) or 0

        for part in tree.parts or ():
            part.prune(self._has_a_thing_a_row)
        self.rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
        """Returns positional and keyword arguments around other leaves."""
        self.rebuild = tree.rebuild
        self._leaves = tree.leaves
        self.leaves = [leaf.value for leaf in self._leaves]
        self.roles = [self._role(leaf.path, leaf.value) for leaf in self._leaves]
        """What each leaf is."""
        if not self.batch_size or not any(role.has_rows for role in self.roles):
            raise ValueError(
                f"Passed no batch, or an empty one, to a tower ({self}). A tower takes at least "
                "one tensor or list whose first dimension is the batch. Pass the batch as an "
                "argument, not as an attribute."
            )

    @property
    def paths(self) -> list[str]:
        """The names of all leaves."""
        return [leaf.path for leaf in self._leaves]

    def name(self, index: int) -> str:
        """Return the name of the leaf at an index."""
        return self._leaves[index].path

    def __str__(self) -> str:
        """Return what was taken for what, for messages."""
        words: dict[str, list[str]] = {}
        for leaf, role in zip(self._leaves, self.roles, strict=True):
            taken = "whole" if role == WHOLE else f"as {role} of the batch"
            words.setdefault(taken, []).append(f"`{leaf.path}` {described(leaf.value)}")
        parts = [f"taken {taken}: {', '.join(words[taken])}" for taken in sorted(words)]
        return "; ".join(parts) or "no arguments"

    def _find_batch_size(self, parts: list[Tree], expected: int | None) -> int | None:
        lists = [each for part in parts for each in lists_in(part)]
        leaves = [leaf for part in parts for leaf in part.leaves if is_array(leaf.value)]
        found = [(each, self._declared_role(each.path)) for each in [*leaves, *lists]]
        # Lists first: the tensors in one, as of images of different sizes, have its name, too.
        declared = [
            (tree.value, role)
            for tree, role in [*found[len(leaves) :], *found[: len(leaves)]]
            if role is not None and role.has_rows
        ]
        # The first tensor decides where nothing else does: towers take their data first.
        guessed = [
            len(tree.value)
            for tree, role in found
            if role is None and not self._is_constant(tree.value)
        ]
        if declared:
            self._fewest = min(role.each for _, role in declared)
            value, role = min(declared, key=lambda each: each[1].each)
            rows: int = len(value) // role.each
            # Alone in a call, "5 rows" of an image each are just its rows.
            if rows not in guessed:
                return rows * self._fewest
            self._fewest = 1
            return rows
        # The step's own rows go before the first tensor, which may be a prompt or class weights.
        if expected is not None and expected in guessed:
            return expected
        return guessed[0] if guessed else None

    def _has_a_thing_a_row(self, tree: Tree) -> bool:
        """Return whether a list has one element for each row, and is no collection of batches."""
        role = self._declared_role(tree.path) or ROWS
        rows = self.batch_size * role.each // self._fewest
        if type(tree.value) not in (list, tuple) or len(tree.value) != rows:
            return False
        # As many tensors as rows, each with as many rows, are a collection of batches.
        inside = [leaf.value for leaf in tree.leaves]
        return not any(is_array(x) and len(x) == self.batch_size for x in inside)

    def _role(self, path: str, value: Any) -> Role:
        # What was declared goes before all that is guessed.
        role = self._declared_role(path)
        is_list = isinstance(value, (list, tuple))  # a leaf, as it has one thing a row
        if not is_list and not is_array(value):
            return WHOLE
        if role is not None:
            return self._checked(path, value, role)
        if is_list:
            return ROWS
        if self._is_constant(value) or not self._earlier.has_rows(path, value, self.batch_size):
            return WHOLE
        # Whole numbers of one dimension are labels or lengths, one a row.
        if value.ndim == 1 and isinstance(value, Tensor) and value.is_floating_point():
            self._check_vector(path, value)
        return ROWS

    def _declared_role(self, path: str) -> Role | None:
        return self._declared.role(path, "argument") if self._declared.words else None

    def _checked(self, path: str, value: Any, role: Role) -> Role:
        """Return a declared role relative to the rows of this call."""
        if not role.has_rows:
            return role
        role = dataclasses.replace(role, each=role.each // self._fewest)
        if len(value) != role.each * self.batch_size:
            raise ValueError(
                f"Passed `{path}`, {described(value)}, which is declared as {str(role)!r}, to a "
                f"tower called with {self.batch_size} rows. Correct it in `roles`."
            )
        return role

    def _check_vector(self, path: str, value: Tensor) -> None:
        """Refuse a vector that may be one value a row, or one for every feature."""
        others = [
            leaf
            for leaf in self._leaves
            if leaf.path != path
            and not self._is_constant(leaf.value)
            and isinstance(leaf.value, (list, tuple, Tensor))
            and (not isinstance(leaf.value, Tensor) or leaf.value.ndim > 1)
        ]
        # Alone, it can only be the batch itself.
        if others:
            name = path.split(".")[-1]
            raise ValueError(
                f"Passed `{path}` of shape {list(value.shape)} to a tower, for a batch of as many "
                "rows. It may be one value a row, which is cut with the batch, or one vector that "
                f"all rows share. Say which: `roles={{{name!r}: 'rows'}}` or "
                f"`roles={{{name!r}: 'whole'}}`."
            )

    def _is_constant(self, value: Any) -> bool:
        # Its first dimension may happen to be that of the batch.
        return isinstance(value, nn.Parameter) or id(value) in self._constants


class EarlierCalls:
    """Which lengths an argument had in earlier calls of a tower, and what they were taken for.

    A prompt of 8 rows is whole beside a batch of 12, and stays so beside a last batch of 8.
    """

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, bool], set[int]] = {}

    def has_rows(self, path: str, value: Any, batch_size: int) -> bool:
        """Return whether an array has a row for each of the batch.

        Raises:
            ValueError: It was cut in an earlier call, as it had by chance as many rows.
        """
        length = len(value)
        is_alike = length == batch_size
        # A length of one is that of what is broadcast.
        if length > 1 and length in self._lengths.get((path, not is_alike), ()):
            if is_alike:
                return False
            raise ValueError(
                f"Passed `{path}` of shape {list(value.shape)} to a tower called with {batch_size} "
                f"rows. In an earlier call with {length} rows it was cut with the batch. Say what "
                f"it is: `roles={{{path!r}: 'whole'}}`, or 'rows' if it has one for each."
            )
        self._lengths.setdefault((path, is_alike), set()).add(length)
        return is_alike


def rows_of(batch: Any) -> int | None:
    """Return the rows of a training step's batch: what most of its tensors or lists begin with."""
    tree = open_tree(batch)
    sizes = [len(leaf.value) for leaf in tree.leaves if is_array(leaf.value)]
    sizes = sizes or [len(each.value) for each in lists_in(tree) if each.value]
    # Most, not the first: a batch may carry a prompt or class weights beside its rows.
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def _names(signature_of: Callable[..., Any], count: int) -> list[str]:
    """Return names for `count` positional arguments."""
    try:
        parameters = inspect.signature(signature_of).parameters.values()
    except (TypeError, ValueError):  # a function of C has none
        parameters = {}.values()  # type: ignore[assignment]
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
    missing = count - len(positional)
    return [*positional[:count], *(f"{rest}[{index}]" for index in range(missing))]


def described(value: Any) -> str:
    """Return what a value is, without what is in it."""
    if isinstance(value, (Tensor, np.ndarray)):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"


def lists_in(tree: Tree) -> list[Tree]:
    """Return plain lists and tuples that hold no batch of their own."""
    # No subclasses: a named tuple is a batch of fields, not a list of rows.
    is_plain = type(tree.value) in (list, tuple)
    if is_plain and not any(isinstance(x, (list, tuple)) for x in tree.value):
        return [tree]
    return [found for part in tree.parts or () for found in lists_in(part)]


def is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def open_tree(value: Any, path: str = "") -> Tree:
    """Take apart what torch's pytrees know, dataclasses, mappings, and subclasses of containers."""
    opened = None if isinstance(value, Tensor) else _open(value)
    if opened is None:
        return Tree(path, value)
    steps, items, close = opened
    parts = [
        open_tree(item, f"{path}{step}" if path else step.lstrip("."))
        for step, item in zip(steps, items, strict=True)
    ]
    return Tree(path, value, parts, close)


def open_call(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tree:
    """Take apart the arguments of a call; the tree is rebuilt as a tuple and a dict of them."""
    keywords, count = list(kwargs), len(names)
    values = zip([*names, *keywords], [*args, *kwargs.values()], strict=True)

    def close(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(values[:count]), dict(zip(keywords, values[count:], strict=True))

    return Tree("", None, [open_tree(value, name) for name, value in values], close)


def _open(value: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]] | None:
    """Return the path steps, the items and the `close` of a container; `None` for a leaf."""
    node = None if hasattr(value, "_fields") else pytree.SUPPORTED_NODES.get(type(value))
    if node is not None:  # built-in containers, and also Hugging Face's `ModelOutput`s
        items, context = node.flatten_fn(value)
        items = list(items)
        steps = _steps(list(value) if isinstance(value, Mapping) else range(len(items)))
        return steps, items, lambda items: node.unflatten_fn(items, context)
    opened = open_container(value)
    return None if opened is None else (_steps(opened.keys), opened.items, opened.close)


def _steps(keys: Iterable[Any]) -> list[str]:
    return [f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in keys]
