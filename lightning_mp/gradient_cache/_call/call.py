"""One call of a tower: run in micro-batches, then replayed for its gradients.

Shapes:
    B: the batch of the call. m: rows of one micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.gradient_cache._call.arguments import Arguments
from lightning_mp.gradient_cache._call.config import Settings
from lightning_mp.gradient_cache._call.graph import (
    GradientSums,
    Graph,
    explore,
    for_hooks,
    gradients_aside,
    sequence_number,
)
from lightning_mp.gradient_cache._call.micro_batches import MicroBatches, WrittenError
from lightning_mp.gradient_cache._call.outputs import Outputs, check_no_tangents
from lightning_mp.gradient_cache._call.row_shapes import check_row_shapes
from lightning_mp.gradient_cache._call.sharding import (
    agree_on_parts,
    own_parameters,
    set_reduction,
    sharded_modules,
)
from lightning_mp.gradient_cache._call.verification import Sketch, rounding_noise
from lightning_mp.numerics.replay_state import AutocastState, BufferState, RngState, version_of

__all__ = ["Call", "Replayed"]


@dataclass(frozen=True)
class Replayed:
    """What a replay leaves behind.

    Args:
        gradients: For the inputs and then the leaves of the call.
        difference: Of its outputs to those of the call, a 0-d tensor; `None`: not compared.
        tolerance: How large it may be.
        unused: Names and bytes of outputs that got no gradient.
        used_bytes: Bytes of the others.
    """

    gradients: list[Tensor | None]
    difference: Tensor | None
    tolerance: float
    unused: dict[str, int]
    used_bytes: int


@dataclass(frozen=True)
class _Part:
    """What a replay needs to know of one micro-batch."""

    rng: RngState
    leaves: frozenset[int]
    sketches: list[Sketch]


class Call:
    """A call of a tower.

    Args:
        settings: Of the cache.
        tower: The name, for messages.
        function: The tower.
        module: Whose buffers and generators it moves.
        arguments: What it is called with.
    """

    def __init__(
        self,
        settings: Settings,
        tower: str,
        function: Callable[..., Any],
        module: nn.Module | None,
        arguments: Arguments,
    ) -> None:
        self._settings, self.tower = settings, tower
        self._function, self._module, self._arguments = function, module, arguments
        leaves = arguments.leaves
        check_no_tangents(tower, leaves)
        self._with_grad = [
            index
            for index, leaf in enumerate(leaves)
            if torch.is_grad_enabled() and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.inputs: list[Tensor] = [leaves[index] for index in self._with_grad]
        self._batches = MicroBatches(
            [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            arguments.is_cut,
            batch_size=arguments.batch_size,
            device=settings.device,
            prefetch=settings.prefetch,
        )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.device = settings.device or (tensors[0].device if tensors else torch.device("cpu"))
        self._autocast = AutocastState(self.device.type)
        self._buffers = BufferState(module)
        self._parts: list[_Part] = []
        self._versions: dict[int, int] = {}
        self._goes_outside = False
        self._facts: list[tuple[str, int, bool]] = []
        self.leaves: dict[int, Tensor] = {}
        self.is_reentrant = False
        self.outputs = Outputs(tower, arguments, settings.leave_out)
        self.sharded = sharded_modules(module)
        """The parts of the tower that `fully_shard` was called for."""
        own = own_parameters(module) if module is not None and self.sharded else []
        self._own = {id(parameter) for parameter in own}
        if self.sharded and self.inputs:
            raise RuntimeError(
                f"Called the sharded tower `{tower}` with `{arguments.name(self._with_grad[0])}`, "
                "which requires grad. It is replayed after the backward of the loss, when "
                "gradients for inputs come too late. Put what makes the input into the tower, or "
                "detach it."
            )

    @property
    def is_sharded(self) -> bool:
        """Whether parts of the tower are spread over ranks."""
        return bool(self.sharded)

    @property
    def batch_size(self) -> int:
        """How many rows it is for."""
        return self._arguments.batch_size

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of its module that are trained."""
        parameters = () if self._module is None else self._module.parameters()
        return [p for p in parameters if p.requires_grad]

    @property
    def needs_grad(self) -> bool:
        """Whether anything is trained through the call."""
        return bool(self.leaves or self.is_reentrant) or any(facts[2] for facts in self._facts)

    def probe(self, rows: int) -> int:
        """Run the first rows and differentiate them, without a trace; return the bytes of a row.

        The gradients are of zeros, so that nothing that watches them sees an overflow.
        """
        set_reduction(self.sharded, False)
        with self._undisturbed():
            since = sequence_number()
            samples = self._batches.samples(rows)
            returned, inputs = self._run(samples[0])
            outputs = self.outputs.open(returned, slice(0, rows))
            size = sum(x.numel() * x.element_size() for x in outputs) // rows
            roots = [x for x in outputs if x.requires_grad]
            del returned, outputs
            if roots:
                graph = explore(roots, since)
                gradients_aside(
                    roots,
                    [torch.zeros_like(x) for x in roots],
                    [*inputs, *self._taken_aside(graph.leaves).values()],
                    is_full=graph.is_reentrant or self.is_sharded,
                    retain_graph=graph.goes_outside,
                )
        set_reduction(self.sharded, True)
        return size

    def check_shapes(self) -> None:
        """Refuse outputs whose rows have a shape that follows the number of rows."""
        with self._undisturbed():
            check_row_shapes(lambda n: self._run(self._batches.repeated(n))[0], self.outputs)

    def run(self, micro_batch_size: int) -> list[Tensor]:
        """Run every micro-batch, and return the outputs for the whole batch.

        Each runs as it will be replayed, with a graph, so that the same kernels are chosen and
        what it trains is seen; the graph is let go at once.
        """
        parts = None
        if self.is_sharded:
            parts = agree_on_parts(self.tower, self.batch_size, micro_batch_size, self.device)
        self._batches.cut(micro_batch_size, parts)
        needs_grad: list[bool] = []
        try:
            for rows, leaves in self._batches.first_run():
                self._buffers.restore(keep_grown=True)
                rng = RngState(self.device, self._module)
                since = sequence_number()
                returned, inputs = self._run(leaves)
                self._buffers.collect(rows.stop - rows.start)
                tensors = self.outputs.open(returned, rows)
                needs_grad = needs_grad or [False] * len(tensors)
                needs_grad = [
                    needed or tensor.requires_grad
                    for needed, tensor in zip(needs_grad, tensors, strict=False)
                ]
                self._note(explore(tensors, since), inputs, rng, tensors)
                self.outputs.add(returned, rows)
                del returned, inputs, tensors  # the graph, before the next one is made
        except WrittenError as error:
            raise RuntimeError(
                f"The tower `{self.tower}` writes to `{self._arguments.name(error.args[0])}` in "
                "place, which all micro-batches share, or not in all of them alike. Let it work "
                "on a copy, such as `x = x * 2` for `x.mul_(2)`."
            ) from None
        self._buffers.commit()
        if self.is_sharded and any(part.leaves - self._parts[-1].leaves for part in self._parts):
            raise RuntimeError(
                f"The sharded tower `{self.tower}` trains other parameters in some micro-batches "
                "than in the last one, which reduces the gradients of all. Let it use the same "
                "layers for every row."
            )
        self._versions = {key: version_of(leaf) for key, leaf in self.leaves.items()}
        # Held by the graph alone from here on, so that they go when the loss lets them go.
        tensors, self.outputs.tensors = self.outputs.tensors, []
        self._facts = [
            (name, tensor.numel() * tensor.element_size(), needed)
            for name, tensor, needed in zip(self.outputs.names, tensors, needs_grad, strict=True)
        ]
        return tensors

    def without_grad(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that no gradient reaches."""
        return [x for x, (*_, needed) in zip(tensors, self._facts, strict=True) if not needed]

    def replay(
        self, cotangents: Sequence[Tensor | None], to_reduce: Sequence[Any] = ()
    ) -> Replayed:
        """Run every micro-batch again and return the gradients of all of them together.

        Args:
            cotangents: Of the outputs.
            to_reduce: Sharded modules whose gradients are complete after the last micro-batch.

        Raises:
            RuntimeError: Something changed since the call, so that no replay can be right.
        """
        self._check_unchanged()
        wanted = list(self.leaves.values())
        sums = GradientSums(wanted)
        input_grads: list[Tensor | None] = [None] * len(self.inputs)
        differences: list[Tensor] = []
        with self._undisturbed():
            for (rows, leaves), part in zip(self._batches, self._parts, strict=True):
                self._buffers.rewind()
                part.rng.restore()
                since = sequence_number()
                with torch.enable_grad(), self._settings.context():
                    returned, inputs = self._run(leaves)
                roots, grads = [], []
                for tensor, cotangent, sketch in zip(
                    self.outputs.open(returned, rows), cotangents, part.sketches, strict=True
                ):
                    if cotangent is not None and tensor.requires_grad:
                        differences.append(sketch.difference(tensor))
                        roots.append(tensor)
                        grads.append(cotangent[rows])
                del returned
                if not roots:
                    continue
                self._check_leaves(explore(roots, since), inputs, part)
                # Gradients travel once, when they are complete.
                if part is self._parts[-1]:
                    set_reduction(to_reduce, True)
                gradients = gradients_aside(
                    roots,
                    grads,
                    [*inputs, *wanted],
                    is_full=self.is_reentrant or self.is_sharded,
                    retain_graph=self._goes_outside,
                )
                self._add_input_grads(input_grads, gradients[: len(inputs)], rows)
                sums.add(gradients[len(inputs) :])
        return self._result(
            [*input_grads, *for_hooks(wanted, sums.totals())], differences, cotangents
        )

    def _result(
        self,
        gradients: list[Tensor | None],
        differences: list[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> Replayed:
        tolerance = self._settings.replay_tolerance
        if tolerance is None:
            dtypes = {x.dtype for x in (*cotangents, *self.leaves.values()) if x is not None}
            tolerance = rounding_noise(dtypes | self._autocast.dtypes, self.device)
        unused, used_bytes = {}, 0
        for cotangent, (name, size, _) in zip(cotangents, self._facts, strict=True):
            if cotangent is None:
                unused[name] = size
            else:
                used_bytes += size
        # One number for all, so that reading it back is one copy.
        difference = torch.stack(differences).max() if differences else None
        return Replayed(gradients, difference, tolerance, unused, used_bytes)

    def _run(self, leaves: list[Any]) -> tuple[Any, list[Tensor]]:
        """Return what the tower returns for a micro-batch, and its inputs that get gradients."""
        inputs = []
        for index in self._with_grad:
            # A leaf of its own: the gradient of a micro-batch ends here, and not in the caller.
            detached = leaves[index].detach().requires_grad_()
            inputs.append(detached)
            # No leaf, as the caller's is no leaf: the tower may write to it in place.
            leaves[index] = detached.clone()
        args, kwargs = self._arguments.rebuild(leaves)
        with self._autocast.entered():
            return self._function(*args, **kwargs), inputs

    def _note(
        self, graph: Graph, inputs: list[Tensor], rng: RngState, tensors: list[Tensor]
    ) -> None:
        leaves = dict(graph.leaves)
        for tensor in inputs:
            leaves.pop(id(tensor), None)
        if graph.is_reentrant:
            # Its checkpoints show no leaves: any parameter may be trained.
            leaves.update({id(p): p for p in self.trained})
        self.leaves.update(self._taken_aside(leaves))
        self.is_reentrant |= graph.is_reentrant
        self._goes_outside |= graph.goes_outside
        # Without a graph there is no replay.
        sketches = [Sketch(x) for x in tensors] if torch.is_grad_enabled() else []
        self._parts.append(_Part(rng, frozenset(leaves), sketches))

    def _taken_aside(self, leaves: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the leaves whose gradients are summed up here: all but those FSDP gathered."""
        return {
            key: leaf
            for key, leaf in leaves.items()
            if not self.sharded or key in self._own or not isinstance(leaf, nn.Parameter)
        }

    def _check_unchanged(self) -> None:
        if any(version_of(x) != self._versions[key] for key, x in self.leaves.items()):
            raise RuntimeError(
                f"A parameter of the tower `{self.tower}` was changed in place between the tower's "
                "call and the backward through it, so a replay would not give the gradient of that "
                "call. Call the tower again after `optimizer.step()`, or step after the last "
                "backward."
            )
        written = self._batches.written_since()
        if written:
            raise RuntimeError(
                f"`{self._arguments.name(written[0])}`, which the tower `{self.tower}` was called "
                "with, was changed in place between the call and the backward through it, so a "
                "replay would not give the gradient of that call. Pass the tower a copy, or change "
                "the batch after the backward."
            )

    def _check_leaves(self, graph: Graph, inputs: list[Tensor], part: _Part) -> None:
        strange = set(graph.leaves) - part.leaves - {id(tensor) for tensor in inputs}
        if strange:
            raise RuntimeError(
                f"The tower `{self.tower}` trains other tensors in its replay than in its call, "
                "such as one of shape "
                f"{list(graph.leaves[min(strange)].shape)}. Parameters must stay in place until "
                "the backward: do not call a tower inside `torch.func.functional_call` or swap its "
                "parameters while its gradients are cached."
            )

    def _add_input_grads(
        self, grads: list[Tensor | None], parts: Sequence[Tensor | None], rows: slice
    ) -> None:
        """Put the rows of a cut input in their place, and sum up those of a shared one."""
        for place, (index, whole, part) in enumerate(
            zip(self._with_grad, self.inputs, parts, strict=True)
        ):
            if part is None:
                continue
            grad = grads[place]
            if grad is None:
                grad = grads[place] = torch.zeros_like(whole)
            if self._arguments.is_cut[index]:
                grad[rows].copy_(part)
            else:
                grad.add_(part.to(grad.device))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Leave generators and buffers as they are found, whatever a replay does."""
        rng, buffers = RngState(self.device, self._module), BufferState(self._module)
        try:
            yield
        finally:
            rng.restore()
            buffers.restore()
