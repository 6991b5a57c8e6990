"""One call of a tower: run in micro-batches, then replayed for its gradients.

Shapes:
    B: the batch of the call. m: rows of one micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mp.gradient_cache._served.arguments import Arguments
from lightning_mp.gradient_cache._served.autograd import (
    GradientSums,
    Trained,
    for_hooks,
)
from lightning_mp.gradient_cache._served.config import CacheConfig
from lightning_mp.gradient_cache._served.micro_batches import MicroBatches, WrittenError
from lightning_mp.gradient_cache._served.outputs import (
    Outputs,
    Sketch,
    check_no_tangents,
    rounding_noise,
)
from lightning_mp.gradient_cache._served.roles import Declared, Role
from lightning_mp.gradient_cache._served.row_shapes import check_row_shapes
from lightning_mp.gradient_cache._served.sharding import (
    agree_on_parts,
    own_parameters,
    set_reduction,
)
from lightning_mp.numerics.replay_state import (
    AutocastState,
    BufferState,
    RngState,
    undisturbed,
    version_of,
)

__all__ = ["TowerCall", "Replayed"]


class Replayed(NamedTuple):
    """What a replay leaves behind."""

    gradients: list[Tensor | None]
    """For the inputs and then the leaves of the call."""
    difference: Tensor | None
    """Relative difference between its outputs and the call's, 0-d; `None` if not compared."""
    tolerance: float
    unused: dict[str, int]
    """Names and bytes of outputs that got no gradient."""
    used_bytes: int


class _Part(NamedTuple):
    """What a replay of one micro-batch starts from, and what it is held against."""

    rng: RngState
    leaves: frozenset[int]
    sketches: list[Sketch]


class TowerCall:
    """A call of a tower.

    Args:
        config: Of the cache.
        tower: The name, for messages.
        function: The tower.
        module: Whose buffers and generators it moves.
        sharded: The parts of the tower that `fully_shard` was called for.
        arguments: What it is called with.
        declared: The roles that were declared.
        known: Roles of outputs that earlier calls of the tower have shown.
    """

    def __init__(
        self,
        config: CacheConfig,
        tower: str,
        function: Callable[..., Any],
        module: nn.Module | None,
        sharded: list[Any],
        arguments: Arguments,
        declared: Declared,
        known: dict[str, Role],
    ) -> None:
        self._config, self.tower, self.sharded = config, tower, sharded
        self._function, self._module, self._arguments = function, module, arguments
        self.batch_size = arguments.batch_size
        leaves = arguments.leaves
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._with_grad = [
            index
            for index, leaf in enumerate(leaves)
            if torch.is_grad_enabled() and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.inputs: list[Tensor] = [leaves[index] for index in self._with_grad]
        self.outputs = Outputs(tower, arguments, declared, known)
        check_no_tangents(tower, tensors)
        device = None if config.device is None else torch.device(config.device)
        self._batches = MicroBatches(
            [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            arguments.roles,
            batch_size=self.batch_size,
            device=device,
            prefetch=config.prefetch,
            with_grad=self._with_grad,
        )
        self.device = device or (tensors[0].device if tensors else torch.device("cpu"))
        autocast = AutocastState(self.device.type)
        self._autocast, self._autocast_dtypes = autocast.entered(), autocast.dtypes
        self._buffers = BufferState(module)
        self._parts: list[_Part] = []
        self._versions: dict[int, int] = {}
        self._bytes: list[int] = []
        own = {id(p) for p in own_parameters(module)} if module is not None and sharded else None
        self.trained = Trained(tower, module, own)
        if sharded and self.inputs:
            raise RuntimeError(
                f"Called the sharded tower `{tower}` with `{arguments.name(self._with_grad[0])}`, "
                "which requires grad. It is replayed after the backward of the loss, when "
                "gradients for inputs come too late. Put what makes the input into the tower, or "
                "detach it."
            )

    def probe(self, rows: int) -> int:
        """Run the first rows and differentiate them, without a trace; return the bytes of a row.

        The gradients are of zeros, so that nothing that watches them sees an overflow.
        """
        set_reduction(self.sharded, False)
        with undisturbed(self.device, self._module):
            trained = self.trained.alike()
            trained.begin()
            samples = self._batches.samples(rows)
            returned, inputs = self._run(samples[0])
            outputs = self.outputs.open(returned, slice(0, rows)).tensors
            size = sum(x.numel() * x.element_size() for x in outputs) // rows
            roots = [x for x in outputs if x.requires_grad]
            del returned, outputs
            if roots:
                known = trained.note(roots, inputs)
                trained.gradients(roots, [torch.zeros_like(x) for x in roots], inputs, known)
        set_reduction(self.sharded, True)
        return size

    def check_shapes(self) -> None:
        """Refuse outputs whose rows have a shape that follows the number of rows."""
        with undisturbed(self.device, self._module):
            check_row_shapes(lambda n: self._run(self._batches.repeated(n))[0], self.outputs)

    def run(self, micro_batch_size: int) -> list[Tensor]:
        """Run every micro-batch, and return the outputs for the whole batch.

        Each runs as it will be replayed, with a graph, so that the same kernels are chosen and
        what it trains is seen; the graph is let go at once.
        """
        parts = None
        if self.sharded:
            parts = agree_on_parts(self.tower, self.batch_size, micro_batch_size, self.device)
        self.trained.begin()
        self._batches.cut(micro_batch_size, parts)
        try:
            for rows, leaves in self._batches.first_run():
                inputs = self._batches.for_grad(leaves)
                args, kwargs = self._arguments.rebuild(leaves)
                self._buffers.restore(keep_grown=True)
                rng = RngState(self.device, self._module)
                with self._autocast:
                    returned = self._function(*args, **kwargs)
                self._buffers.collect(rows.stop - rows.start)
                opened = self.outputs.open(returned, rows)
                lengths = self._batches.lengths(rows) if self._batches.is_padded else None
                self.outputs.add(opened, rows, lengths)
                sketches = self.outputs.sketches(opened)
                known = self.trained.note(opened.tensors, inputs)
                self._parts.append(_Part(rng, known, sketches))
                del args, kwargs, returned, inputs, opened  # the graph, before the next one is made
        except WrittenError as error:
            raise RuntimeError(
                f"The tower `{self.tower}` writes to `{self._arguments.name(error.args[0])}` in "
                "place, which all micro-batches share, or not in all of them alike. Let it work "
                "on a copy, such as `x = x * 2` for `x.mul_(2)`."
            ) from None
        self._buffers.commit()
        if self.sharded and any(part.leaves - self._parts[-1].leaves for part in self._parts):
            raise RuntimeError(
                f"The sharded tower `{self.tower}` trains other parameters in some micro-batches "
                "than in the last one, which reduces the gradients of all. Let it use the same "
                "layers for every row."
            )
        self._versions = {key: version_of(leaf) for key, leaf in self.trained.leaves.items()}
        # Held by the graph alone from here on, so that they go when the loss lets them go.
        tensors = self.outputs.finished()
        self._bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        return tensors

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
        wanted = list(self.trained.leaves.values())
        sums = GradientSums(wanted)
        input_grads: list[Tensor | None] = [None] * len(self.inputs)
        differences: list[Tensor] = []
        with undisturbed(self.device, self._module):
            for (rows, leaves), part in zip(self._batches, self._parts, strict=True):
                with torch.enable_grad(), self._config.context():
                    inputs = self._batches.for_grad(leaves)
                    args, kwargs = self._arguments.rebuild(leaves)
                    self._buffers.rewind()
                    part.rng.restore()
                    with self._autocast:
                        returned = self._function(*args, **kwargs)
                roots, grads = [], []
                opened = self.outputs.open(returned, rows).tensors
                for index, (tensor, cotangent, sketch) in enumerate(
                    zip(opened, cotangents, part.sketches, strict=True)
                ):
                    if cotangent is not None and tensor.requires_grad:
                        differences.append(sketch.difference(tensor))
                        roots.append(tensor)
                        grads.append(self.outputs.share(index, cotangent, rows, tensor))
                del args, kwargs, returned, opened
                if not roots:
                    continue
                # Gradients travel once, when they are complete.
                if to_reduce and part is self._parts[-1]:
                    set_reduction(to_reduce, True)
                gradients = self.trained.gradients(roots, grads, inputs, part.leaves)
                sums.add(gradients[len(inputs) :])
                if inputs:
                    self._add_input_grads(input_grads, gradients, rows)
        gradients = [*input_grads, *for_hooks(wanted, sums.totals())]
        return self._result(gradients, differences, cotangents)

    def _result(
        self,
        gradients: list[Tensor | None],
        differences: list[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> Replayed:
        tolerance = self._config.replay_tolerance
        if tolerance is None:
            used = (*cotangents, *self.trained.leaves.values())
            dtypes = {x.dtype for x in used if x is not None}
            tolerance = rounding_noise(dtypes | self._autocast_dtypes, self.device)
        unused, used_bytes = {}, 0
        sizes = zip(cotangents, self.outputs.names, self._bytes, strict=True)
        for cotangent, name, size in sizes:
            if cotangent is None:
                unused[name] = size
            else:
                used_bytes += size
        # One number for all, so that reading it back is one copy.
        difference = torch.stack(differences).max() if differences else None
        return Replayed(gradients, difference, tolerance, unused, used_bytes)

    def _run(self, leaves: list[Any]) -> tuple[Any, list[Tensor]]:
        """Return what the tower returns for some rows, and its inputs that get gradients."""
        inputs = self._batches.for_grad(leaves)
        args, kwargs = self._arguments.rebuild(leaves)
        with self._autocast:
            return self._function(*args, **kwargs), inputs

    def _check_unchanged(self) -> None:
        if any(version_of(x) != self._versions[key] for key, x in self.trained.leaves.items()):
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

    def _add_input_grads(
        self, grads: list[Tensor | None], parts: Sequence[Tensor | None], rows: slice
    ) -> None:
        """Put the rows of a cut input in their place, and sum up those of a shared one."""
        for place, (index, whole, part) in enumerate(
            zip(self._with_grad, self.inputs, parts, strict=False)
        ):
            if part is None:
                continue
            grad = grads[place]
            if grad is None:
                grad = grads[place] = torch.zeros_like(whole)
            role = self._arguments.roles[index]
            if role.has_rows:
                share = grad[role.slice(rows)]
                if share.shape != part.shape:  # of rows cut at the longest
                    share = share[:, : part.shape[1]]
                share.copy_(part)
            else:
                grad.add_(part.to(grad.device))
