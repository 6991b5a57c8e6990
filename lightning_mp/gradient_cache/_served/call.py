"""One call of a tower: the first run in micro-batches, and the replay for gradients."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_mp.gradient_cache._served.arguments import Arguments
from lightning_mp.gradient_cache._served.autograd import GradientSums, TrainedLeaves
from lightning_mp.gradient_cache._served.micro_batches import MicroBatches, SharedWriteError
from lightning_mp.gradient_cache._served.outputs import Outputs, Sketch
from lightning_mp.gradient_cache._served.sharding import (
    agree_on_micro_batches,
    set_reduction,
    unsharded_parameters,
)
from lightning_mp.gradient_cache._served.towers import Tower
from lightning_mp.numerics.replay_state import (
    AutocastState,
    BufferState,
    RngState,
    eager_mode,
    undisturbed,
    version_of,
)

__all__ = ["Replayed", "TowerCall", "check_no_transform", "rounding_noise"]


class Replayed(NamedTuple):
    """The results of a replay."""

    gradients: list[Tensor | None]  # of the inputs, then of the trained leaves
    difference: Tensor | None  # relative, to the call's outputs, 0-d; `None` if not compared
    rounding_noise: float  # the difference that rounding may cause
    unused: dict[str, int]  # bytes of outputs that got no gradient, by name
    used_bytes: int


class _FirstRun(NamedTuple):
    """The facts of a micro-batch's first run that its replay needs."""

    rng: RngState  # before the run
    trained: frozenset[int]  # identities of the leaves that the micro-batch trains
    sketches: list[Sketch]  # of the outputs


class TowerCall:
    """A call of a tower; `function` runs the tower without an interception."""

    def __init__(
        self,
        tower: Tower,
        function: Callable[..., Any],
        arguments: Arguments,
        device: torch.device | None,
        prefetch: int,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.tower, self.module, self.sharded = tower.name, tower.module, tower.sharded
        self._function, self._arguments, self._context = function, arguments, context
        self.batch_size = arguments.batch_size
        leaves = arguments.leaves
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        is_on = torch.is_grad_enabled()
        self._with_grad = [index for index in tensors if is_on and leaves[index].requires_grad]
        self.inputs: list[Tensor] = [leaves[index] for index in self._with_grad]
        self.outputs = Outputs(tower.name, arguments)
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._micro_batches = MicroBatches(
            detached, arguments.roles, self.batch_size, device, prefetch, self._with_grad
        )
        self.device = device or (leaves[tensors[0]].device if tensors else torch.device("cpu"))
        autocast = AutocastState(self.device.type)
        self._autocast, self._autocast_dtypes = autocast.entered(), autocast.dtypes
        self._buffers = BufferState(tower.module)
        self._first_runs: list[_FirstRun] = []
        self._versions: dict[int, int] = {}
        self._bytes: list[int] = []
        unsharded = unsharded_parameters(tower.module) if tower.sharded else []
        self._unsharded = {id(p) for p in unsharded} if tower.sharded else None
        self.trained = TrainedLeaves(tower.name, tower.module, self._unsharded)
        if tower.sharded and self.inputs:
            raise RuntimeError(
                f"Called the sharded tower `{tower.name}` with "
                f"`{arguments.paths[self._with_grad[0]]}`, which requires grad. A sharded tower is "
                "replayed after the backward of the loss, too late for gradients of its inputs. "
                "Move the computation of the input into the tower, or detach the input."
            )

    def probe(self, rows: int) -> int:
        """Run and differentiate the first rows without side effects; return output bytes per row.

        Cotangents are zeros, so that no observer of gradients sees an overflow.
        """
        set_reduction(self.sharded, False)
        with undisturbed(self.device, self.module), _plain_saved_tensors():
            trained = TrainedLeaves(self.tower, self.module, self._unsharded)
            samples = self._micro_batches.samples(rows)
            returned, inputs = self._run(samples[0])
            outputs = self.outputs.open(returned, slice(0, rows)).tensors
            size = sum(x.nbytes for x in outputs) // rows
            roots = [x for x in outputs if x.requires_grad]
            del returned, outputs
            if roots:
                known, zeros = trained.note(roots, inputs), [torch.zeros_like(x) for x in roots]
                trained.gradients(roots, roots, zeros, inputs, known)
        set_reduction(self.sharded, True)
        return size

    def _check_shapes(self) -> None:
        """Raise for an output without rows, or whose shape of a row depends on their number.

        For m rows, `logits_per_image` of Hugging Face's `CLIPModel` has shape m x m. Concatenated,
        the micro-batches would be B x m, as if each image had only m - 1 negatives: a different
        loss. The tower runs on copies of one row, so that only their number differs.
        """
        # With grad, for towers that differentiate; but FSDP's hooks would wait for a backward.
        with_grad = torch.is_grad_enabled() and not self.sharded
        # Eager, because a compiler would specialize on these sizes.
        with undisturbed(self.device, self.module), torch.set_grad_enabled(with_grad), eager_mode():
            two, three = (
                self.outputs.values(self._run(self._micro_batches.repeated(rows))[0])
                for rows in (2, 3)  # at least two, because BatchNorm fails on one row
            )
        for path in (path for path in two if path in three):
            self.outputs.check_rows(path, two[path], three[path])
        self._arguments.earlier.has_checked_outputs = True

    def run(self, micro_batch_size: int) -> list[Tensor]:
        """Run every micro-batch, and return the outputs of the whole batch.

        Each micro-batch builds a graph as in its replay, so that torch chooses the same kernels and
        the graph shows which tensors train. The graph is freed at once.
        """
        # Once per tower, and only if all micro-batches have one size: different sizes reveal an
        # output whose shape depends on them. Ranks with a sharded tower must all run the check.
        is_even = self.batch_size > micro_batch_size and self.batch_size % micro_batch_size == 0
        if self.outputs.is_first_call and (is_even or self.sharded):
            self._check_shapes()
        count = None
        if self.sharded:
            count = agree_on_micro_batches(
                self.tower, self.batch_size, micro_batch_size, self.device
            )
        self._micro_batches.split(micro_batch_size, count)
        try:
            for rows, leaves in self._micro_batches.first_run():
                inputs = self._micro_batches.for_grad(leaves)
                args, kwargs = self._arguments.rebuild(leaves)
                self._buffers.restore(keep_grown=True)
                rng = RngState(self.device, self.module)
                with self._autocast:
                    returned = self._function(*args, **kwargs)
                self._buffers.collect(rows.stop - rows.start)
                opened = self.outputs.open(returned, rows)
                cuts = self._micro_batches.cuts(rows) if self._micro_batches.is_padded else {}
                self.outputs.add(opened, rows, {cut: length for length, cut in cuts.items()})
                # Without grad, no replay follows.
                sketches = [Sketch(x) for x in opened.tensors if torch.is_grad_enabled()]
                known = self.trained.note(opened.tensors, inputs)
                self._first_runs.append(_FirstRun(rng, known, sketches))
                del args, kwargs, leaves, returned, inputs, opened  # frees the graph now
        except SharedWriteError as error:
            raise RuntimeError(
                f"The tower `{self.tower}` writes in place to "
                f"`{self._arguments.paths[error.args[0]]}`, which all micro-batches share or which "
                "only some micro-batches write to. Write to a copy instead, such as `x = x * 2` "
                "instead of `x.mul_(2)`."
            ) from None
        self.trained.close()
        self._buffers.commit()
        freed = self.trained.freed
        self.trains = self._first_runs[-1].trained - freed  # identities of leaves
        if self.sharded and any(run.trained - self.trains - freed for run in self._first_runs):
            raise RuntimeError(
                f"The sharded tower `{self.tower}` trains parameters in some micro-batches that "
                "the last micro-batch does not train. Gradients are reduced with the last "
                "micro-batch only. Use the same layers for every row."
            )
        self._versions = {key: version_of(leaf) for key, leaf in self.trained.leaves.items()}
        # From here on only the graph holds the outputs, so that the loss can free them.
        tensors = self.outputs.release()
        self._bytes = [tensor.nbytes for tensor in tensors]
        return tensors

    def replay(
        self, cotangents: Sequence[Tensor | None], to_reduce: Sequence[Any] = ()
    ) -> Replayed:
        """Run every micro-batch again, and return the summed gradients for the cotangents.

        The gradients of the sharded modules `to_reduce` are complete after the last micro-batch.
        """
        self._check_unchanged()
        sums = GradientSums([*self.inputs, *self.trained.leaves.values()])
        split_grads: dict[int, Tensor] = {}
        differences: list[Tensor] = []
        with undisturbed(self.device, self.module):
            for (rows, leaves), first_run in zip(
                self._micro_batches, self._first_runs, strict=True
            ):
                with torch.enable_grad(), self._context():
                    inputs = self._micro_batches.for_grad(leaves)
                    args, kwargs = self._arguments.rebuild(leaves)
                    self._buffers.rewind()
                    first_run.rng.restore()
                    with self._autocast:
                        returned = self._function(*args, **kwargs)
                roots, grads = [], []
                opened = self.outputs.open(returned, rows).tensors
                for index, (tensor, cotangent, sketch) in enumerate(
                    zip(opened, cotangents, first_run.sketches, strict=True)
                ):
                    if cotangent is not None and tensor.requires_grad:
                        differences.append(sketch.difference(tensor))
                        roots.append(tensor)
                        grads.append(
                            self.outputs.micro_batch_cotangent(index, cotangent, rows, tensor)
                        )
                del args, kwargs, returned
                if not roots:
                    continue
                # Gradients are reduced once, when they are complete.
                if to_reduce and first_run is self._first_runs[-1]:
                    set_reduction(to_reduce, True)
                gradients = self.trained.gradients(opened, roots, grads, inputs, first_run.trained)
                if inputs:
                    gradients = self._without_split(gradients, split_grads, rows)
                sums.add(gradients)
            totals = [split_grads.get(i, total) for i, total in enumerate(sums.totals())]
        return self._result(totals, differences, cotangents)

    def _result(
        self,
        gradients: list[Tensor | None],
        differences: list[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> Replayed:
        used = (*cotangents, *self.trained.leaves.values())
        dtypes = {x.dtype for x in used if x is not None}
        noise = rounding_noise(dtypes | self._autocast_dtypes, self.device)
        is_exact = torch.are_deterministic_algorithms_enabled()
        # Clones of overwritten rows have other addresses, on which the order of sums may depend.
        if is_exact and not self._micro_batches.unwritten:
            noise = 0.0
        of = self.outputs
        sizes = zip(of.names, self._bytes, of.needs_grad, cotangents, strict=True)
        # The loss may use outputs without grad, such as masks.
        unused = {name: size for name, size, needs_grad, x in sizes if needs_grad and x is None}
        used_bytes = sum(self._bytes) - sum(unused.values())
        # A single number needs a single copy to the host.
        difference = torch.stack(differences).max() if differences else None
        return Replayed(gradients, difference, noise, unused, used_bytes)

    def _run(self, leaves: list[Any]) -> tuple[Any, list[Tensor]]:
        """Run the tower, and return its result and the leaves that get gradients."""
        inputs = self._micro_batches.for_grad(leaves)
        args, kwargs = self._arguments.rebuild(leaves)
        with self._autocast:
            return self._function(*args, **kwargs), inputs

    def _check_unchanged(self) -> None:
        if any(version_of(x) != self._versions[key] for key, x in self.trained.leaves.items()):
            raise RuntimeError(
                f"A parameter of the tower `{self.tower}` was changed in place between the call of "
                "the tower and its backward, so a replay would compute a different gradient. Call "
                "the tower again after `optimizer.step()`, or step after the last backward. An "
                "`nn.Embedding` with `max_norm` is changed by every call."
            )
        written = self._micro_batches.written_since()
        if written:
            raise RuntimeError(
                f"The argument `{self._arguments.paths[written[0]]}` of the tower `{self.tower}` "
                "was changed in place between the call of the tower and its backward, so a replay "
                "would compute a different gradient. Pass a copy to the tower, or change the batch "
                "after the backward."
            )

    def _without_split(
        self, gradients: Sequence[Tensor | None], split: dict[int, Tensor], rows: slice
    ) -> list[Tensor | None]:
        """Write the gradients of split inputs to their rows in `split`; return all others."""
        others = list(gradients)
        for position, (index, whole) in enumerate(zip(self._with_grad, self.inputs, strict=True)):
            role, part = self._arguments.roles[index], others[position]
            if part is None or not role.has_rows:
                continue
            others[position] = None
            if position not in split:
                split[position] = torch.zeros_like(whole)
            own_rows = split[position][role.slice(rows)]
            if own_rows.shape != part.shape:  # padding was cut off
                own_rows = own_rows[:, : part.shape[1]]
            own_rows.copy_(part)
        return others


def check_no_transform(tower: str) -> None:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"Called the tower `{tower}` inside a transform of `torch.func` or in forward-mode AD "
            "while its gradients are cached. A replay needs a plain backward. Call the tower "
            "outside of `cache.serving(...)`, or use `torch.autograd.grad`."
        )


def _plain_saved_tensors() -> AbstractContextManager[Any]:
    """Suspend hooks for saved tensors: a checkpoint around the tower would run it once more."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()  # torch.func inside the tower supports no hooks
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)


def rounding_noise(dtypes: set[torch.dtype], device: torch.device) -> float:
    """Return the relative difference that rounding may cause between two runs of one network.

    Eight epsilons of the coarsest dtype in use if that is a 16-bit dtype or tf32, whose roundings
    are mostly equal in both runs; otherwise 128 epsilons, for sums in a different order in a deep
    network.
    """
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    # `allow_tf32` raises an error if a user has set `fp32_precision`.
    backends: Any = torch.backends
    is_tf32 = "tf32" in (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    if is_tf32 and device.type == "cuda" and torch.float32 in dtypes:
        # tf32 has 10 bits of mantissa.
        eps = max(eps, 2.0**-10)
    return (8 if eps > torch.finfo(torch.float32).eps else 128) * eps
