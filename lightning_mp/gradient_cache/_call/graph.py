"""What a graph trains, and gradients for it that are kept aside."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.numerics.floats import accumulation_dtype

__all__ = [
    "GradientSums",
    "Graph",
    "explore",
    "for_hooks",
    "gradients_aside",
    "hooks_held",
    "sequence_number",
]


class Graph(NamedTuple):
    """What stands behind some outputs.

    Args:
        leaves: Tensors that gradients are accumulated into, such as parameters.
        is_reentrant: Whether a part is checkpointed in the reentrant way, which hides its leaves
            and works in a full backward only.
        goes_outside: Whether it goes on into a graph that was there before, such as that of a
            prompt which a tower has as an attribute. Several micro-batches then share it.
    """

    leaves: dict[int, Tensor]
    is_reentrant: bool
    goes_outside: bool


def explore(roots: Iterable[Tensor], since: int) -> Graph:
    """Walk through a graph.

    Not `module.parameters()`: an adapter may hang on a hook and a prompt on an attribute, and a
    precision plugin may let a module compute with copies of its parameters.

    Args:
        roots: Outputs.
        since: The sequence number that autograd had reached before they were computed.
    """
    # The nodes are held until the end: Python may make new objects for those that it let go.
    seen: set[Any] = {root.grad_fn for root in roots if root.grad_fn is not None}
    nodes = list(seen)
    # A tower may return a parameter as it is, which has no node.
    leaves = {id(root): root for root in roots if root.requires_grad and root.grad_fn is None}
    is_reentrant = goes_outside = False
    while nodes:
        node = nodes.pop()
        # A node that accumulates into a leaf's `.grad`; torch has no public type for it.
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
            continue
        # Named so in torch, and in the libraries that have one of their own.
        is_reentrant |= node.name().startswith("CheckpointFunction")
        # Autograd numbers its nodes in the order in which they are made.
        goes_outside |= node._sequence_nr() < since
        following = {parent for parent, _ in node.next_functions if parent is not None} - seen
        nodes.extend(following)
        seen |= following
    return Graph(leaves, is_reentrant, goes_outside)


class GradientSums:
    """Adds up gradients of micro-batches, those in 16 bits in fp32.

    Otherwise 128 micro-batches in bf16, which has 8 bits, would leave out most of what they add.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sums: list[Tensor | None] = [None] * len(tensors)
        self._dtypes: list[torch.dtype] = [tensor.dtype for tensor in tensors]
        self._is_own = [False] * len(tensors)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch."""
        into, what = [], []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._dtypes[index] = gradient.dtype
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient  # may be shared, as by the inputs of a sum
            elif not self._is_own[index] or total.is_sparse or gradient.is_sparse:
                wide = accumulation_dtype(gradient.dtype)
                self._sums[index] = total.to(wide) + gradient
                self._is_own[index] = True
            else:
                into.append(total)
                what.append(gradient)
        if into:
            # One launch for all: an encoder has hundreds of parameters in every micro-batch.
            torch._foreach_add_(into, what)

    def totals(self) -> list[Tensor | None]:
        """Return the sums, in the dtype of what was added."""
        return [
            None if total is None else total.to(dtype)
            for total, dtype in zip(self._sums, self._dtypes, strict=True)
        ]


def gradients_aside(
    roots: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    is_full: bool,
    retain_graph: bool,
) -> Sequence[Tensor | None]:
    """Return gradients for `inputs`, without touching a `.grad` and without firing a hook of them.

    A reentrant checkpoint refuses `torch.autograd.grad`, and FSDP does not see it; there a full
    backward runs, and `.grad` is put aside before.
    """
    with hooks_held(inputs):
        if not is_full:
            # `inputs` are those of all micro-batches, and one of them may leave some out.
            return torch.autograd.grad(
                roots, inputs, cotangents, retain_graph=retain_graph, allow_unused=True
            )
        # What the user has accumulated so far is not this replay's to add to.
        before = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        try:
            torch.autograd.backward(roots, cotangents, retain_graph=retain_graph)
            return [tensor.grad for tensor in inputs]
        finally:
            # Also after an error, or what the user has accumulated would be lost.
            for tensor, gradient in zip(inputs, before, strict=True):
                tensor.grad = gradient


@contextmanager
def hooks_held(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let no gradient hook of leaves fire, so that they see whole gradients only."""
    held = [
        (hooks, dict(hooks))
        for tensor in tensors
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        if hooks
    ]
    # The dictionaries themselves are emptied: autograd's nodes hold on to them.
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


def for_hooks(leaves: list[Tensor], totals: list[Tensor | None]) -> list[Tensor | None]:
    """Give zeros to leaves without a gradient that have hooks, which cannot take `None`."""
    return [
        torch.zeros_like(leaf) if total is None and leaf._backward_hooks else total
        for leaf, total in zip(leaves, totals, strict=True)
    ]


def sequence_number() -> int:
    """Return autograd's count of nodes so far."""
    # A node is made to be asked: the counter itself is not shown.
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view_as(torch.empty(0)).grad_fn
    assert node is not None
    number: int = node._sequence_nr()
    return number
