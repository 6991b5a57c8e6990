"""What a tower returned, micro-batch by micro-batch, put together for the whole batch.

Shapes:
    B: the batch of one call. m: rows of one micro-batch.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_mp.gradient_cache._call.arguments import Arguments, is_named
from lightning_mp.gradient_cache._call.structures import Structure, open_structure

__all__ = ["Outputs", "check_no_tangents"]

_DROPPED = object()  # `None` may be a value that a tower returns


class Outputs:
    """Collects the outputs of a tower.

    Tensors must have one row for each row of the micro-batch; so may lists without tensors. All
    else must be the same in every micro-batch.
    """

    def __init__(self, tower: str, arguments: Arguments, leave_out: Collection[str] = ()) -> None:
        self._tower = tower
        self._arguments = arguments
        self._leave_out = leave_out
        self._structure: Structure | None = None
        self._wholes: list[Any] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []

    @property
    def paths(self) -> list[str]:
        """The names of all outputs, also of those left out."""
        return [leaf.path for leaf in self._structure.leaves] if self._structure else []

    def open(self, returned: Any, rows: slice) -> list[Tensor]:
        """Return the tensors among the outputs of a micro-batch, those left out excepted.

        Raises:
            ValueError: There are no outputs, or one has no rows.
        """
        count = rows.stop - rows.start
        structure = self._open(returned)
        tensors = [x for path, x in structure.leaves if self._is_tensor(path, x)]
        if not tensors:
            raise ValueError(
                f"The tower `{self._tower}` returned no tensor but a "
                f"{type(returned).__name__}. A tower returns tensors, or lists, dicts, dataclasses "
                "and mappings of them. Return the features themselves."
            )
        for path, tensor in structure.leaves:
            if self._is_tensor(path, tensor) and (tensor.ndim == 0 or len(tensor) != count):
                self._refuse(path, tensor, f"{count} rows were expected")
        check_no_tangents(self._tower, tensors)
        return tensors

    def shapes(self, returned: Any) -> dict[str, list[int]]:
        """Return the shapes of the tensors among some outputs, those left out excepted."""
        leaves = self._open(returned).leaves
        return {path: list(x.shape) for path, x in leaves if self._is_tensor(path, x)}

    # With a graph, these copies would keep the activations of all micro-batches alive.
    @torch.no_grad()
    def add(self, returned: Any, rows: slice) -> None:
        """Copy the outputs of a micro-batch to their rows."""
        tensors = self.open(returned, rows)
        structure = self._open(returned)
        if self._structure is None:
            self._begin(structure)
        names = [path for path, x in structure.leaves if self._is_tensor(path, x)]
        if names != self.names or len(structure.leaves) != len(self._wholes):
            raise ValueError(
                f"The tower `{self._tower}` returned {names} for one micro-batch and {self.names} "
                "for another. It must return the same things every time. Make what it returns "
                "independent of the rows."
            )
        # Copied at once: CUDA graphs write the next micro-batch over this one's outputs.
        for name, output, tensor in zip(names, self.tensors, tensors, strict=True):
            # `copy_` would spread one value over a row without a word.
            if tensor.shape[1:] != output.shape[1:]:
                self._refuse(name, tensor, f"{list(output[rows].shape)} was expected")
            output[rows].copy_(tensor)
        for index, (path, value) in enumerate(structure.leaves):
            if not self._is_tensor(path, value):
                self._merge(index, value, rows)

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors for the whole batch in the structure that the tower gave them."""
        assert self._structure is not None
        remaining = iter(tensors)
        leaves = [
            next(remaining)
            if self._is_tensor(leaf.path, leaf.value)
            else None
            if whole is _DROPPED
            else whole
            for leaf, whole in zip(self._structure.leaves, self._wholes, strict=True)
        ]
        return self._structure.rebuild(leaves)

    def refuse_scores(self, path: str, two: list[int], three: list[int]) -> NoReturn:
        """Refuse an output by its shapes for two and for three rows."""
        advice = f"leave it out: `leave_out=[{path!r}]`" if path else "return the features"
        raise ValueError(
            f"The tower `{self._tower}` returned {_name(path)} of shape {two} for 2 rows and of "
            f"{three} for 3 rows. Rows are put together from micro-batches, so the shape of one "
            "must not follow how many there are. Compute scores of rows against each other "
            f"outside of towers, from the features, and {advice}."
        )

    def _begin(self, structure: Structure) -> None:
        batch_size = self._arguments.batch_size
        self._wholes = [_DROPPED for _ in structure.leaves]
        for path, value in structure.leaves:
            if self._is_tensor(path, value):
                self.names.append(path)
                # For all rows at once: to join micro-batches in the end would hold them twice.
                self.tensors.append(value.new_empty(batch_size, *value.shape[1:]))
        # Only types and names are needed, not the tensors of this micro-batch.
        leaves = [x.new_empty(0) if isinstance(x, Tensor) else x for _, x in structure.leaves]
        self._structure = self._open(structure.rebuild(leaves))

    def _merge(self, index: int, value: Any, rows: slice) -> None:
        if isinstance(value, Tensor):
            return  # left out
        if rows.start == 0:
            self._wholes[index] = value
            return
        whole = self._wholes[index]
        # As long as the rows so far; a list of another length is one thing that all rows share.
        is_a_row_each = isinstance(value, list) and isinstance(whole, list)
        if is_a_row_each and len(whole) == rows.start and len(value) == rows.stop - rows.start:
            self._wholes[index] = whole + value
        # The same object is equal whatever `==` says of it, as of NaN; of arrays it says several.
        elif whole is not value and not bool(np.all(whole == value)):
            assert self._structure is not None
            path = self._structure.leaves[index].path
            raise ValueError(
                f"The tower `{self._tower}` returned {_name(path)} of type "
                f"{type(value).__name__}, which differs between micro-batches: {whole!r} and "
                f"{value!r}. Only tensors and lists with one thing a row are put together. Leave "
                f"it out: `leave_out=[{path!r}]`."
            )

    def _open(self, returned: Any) -> Structure:
        def has_no_tensor(value: Any) -> bool:
            # Left closed, so that the lists of micro-batches can be joined.
            return type(value) is list and not any(
                isinstance(leaf.value, Tensor) for leaf in open_structure(value).leaves
            )

        return open_structure(returned, "", has_no_tensor)

    def _is_tensor(self, path: str, value: Any) -> bool:
        return isinstance(value, Tensor) and not is_named(path, self._leave_out)

    def _refuse(self, path: str, tensor: Tensor, expected: str) -> None:
        raise ValueError(
            f"The tower `{self._tower}` returned {_name(path)} of shape {list(tensor.shape)} for a "
            f"micro-batch, where {expected}. Every tensor that a tower returns must have one row "
            "for each row of its batch and the same shape in every micro-batch. Of its arguments, "
            f"{self._arguments}. If that is wrong, declare it by name with `rows=[...]` or "
            "`whole=[...]`; else compute losses, scales and pairwise scores outside of towers, and "
            "pad sequences to a fixed length."
        )


def _name(path: str) -> str:
    return f"`{path}`" if path else "a tensor"


def check_no_tangents(tower: str, values: Iterable[Any]) -> None:
    """Refuse forward-mode AD, whose tangents would be lost.

    Raises:
        RuntimeError: A tensor has one.
    """
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"Called the tower `{tower}` in forward-mode AD. A tower whose gradients are "
                "cached has no tangents. Call it outside of `cache.serving(...)`."
            )
