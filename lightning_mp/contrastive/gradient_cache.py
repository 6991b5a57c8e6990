"""Gradient caching: a tower runs in micro-batches, and its activations are never all held at once.

Shapes:
    B: the batch of one call. m: rows of one micro-batch.

Run 1, without grad: `features = tower(batch)`, micro-batch by micro-batch, nothing saved. The loss
turns the features into `dL/dfeatures`. Run 2, inside that backward: each micro-batch again with
grad, from the same generator states, then `backward(dL/dfeatures[rows])`. By the chain rule the
parameters get exactly the gradients of the whole batch; the price is one more forward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_mp.contrastive.micro_batches import MicroBatches
from lightning_mp.contrastive.replay_state import AutocastState, BufferState, RngState

__all__ = ["GradientCache"]

_TENSOR = object()  # stands where a tensor was in a list of outputs

_CHANGED = (
    "A parameter of a tower was changed in place between the tower's call and the backward through "
    "it, so a replay would not give the gradient of that call. Call the tower again after "
    "`optimizer.step()`, or step after the last backward."
)


class GradientCache:
    """Serves calls to towers in micro-batches and replays them in the backward.

    Args:
        micro_batch_size: Rows that a tower sees at a time.
        device: Where towers run; arguments elsewhere are brought there.
        prefetch: Micro-batches to copy ahead when arguments are on the host.
        context: Makes the context of every replay, such as a precision plugin's forward context.

    References:
        - Scaling deep contrastive learning batch size under memory limited setup (GradCache),
          https://arxiv.org/abs/2101.06983
        - BASIC, section on memory, https://arxiv.org/abs/2111.10050
    """

    def __init__(
        self,
        *,
        micro_batch_size: int,
        device: torch.device,
        prefetch: int = 2,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.micro_batch_size = micro_batch_size
        self.device = device
        self.prefetch = prefetch
        self.context = context

    def call(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `function(*args, **kwargs)`, a graph node that replays the call in its backward.

        Args:
            function: The tower; every tensor that it returns has the batch first.
            module: Whose parameters and buffers the function uses.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: No argument has a batch dimension, or a returned tensor has none.
            RuntimeError: In the backward, when a parameter was changed in place since the call.
        """
        call = _Call(self, function, module, args, kwargs)
        needs_grad = torch.is_grad_enabled() and (
            bool(call.inputs_with_grad) or any(p.requires_grad for p in module.parameters())
        )
        if needs_grad:
            anchor = torch.empty(0, requires_grad=True)
            outputs = _CachedCall.apply(call, anchor, *call.inputs_with_grad)
        else:
            with torch.no_grad():
                outputs = call.run_without_grad()
        return call.assemble(outputs)


class _Call:
    """One call of a tower: its arguments and all that a replay needs."""

    def __init__(
        self,
        cache: GradientCache,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._cache = cache
        self._function = function
        self._module = module
        leaves, self._argument_tree = pytree.tree_flatten((args, kwargs))
        self._with_grad = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.inputs_with_grad = [leaves[index] for index in self._with_grad]
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._batches = MicroBatches(detached, cache.micro_batch_size, cache.device, cache.prefetch)
        self._autocast = AutocastState(cache.device.type)
        self._buffers = BufferState(module)
        self._versions = {parameter: parameter._version for parameter in module.parameters()}
        self._rng: list[RngState] = []
        self._outputs_template: list[Any] = []
        self._output_tree = self._argument_tree

    def run_without_grad(self) -> list[Tensor]:
        """Return the tensors among the outputs, for the whole batch."""
        outputs: list[Tensor] = []
        for rows, leaves in self._batches:
            self._buffers.restore()
            self._rng.append(RngState(self._cache.device))
            with self._autocast.entered():
                returned = self._run(leaves)
            self._buffers.collect(rows.stop - rows.start)
            tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
            if not outputs:
                self._outputs_template = [_TENSOR if isinstance(x, Tensor) else x for x in returned]
                outputs = [
                    tensor.new_empty(self._batches.batch_size, *tensor.shape[1:])
                    for tensor in tensors
                ]
            # Copied at once: CUDA graphs write the next micro-batch over this one's outputs.
            for output, tensor in zip(outputs, tensors, strict=True):
                _check_rows(tensor, output[rows])
                output[rows].copy_(tensor)
        self._buffers.commit()
        return outputs

    def replay(self, cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Run every micro-batch with grad and backward; return the gradients of the inputs."""
        input_grads: list[Tensor | None] = [None] * len(self._with_grad)
        changed = {p for p, version in self._versions.items() if p._version != version}
        with self._undisturbed():
            for (rows, leaves), rng in zip(self._batches, self._rng, strict=True):
                self._buffers.restore()
                rng.restore()
                for index in self._with_grad:
                    leaves[index] = leaves[index].detach().requires_grad_()
                with torch.enable_grad(), self._cache.context(), self._autocast.entered():
                    returned = self._run(leaves)
                tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
                roots = [
                    (tensor, cotangent[rows])
                    for tensor, cotangent in zip(tensors, cotangents, strict=True)
                    if cotangent is not None and tensor.requires_grad
                ]
                if not roots:
                    break  # nothing in this tower is trained
                if changed & _leaves_of([root for root, _ in roots] if changed else []):
                    raise RuntimeError(_CHANGED)
                torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
                self._collect_input_grads(input_grads, leaves, rows)
        return input_grads

    def assemble(self, outputs: tuple[Tensor, ...] | list[Tensor]) -> Any:
        """Return the outputs in the shape that the function gave them."""
        remaining = iter(outputs)
        leaves = [next(remaining) if x is _TENSOR else x for x in self._outputs_template]
        return pytree.tree_unflatten(leaves, self._output_tree)

    def _run(self, leaves: list[Any]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(leaves, self._argument_tree)
        returned, self._output_tree = pytree.tree_flatten(self._function(*args, **kwargs))
        return returned

    def _collect_input_grads(
        self, grads: list[Tensor | None], leaves: list[Any], rows: slice
    ) -> None:
        """Put the rows of a cut input in their place, and sum up those of a shared one."""
        for place, (index, whole) in enumerate(
            zip(self._with_grad, self.inputs_with_grad, strict=True)
        ):
            part = leaves[index].grad
            if part is None:
                continue
            grad = grads[place]
            if grad is None:
                grad = grads[place] = torch.zeros_like(whole)
            if self._batches.is_cut(index):
                grad[rows].copy_(part)
            else:
                grad.add_(part.to(grad.device))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Leave generators and buffers as they are found, whatever a replay does."""
        rng, buffers = RngState(self._cache.device), BufferState(self._module)
        try:
            yield
        finally:
            rng.restore()
            buffers.restore()


class _CachedCall(torch.autograd.Function):
    """The node that stands for a call in the graph of the loss.

    The anchor requires grad, so that the outputs do even when no input does.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(call.run_without_grad())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "Called `torch.autograd.grad(...)` or `backward(inputs=...)` through a tower whose "
                "gradients are cached. A replay adds to the `.grad` of all its parameters, so only "
                "a full `backward()` is right. Take the tower out of `towers`, or call "
                "`self.manual_backward(loss)`."
            )
        return (None, None, *ctx.call.replay(cotangents))


def _leaves_of(roots: list[Tensor]) -> set[Tensor]:
    """Return the leaves, such as parameters, that gradients of `roots` would reach."""
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen, leaves = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):  # it accumulates into a leaf's `.grad`
            leaves.add(node.variable)
        following = {parent for parent, _ in getattr(node, "next_functions", ())} - seen
        nodes.extend(following)
        seen |= following
    return leaves


def _check_rows(tensor: Tensor, expected: Tensor) -> None:
    if tensor.shape != expected.shape:
        raise ValueError(
            f"A tower returned a tensor of shape {list(tensor.shape)} for a micro-batch of "
            f"{len(expected)} rows, where {list(expected.shape)} was expected. Every tensor that "
            "a tower returns must have one row for each row of its input and the same shape in "
            "every micro-batch. Compute losses, scales and pairwise scores outside of towers, and "
            "pad sequences to a fixed length."
        )
