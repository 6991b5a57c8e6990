"""The checks of `lightning-mp doctor`, each a function from a run to its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_mp.callbacks import ActivationRangeMonitor, NonFiniteLocator, SpikeGuard
from lightning_mp.cli.reasons import reason_of
from lightning_mp.doctor.finding import Finding
from lightning_mp.doctor.started_run import StartedRun
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.optim.adam_epsilon import check_adam_epsilon
from lightning_mp.precision._choice.module_selection import find_modules
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["CHECKS"]

_SHOWN = 3  # names in one finding


def set_up(run: StartedRun) -> Iterator[Finding]:
    """The set-up is refused: by a class of the config, by Lightning, or by a plugin."""
    if run.error is None or any(unknown_modules(run)):
        return  # where another check names the cause
    message = reason_of(str(run.error)) or str(run.error)
    # The errors of this package end with what to do.
    what, _, change = message.rpartition(". ")
    yield Finding(
        "set-up",
        "wrong",
        f"The run ends before its first batch: {what or message}",
        f"`fit` raises the same {type(run.error).__name__}.",
        change or "See the error.",
    )


def precision_flag(run: StartedRun) -> Iterator[Finding]:
    """`precision` stands beside a precision plugin."""
    if run.has_both_precisions:
        flag = run.trainer_settings["precision"]
        yield Finding(
            "precision flag",
            "wrong",
            f"`trainer.precision: {flag}` stands beside a precision plugin.",
            "A Trainer takes one of the two and raises an error.",
            f"Remove `precision: {flag}` from `trainer`.",
        )


def unknown_modules(run: StartedRun) -> Iterator[Finding]:
    """A name in `fp32_modules` or `inf_clamp` stands for no module of the model."""
    if run.model is None:
        return
    for name, arguments in run.plugins:
        for argument in ("fp32_modules", "inf_clamp"):
            given = arguments.get(argument) or []
            for module in given if isinstance(given, list) else []:
                try:
                    find_modules(run.model, str(module))
                except ValueError as error:
                    yield Finding(
                        f"unknown name in `{argument}`",
                        "wrong",
                        f"`{name}({argument}={given})`: {error}",
                        "The plugin refuses the model.",
                        f"Correct or remove {module!r} in `{argument}`.",
                    )


def epsilon(run: StartedRun) -> Iterator[Finding]:
    """The epsilon of an optimizer is lost in the dtype of its states."""
    for optimizer in _plain_optimizers(run):
        assert run.model is not None
        reports = check_adam_epsilon(optimizer, named_parameters=run.model.named_parameters())
        unsafe = [(name, report) for name, report in reports if not report.is_safe]
        if unsafe:
            name, report = unsafe[0]
            yield Finding(
                "epsilon",
                "wrong",
                f"`{type(optimizer).__name__}` steps {_count(unsafe)} in half precision, such as "
                f"`{name}`.",
                f"{report}.",
                "optimizer: SafeAdamW",
            )


def optimizer_states(run: StartedRun) -> Iterator[Finding]:
    """An optimizer keeps its states in half precision."""
    for optimizer in _plain_optimizers(run):
        half = [p for group in optimizer.param_groups for p in group["params"] if _trains_half(p)]
        if half and not getattr(optimizer, "keeps_fp32_states", False):
            dtype = str(half[0].dtype).removeprefix("torch.")
            yield Finding(
                "optimizer states",
                "wrong",
                f"`{type(optimizer).__name__}` keeps the states of {_count(half)} in {dtype}.",
                "A moment that moves by (1 - beta) of a difference stops where that is less than "
                "half a unit in the last place, and so does a weight whose update is.",
                "plugins: BalancedAMP, or optimizer: SafeAdamW, which keep fp32.",
            )


def accumulation(run: StartedRun) -> Iterator[Finding]:
    """Gradients are accumulated in half precision."""
    batches = 1 if run.trainer is None else run.trainer.accumulate_grad_batches
    half = [p for o in _plain_optimizers(run) for g in o.param_groups for p in g["params"]]
    half = [p for p in half if _trains_half(p)]
    if half and batches > 1:
        dtype = half[0].dtype
        yield Finding(
            "accumulation in half precision",
            "wrong",
            f"`accumulate_grad_batches={batches}` adds gradients of {dtype}.",
            f"A gradient that is less than {torch.finfo(dtype).eps / 2:.1e} of the sum so far is "
            "lost.",
            "plugins: BalancedAMP, which accumulates in fp32.",
        )


def checkpoint_dtype(run: StartedRun) -> Iterator[Finding]:
    """Checkpoints hold half weights, and nothing holds the rest."""
    if run.is_set_up and run.model is not None and _plain_optimizers(run):
        half = [name for name, p in run.model.named_parameters() if _trains_half(p)]
        if half:
            yield Finding(
                "dtype of checkpoints",
                "advice",
                f"{_count(half)}, such as `{half[0]}`, are saved in half precision.",
                "A run that loads the checkpoint in fp32 starts from rounded weights.",
                "plugins: BalancedAMP or PureFP16, whose checkpoints hold fp32.",
            )


def batch_norm(run: StartedRun) -> Iterator[Finding]:
    """A tower of a gradient cache has BatchNorm."""
    strategy = _caching_strategy(run)
    if strategy is None or run.model is None:
        return
    for name in strategy.towers:
        try:
            tower = find_tower(run.model, name)
        except ValueError:
            continue  # the set-up has refused the name
        norms = [path for path, m in tower.module.named_modules() if isinstance(m, _BatchNorm)]
        if norms:
            yield Finding(
                "BatchNorm in a tower",
                "wrong",
                f"The tower `{name}` has BatchNorm ({len(norms)} layers, such as "
                f"`{name}.{norms[0]}`).",
                "They normalise by the statistics of a micro-batch: the gradients are not those "
                "of the whole batch.",
                "Replace them by LayerNorm or GroupNorm, or freeze them (`eval()`).",
            )


def unused_parameters(run: StartedRun) -> Iterator[Finding]:
    """A gradient cache is told to search for unused parameters."""
    strategy = _caching_strategy(run)
    if strategy is not None and getattr(strategy, "_ddp_kwargs", {}).get("find_unused_parameters"):
        yield Finding(
            "`find_unused_parameters`",
            "advice",
            f"`{type(strategy).__name__}(find_unused_parameters=True)`.",
            "DDP walks the graph in each step. The strategy averages what trains without it.",
            "Remove `find_unused_parameters` from the strategy.",
        )


def drop_last(run: StartedRun) -> Iterator[Finding]:
    """The last batch of a contrastive run is short."""
    loader = run.loader
    if _caching_strategy(run) is None or not isinstance(loader, DataLoader) or loader.drop_last:
        return
    try:
        rows, size = len(loader.sampler), loader.batch_size  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return
    if size and rows % size:
        yield Finding(
            "`drop_last`",
            "advice",
            f"The last batch of an epoch has {rows % size} rows, the others {size}.",
            "Its pairs have fewer negatives, and their loss has another expectation.",
            "DataLoader(..., drop_last=True)",
        )


def compiled_modules(run: StartedRun) -> Iterator[Finding]:
    """Monitors look into modules that `torch.compile` has compiled."""
    if run.model is None:
        return
    compiled = [name or "model" for name, m in run.model.named_modules() if _is_compiled(m)]
    looking = [type(c).__name__ for c in run.callbacks if isinstance(c, ActivationRangeMonitor)]
    if compiled and looking:
        yield Finding(
            "compiled modules",
            "advice",
            f"`{looking[0]}` watches `{compiled[0]}`, which `torch.compile` compiles.",
            "Hooks do not run inside compiled code: the output of the whole module alone is seen.",
            "Compile blocks (`block.compile()`), and name the blocks in `modules`.",
        )


def callbacks(run: StartedRun) -> Iterator[Finding]:
    """Callbacks that end the run at a step which another one would mend."""
    guards = [c for c in run.callbacks if isinstance(c, SpikeGuard)]
    mending = next((c for c in guards if c.action in ("skip", "rewind")), None)
    if mending is None:
        return
    shown = f"`SpikeGuard(action={mending.action!r})`"
    for callback in run.callbacks:
        if isinstance(callback, NonFiniteLocator) and callback.action in ("stop", "raise"):
            yield Finding(
                "callbacks",
                "wrong",
                f"`NonFiniteLocator(action={callback.action!r})` stands beside {shown}.",
                "The locator ends the run at the step that the guard is to mend.",
                'NonFiniteLocator(action="warn")',
            )
        if isinstance(callback, EarlyStopping) and callback.check_finite:
            yield Finding(
                "callbacks",
                "advice",
                f"`EarlyStopping(check_finite=True)` stands beside {shown}.",
                f"It ends the run when `{callback.monitor}` is NaN once.",
                "EarlyStopping(check_finite=False, ...)",
            )
    if run.trainer_settings.get("detect_anomaly"):
        yield Finding(
            "callbacks",
            "wrong",
            f"`trainer.detect_anomaly: true` stands beside {shown}.",
            "The backward raises an error at the first NaN, before the guard sees the step.",
            "Remove `detect_anomaly`; NonFiniteLocator names the module.",
        )


def tensor_cores(run: StartedRun) -> Iterator[Finding]:
    """Sizes of matrix products that tensor cores pad."""
    computes_half = run.trainer is not None and run.trainer.precision != "32-true"
    if run.model is None or not computes_half:
        return
    odd = [
        f"{name} ({layer.in_features} x {layer.out_features})"
        for name, layer in run.model.named_modules()
        if isinstance(layer, nn.Linear) and (layer.in_features % 8 or layer.out_features % 8)
    ]
    if odd:
        yield Finding(
            "sizes for tensor cores",
            "advice",
            f"{len(odd)} linear layers have a size that 8 does not divide: {_listed(odd)}.",
            "Half-precision matrix products of such sizes run on padded copies or without tensor "
            "cores.",
            "Round widths, class counts and vocabularies up to multiples of 8.",
        )


CHECKS: tuple[Callable[[StartedRun], Iterator[Finding]], ...] = (
    set_up, precision_flag, unknown_modules, epsilon, optimizer_states, accumulation,
    checkpoint_dtype, batch_norm, unused_parameters, drop_last, compiled_modules, callbacks,
    tensor_cores,
)  # fmt: skip
"""All checks but that of memory, which makes model and data itself."""


def _plain_optimizers(run: StartedRun) -> list[torch.optim.Optimizer]:
    """Return the optimizers that no plugin of this package steps in fp32."""
    plugin = None if run.trainer is None else run.trainer.precision_plugin
    return [] if isinstance(plugin, ScaledPrecision) else run.optimizers


def _caching_strategy(run: StartedRun) -> ServesTowers | None:
    strategy = None if run.trainer is None else run.trainer.strategy
    return strategy if isinstance(strategy, ServesTowers) else None


def _trains_half(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.dtype in HALF_DTYPES


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _count(items: list[Any]) -> str:
    return "1 parameter" if len(items) == 1 else f"{len(items)} parameters"


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
