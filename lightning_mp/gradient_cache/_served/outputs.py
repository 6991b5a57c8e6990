"""Concatenates the outputs of micro-batches and compares them with those of the replay."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_mp.gradient_cache._served.arguments import (
    Arguments,
    Tree,
    describe_value,
    is_same,
    open_tree,
)
from lightning_mp.gradient_cache._served.roles import ROWS, Role

__all__ = ["Outputs", "Sketch"]


class Outputs:
    """Collects the outputs of a tower.

    Tensors must have the rows of the micro-batch or a declared role. Lists without tensors may have
    one item per row. All other values must be equal in every micro-batch.
    """

    def __init__(self, tower: str, arguments: Arguments) -> None:
        self._tower, self._arguments, self._declared = tower, arguments, arguments.declared
        self.is_first_call = not arguments.earlier.has_checked_outputs
        self._tree: Tree | None = None
        self._leaves: list[Tree] = []
        self._values: list[Any] = []
        self._dtypes: list[torch.dtype] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.roles: list[Role] = []
        self.needs_grad: list[bool] = []

    @property
    def paths(self) -> list[str]:
        return [leaf.path for leaf in self._leaves]

    def open(self, returned: Any, rows: slice) -> "OpenedOutputs":
        """Open the value that the tower returned for a micro-batch."""
        tree, leaves = self._open(returned)
        count = rows.stop - rows.start
        kept = [leaf for leaf in leaves if self._is_kept(leaf)]
        if not kept:
            raise ValueError(
                f"The tower `{self._tower}` returned a {type(returned).__name__} without tensors. "
                "A tower must return tensors, or lists, dicts, dataclasses and mappings of "
                "tensors. Return the features themselves."
            )
        roles = [self._role(leaf.path, leaf.value, count) for leaf in kept]
        names, tensors = [leaf.path for leaf in kept], [leaf.value for leaf in kept]
        return OpenedOutputs(tree, leaves, names, tensors, roles)

    # Without grad, or the copies would keep the activations of all micro-batches alive.
    @torch.no_grad()
    def add(self, opened: "OpenedOutputs", rows: slice, lengths: Mapping[int, int]) -> None:
        """Copy the outputs of a micro-batch to their rows.

        `lengths` maps lengths that the micro-batch was cut to, to padded lengths of the batch.
        """
        if self._tree is None:
            self._begin(opened, lengths)
        if opened.names != self.names or len(opened.leaves) != len(self._values):
            raise ValueError(
                f"The tower `{self._tower}` returned {opened.names} for one micro-batch and "
                f"{self.names} for another. A tower must return the same outputs for every "
                "micro-batch, independently of the rows."
            )
        # Copied at once, because CUDA graphs overwrite these outputs with the next micro-batch.
        for index, (output, tensor) in enumerate(zip(self.tensors, opened.tensors, strict=True)):
            self.needs_grad[index] |= tensor.requires_grad
            role = self.roles[index]
            part = output[_rows(role, rows)] if role.has_rows else output
            if role.padding is not None and tensor.ndim > 1:
                part = part[:, : tensor.shape[1]]
            # `copy_` would silently broadcast one value over a row.
            if tensor.shape != part.shape:
                self._raise_shape_error(
                    self.names[index], tensor.shape, f"{list(part.shape)} was expected"
                )
            self._merge_tensor(index, part, tensor, rows)
        for index, leaf in enumerate(opened.leaves):
            if not isinstance(leaf.value, Tensor) and not self._is_left_out(leaf.path):
                self._merge(index, leaf, rows)

    def micro_batch_cotangent(
        self, index: int, cotangent: Tensor, rows: slice, like: Tensor
    ) -> Tensor:
        """Return the cotangent of a micro-batch's output `like`, from that of the whole batch."""
        role = self.roles[index]
        if role.has_rows:
            part = cotangent[_rows(role, rows)]
            return part if part.shape == like.shape else part[:, : like.shape[1]]
        return cotangent if role.kind == "sum" else cotangent.mul(self._weight(rows))

    def release(self) -> list[Tensor]:
        """Release and return the tensors of the whole batch, in the dtypes of the tower."""
        tensors, self.tensors = self.tensors, []
        return [x.to(dtype) for x, dtype in zip(tensors, self._dtypes, strict=True)]

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors of the whole batch in the structure that the tower returned."""
        assert self._tree is not None
        remaining = iter(tensors)
        leaves = [
            next(remaining) if self._is_kept(leaf) else whole
            for leaf, whole in zip(self._leaves, self._values, strict=True)
        ]
        return self._tree.rebuild(leaves)

    def values(self, returned: Any) -> dict[str, Any]:
        """Return the values that are not left out by path; of tensors, only their shapes."""
        _, leaves = self._open(returned)
        return {
            leaf.path: leaf.value.shape if isinstance(leaf.value, Tensor) else leaf.value
            for leaf in leaves
            if not self._is_left_out(leaf.path)
        }

    def _begin(self, opened: "OpenedOutputs", lengths: Mapping[int, int]) -> None:
        batch_size = self._arguments.batch_size
        self.names, self.roles = opened.names, opened.roles
        # Allocated for all rows at once: a final `cat` would hold the outputs twice.
        self.tensors = [
            _allocate(x, role, batch_size, lengths)
            for x, role in zip(opened.tensors, opened.roles, strict=True)
        ]
        self._dtypes = [x.dtype for x in opened.tensors]
        self.needs_grad = [False] * len(self.tensors)
        self._values = [None] * len(opened.leaves)  # values that are left out stay `None`
        # Keep the structure without its values. Not `None`, which outputs of Hugging Face drop.
        empty = [
            leaf.value.new_empty(0) if isinstance(leaf.value, Tensor) else ...
            for leaf in opened.leaves
        ]
        self._tree, self._leaves = self._open(opened.tree.rebuild(empty))

    def _merge_tensor(self, index: int, part: Tensor, tensor: Tensor, rows: slice) -> None:
        kind = self.roles[index].kind
        if kind in ("mean", "sum"):
            weight = self._weight(rows) if kind == "mean" else 1.0
            part.add_(tensor.to(part.dtype), alpha=weight)
        elif kind != "whole" or rows.start == 0:
            part.copy_(tensor)
        elif self.is_first_call and not torch.equal(part, tensor):
            # Only in the first call, because the comparison makes the host wait.
            expected = "a tensor equal to those of other micro-batches was expected"
            self._raise_shape_error(self.names[index], tensor.shape, expected)

    def _weight(self, rows: slice) -> float:
        weight: float = (rows.stop - rows.start) / self._arguments.batch_size
        return weight

    def _merge(self, index: int, leaf: Tree, rows: slice) -> None:
        value = leaf.value
        if rows.start == 0:
            self._values[index] = value
            return
        whole = self._values[index]
        # A list with one item per row is concatenated; a list of another length is shared.
        are_lists = isinstance(value, list) and isinstance(whole, list)
        if are_lists and len(whole) == rows.start and len(value) == rows.stop - rows.start:
            self._values[index] = whole + value
        else:
            self._check_same(leaf.path, whole, value)

    def _check_same(self, path: str, value: Any, other: Any) -> None:
        if not is_same(value, other):
            raise ValueError(
                f"The tower `{self._tower}` returned {_name_of(path)} of type "
                f"{type(other).__name__}, which differs between micro-batches: "
                f"{describe_value(value)} and {describe_value(other)}. Only tensors and lists with "
                "one item per row are concatenated. Leave the output out: "
                f"`roles={{{path!r}: 'left out'}}`."
            )

    def _open(self, returned: Any) -> tuple[Tree, list[Tree]]:
        if isinstance(returned, Tensor):  # the common case
            tree = Tree("", returned)
            return tree, [tree]
        # Lists without tensors are leaves, so that micro-batches can be concatenated.
        tree = open_tree(returned).prune(
            lambda tree: (
                type(tree.value) is list
                and not any(isinstance(leaf.value, Tensor) for leaf in tree.leaves)
            )
        )
        return tree, tree.leaves

    def _is_kept(self, leaf: Tree) -> bool:
        return isinstance(leaf.value, Tensor) and not self._is_left_out(leaf.path)

    def _is_left_out(self, path: str) -> bool:
        role = self._declared_role(path)
        return role is not None and role.kind == "left out"

    def _declared_role(self, path: str) -> Role | None:
        return self._declared.role(path, "output") if self._declared.texts else None

    def _role(self, path: str, tensor: Tensor, count: int) -> Role:
        role = self._declared_role(path)
        if role is not None and not role.has_rows:
            if role.kind != "whole" and not tensor.is_floating_point():
                self._raise_shape_error(
                    path, tensor.shape, f"{role}s of floating-point numbers were expected"
                )
            return role
        if tensor.is_nested or tensor.layout is not torch.strided:
            self._raise_shape_error(path, tensor.shape, "a dense tensor was expected")
        per_sample = len(tensor) // count if tensor.ndim and not len(tensor) % count else 0
        if role is None and per_sample:
            return ROWS if per_sample == 1 else Role("rows", per_sample)
        if role is None or per_sample != role.rows_per_sample:
            expected = count * role.rows_per_sample if role is not None else count
            self._raise_shape_error(path, tensor.shape, f"{expected} rows were expected")
        return role

    def check_rows(self, path: str, two: Any, three: Any) -> None:
        """Raise if an output is not one of rows, by its `values` for two and for three rows."""
        if not isinstance(two, torch.Size):
            if not isinstance(two, list):
                self._check_same(path, two, three)  # such as a number of rows
            return
        role = self._declared_role(path)
        if role is not None and not role.has_rows:
            return
        per_sample = two[0] // 2 if two and three else 0
        if not per_sample or [two[0], three[0]] != [2 * per_sample, 3 * per_sample]:
            self._raise_shape_error(path, two, "2 rows were expected")
        if two[1:] != three[1:]:
            advice = "return the features"
            if path:
                advice = f"leave it out: `roles={{{path!r}: 'left out'}}`"
            raise ValueError(
                f"The tower `{self._tower}` returned {_name_of(path)} of shape {list(two)} for 2 "
                f"rows and of {list(three)} for 3 rows. Outputs of micro-batches are concatenated, "
                "so the shape of a row must not depend on the number of rows. Compute pairwise "
                f"scores outside of towers, from the features, and {advice}."
            )

    def _raise_shape_error(self, path: str, shape: Sequence[int], expected: str) -> NoReturn:
        name = repr(path or "name")
        raise ValueError(
            f"The tower `{self._tower}` returned {_name_of(path)} of shape {list(shape)} for a "
            f"micro-batch, where {expected}. Every output must have the rows of the batch, in the "
            "same shape for every micro-batch. The arguments of the tower are "
            f"{self._arguments}. If a role is wrong, declare the argument by name: "
            "`roles={'name': 'rows'}` or 'whole'. Otherwise compute losses and pairwise scores "
            "outside of towers, declare sequences of different lengths with "
            f"`roles={{{name}: 'rows padded with 0'}}`, and declare outputs without rows: "
            f"`roles={{{name}: 'mean'}}` for a mean over rows, 'sum' for a sum, 'whole' for a "
            "tensor that is equal in all micro-batches."
        )


class OpenedOutputs(NamedTuple):
    """The value that a tower returned for a micro-batch, and the tensors that are kept."""

    tree: Tree
    leaves: list[Tree]
    names: list[str]
    tensors: list[Tensor]
    roles: list[Role]


def _name_of(path: str) -> str:
    return f"`{path}`" if path else "a tensor"


def _rows(role: Role, rows: slice) -> slice:
    return rows if role.rows_per_sample == 1 else role.slice(rows)


def _allocate(like: Tensor, role: Role, rows: int, lengths: Mapping[int, int]) -> Tensor:
    """Allocate an output of the whole batch for an output of a micro-batch."""
    if role.kind in ("mean", "sum"):
        return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    if not role.has_rows:
        return torch.empty_like(like)
    shape = [rows * role.rows_per_sample, *like.shape[1:]]
    if role.padding is None or like.ndim < 2:
        return like.new_empty(shape)
    shape[1] = lengths.get(shape[1], shape[1])
    return like.new_full(shape, role.padding)


class Sketch:
    """Two numbers per row of an output: its dot product with random weights, and its squared norm.

    For rows `x` and `y` and standard normal `w`, the mean of `(w.x - w.y)^2` is `|x - y|^2`, so the
    sum over a micro-batch estimates the distance of its outputs. Bitwise equal outputs have equal
    sketches. A sketch takes one pass over an output and 8 bytes per row, where a copy would double
    the memory of the features.
    """

    def __init__(self, output: Tensor) -> None:
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            one = output.detach().reshape(-1, 1)
            rows = output.detach().flatten(1) if output.ndim > 1 else one
            rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
            # 256 squared overflows in fp16.
            values_mF = rows.to(torch.promote_types(rows.dtype, torch.float32))
            # Random weights, because with equal weights changes that sum to 0 would cancel.
            weights_F = _standard_normal(values_mF.shape[1], values_mF.device)
            self._sum_m = (values_mF * weights_F.to(values_mF.dtype)).sum(1)
            self._square_m = values_mF.square().sum(1)

    def difference(self, replayed: Tensor) -> Tensor:
        """Return the norm of the difference to a replayed output, relative to the output's norm.

        The result is inf if only the replay is non-finite, and 0 if the output itself was
        non-finite: such a step trains nothing.
        """
        other = Sketch(replayed)
        square = self._square_m.sum()
        difference = (other._sum_m - self._sum_m).square().sum() / square
        # For outputs of zeros the quotient is 0 / 0.
        difference = torch.where((other._sum_m == self._sum_m).all(), 0.0, difference.sqrt())
        difference = torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf)
        return torch.where(square.isfinite(), difference, 0.0).to(torch.float32)


# Bounded, because every new output width leaves a vector on the device.
@functools.lru_cache(maxsize=32)
def _standard_normal(count: int, device: torch.device) -> Tensor:
    """Return fixed random numbers without using the user's generators."""
    # Drawn on the CPU, so that all devices get the same numbers.
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
    return numbers.to(device)
