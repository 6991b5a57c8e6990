"""`GradientCache`: a tower runs in micro-batches, and its activations are never all held at once.

Shapes:
    B: the batch of one call. D: width of the features.

Run 1: `features = tower(batch)`, micro-batch by micro-batch, every graph let go at once. The loss
turns the features into `dL/dfeatures`. Run 2, inside that backward: each micro-batch again, from
the same generator states, then `backward(dL/dfeatures[rows])` into sums that stand aside. By the
chain rule these are exactly the gradients of the whole batch; the price is one more forward.
"""

import functools
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp.gradient_cache._served.arguments import (
    Arguments,
    EarlierCalls,
    open_tree,
    rows_of,
)
from lightning_mp.gradient_cache._served.auto_size import find_micro_batch_size
from lightning_mp.gradient_cache._served.autograd import attach
from lightning_mp.gradient_cache._served.call import Replayed, TowerCall
from lightning_mp.gradient_cache._served.config import CHECKS, CacheConfig, takes_config
from lightning_mp.gradient_cache._served.declared_names import DeclaredNames
from lightning_mp.gradient_cache._served.outputs import Outputs
from lightning_mp.gradient_cache._served.refusals import difference_error
from lightning_mp.gradient_cache._served.roles import Declared, Role
from lightning_mp.gradient_cache._served.sharding import set_reduction
from lightning_mp.gradient_cache._served.towers import Tower, find_tower, sharded_modules
from lightning_mp.numerics.async_readback import AsyncReadback

__all__ = ["GradientCache"]

_log = logging.getLogger(__name__)
_UNUSED_BYTES = 2**20  # of outputs that were not used, from which on a warning says so


@explains_arguments(
    checks={
        **CHECKS,
        "device": Check(take=torch.device, words="a device", fix="Pass 'cuda', 'cuda:1' or 'cpu'."),
    }
)
class GradientCache:
    """Serves calls to towers in micro-batches and replays them in the backward, in any loop.

    Every feature of a contrastive batch meets every other, so a batch cannot be accumulated from
    smaller ones: 8 times 4,096 pairs have an eighth of the negatives of 32,768. With this cache,
    activations are those of one micro-batch and gradients those of the whole batch. Each replayed
    output is compared with that of the call, and a difference beyond rounding is an error. What is
    replayed, and what is not as in a whole batch, stands in docs/contrastive/gradient-cache.md.

    Args:
        micro_batch_size: Rows that a tower sees at a time; `"auto"`: as many as memory holds, found
            in the first call of each tower and agreed by all ranks.
        activation_bytes: What a micro-batch's activations may take with `"auto"`, in bytes.
            `None`: 1 GiB on a CPU, all that is free on CUDA (half of that for sharded towers).
        device: Where towers run; arguments elsewhere are brought there, micro-batch by micro-batch.
        prefetch: Micro-batches to copy ahead when arguments are on the host; from 2 on copies
            overlap with the towers, and at most `max(prefetch + 1, 2)` are on the device.
        roles: What arguments and outputs of towers are, by name, where shapes cannot tell:
            `{"prompt": "whole", "lengths": "rows", "last_hidden_state": "left out"}`. The words and
            what they do stand in docs/contrastive/gradient-cache.md.
        replay_tolerance: The relative difference of a replay's outputs that is allowed. `None`:
            rounding of the dtypes, 1.5e-5 in fp32, 0.8% in fp16 and tf32, 6% in bf16. `inf`: any.
        context: Makes the context of every replay, such as a precision plugin's forward context.

    Raises:
        ValueError: For arguments that cannot be used, here or in a tower's call.
        RuntimeError: In the backward, for a replay that cannot be right or was not.

    References:
        - GradCache, https://arxiv.org/abs/2101.06983

    Example::

        cache = GradientCache(micro_batch_size=64)
        with cache.serving(model, ["visual", "text"]):
            loss = training_step(model, batch)  # calls model.visual(...) and model.text(...)
        loss.backward()
    """

    @takes_config(CacheConfig)
    def __init__(self, *, config: CacheConfig) -> None:
        self._config = config
        self._declared = Declared(config.roles)
        self.declared = DeclaredNames(self, self._declared)
        """The names of declared roles, and whether each of them matches something."""
        self.roles: dict[str, dict[str, dict[str, str]]] = {}
        """What `"arguments"` and `"outputs"` of each tower were taken for, by name."""
        self._trained: list[Tensor] = []
        self._expected_rows: int | None = None
        self._in_a_tower = False
        self._told_of: set[str] = set()
        # Of each tower: what its arguments were, and its outputs if it was tried with two sizes.
        self._earlier: defaultdict[tuple[str, int], EarlierCalls] = defaultdict(EarlierCalls)
        self._known: defaultdict[tuple[str, int], dict[str, Role]] = defaultdict(dict)
        self._pending: list[tuple[TowerCall, Sequence[Tensor | None]]] = []
        self._differences = AsyncReadback()
        self._is_waiting = False  # for a difference to arrive
        self.calls = 0
        """How many calls of towers were served."""
        self.micro_batch_sizes: dict[str, int] = {}
        """What `"auto"` has found for each tower."""

    @contextmanager
    def serving(self, model: nn.Module, towers: Sequence[str], batch: Any = None) -> Iterator[None]:
        """Serve all calls to some towers until the context ends; the backward may come later.

        A tower inside a tower runs as it is.

        Args:
            model: Whose towers they are; it may be wrapped in DDP.
            towers: Submodules or methods of the model by dotted path, such as `visual` or
                `model.encode_image`.
            batch: The batch of the step. Its rows tell which arguments of a tower are the batch
                where those have different first dimensions.

        Raises:
            ValueError: The model has no such tower, or a declared name has matched nothing
                once all towers were called.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # towers are named as the user knows them
        if self._pending:
            raise RuntimeError(
                f"The sharded tower `{self._pending[0][0].tower}` was called, and its replay never "
                "run, so its gradients are missing. Call `cache.finish()` after `loss.backward()`; "
                "with `InfCLModelParallelStrategy`, `self.manual_backward(loss)` does both."
            )
        found = [find_tower(model, name) for name in towers]
        before, self._expected_rows = self._expected_rows, rows_of(batch)
        if self.declared.is_open:
            self.declared.note("field", [leaf.path for leaf in open_tree(batch).leaves])
        self._trained = [p for p in model.parameters() if p.requires_grad]
        try:
            with ExitStack() as interceptions:
                for tower in found:
                    interceptions.enter_context(tower.intercepted(self._serve))
                yield
            if self.declared.is_open:
                self.declared.check(towers)
        finally:
            self._expected_rows, self._trained = before, []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, served in micro-batches.

        Args:
            function: A module or a method of one. Tensors that it returns have the batch first.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: No argument is a batch, or an output has no rows.
        """
        module = (
            function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        )
        module = module if isinstance(module, nn.Module) else None
        # A module's `__call__` takes anything; its `forward` names what it takes.
        signature_of = function.forward if isinstance(function, nn.Module) else function
        name = getattr(function, "__name__", type(function).__name__)
        return self._run(
            name, signature_of, function, module, sharded_modules(module), args, kwargs
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to cut batches, and so to draw dropout, as this one."""
        return {"micro_batch_sizes": dict(self.micro_batch_sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned; without `micro_batch_size="auto"` it has no effect."""
        self.micro_batch_sizes = dict(state["micro_batch_sizes"])

    def finish(self, *, reduce: bool = True) -> None:
        """Replay what the backward of the loss has left: calls of towers under `fully_shard`.

        Gathered parameters get their gradients through FSDP's own hooks only, which a backward
        inside another cannot run. Call it after `loss.backward()`; without such towers it does
        nothing. Until the end, whole gradients stay on each rank, as in FSDP's own accumulation.

        Args:
            reduce: Whether to reduce and scatter the gradients with the last micro-batch; False
                where another backward follows before the step.
        """
        # Taken out first: an error in a replay must not leave them for the next step.
        pending, self._pending = self._pending, []
        for index, (call, cotangents) in enumerate(pending):
            # What a later call shares is reduced there, once and with all gradients in it.
            following = {id(part) for other, _ in pending[index + 1 :] for part in other.sharded}
            set_reduction(call.sharded, False)
            last = [part for part in call.sharded if id(part) not in following]
            gradients = self._replay_now(call, cotangents, last if reduce else ())
            for leaf, gradient in zip(call.trained.leaves.values(), gradients, strict=True):
                if gradient is not None:
                    # Not into `.grad`: a backward runs the hooks of the leaf.
                    torch.autograd.backward([leaf], [gradient])

    def check(self) -> None:
        """Wait for the comparisons of all replays so far.

        Raises:
            RuntimeError: A replay gave other outputs than its call.
            ValueError: A declared name has matched nothing.
        """
        self._judge(self._differences.drain())
        self.declared.check()

    def _serve(
        self, tower: Tower, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self._in_a_tower:  # a tower that calls another is one tower
            return original(*args, **kwargs)
        signature_of, module = tower.signature_of, tower.module
        return self._run(tower.name, signature_of, original, module, tower.sharded, args, kwargs)

    def _run(
        self,
        name: str,
        signature_of: Callable[..., Any],
        function: Callable[..., Any],
        module: nn.Module | None,
        sharded: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        _check_no_transform(name)
        if self._is_waiting:
            # Of earlier replays, whose numbers may have come by now: on CUDA none is waited for.
            self._judge(self._differences.ready())
            self._is_waiting = len(self._differences) > 0
        self.calls += 1
        arguments = Arguments(
            signature_of,
            args,
            kwargs,
            constants=() if module is None else list(module.buffers()),
            declared=self._declared,
            earlier=self._earlier[name, id(module)],
            expected=self._expected_rows,
        )
        known = self._known[name, id(module)]
        call = TowerCall(
            self._config, name, function, module, sharded, arguments, self._declared, known
        )
        was_in_a_tower, self._in_a_tower = self._in_a_tower, True
        try:
            outputs = call.run(self._rows_at_a_time(call, bool(known)))
        finally:
            self._in_a_tower = was_in_a_tower
        if self.declared.is_open:
            self.declared.note_call(name, signature_of)
            self.declared.note("argument", arguments.paths)
            self.declared.note("output", call.outputs.paths)
        if name not in self.roles:
            self._note_roles(name, arguments, call.outputs)
        trained = [*call.inputs, *call.trained.leaves.values()]
        if trained or call.trained.is_reentrant or any(call.outputs.needs_grad):
            # Of a sharded tower nothing may be left that is trained here.
            anchor = [torch.zeros((), requires_grad=True)] if sharded else []
            reached = zip(outputs, call.outputs.needs_grad, strict=True)
            constant = [output for output, needs_grad in reached if not needs_grad]
            replay = functools.partial(self._replay, call)
            outputs = attach(replay, [*trained, *anchor], outputs, constant)
        return call.outputs.assemble(outputs)

    def _note_roles(self, name: str, arguments: Arguments, outputs: Outputs) -> None:
        found = {
            "arguments": zip(arguments.paths, arguments.roles, strict=True),
            "outputs": zip(outputs.names, outputs.roles, strict=True),
        }
        self.roles[name] = {
            place: {path: str(role) for path, role in roles} for place, roles in found.items()
        }
        _log.debug("The tower `%s` was called with these roles: %s", name, self.roles[name])

    def _rows_at_a_time(self, call: TowerCall, is_known: bool) -> int:
        rows = self._config.micro_batch_size
        if rows == "auto":
            # A call without a graph, as of a teacher, holds less.
            name = call.tower if torch.is_grad_enabled() else f"{call.tower} (without grad)"
            if name not in self.micro_batch_sizes:
                trained = self._trained or call.trained.parameters
                found = find_micro_batch_size(call, self._config.activation_bytes, trained)
                self.micro_batch_sizes[name] = found
            rows = self.micro_batch_sizes[name]
        # Once a tower. All ranks gather the layers of a sharded one, so there whatever the sizes.
        # Micro-batches of several sizes show by themselves what follows the size.
        is_cut = call.batch_size > rows and call.batch_size % rows == 0
        if not is_known and (is_cut or call.sharded):
            call.check_shapes()
        return rows

    def _replay(self, call: TowerCall, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        # FSDP's hooks do not run in a backward inside of another: left to `finish`.
        if call.sharded:
            self._pending.append((call, cotangents))
            return [None] * (len(call.trained.leaves) + 1)
        return self._replay_now(call, cotangents)

    def _replay_now(
        self, call: TowerCall, cotangents: Sequence[Tensor | None], to_reduce: Sequence[Any] = ()
    ) -> list[Tensor | None]:
        was_in_a_tower, self._in_a_tower = self._in_a_tower, True
        try:
            replayed = call.replay(cotangents, to_reduce)
        finally:
            self._in_a_tower = was_in_a_tower
        self._tell_of_unused(call.tower, replayed)
        difference, tolerance = replayed.difference, replayed.tolerance
        if difference is not None and tolerance < float("inf"):
            context = {"tower": call.tower, "tolerance": tolerance}
            if call.device.type == "cpu":  # nothing is waited for there
                self._judge([(0, difference, context)])
            else:
                self._differences.submit(0, difference, **context)
                self._is_waiting = True
        return replayed.gradients

    def _judge(self, arrived: Sequence[Any]) -> None:
        for _, difference, context in arrived:
            # Not `>`: a NaN is a difference as well.
            if not float(difference) <= context["tolerance"]:
                raise difference_error(context["tower"], float(difference), context["tolerance"])

    def _tell_of_unused(self, tower: str, replayed: Replayed) -> None:
        unused = sum(replayed.unused.values())
        is_initialized = dist.is_available() and dist.is_initialized()
        is_first = not is_initialized or dist.get_rank() == 0
        if unused < max(_UNUSED_BYTES, replayed.used_bytes) or tower in self._told_of:
            return
        self._told_of.add(tower)
        if is_first:
            names = sorted(replayed.unused, key=replayed.unused.__getitem__, reverse=True)
            warnings.warn(
                f"The tower `{tower}` returns {unused:,} bytes for the whole batch that the loss "
                f"never used, next to {replayed.used_bytes:,} that it did: {', '.join(names)}. "
                "Leave them out to save that memory: "
                f"`roles={dict.fromkeys(names, 'left out')!r}`.",
                stacklevel=2,
            )


def _check_no_transform(tower: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"Called the tower `{tower}` inside a transform of `torch.func` while its gradients "
            "are cached. A replay needs a plain backward. Call it outside of `cache.serving(...)` "
            "there, or take the gradient with `torch.autograd.grad`."
        )
