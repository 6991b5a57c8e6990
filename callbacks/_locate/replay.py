"""Replays a training step with hooks, restores all state, and finds the source of a failure."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_mp.callbacks._locate.finding import find_source
from lightning_mp.callbacks._locate.trace import Trace
from lightning_mp.callbacks._rules.records import Verdict
from lightning_mp.callbacks._step.batches import copy_containers, loss_in, named_tensors
from lightning_mp.callbacks._step.training_state import gather_objects
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype
from lightning_mp.numerics.replay_state import BufferState, RngState, eager_mode
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._weights.ledger import parameters_of

__all__ = ["Record", "find_in_batches", "replay", "restored_training"]

_NEAR = 2**-6  # two roundings to bf16, because compiled code runs eagerly in a replay
# Attributes of a metric in addition to its states.
_METRIC = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced")
# Source, and the differing losses of replay and step, of one rank.
_Seen = tuple[Verdict | None, dict[str, Any]]
_UNKNOWN = Verdict("non_finite", severity="error")


@dataclass(eq=False)
class Record:
    """Everything that is needed to replay a batch."""

    batch: Any  # argument of `training_step`; containers are copied
    batch_idx: int  # within the epoch
    rng: RngState  # states of the random generators before the step
    loss: float | None = None  # the loss of the original step, if known


class _ReachedStepError(Exception):
    """Ends a replay in manual optimization at the current optimizer step of the original run."""


def find_in_batches(
    trainer: pl.Trainer, records: Sequence[Record], scale: float | None, steps: int, near: float
) -> tuple[int, int, Verdict]:
    """Replay batches until a source is found; return index, rank and source on all ranks."""
    # A `training_step` that fetches its batches itself cannot be replayed.
    step = trainer.lightning_module.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        return 0, 0, _saying(_UNKNOWN, "no_replay")
    inexact: dict[str, Any] = {}
    replayed = partial(_replayed_findings, trainer, steps, near)
    for index, record in enumerate(records):
        for rank, (finding, difference) in enumerate(replayed(record, scale)):
            inexact = inexact or difference
            if finding is None:
                continue
            outlier = _outlier(trainer, record, finding, lambda calm: replayed(calm, scale))
            if outlier is not None:
                rank, finding = outlier
            elif "backward" in finding.tags and scale is not None:
                rank, finding = _at_lower_scales(partial(replayed, record), rank, finding, scale)
            return index, rank, _saying(finding, *["not_exact"] * bool(difference), **difference)
    keys = ["nowhere_of" if len(records) > 1 else "nowhere", *["not_exact"] * bool(inexact)]
    return 0, 0, _saying(_UNKNOWN, *keys, batches=len(records), **inexact)


def _saying(found: Verdict, *keys: str, **fields: object) -> Verdict:
    """Return a source with further sentences and their fields."""
    return replace(found, also=(*found.also, *keys)).given(**fields)


_FAR = 100.0  # times the 99.9% quantile of magnitudes: no distribution of data has such tails


def _outlier(
    trainer: pl.Trainer,
    record: Record,
    finding: Verdict,
    findings_of: Callable[[Record], list[_Seen]],
) -> tuple[int, Verdict] | None:
    """Return rank and finding if a few huge values in the batch are the cause; a collective."""
    huge: tuple[str, float, float] | None = None
    calm = None
    with suppress(Exception):  # the batch cannot be copied
        calm = copy.deepcopy(record.batch)
    for name, tensor in named_tensors(calm, "batch"):
        is_plain = tensor.layout == torch.strided and not tensor.is_nested
        if is_plain and tensor.dtype in FLOAT_DTYPES and tensor.numel() > 1:
            sizes = tensor.detach().float().abs().flatten()
            usual = float(sizes.kthvalue(max(int(0.999 * sizes.numel()), 1)).values)
            amax = float(sizes.max())
            if _FAR * usual < amax < math.inf and usual:
                huge = huge or (name, amax, usual)
                tensor.data = tensor.clamp(-usual, usual)
    found = gather_objects(trainer, huge)
    rank = next((rank for rank, each in enumerate(found) if each is not None), None)
    if rank is None or not {"forward", "backward"} & {*finding.tags}:
        return None
    again = findings_of(replace(record, batch=calm, loss=None))
    if any(each is not None for each, _ in again):
        return None
    name, amax, usual = found[rank]
    also = ("outlier", *finding.also)
    own = replace(finding, value=amax, tensor=name, tags=("outlier",), also=also)
    return rank, own.given(path=name, amax=amax, usual=usual)


def _difference(trace: Trace, record: Record) -> dict[str, Any]:
    """Return the loss of the replay and the original loss if they differ."""
    if record.loss is None or len(trace.groups["loss"]) != 1:
        return {}
    (loss,) = trace.groups["loss"]
    before = abs(record.loss)
    is_same = loss.is_finite == math.isfinite(before)
    if is_same and loss.is_finite:
        is_same = abs(loss.amax - before) <= _NEAR * max(loss.amax, before)
    now = f"{loss.amax:.4g}" if loss.is_finite else loss.kind
    return {} if is_same else {"now": now, "before": before}


def _at_lower_scales(
    findings_at: Callable[[float], list[_Seen]], rank: int, finding: Verdict, scale: float
) -> tuple[int, Verdict]:
    """Return the finding at a loss scale of 1, or the given one with the highest fitting scale."""
    # A value that is non-finite at a scale of 1 does not depend on the scale.
    for other, (found, _) in enumerate(findings_at(1.0)):
        if found is not None:
            return other, found
    # Powers of two: one that fits, one that does not. The scale of torch can reach 0 and inf.
    low, high = 0, math.ceil(math.log2(scale)) if 1 < scale < math.inf else 0
    while high - low > 1:
        middle = (low + high) // 2
        is_fitting = all(found is None for found, _ in findings_at(2.0**middle))
        low, high = (middle, high) if is_fitting else (low, middle)
    finding = replace(finding, tags=(*finding.tags, "scale"))
    return rank, _saying(finding, "fitting_scale", fitting=2.0**low)


def _replayed_findings(
    trainer: pl.Trainer, steps: int, near: float, record: Record, scale: float | None
) -> list[_Seen]:
    """Replay a batch; return finding and `_difference` of every rank."""
    try:
        trace = replay(trainer, record, scale, steps)
    except Exception as error:
        # A failed replay, for example by lack of memory, must not end the run.
        text = (str(error).splitlines() or [""])[0][:200].removesuffix(".")
        failed = _saying(_UNKNOWN, "failed", name=type(error).__name__, text=text)
        seen: _Seen = failed, {}
    else:
        seen = _with_row(find_source(trace, near, scale), record), _difference(trace, record)
    return gather_objects(trainer, seen)


def _with_row(found: Verdict | None, record: Record) -> Verdict | None:
    """Add the first row of a batch that holds a non-finite value."""
    named = dict(named_tensors(record.batch, "batch"))
    bad = named.get(found.tensor or "") if found is not None and "batch" in found.tags else None
    if found is None or bad is None or bad.is_nested or bad.layout != torch.strided or not bad.ndim:
        return found
    is_finite = bad.isfinite().reshape(len(bad), -1).all(1)
    return _saying(found, "row", row=int(is_finite.int().argmin()))


def replay(trainer: pl.Trainer, record: Record, scale: float | None, optimizer_steps: int) -> Trace:
    """Replay the forward and backward of a batch eagerly, without optimizer steps.

    In manual optimization the replay ends before optimizer step number `optimizer_steps` of the
    batch, counted from 1; with 0 the replay runs to the end. All ranks must replay together.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    trace = Trace(module)
    trace.note("batch", named_tensors(record.batch, "batch"))
    trace.note("parameters", module.named_parameters())
    trace.note("buffers", module.named_buffers())
    aside: dict[Tensor, Tensor] = {}
    is_off = isinstance(trainer.precision_plugin, DeepSpeedPrecision)  # owns gradients
    hooks = (getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())
    is_off |= any(hooks)  # hooks that step parameters in the backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trace.note("loss", [("loss", loss)])
        if is_off or not loss.requires_grad or not bool(torch.isfinite(loss).all()):
            return loss.detach()
        if scale is not None:
            loss = loss.to(accumulation_dtype(loss.dtype)) * scale
        trainer.precision_plugin.backward(loss, module, *(args or (None,)), **kwargs)
        return loss.detach()

    with ExitStack() as stack:
        stack.enter_context(restored_training(trainer, record.batch))
        if not module.automatic_optimization:
            _hold_steps(stack, trainer, backward, optimizer_steps)
        # Without `no_sync`, DDP would all-reduce the gradients of the replay.
        if isinstance(model := strategy.model, DistributedDataParallel):
            is_due = model.require_forward_param_sync
            stack.callback(setattr, model, "require_forward_param_sync", is_due)
            stack.enter_context(model.no_sync())
            _hide_from_ddp(module, aside, stack)
        stack.enter_context(torch.enable_grad())
        trace.start(stack)
        record.rng.restore()
        loss = None  # in manual optimization, or if `training_step` returns None
        with suppress(_ReachedStepError):
            loss = loss_in(_training_step(trainer, record))
        if module.automatic_optimization and loss is not None:
            backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        gradients = ((name, aside.get(p, p.grad)) for name, p in module.named_parameters())
        trace.note("gradients", ((name, g) for name, g in gradients if g is not None))
        trace.read()
    return trace


def _hide_from_ddp(
    module: pl.LightningModule, aside: dict[Tensor, Tensor], undo: ExitStack
) -> None:
    """Move gradients from parameters to `aside` as they arrive.

    With `find_unused_parameters`, DDP takes a parameter that gets a gradient as used in the next
    backward of a manual `training_step`, also inside `no_sync`, and raises if it is not used.
    """

    def take(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            aside[parameter] = aside[parameter] + gradient if parameter in aside else gradient

    for parameter in module.parameters():
        if parameter.requires_grad:
            undo.callback(parameter.register_post_accumulate_grad_hook(take).remove)


def _training_step(trainer: pl.Trainer, record: Record) -> Any:
    strategy, module = trainer.strategy, trainer.lightning_module
    batch = copy_containers(record.batch)  # there may be another replay
    kwargs = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, record.batch_idx)
    is_plain_ddp = isinstance(strategy.model, DistributedDataParallel) and (
        type(strategy).training_step is Strategy.training_step
    )
    if not is_plain_ddp:  # the strategy implements sharding or micro-batches
        return strategy.training_step(*kwargs.values())
    with trainer.precision_plugin.train_step_context():
        return module.training_step(*kwargs.values())


@contextmanager
def restored_training(trainer: pl.Trainer, batch: Any) -> Iterator[None]:
    """Restore all state that a step changes, and run compiled modules eagerly."""
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    # States are saved here and restored in reverse order on exit.
    connector, plugin = trainer._logger_connector, trainer.precision_plugin
    with ExitStack() as stack:
        stack.enter_context(eager_mode())  # hooks do not run in compiled code
        stack.callback(RngState(trainer.strategy.root_device, module).restore)
        stack.callback(BufferState(module).restore)
        if isinstance(plugin, ScaledPrecision):
            stack.callback(plugin.inf_clamp.load_state_dict, plugin.inf_clamp.state_dict())
        for metric in module.modules():
            if isinstance(metric, Metric):
                kept = {name: vars(metric)[name] for name in _METRIC if name in vars(metric)}
                stack.callback(vars(metric).update, metric._copy_state_dict() | kept)
        for owner, name in (
            (loop, "_results"),
            (connector, "_current_fx"),
            (module, "_current_fx_name"),
            (module, "_param_requires_grad_state"),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
        # Set aside, not zeroed, because gradients of accumulated batches are still needed.
        stepped = (p for each in trainer.optimizers for p in parameters_of(each))
        for parameter in dict.fromkeys([*module.parameters(), *stepped]):
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        loop._results = _ResultCollection(training=True)
        loop._results.batch = batch
        module._current_fx_name = "training_step"
        yield


def _hold_steps(
    stack: ExitStack, trainer: pl.Trainer, backward: Callable[..., Tensor], optimizer_steps: int
) -> None:
    """Replace the steps that a manual `training_step` performs, until the stack is closed."""
    module, strategy, steps = trainer.lightning_module, trainer.strategy, 0

    def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        nonlocal steps
        result = None if closure is None else closure()
        steps += 1
        if steps == optimizer_steps:
            raise _ReachedStepError
        return result

    def nothing(*_: Any, **__: Any) -> None:
        pass

    stepped: list[Any] = [*strategy._lightning_optimizers, *strategy.optimizers]
    replaced = [(strategy, "backward", backward), (module, "clip_gradients", nothing)]
    replaced += [(optimizer, "step", step) for optimizer in stepped]
    replaced += [(config.scheduler, "step", nothing) for config in strategy.lr_scheduler_configs]
    for owner, name, value in replaced:
        stack.enter_context(mock.patch.object(owner, name, value))
