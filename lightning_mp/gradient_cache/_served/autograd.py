"""What a graph trains, gradients for it that are kept aside, and the node that hands them on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["GradientSums", "Trained", "attach", "explore", "for_hooks", "gradients_aside"]

_TWICE = (
    "Called a second derivative through a tower whose gradients are cached. Its replay leaves no "
    "graph behind, so there is only a first one. Leave the tower out of `towers` for a gradient "
    "penalty, or write the penalty on the features."
)


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


class Trained:
    """What the micro-batches of a call train: a replay must train the same.

    Args:
        tower: The name, for messages.
        module: Whose parameters may be trained where a graph hides them.
        own: Identities of the parameters that are not sharded; `None`: the tower is not sharded.
    """

    def __init__(self, tower: str, module: nn.Module | None, own: set[int] | None) -> None:
        self._tower, self._module, self._own = tower, module, own
        self.leaves: dict[int, Tensor] = {}
        self.is_reentrant = False
        self.goes_outside = False
        self._since = 0

    def alike(self) -> "Trained":
        """Return one for the same tower that has seen nothing."""
        return Trained(self._tower, self._module, self._own)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the module that require gradients."""
        parameters = () if self._module is None else self._module.parameters()
        return [p for p in parameters if p.requires_grad]

    def begin(self) -> None:
        """Take graphs from here on for those of micro-batches."""
        self._since = sequence_number()

    def note(self, roots: Iterable[Tensor], inputs: Iterable[Tensor]) -> frozenset[int]:
        """Note what the graph of a micro-batch trains beside its inputs, and return that."""
        graph = explore(roots, self._since)
        self._since = sequence_number()
        leaves = dict(graph.leaves)
        for tensor in inputs:
            leaves.pop(id(tensor), None)
        if graph.is_reentrant:
            # Its checkpoints show no leaves: any parameter may be trained.
            leaves.update({id(p): p for p in self.parameters})
        self.leaves.update(self.aside(leaves))
        self.is_reentrant |= graph.is_reentrant
        self.goes_outside |= graph.goes_outside
        return frozenset(leaves)

    def aside(self, leaves: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the leaves whose gradients are summed up here: all but those FSDP gathered."""
        return {
            key: leaf
            for key, leaf in leaves.items()
            if self._own is None or key in self._own or not isinstance(leaf, nn.Parameter)
        }

    def gradients(
        self,
        roots: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        inputs: Sequence[Tensor],
        known: frozenset[int],
    ) -> Sequence[Tensor | None]:
        """Return gradients of a replay for its inputs and then for all leaves of the call.

        Raises:
            RuntimeError: It trains what its micro-batch did not.
        """
        leaves = explore(roots, 0).leaves
        strange = set(leaves) - known - {id(tensor) for tensor in inputs}
        if strange:
            raise RuntimeError(
                f"The tower `{self._tower}` trains other tensors in its replay than in its call, "
                f"such as one of shape {list(leaves[min(strange)].shape)}. Parameters must stay in "
                "place until the backward: do not call a tower inside "
                "`torch.func.functional_call` or swap its parameters while its gradients are "
                "cached."
            )
        return gradients_aside(
            roots,
            cotangents,
            [*inputs, *self.leaves.values()],
            is_full=self.is_reentrant or self._own is not None,
            retain_graph=self.goes_outside,
        )


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
                wide = torch.promote_types(gradient.dtype, torch.float32)
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


def attach(
    replay: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    trained: Sequence[Tensor],
    outputs: list[Tensor],
    constant: Sequence[Tensor],
) -> list[Tensor]:
    """Return the outputs of a call as those of a node whose backward replays the call.

    What the call trains are its inputs. So autograd itself adds up what several calls and the rest
    of the loss give a parameter, accumulates it once, fires hooks once, and DDP finds the parameter
    in the graph and reduces it once, as if the tower had been called plainly.

    Args:
        replay: Returns the gradients of what is trained from those of the outputs.
        trained: What the call trains.
        outputs: The outputs; the list is emptied.
        constant: Those that no gradient reaches.
    """
    attached: tuple[Tensor, ...] = _Replay.apply((replay, outputs, constant), *trained)
    outputs.clear()  # else the node would hold itself
    return list(attached)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: tuple[Any, list[Tensor], Any], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.replay, outputs, constant = what
        # Zeros for outputs that the loss leaves out would be replayed for nothing.
        ctx.set_materialize_grads(False)
        # As after a plain call: else a loss would send gradients to labels and masks.
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        # With `create_graph=True` grad mode is on here; a replay turns it on where it needs it.
        with torch.no_grad():
            gradients = (None, *ctx.replay(cotangents))
        given = [gradient for gradient in gradients if gradient is not None]
        if not torch.is_grad_enabled() or not given:  # it is with `create_graph=True`
            return gradients
        # Cotangents lead back to the loss: `torch.autograd.grad` passes over a graph that does not
        # reach what it is asked for, as that of torch's `once_differentiable`.
        handle = torch.zeros((), requires_grad=True, device=given[0].device)
        reached = [each for each in cotangents if each is not None]
        refusing = iter(_Refuse.apply(given, handle, *reached))
        return tuple(None if gradient is None else next(refusing) for gradient in gradients)


class _Refuse(torch.autograd.Function):
    """Hands on gradients, in whose graph a backward raises an error."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(_TWICE)
