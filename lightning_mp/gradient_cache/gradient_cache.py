"""`GradientCache`: runs towers in micro-batches and holds the activations of one at a time.

docs/how-it-works.md explains the two runs of a tower and why their gradients are exact.
"""

import functools
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp._nested import map_tensors
from lightning_mp.gradient_cache._served.arguments import (
    Arguments,
    EarlierCalls,
    open_tree,
    rows_of,
)
from lightning_mp.gradient_cache._served.auto_size import find_micro_batch_size
from lightning_mp.gradient_cache._served.autograd import attach_replay
from lightning_mp.gradient_cache._served.call import Replayed, TowerCall, check_no_transform
from lightning_mp.gradient_cache._served.roles import DeclaredRoles
from lightning_mp.gradient_cache._served.sharding import is_alone, reduce_remaining, set_reduction
from lightning_mp.gradient_cache._served.towers import Tower, find_tower, modules_of
from lightning_mp.numerics.async_readback import AsyncReadback

__all__ = ["CHECKS", "GradientCache"]

_log = logging.getLogger(__name__)
_UNUSED_BYTES = 2**20  # unused outputs of at least this size draw a warning

CHECKS: dict[str, Check | str] = {
    "micro_batch_size activation_bytes": "[1, inf)",
    "prefetch": "[0, inf)",
    "replay_tolerance": "[0, inf]",
    "roles": Check(test=DeclaredRoles, words="a mapping of names to roles"),
}
"""Checks of the arguments that the strategies take, too, beyond their annotations."""
_DEVICE = Check(take=torch.device, words="a device", fix="Pass 'cuda', 'cuda:1' or 'cpu'.")


@explains_arguments(checks={**CHECKS, "device": _DEVICE})
class GradientCache:
    """Runs towers in micro-batches and replays them in the backward; works in any training loop.

    A contrastive loss compares every feature with every other, so gradient accumulation is no
    substitute for a large batch: 8 batches of 4,096 pairs have an eighth of the negatives of one
    batch of 32,768. With this cache, memory holds the activations of one micro-batch, and the
    gradients are those of the whole batch. The replay's outputs are compared with the first run's,
    and a difference beyond rounding error raises. docs/contrastive/gradient-cache.md lists what a
    replay restores and what differs from a run of the whole batch.

    Args:
        micro_batch_size: Rows per micro-batch. `"auto"`: as many as memory allows, measured in the
            first call of each tower and agreed on by all ranks.
        activation_bytes: Memory budget for the activations of a micro-batch with `"auto"`, in
            bytes. `None`: 1 GiB on a CPU; on CUDA all free memory, half of it for sharded towers.
        device: Device of the towers. Arguments on another device are copied to it, micro-batch by
            micro-batch.
        prefetch: Number of micro-batches to copy ahead if arguments are on the host. Copies overlap
            with the towers from 2 on; the device holds at most `max(prefetch + 1, 2)`.
        roles: Roles of the towers' arguments and outputs by name, where shapes are ambiguous:
            `{"prompt": "whole", "lengths": "rows", "last_hidden_state": "left out"}`.
            docs/contrastive/gradient-cache.md explains all roles.
        replay_tolerance: Largest accepted relative difference between the outputs of a replay and
            of the first run. `None`: rounding error of the dtypes, 1.5e-5 in fp32, 0.8% in fp16 and
            tf32, 6% in bf16. `inf`: no comparison.
        context: Returns a context manager that is entered for each replayed micro-batch, such as
            the forward context of a precision plugin.

    Raises:
        ValueError: On invalid arguments, here or in the call of a tower.
        RuntimeError: In the backward, if a replay is impossible or its outputs differ.

    References:
        - GradCache, https://arxiv.org/abs/2101.06983

    Example::

        cache = GradientCache(micro_batch_size=64)
        with cache.serving(model, ["visual", "text"]):
            loss = training_step(model, batch)  # calls model.visual(...) and model.text(...)
        loss.backward()
    """

    def __init__(
        self,
        *,
        micro_batch_size: int | Literal["auto"],
        activation_bytes: int | None = None,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        roles: Mapping[str, str] | None = None,
        replay_tolerance: float | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._micro_batch_size, self._activation_bytes = micro_batch_size, activation_bytes
        self._device: Any = device  # the check has made it a `torch.device`
        self._prefetch, self._context = prefetch, context
        self._replay_tolerance = replay_tolerance
        self.declared = DeclaredRoles(roles, self)
        self.roles: dict[str, dict[str, dict[str, str]]] = {}
        """Roles of the `"arguments"` and `"outputs"` of each tower, by name."""
        self._trained: list[Tensor] = []
        self._expected_rows: int | None = None
        self._in_a_tower = False
        self._warned_towers: set[str] = set()
        self._namesakes: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._earlier: defaultdict[Any, EarlierCalls] = defaultdict(EarlierCalls)
        self._pending: list[tuple[TowerCall, Sequence[Tensor | None]]] = []
        self.unreduced: dict[Any, None] = {}
        """Sharded modules that may hold gradients which are not reduced yet, in order."""
        self._differences = AsyncReadback()
        self._has_pending_differences = False  # not yet arrived on the host
        self.calls = 0
        """Number of calls of towers so far."""
        self.micro_batch_sizes: dict[str, int] = {}
        """Micro-batch size that `"auto"` chose for each tower."""

    @contextmanager
    def serving(self, model: nn.Module, towers: Sequence[str], batch: Any = None) -> Iterator[None]:
        """Run all calls of the given towers in micro-batches until the context ends.

        The backward may follow after the context. A tower called inside another tower runs plainly.

        Args:
            model: The module that contains the towers; it may be wrapped in DDP.
            towers: Dotted paths of submodules or methods of the model, such as `visual` or
                `model.encode_image`.
            batch: The batch of the step. Its number of rows identifies the batch among the
                arguments of a tower if their first dimensions differ.

        Raises:
            ValueError: `towers` is not a list, the model has no such tower, or all towers have been
                called and a name in `roles` matches nothing.
        """
        if isinstance(towers, str):
            raise ValueError(f"Passed the name {towers!r}. Pass a list of names: [{towers!r}].")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # the user's paths do not contain DDP's `module`
        self._check_finished()
        expected = rows_of(batch)
        found = [find_tower(model, name) for name in towers]
        before, self._expected_rows = self._expected_rows, expected
        if self.declared.is_open:
            self.declared.note("field", [leaf.path for leaf in open_tree(batch).leaves])
        self._trained = [p for p in model.parameters() if p.requires_grad]
        try:
            with ExitStack() as interceptions:
                for tower in found:
                    interceptions.enter_context(tower.intercepted(self._run))
                yield
            if self.declared.is_open:
                self.declared.check(towers)
        finally:
            self._expected_rows, self._trained = before, []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, computed in micro-batches.

        Args:
            function: A module, a method, or a function that has its modules in its closure or its
                arguments. The first dimension of the tensors that it returns is the batch.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Raises:
            ValueError: No argument is a batch, or an output does not have the rows of the batch.
        """
        self._check_finished()
        called = function
        while isinstance(called, functools.partial):
            called = called.func
        modules = modules_of(function, (*args, *kwargs.values()))
        module = nn.ModuleList(modules) if len(modules) > 1 else next(iter(modules), None)
        # `nn.Module.__call__` takes any arguments; `forward` names them.
        signature_of = function.forward if isinstance(function, nn.Module) else function
        tower = Tower(getattr(called, "__name__", type(called).__name__), module, signature_of)
        namesakes = self._namesakes[tower.name]  # two encoders of one class are two towers
        if tower.identity not in namesakes:
            namesakes.append(tower.identity)
        if number := namesakes.index(tower.identity):
            tower.name += f" ({number + 1})"
        return self._run(tower, function, args, kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batch sizes, so that a resumed run draws the same dropout masks."""
        return {"micro_batch_sizes": dict(self.micro_batch_sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; it only has an effect with `micro_batch_size="auto"`."""
        self.micro_batch_sizes = dict(state.get("micro_batch_sizes", {}))

    def finish(self, *, reduce: bool = True) -> None:
        """Replay the calls of sharded towers, which the backward of the loss cannot replay.

        Only hooks of FSDP give sharded parameters their gradients, and they do not run in a nested
        backward. Call this method after `loss.backward()`; without towers under `fully_shard` it
        does nothing. Until the last micro-batch each rank holds whole gradients.

        Args:
            reduce: Whether to reduce-scatter the gradients with the last micro-batch. Pass False if
                another backward follows before the optimizer step.
        """
        # Cleared first: after an error in a replay, the next step must not find these calls.
        pending, self._pending = self._pending, []
        for index, (call, cotangents) in enumerate(pending):
            later = [other for other, _ in pending[index + 1 :]]
            # The last call that trains parameters, or whose owner has them, reduces gradients. Not
            # the last that lists them: a method also lists modules that only another tower runs.
            is_last = not call.trains <= {key for other in later for key in other.trains}
            reduces = reduce and (is_last or call.trained.is_reentrant)
            set_reduction(call.sharded, False)
            last = [m for m in call.sharded if reduces and m not in [o.module for o in later]]
            # A later backward through the same sharded owner reduces all its modules.
            is_covered = call.module in call.sharded and call.module in [o.module for o in later]
            if not reduces and not (reduce and is_covered):
                self.unreduced.update(dict.fromkeys(call.sharded))
            gradients = self._replay_now(call, cotangents, last)
            for leaf, gradient in zip(call.trained.leaves.values(), gradients, strict=True):
                if gradient is not None:
                    # A backward, unlike an addition to `.grad`, runs the hooks of the leaf.
                    torch.autograd.backward([leaf], [gradient])
        if reduce:
            for call, _ in pending:
                set_reduction(call.sharded, True)
            remaining, self.unreduced = self.unreduced, {}
            if remaining:
                reduce_remaining(remaining)

    def check(self) -> None:
        """Wait for the comparison of all replays with their first runs.

        Raises:
            RuntimeError: A replay's outputs differ from the first run's.
            ValueError: A name in `roles` matches nothing.
        """
        self._check_differences(self._differences.drain())
        self.declared.check()

    def _check_finished(self) -> None:
        # A backward may call towers again, such as one with activation checkpoints.
        if self._pending and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"The sharded tower `{self._pending[0][0].tower}` was called, but its replay never "
                "ran, so its gradients are missing. Call `cache.finish()` after `loss.backward()`; "
                "with `InfCLModelParallelStrategy`, `self.manual_backward(loss)` does both."
            )

    def _run(
        self,
        tower: Tower,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._in_a_tower:  # the outer tower replays the call with its own
            return function(*args, **kwargs)
        name = tower.name
        check_no_transform(name)
        if self._has_pending_differences:
            # On CUDA, differences of earlier replays are read when they have arrived.
            self._check_differences(self._differences.ready())
            self._has_pending_differences = len(self._differences) > 0
        self.calls += 1
        earlier = self._earlier[name, tower.identity]
        arguments = Arguments(tower, args, kwargs, self.declared, earlier, self._expected_rows)
        rows = self._micro_batch_size
        if not arguments.batch_size:  # such as the images of a batch without images
            if not is_alone() and (tower.sharded or rows == "auto"):
                raise ValueError(
                    f"Passed an empty batch to the tower `{name}` ({arguments}). All ranks must "
                    "run a sharded tower together, and measure memory together for "
                    "`micro_batch_size='auto'`. Pass at least one row on each rank."
                )
            # On the device of the towers, too.
            args, kwargs = map_tensors((args, kwargs), lambda x: x.to(self._device))
            return function(*args, **kwargs)
        call = TowerCall(tower, function, arguments, self._device, self._prefetch, self._context)
        call.trained.refuse = functools.partial(self._refuse_stored, name)
        self._in_a_tower = True
        try:
            outputs = call.run(self._auto_size(call) if rows == "auto" else rows)
        except RuntimeError as error:
            if hasattr(error, "add_note"):  # since Python 3.11; torch knows neither tower nor role
                error.add_note(f"In a micro-batch of the tower `{name}`; its `roles`: {arguments}.")
            raise
        finally:
            self._in_a_tower = False
        if self.declared.is_open:
            self.declared.note_call(name, tower.signature_of)
            self.declared.note("argument", arguments.paths)
            self.declared.note("output", call.outputs.paths)
        if name not in self.roles:
            self.roles[name] = {
                "arguments": dict(zip(arguments.paths, map(str, arguments.roles), strict=True)),
                "outputs": dict(zip(call.outputs.names, map(str, call.outputs.roles), strict=True)),
            }
            _log.debug("Roles in the call of the tower `%s`: %s", name, self.roles[name])
        if any(call.outputs.needs_grad):
            trained = [*call.inputs, *call.trained.leaves.values()]
            # The call of a sharded tower may have no other input that requires grad.
            anchor = [torch.zeros((), requires_grad=True)] if tower.sharded else []
            reached = zip(outputs, call.outputs.needs_grad, strict=True)
            constant = [output for output, needs_grad in reached if not needs_grad]
            replay = functools.partial(self._replay, call)
            outputs = attach_replay(replay, [*trained, *anchor], outputs, constant)
        return call.outputs.assemble(outputs)

    def _auto_size(self, call: TowerCall) -> int:
        # A call without grad, such as a teacher's, needs less memory.
        name = call.tower if torch.is_grad_enabled() else f"{call.tower} (without grad)"
        sizes, trained = self.micro_batch_sizes, self._trained or call.trained.parameters
        if name not in sizes:
            sizes[name] = find_micro_batch_size(call, self._activation_bytes, trained)
        return sizes[name]

    def _replay(self, call: TowerCall, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        # FSDP's hooks do not run in a backward inside another backward; `finish` replays the call.
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
        self._warn_about_unused_outputs(call.tower, replayed)
        difference, tolerance = replayed.difference, self._replay_tolerance
        tolerance = replayed.rounding_noise if tolerance is None else tolerance
        if difference is not None and tolerance < float("inf"):
            context = {"tower": call.tower, "tolerance": tolerance}
            if call.device.type == "cpu":  # reading the number does not wait for a device
                self._check_differences([(0, difference, context)])
            else:
                self._differences.submit(0, difference, **context)
                self._has_pending_differences = True
        return replayed.gradients

    def _check_differences(self, arrived: Sequence[Any]) -> None:
        for _, difference, context in arrived:
            tolerance = context["tolerance"]
            # `not <=` instead of `>`, so that NaN counts as a difference.
            if not float(difference) <= tolerance:
                raise RuntimeError(
                    f"The tower `{context['tower']}` returned different outputs when it was "
                    "replayed for its gradients: the relative difference is "
                    f"{float(difference):.1e}, and {tolerance:.1e} is allowed. The gradients of "
                    "the tower are wrong. Likely causes, in this order: an input was changed in "
                    "place where torch does not count the write, such as through memory shared "
                    "with numpy or `.data`; the tower draws from a generator that is not an "
                    "attribute of its modules; the tower keeps state outside of buffers that "
                    "changed, such as a counter or by `eval()` or `train()`; weights were changed "
                    "through `.data`. If only nondeterministic kernels differ, pass a larger "
                    "`replay_tolerance`, or `inf` to skip the comparison."
                )

    def _refuse_stored(self, tower: str, *_: Any) -> None:
        if self._in_a_tower:  # a replay may share weights that the first run computed and stored
            return
        raise RuntimeError(
            f"The loss uses a tensor that the tower `{tower}` computed but did not return, such as "
            "an attribute or what a hook stored. It belongs to the last micro-batch, so its "
            "gradients would miss all other rows. Return the tensor from the tower; a mean over "
            "rows is declared as `roles={'name': 'mean'}`. Or detach it."
        )

    def _warn_about_unused_outputs(self, tower: str, replayed: Replayed) -> None:
        unused = sum(replayed.unused.values())
        if unused < max(_UNUSED_BYTES, replayed.used_bytes) or tower in self._warned_towers:
            return
        self._warned_towers.add(tower)
        if is_alone() or dist.get_rank() == 0:
            names = sorted(replayed.unused, key=replayed.unused.__getitem__, reverse=True)
            warnings.warn(
                f"The loss never used {unused:,} bytes of the outputs of the tower `{tower}` for "
                f"the whole batch, and used {replayed.used_bytes:,}. The unused outputs are "
                f"{', '.join(names)}. Leave them out to save their memory: "
                f"`roles={dict.fromkeys(names, 'left out')!r}`.",
                stacklevel=2,
            )
