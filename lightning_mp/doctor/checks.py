"""The checks of `lightning-mp doctor`; each yields findings about a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_mp._config_files import plugins_of
from lightning_mp.callbacks import ActivationRangeMonitor, NonFiniteLocator, SpikeGuard
from lightning_mp.doctor.finding import Finding
from lightning_mp.doctor.started_run import StartedRun
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.optim.adam_epsilon import check_adam_epsilon
from lightning_mp.plan.config import devices_of
from lightning_mp.precision._choice.module_selection import find_modules
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["CHECKS"]

_SHOWN = 3  # names in one finding


def set_up(run: StartedRun) -> Iterator[Finding]:
    """A class of the config, Lightning or a plugin raises an error during the set-up."""
    if run.error is None or any(unknown_modules(run)):
        return  # another check names the cause
    # Errors of this package end with the remedy.
    *what, change = re.split(r"(?<=[^.]\.) +(?=[A-Z])(?!Got value)", run.reason.strip())
    yield Finding(
        "set-up",
        "wrong",
        f"The run ends before its first batch: {' '.join(what) or run.reason}{run.place}",
        f"`fit` raises the same {type(run.error).__name__}.",
        change if what else "Correct the setting that the error names.",
    )


def precision_flag(run: StartedRun) -> Iterator[Finding]:
    """`precision` is set in addition to a precision plugin."""
    if run.has_both_precisions:
        flag = run.trainer_settings["precision"]
        yield Finding(
            "precision flag",
            "wrong",
            f"`trainer.precision: {flag}` is set in addition to a precision plugin.",
            "A Trainer accepts only one of the two, and raises an error.",
            f"Remove `precision: {flag}` from `trainer`.",
        )


def unknown_modules(run: StartedRun) -> Iterator[Finding]:
    """`fp32_modules` or `inf_clamp` names a module that the model does not have."""
    if run.model is None:
        return
    for name, arguments in plugins_of(run.trainer_settings):
        for argument in ("fp32_modules", "inf_clamp"):
            given = arguments.get(argument)
            for module in given if isinstance(given, list) else []:
                if (argument, module) == ("inf_clamp", "auto"):
                    continue
                try:
                    find_modules(run.model, str(module))
                except ValueError as error:
                    yield Finding(
                        f"unknown name in `{argument}`",
                        "wrong",
                        f"`{name}({argument}={given})`: {error}",
                        "The plugin raises an error.",
                        f"Correct or remove {module!r} in `{argument}`.",
                    )


def epsilon(run: StartedRun) -> Iterator[Finding]:
    """The epsilon of an optimizer rounds to zero in the dtype of its states."""
    for optimizer in _plain_optimizers(run):
        assert run.model is not None
        reports = check_adam_epsilon(optimizer, named_parameters=run.model.named_parameters())
        unsafe = [(name, report) for name, report in reports if not report.is_safe]
        if unsafe:
            name, report = unsafe[0]
            yield Finding(
                "epsilon",
                "wrong",
                f"`{type(optimizer).__name__}` updates {_count_parameters(unsafe)} in half "
                f"precision, such as `{name}`.",
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
                f"`{type(optimizer).__name__}` keeps the states of {_count_parameters(half)} in "
                f"{dtype}.",
                "Moments and weights stop changing when an update is below half a unit in the last "
                "place of the dtype.",
                f"plugins: {run.balanced_plugin} without `precision`, or optimizer: SafeAdamW, "
                "which keep states in fp32.",
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
            f"A gradient below {torch.finfo(dtype).eps / 2:.1e} of the accumulated sum is lost.",
            f"plugins: {run.balanced_plugin} without `precision`, which accumulates in fp32.",
        )


def checkpoint_dtype(run: StartedRun) -> Iterator[Finding]:
    """Checkpoints hold weights in half precision only."""
    if _plain_optimizers(run):
        assert run.model is not None
        half = [name for name, p in run.model.named_parameters() if _trains_half(p)]
        if half:
            yield Finding(
                "dtype of checkpoints",
                "advice",
                f"{_count_parameters(half)}, such as `{half[0]}`, are saved in half precision.",
                "A run that loads the checkpoint in fp32 starts from rounded weights.",
                f"plugins: {run.balanced_plugin} without `precision`, whose checkpoints hold fp32.",
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
            continue  # the set-up raises an error for the name
        modules = tower.module.named_modules()
        norms = [path for path, m in modules if isinstance(m, _BatchNorm) and m.training]
        if norms:
            yield Finding(
                "BatchNorm in a tower",
                "wrong",
                f"The tower `{name}` has BatchNorm, first in `{name}.{norms[0]}`.",
                "BatchNorm normalizes by the statistics of a micro-batch, so the gradients differ "
                "from those of the rank batch.",
                "Replace BatchNorm by LayerNorm or GroupNorm, or freeze it (`eval()`).",
            )


def unused_parameters(run: StartedRun) -> Iterator[Finding]:
    """`find_unused_parameters` is set for a gradient cache."""
    strategy = _caching_strategy(run)
    if strategy is not None and getattr(strategy, "_ddp_kwargs", {}).get("find_unused_parameters"):
        yield Finding(
            "`find_unused_parameters`",
            "advice",
            f"`{type(strategy).__name__}(find_unused_parameters=True)`.",
            "DDP searches the graph in every step, which the strategy does not need.",
            "Remove `find_unused_parameters` from the strategy.",
        )


def drop_last(run: StartedRun) -> Iterator[Finding]:
    """The last batch of a contrastive epoch is shorter than the others."""
    loader = None if run.trainer is None else run.trainer.train_dataloader
    if _caching_strategy(run) is None or not isinstance(loader, DataLoader) or loader.drop_last:
        return
    settings, ranks = run.trainer_settings, 1
    if settings.get("use_distributed_sampler", True):  # shares the rows of the data set equally
        ranks = (devices_of(settings) or 1) * int(settings.get("num_nodes") or 1)
    try:
        rows, size = -(-len(loader.sampler) // ranks), loader.batch_size  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return
    if size and rows > size and rows % size:
        yield Finding(
            "`drop_last`",
            "advice",
            f"The last batch of an epoch has {rows % size} rows, the others {size}.",
            "The pairs of a short batch have fewer negatives, so their loss is on another scale.",
            "DataLoader(..., drop_last=True)",
        )


def compiled_modules(run: StartedRun) -> Iterator[Finding]:
    """A monitor measures modules inside a compiled module."""
    if run.model is None:
        return
    compiled = [name or "model" for name, m in run.model.named_modules() if _is_compiled(m)]
    looking = [type(c).__name__ for c in run.callbacks if isinstance(c, ActivationRangeMonitor)]
    if compiled and looking:
        yield Finding(
            "compiled modules",
            "advice",
            f"`{looking[0]}` monitors `{compiled[0]}`, which `torch.compile` compiles.",
            "Hooks do not run in compiled code, so the monitor measures only the module's output.",
            "Compile blocks (`block.compile()`), and name the blocks in `modules`.",
        )


def callbacks(run: StartedRun) -> Iterator[Finding]:
    """A callback ends the run at a step that another callback would handle."""
    guards = [c for c in run.callbacks if isinstance(c, SpikeGuard)]
    handling = next((c for c in guards if c.action in ("skip", "rewind")), None)
    if handling is None:
        return
    shown = f"`SpikeGuard(action={handling.action!r})`"
    for callback in run.callbacks:
        if isinstance(callback, NonFiniteLocator) and callback.action in ("stop", "raise"):
            yield Finding(
                "callbacks",
                "wrong",
                f"`NonFiniteLocator(action={callback.action!r})` is used with {shown}.",
                "The locator ends the run at the step that the guard would handle.",
                'NonFiniteLocator(action="warn")',
            )
        if isinstance(callback, EarlyStopping) and callback.check_finite:
            yield Finding(
                "callbacks",
                "advice",
                f"`EarlyStopping(check_finite=True)` is used with {shown}.",
                f"The run ends the first time that `{callback.monitor}` is not finite.",
                "EarlyStopping(check_finite=False, ...)",
            )
    if run.trainer_settings.get("detect_anomaly"):
        yield Finding(
            "callbacks",
            "wrong",
            f"`trainer.detect_anomaly: true` is used with {shown}.",
            "The backward raises an error at the first NaN, before the guard sees the step.",
            "Remove `detect_anomaly`; NonFiniteLocator names the module.",
        )


def tensor_cores(run: StartedRun) -> Iterator[Finding]:
    """Linear layers have sizes that 8 does not divide."""
    computes_half = run.trainer is not None and run.trainer.precision not in ("32-true", "64-true")
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
            f"Linear layers have sizes that 8 does not divide ({len(odd)}): {_first_names(odd)}.",
            "Half-precision matrix products of such sizes run on padded copies or without tensor "
            "cores.",
            "Round widths, class counts and vocabularies up to multiples of 8.",
        )


CHECKS: tuple[Callable[[StartedRun], Iterator[Finding]], ...] = (
    set_up, precision_flag, unknown_modules, epsilon, optimizer_states, accumulation,
    checkpoint_dtype, batch_norm, unused_parameters, drop_last, compiled_modules, callbacks,
    tensor_cores,
)  # fmt: skip
"""All checks except the check of memory, which makes model and data itself."""


def _plain_optimizers(run: StartedRun) -> list[torch.optim.Optimizer]:
    """Return the optimizers, unless a plugin of this package runs them in fp32."""
    if run.trainer is None or isinstance(run.trainer.precision_plugin, ScaledPrecision):
        return []
    return run.trainer.optimizers


def _caching_strategy(run: StartedRun) -> ServesTowers | None:
    strategy = None if run.trainer is None else run.trainer.strategy
    return strategy if isinstance(strategy, ServesTowers) else None


def _trains_half(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.dtype in HALF_DTYPES


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _count_parameters(items: list[Any]) -> str:
    return "1 parameter" if len(items) == 1 else f"{len(items)} parameters"


def _first_names(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
