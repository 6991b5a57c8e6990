"""Which arguments of a tower's call are cut with the batch, and which go whole to every part.

Shapes:
    B: the batch of one call.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_mp.gradient_cache._call.structures import open_structure

__all__ = ["Arguments", "is_named", "rows_of"]


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
        rows: Names of arguments that have one row for each of the batch.
        whole: Names of arguments that all rows share.
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
        rows: Collection[str] = (),
        whole: Collection[str] = (),
        expected: int | None = None,
    ) -> None:
        self._count = len(args)
        self._keywords = list(kwargs)
        names = _names(signature_of, len(args))
        values = dict(zip([*names, *kwargs], [*args, *kwargs.values()], strict=True))
        # By identity, as `==` of tensors compares their values.
        self._constants = {id(tensor) for tensor in constants}
        self._rows, self._whole = rows, whole
        self.batch_size = self._find_batch_size(values, expected) or 0
        self._structure = open_structure(values, "", self._has_a_thing_a_row)
        self.leaves = [leaf.value for leaf in self._structure.leaves]
        self.is_cut = [self._decide(path, value) for path, value in self._structure.leaves]
        if not self.batch_size or not any(self.is_cut):
            raise ValueError(
                f"Passed no batch, or an empty one, to a tower ({self}). A tower takes at least "
                "one tensor or list whose first dimension is the batch. Pass the batch as an "
                "argument, not as an attribute."
            )

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments around other leaves."""
        values = list(self._structure.rebuild(leaves).values())
        keywords = dict(zip(self._keywords, values[self._count :], strict=True))
        return tuple(values[: self._count]), keywords

    @property
    def paths(self) -> list[str]:
        """The names of all leaves."""
        return [leaf.path for leaf in self._structure.leaves]

    def name(self, index: int) -> str:
        """Return the name of the leaf at an index."""
        return self._structure.leaves[index].path

    def __str__(self) -> str:
        """Return what was taken for what, for messages."""
        roles: dict[bool, list[str]] = {True: [], False: []}
        for (path, value), is_cut in zip(self._structure.leaves, self.is_cut, strict=True):
            roles[is_cut].append(f"`{path}` {_describe(value)}")
        parts = [
            f"{role}: {', '.join(roles[is_cut])}"
            for role, is_cut in (("taken as rows of the batch", True), ("taken whole", False))
            if roles[is_cut]
        ]
        return "; ".join(parts) or "no arguments"

    def _find_batch_size(self, values: dict[str, Any], expected: int | None) -> int | None:
        leaves = open_structure(values).leaves
        declared = [(p, v) for p, v in leaves if is_named(p, self._rows)]
        data = declared or [
            (p, v) for p, v in leaves if not is_named(p, self._whole) and not self._is_constant(v)
        ]
        # The first tensor decides where nothing else does: towers take their data first.
        sizes = [v.shape[0] for _, v in data if isinstance(v, (Tensor, np.ndarray)) and v.ndim]
        lists = [
            len(v)
            for p, v in _lists_in(values)
            if (is_named(p, self._rows) if declared else not is_named(p, self._whole))
        ]
        if declared and lists:
            return lists[0]
        # The step's own rows go before the first tensor, which may be a prompt or class weights.
        if expected is not None and expected in [*sizes, *lists]:
            return expected
        return sizes[0] if sizes else lists[0] if lists else None

    def _has_a_thing_a_row(self, value: Any) -> bool:
        """Return whether a list has one element for each row, and is no collection of batches."""
        if type(value) not in (list, tuple) or len(value) != self.batch_size:
            return False
        # As many tensors as rows, each with as many rows, are a collection of batches.
        inside = [leaf.value for leaf in open_structure(value).leaves]
        return not any(
            isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0 and x.shape[0] == self.batch_size
            for x in inside
        )

    def _decide(self, path: str, value: Any) -> bool:
        # What was declared goes before all that is guessed.
        if is_named(path, self._whole):
            return False
        if isinstance(value, (list, tuple)):
            return len(value) == self.batch_size and self._has_a_thing_a_row(value)
        if not isinstance(value, (Tensor, np.ndarray)) or value.ndim == 0:
            return False
        if is_named(path, self._rows):
            if value.shape[0] != self.batch_size:
                raise ValueError(
                    f"Passed `{path}` of shape {list(value.shape)}, which is declared as rows, to "
                    f"a tower called with {self.batch_size} rows. Leave it out of `rows`."
                )
            return True
        if self._is_constant(value) or value.shape[0] != self.batch_size:
            return False
        # Whole numbers of one dimension are labels or lengths, one a row.
        if value.ndim == 1 and isinstance(value, Tensor) and value.is_floating_point():
            self._check_vector(path, value)
        return True

    def _check_vector(self, path: str, value: Tensor) -> None:
        """Refuse a vector that may be one value a row, or one for every feature."""
        others = [
            other
            for other_path, other in self._structure.leaves
            if other_path != path
            and not self._is_constant(other)
            and (isinstance(other, (list, tuple)) or (isinstance(other, Tensor) and other.ndim > 1))
        ]
        # Alone, it can only be the batch itself.
        if others:
            name = path.split(".")[-1]
            raise ValueError(
                f"Passed `{path}` of shape {list(value.shape)} to a tower, for a batch of as many "
                "rows. It may be one value a row, which is cut with the batch, or one vector that "
                f"all rows share. Say which: `rows=[{name!r}]` or `whole=[{name!r}]`."
            )

    def _is_constant(self, value: Any) -> bool:
        # Its first dimension may happen to be that of the batch.
        return isinstance(value, nn.Parameter) or id(value) in self._constants


def is_named(path: str, names: Collection[str]) -> bool:
    """Return whether a path, a part that it begins with, or its last part is among `names`."""
    if not names:
        return False
    # `batch.images[0]` is named by itself, `batch.images`, `batch`, and `images`.
    steps = path.replace("[", ".[").split(".")
    begins = {".".join(steps[: k + 1]).replace(".[", "[") for k in range(len(steps))}
    return bool((begins | {steps[-1], *steps}) & set(names))


def rows_of(batch: Any) -> int | None:
    """Return the rows of a training step's batch: what most of its tensors or lists begin with."""
    sizes = [
        leaf.value.shape[0]
        for leaf in open_structure(batch).leaves
        if isinstance(leaf.value, (Tensor, np.ndarray)) and leaf.value.ndim > 0
    ]
    sizes = sizes or [len(value) for _, value in _lists_in(batch) if value]
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


def _lists_in(values: Any) -> list[tuple[str, Any]]:
    """Return plain lists and tuples that hold no batch of their own, with their paths."""
    found: list[tuple[str, Any]] = []

    def note(value: Any) -> bool:
        # No subclasses: a named tuple is a batch of fields, not a list of rows.
        return type(value) in (list, tuple) and not _holds_containers(value)

    for leaf in open_structure(values, "", note).leaves:
        if isinstance(leaf.value, (list, tuple)):
            found.append((leaf.path, leaf.value))
    return found


def _holds_containers(value: Sequence[Any]) -> bool:
    return any(isinstance(x, (list, tuple)) for x in value)


def _describe(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
