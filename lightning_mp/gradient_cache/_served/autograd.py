"""Finds the leaves of graphs, sums their gradients, and attaches the replay to the graph."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "GradientSums",
    "TrainedLeaves",
    "attach_replay",
    "explore_graph",
    "grad_without_side_effects",
]


class Graph(NamedTuple):
    """The part of the autograd graph that leads to some outputs."""

    leaves: dict[int, Tensor]  # accumulate gradients, such as parameters; by identity
    is_reentrant: bool  # by checkpoints that hide their leaves and only work in a full backward
    # Whether it continues into an older graph, such as that of a prompt in an attribute of the
    # tower. Micro-batches then share the older graph.
    goes_outside: bool


def explore_graph(
    roots: Iterable[Tensor], since: int, refuse: Callable[..., None] | None = None
) -> Graph:
    """Traverse the graph of outputs whose nodes are numbered from `since` on, and describe it.

    `module.parameters()` would not do: a hook may use an adapter, an attribute may hold a prompt,
    and a precision plugin may make a module compute with copies of its parameters. Later backwards
    through a node that leads to a leaf call `refuse`.
    """
    # Hold all nodes: Python may create a second object for a node whose first object was freed.
    seen: set[Any] = {root.grad_fn for root in roots if root.grad_fn is not None}
    nodes = list(seen)
    # A tower may return a parameter itself, which has no node.
    leaves = {id(root): root for root in roots if root.requires_grad and root.grad_fn is None}
    is_reentrant = goes_outside = False
    while nodes:
        node = nodes.pop()
        # The node that accumulates into `.grad`; torch has no public type for it.
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
            continue
        # torch and other libraries use this name.
        hides_leaves = node.name().startswith("CheckpointFunction")
        is_reentrant |= hides_leaves
        # Autograd numbers nodes in the order of their creation.
        is_older = node._sequence_nr() < since
        goes_outside |= is_older
        parents = {parent for parent, _ in node.next_functions if parent is not None}
        ends = hides_leaves or any(hasattr(parent, "variable") for parent in parents)
        if refuse is not None and ends and not is_older:
            node.register_prehook(refuse)
        following = parents - seen
        nodes.extend(following)
        seen |= following
    return Graph(leaves, is_reentrant, goes_outside)


class TrainedLeaves:
    """The leaves that the micro-batches of a call train; a replay must train the same leaves.

    The parameters of `module` count as trained if the graph hides its leaves. `unsharded` are the
    identities of the parameters that are not sharded; `None` if no parameter is.
    """

    def __init__(self, tower: str, module: nn.Module | None, unsharded: set[int] | None) -> None:
        self._tower, self._module, self._unsharded = tower, module, unsharded
        self.leaves: dict[int, Tensor] = {}
        # Called before a backward through the graph of a first run.
        self.refuse: Callable[..., None] | None = None
        # Leaves that may belong to the graph of one micro-batch, such as an embedding that
        # `enable_input_require_grads` turns into a leaf.
        self._new: dict[int, weakref.ref[Tensor]] = {}
        self.freed: set[int] = set()  # leaves that were freed with the graph of their micro-batch
        self.is_reentrant = self.goes_outside = False
        # All nodes created from here on are part of a micro-batch.
        self._first = self._since = torch._C._autograd._get_sequence_nr()

    @property
    def parameters(self) -> list[Tensor]:
        parameters = () if self._module is None else self._module.parameters()
        return [p for p in parameters if p.requires_grad]

    def note(self, roots: Iterable[Tensor], inputs: Iterable[Tensor]) -> frozenset[int]:
        """Record the leaves that a micro-batch trains besides its inputs, and return their ids."""
        self._settle()
        graph = explore_graph(roots, self._since, self.refuse)
        self._since = torch._C._autograd._get_sequence_nr()
        leaves = dict(graph.leaves)
        for tensor in inputs:
            leaves.pop(id(tensor), None)
        if graph.is_reentrant:
            # Reentrant checkpoints hide leaves, so any parameter may be trained.
            leaves.update({id(p): p for p in self.parameters})
        for key, leaf in leaves.items():
            # FSDP itself sums the gradients of the parameters that it gathers.
            is_gathered = self._unsharded is not None and key not in self._unsharded
            if not isinstance(leaf, nn.Parameter):
                self._new[key] = weakref.ref(leaf)
            elif not is_gathered:
                self.leaves[key] = leaf
        self.is_reentrant |= graph.is_reentrant
        self.goes_outside |= graph.goes_outside
        return frozenset(leaves)

    def close(self) -> None:
        """End the first run: refuse gradients of tensors that the module stored in attributes."""
        self._settle()
        for owner in () if self._module is None else self._module.modules():
            for value in vars(owner).values():
                # A loss that sums a list needs a gradient of the last item, too.
                stored = value[-1] if type(value) is list and value else value
                node = stored.grad_fn if isinstance(stored, Tensor) else None
                if node is not None and node._sequence_nr() >= self._first and self.refuse:
                    stored.register_hook(self.refuse)

    def _settle(self) -> None:
        """Keep the leaves that outlive the graph of the latest micro-batch."""
        for key, reference in self._new.items():
            leaf = reference()
            if leaf is None:
                self.freed.add(key)
            else:
                self.leaves[key] = leaf
        self._new = {}

    def gradients(
        self,
        outputs: Sequence[Tensor],
        roots: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        inputs: Sequence[Tensor],
        known: frozenset[int],
    ) -> Sequence[Tensor | None]:
        """Return the gradients of a replay for its inputs and then for all leaves of the call."""
        leaves = explore_graph(outputs, 0).leaves
        # With equal outputs, too: a flag of the tower may detach activations.
        changed = set(leaves) - known - {id(tensor) for tensor in inputs}
        if self.freed:
            changed = {key for key in changed if isinstance(leaves[key], nn.Parameter)}
        if not self.is_reentrant:
            changed |= known - set(leaves) - self.freed
        if changed:
            raise RuntimeError(
                f"The tower `{self._tower}` trains other tensors in its replay than in its call. "
                "What decides which tensors train must not change between the call and the "
                "backward: pass flags as arguments of the tower instead of setting attributes, "
                "change `requires_grad` and adapters after the backward, and do not call a tower "
                "inside `torch.func.functional_call`."
            )
        return grad_without_side_effects(
            roots,
            cotangents,
            [*inputs, *self.leaves.values()],
            is_full=self.is_reentrant or self._unsharded is not None,
            retain_graph=self.goes_outside,
        )


class GradientSums:
    """Sums the gradients of micro-batches; gradients in half precision are summed in fp32.

    In bf16 with its 8-bit significand, a sum over 128 micro-batches would lose most addends.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._sums: list[Tensor | None] = [None] * len(tensors)
        self._dtypes: list[torch.dtype] = [tensor.dtype for tensor in tensors]
        self._is_copy = [False] * len(tensors)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        sums, addends = [], []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._dtypes[index] = gradient.dtype
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient  # autograd may return one tensor for two inputs
            elif not self._is_copy[index] or {total.layout, gradient.layout} != {torch.strided}:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self._sums[index] = total.to(wide) + gradient
                self._is_copy[index] = True
            else:
                sums.append(total)
                addends.append(gradient)
        if sums:
            # One launch for the hundreds of parameters of an encoder.
            torch._foreach_add_(sums, addends)

    def totals(self) -> list[Tensor | None]:
        """Return the sums, in the dtype of the gradients, on the devices of the tensors."""
        totals: list[Tensor | None] = []
        for tensor, total, dtype in zip(self._tensors, self._sums, self._dtypes, strict=True):
            if total is None and tensor._backward_hooks:  # which do not accept `None`
                total = torch.zeros_like(tensor)
            totals.append(None if total is None else total.to(tensor.device, dtype))
        return totals


def grad_without_side_effects(
    roots: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    is_full: bool,
    retain_graph: bool,
) -> Sequence[Tensor | None]:
    """Return gradients for `inputs` without changing their `.grad` or running their hooks.

    Reentrant checkpoints raise in `torch.autograd.grad`, and FSDP's hooks do not run in it. With
    `is_full`, a full backward runs instead, and `.grad` is saved and restored.
    """
    with hooks_disabled(inputs):
        if not is_full:
            # `inputs` belong to all micro-batches, and one micro-batch may not use all of them.
            return torch.autograd.grad(
                roots, inputs, cotangents, retain_graph=retain_graph, allow_unused=True
            )
        # A replay must not add to gradients that the user has accumulated.
        before = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        try:
            torch.autograd.backward(roots, cotangents, retain_graph=retain_graph)
            return [tensor.grad for tensor in inputs]
        finally:
            # Also after an error, or the user's accumulated gradients would be lost.
            for tensor, gradient in zip(inputs, before, strict=True):
                tensor.grad = gradient


@contextmanager
def hooks_disabled(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable the gradient hooks of leaves, which shall only see whole gradients."""
    held = [
        (hooks, dict(hooks))
        for tensor in tensors
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        if hooks
    ]
    # Clear the dictionaries in place, because autograd's nodes hold references to them.
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


def attach_replay(
    replay: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    trained: Sequence[Tensor],
    outputs: list[Tensor],
    constant: Sequence[Tensor],
) -> list[Tensor]:
    """Return the outputs of a call as outputs of an autograd node whose backward replays the call.

    The inputs of the node are the leaves that the call trains. So autograd sums the gradients of
    several calls and of the rest of the loss, accumulates them once and runs hooks once, and DDP
    finds each parameter in the graph and reduces it once, as after a plain call of the tower.
    `constant` are the outputs that do not require grad. The list `outputs` is cleared.
    """
    attached: tuple[Tensor, ...] = _Replay.apply((replay, outputs, constant), *trained)
    outputs.clear()  # the node must not hold its own outputs
    return list(attached)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[Any, list[Tensor], Any], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.replay, outputs, constant = call
        # Without this, unused outputs would get zeros, and the replay would differentiate them.
        ctx.set_materialize_grads(False)
        # Labels and masks get no gradients, as after a plain call.
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        replay = ctx.replay
        if replay is None:
            raise RuntimeError(
                "Called a second backward through a tower whose gradients are cached. The first "
                "one frees the arguments of the tower. Pass `retain_graph=True` to it."
            )
        # As torch frees saved tensors: a list of losses would keep the batches of all steps.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.replay = None
        # With `create_graph=True` grad mode is on here; a replay enables it where needed.
        with torch.no_grad():
            gradients = (None, *replay(cotangents))
        given = [gradient for gradient in gradients if gradient is not None]
        if not torch.is_grad_enabled() or not given:
            return gradients
        # A second derivative must raise. The raising node takes the cotangents as inputs, because
        # `torch.autograd.grad` skips nodes that do not lead to the tensors it is asked for, which
        # is why torch's `once_differentiable` would not raise here.
        handle = torch.zeros((), requires_grad=True, device=given[0].device)
        reached = [each for each in cotangents if each is not None]
        passed = iter(_RaiseInBackward.apply(given, handle, *reached))
        return tuple(None if gradient is None else next(passed) for gradient in gradients)


class _RaiseInBackward(torch.autograd.Function):
    """Passes gradients through; a backward through them raises."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(
            "Called a second derivative through a tower whose gradients are cached. A replay keeps "
            "no graph, so only first derivatives exist. For a gradient penalty leave the tower out "
            "of `towers`, or compute the penalty from the features."
        )
