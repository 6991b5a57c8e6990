"""What a tower returned, micro-batch by micro-batch: put together, and compared with its replay.

Shapes:
    B: the batch of one call. m: rows of one micro-batch. F: values in a row of an output.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_mp._argument_values import shown
from lightning_mp.gradient_cache._served.arguments import Arguments, Tree, is_named, open_tree

__all__ = ["Outputs", "Sketch", "check_no_tangents", "difference_error", "rounding_noise"]

_DROPPED = object()  # `None` may be a value that a tower returns


class Outputs:
    """Collects the outputs of a tower.

    Tensors must have one row for each row of the micro-batch; so may lists without tensors. All
    else must be the same in every micro-batch.

    Args:
        tower: The name, for messages.
        arguments: Of the call.
        leave_out: Names of outputs that are not kept.
        means: Names of outputs that are one number, a mean over rows.
    """

    def __init__(
        self,
        tower: str,
        arguments: Arguments,
        leave_out: Collection[str] = (),
        means: Collection[str] = (),
    ) -> None:
        self._tower = tower
        self._arguments = arguments
        self._leave_out, self._means = leave_out, means
        self._tree: Tree | None = None
        self._leaves: list[Tree] = []
        self._wholes: list[Any] = []
        self._dtypes: list[torch.dtype] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.needs_grad: list[bool] = []
        """Which of the tensors a gradient reaches."""

    @property
    def paths(self) -> list[str]:
        """The names of all outputs, also of those left out."""
        return [leaf.path for leaf in self._leaves]

    def open(self, returned: Any, rows: slice) -> "Opened":
        """Open what the tower returned for a micro-batch.

        Raises:
            ValueError: There are no outputs, or one has no rows.
        """
        tree, leaves = self._open(returned)
        count = rows.stop - rows.start
        kept = [leaf for leaf in leaves if self._is_kept(leaf)]
        if not kept:
            raise ValueError(
                f"The tower `{self._tower}` returned no tensor but a "
                f"{type(returned).__name__}. A tower returns tensors, or lists, dicts, dataclasses "
                "and mappings of them. Return the features themselves."
            )
        for leaf in kept:
            if self._means and is_named(leaf.path, self._means):
                if leaf.value.ndim or not leaf.value.is_floating_point():
                    self._refuse(leaf.path, leaf.value, "one number, as of a mean, was expected")
            elif leaf.value.ndim == 0 or len(leaf.value) != count:
                self._refuse(leaf.path, leaf.value, f"{count} rows were expected")
        tensors = [leaf.value for leaf in kept]
        check_no_tangents(self._tower, tensors)
        return Opened(tree, leaves, [leaf.path for leaf in kept], tensors)

    # With a graph, these copies would keep the activations of all micro-batches alive.
    @torch.no_grad()
    def add(self, opened: "Opened", rows: slice) -> None:
        """Copy the outputs of a micro-batch to their rows."""
        if self._tree is None:
            self._begin(opened)
        if opened.names != self.names or len(opened.leaves) != len(self._wholes):
            raise ValueError(
                f"The tower `{self._tower}` returned {opened.names} for one micro-batch and "
                f"{self.names} for another. It must return the same things every time. Make what "
                "it returns independent of the rows."
            )
        # Copied at once: CUDA graphs write the next micro-batch over this one's outputs.
        for index, (output, tensor) in enumerate(zip(self.tensors, opened.tensors, strict=True)):
            self.needs_grad[index] |= tensor.requires_grad
            if tensor.ndim == 0:
                output.add_(self.share(tensor.to(output.dtype), rows))
                continue
            # `copy_` would spread one value over a row without a word.
            if tensor.shape[1:] != output.shape[1:]:
                expected = f"{list(output[rows].shape)} was expected"
                self._refuse(self.names[index], tensor, expected)
            output[rows].copy_(tensor)
        for index, leaf in enumerate(opened.leaves):
            if not isinstance(leaf.value, Tensor):  # else it is copied, or left out
                self._merge(index, leaf, rows)

    def share(self, value: Tensor, rows: slice) -> Tensor:
        """Return the part of a value for the whole batch, or of its cotangent, that rows have."""
        if value.ndim:
            return value[rows]
        # Of a mean over rows, by their number.
        return value.mul((rows.stop - rows.start) / self._arguments.batch_size)

    def finished(self) -> list[Tensor]:
        """Hand over the tensors for the whole batch, in the dtypes of the tower."""
        tensors, self.tensors = self.tensors, []
        return [x.to(dtype) for x, dtype in zip(tensors, self._dtypes, strict=True)]

    def sketches(self, opened: "Opened") -> "list[Sketch]":
        """Return what the outputs of a replay are compared with; nothing where there is none."""
        return [Sketch(x) for x in opened.tensors] if torch.is_grad_enabled() else []

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors for the whole batch in the structure that the tower gave them."""
        assert self._tree is not None
        remaining = iter(tensors)
        leaves = [
            next(remaining) if self._is_kept(leaf) else None if whole is _DROPPED else whole
            for leaf, whole in zip(self._leaves, self._wholes, strict=True)
        ]
        return self._tree.rebuild(leaves)

    def shapes(self, returned: Any) -> dict[str, list[int]]:
        """Return the shapes of the tensors among some outputs, those left out excepted."""
        _, leaves = self._open(returned)
        return {leaf.path: list(leaf.value.shape) for leaf in leaves if self._is_kept(leaf)}

    def _begin(self, opened: "Opened") -> None:
        batch_size = self._arguments.batch_size
        self.names = opened.names
        # For all rows at once: to join micro-batches in the end would hold them twice.
        self.tensors = [
            x.new_empty(batch_size, *x.shape[1:])
            if x.ndim
            else x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
            for x in opened.tensors
        ]
        self._dtypes = [x.dtype for x in opened.tensors]
        self.needs_grad = [False] * len(self.tensors)
        # Only types and names are needed, not the tensors of this micro-batch.
        values = [leaf.value for leaf in opened.leaves]
        self._wholes = [_DROPPED for _ in values]
        empty = [x.new_empty(0) if isinstance(x, Tensor) else x for x in values]
        is_open = opened.tree.parts is not None
        self._tree, self._leaves = self._open(opened.tree.rebuild(empty) if is_open else empty[0])

    def _merge(self, index: int, leaf: Tree, rows: slice) -> None:
        value = leaf.value
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
            raise ValueError(
                f"The tower `{self._tower}` returned {_name(leaf.path)} of type "
                f"{type(value).__name__}, which differs between micro-batches: {shown(whole)} and "
                f"{shown(value)}. Only tensors and lists with one thing a row are put together. "
                f"Leave it out: `leave_out=[{leaf.path!r}]`."
            )

    def _open(self, returned: Any) -> tuple[Tree, list[Tree]]:
        if isinstance(returned, Tensor):  # as most towers do
            tree = Tree("", returned)
            return tree, [tree]
        # Lists without tensors stay closed, so that those of micro-batches can be joined.
        tree = open_tree(returned).prune(
            lambda tree: (
                type(tree.value) is list
                and not any(isinstance(leaf.value, Tensor) for leaf in tree.leaves)
            )
        )
        return tree, tree.leaves

    def _is_kept(self, leaf: Tree) -> bool:
        is_left_out = bool(self._leave_out) and is_named(leaf.path, self._leave_out)
        return isinstance(leaf.value, Tensor) and not is_left_out

    def _refuse(self, path: str, tensor: Tensor, expected: str) -> NoReturn:
        raise ValueError(
            f"The tower `{self._tower}` returned {_name(path)} of shape {list(tensor.shape)} for a "
            f"micro-batch, where {expected}. Every tensor that a tower returns must have one row "
            "for each row of its batch and the same shape in every micro-batch. Of its arguments, "
            f"{self._arguments}. If that is wrong, declare it by name with `rows=[...]` or "
            "`whole=[...]`; else compute losses, scales and pairwise scores outside of towers, and "
            "pad sequences to a fixed length. One number that is a mean over rows, or the same for "
            "all, is declared with `means=[...]`."
        )

    def refuse_scores(self, path: str, two: list[int], three: list[int]) -> NoReturn:
        """Refuse an output by its shapes for two and for three rows."""
        advice = f"leave it out: `leave_out=[{path!r}]`" if path else "return the features"
        raise ValueError(
            f"The tower `{self._tower}` returned {_name(path)} of shape {two} for 2 rows and of "
            f"{three} for 3 rows. Rows are put together from micro-batches, so the shape of one "
            "must not follow how many there are. Compute scores of rows against each other "
            f"outside of towers, from the features, and {advice}."
        )


class Opened(NamedTuple):
    """What a tower returned for a micro-batch: all of it, and the tensors that are kept."""

    tree: Tree
    leaves: list[Tree]
    names: list[str]
    tensors: list[Tensor]


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


class Sketch:
    """Two numbers for each row of an output: its sum under random weights, and its square norm.

    For rows `x` and `y` and standard normal `w`, the mean of `(w.x - w.y)^2` is `|x - y|^2`, so
    sums over a micro-batch tell how far its outputs are from each other. Outputs that are equal bit
    for bit have sketches that are. That takes one pass over an output and 8 bytes a row, where a
    copy would double the memory of the features.
    """

    def __init__(self, output: Tensor) -> None:
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            one = output.detach().reshape(-1, 1)
            rows = output.detach().flatten(1) if output.ndim > 1 else one
            rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
            # The square of an fp16 value of 256 is no fp16 number.
            values_mF = rows.to(torch.promote_types(rows.dtype, torch.float32))
            # Random weights: with equal ones, changes that sum to 0 would go unseen.
            self._sum_m = (values_mF * _weights(values_mF)).sum(1)
            self._square_m = values_mF.square().sum(1)

    def difference(self, replayed: Tensor) -> Tensor:
        """Return the norm of the difference to a replayed output over the norm of the output.

        inf where the replay alone is not finite, 0 where the output was not: such a loss trains
        nothing.
        """
        other = Sketch(replayed)
        square = self._square_m.sum()
        difference = (other._sum_m - self._sum_m).square().sum() / square
        # Equal outputs of zeros are 0 / 0.
        difference = torch.where((other._sum_m == self._sum_m).all(), 0.0, difference.sqrt())
        difference = torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf)
        return torch.where(square.isfinite(), difference, 0.0).to(torch.float32)


def rounding_noise(dtypes: set[torch.dtype], device: torch.device) -> float:
    """Return by how much two runs of one network may differ by rounding, relative to its outputs.

    Eight roundings of the coarsest dtype in use where that is 16 bits or tf32, as most of its
    roundings fall alike; else 128, for sums in another order that go through a deep network. 0
    under `torch.use_deterministic_algorithms(True)`.

    Args:
        dtypes: Of outputs, of what is trained, and of autocast.
        device: fp32 on CUDA counts as tf32 wherever torch may multiply in it.
    """
    if torch.are_deterministic_algorithms_enabled():
        return 0.0
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    is_tf32 = device.type == "cuda" and (
        torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    )
    if is_tf32 and torch.float32 in dtypes:
        # tf32 has 10 bits of mantissa.
        eps = max(eps, 2.0**-10)
    return (8 if eps > torch.finfo(torch.float32).eps else 128) * eps


def difference_error(tower: str, difference: float, tolerance: float) -> RuntimeError:
    """Return the error for a replay that differs, with its likely causes in order."""
    return RuntimeError(
        f"The tower `{tower}` gave other outputs when it was replayed for its gradients: they "
        f"differ by {difference:.1e} of their norm, where {tolerance:.1e} is allowed. Its "
        "gradients are wrong. Likely causes, in this order: its input was changed in place unseen, "
        "as through memory shared with numpy or `.data`; it draws from a generator that is no "
        "attribute of its modules; it keeps state outside of buffers that moves with every call, "
        "such as a counter; its weights were changed through `.data`. If its kernels are just not "
        "deterministic, pass a larger `replay_tolerance`, or `inf` to compare nothing."
    )


def _weights(values_mF: Tensor) -> Tensor:
    return _normal(values_mF.shape[1], values_mF.device).to(values_mF.dtype)


# Bounded, as outputs of ever new lengths would leave a vector each on the device.
@functools.lru_cache(maxsize=32)
def _normal(count: int, device: torch.device) -> Tensor:
    """Return the same random numbers every time, without moving a generator of the user's."""
    # Drawn on the CPU, so that all devices have the same.
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(device)
