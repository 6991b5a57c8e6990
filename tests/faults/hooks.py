"""Errors in every hook of callbacks, model, strategy and precision plugin."""

import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from tests.faults.runs import KINDS, Run, assert_same, end_without_fault

__all__ = ["CALLED", "HOOKS", "SHORT", "Hook", "Planted", "calls_of"]

_BATCH = "on_{}_batch_start on_{}_batch_end"
_EPOCH = "on_{}_start on_{}_epoch_start on_{}_epoch_end on_{}_end"
_SHARED = (
    f"setup on_fit_start on_fit_end teardown {_EPOCH} {_EPOCH} {_BATCH} {_BATCH} "
    "on_save_checkpoint on_before_zero_grad on_before_backward on_after_backward "
    "on_before_optimizer_step"
).format(*["validation"] * 4, *["train"] * 4, *["validation"] * 2, *["train"] * 2)
_STRATEGY = """
    connect setup_environment setup setup_optimizers setup_precision_plugin teardown broadcast
    barrier reduce reduce_boolean_decision model_to_device batch_to_device process_dataloader
    training_step validation_step post_training_step pre_backward backward post_backward
    optimizer_step on_train_start on_train_batch_start on_train_end on_validation_start
    on_validation_end lightning_module_state_dict optimizer_state save_checkpoint
"""
_PRECISION = """
    convert_module convert_input connect train_step_context val_step_context forward_context
    pre_backward backward post_backward main_params optimizer_step clip_gradients
    clip_grad_by_norm state_dict on_save_checkpoint teardown
"""
# The hooks that `fit` calls in these runs under every supported version of Lightning.
CALLED: dict[str, tuple[str, ...]] = {
    "callback": (*_SHARED.split(), "on_sanity_check_start", "on_sanity_check_end", "state_dict"),
    "module": tuple(
        f"{_SHARED} prepare_data configure_callbacks configure_model configure_optimizers "
        "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer training_step "
        "validation_step log backward optimizer_step optimizer_zero_grad "
        "configure_gradient_clipping on_validation_model_eval on_validation_model_train "
        "on_validation_model_zero_grad".split()
    ),
    "strategy": tuple(_STRATEGY.split()),
    "precision": tuple(_PRECISION.split()),
}
# Hooks that are called fewer than three times: once, or once per epoch.
_ONCE = (
    *("setup", "on_fit_start", "on_fit_end", "teardown", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_sanity_check_start", "prepare_data"),
    *("on_sanity_check_end", "configure_callbacks", "configure_model", "configure_optimizers"),
    *("on_validation_model_zero_grad", "connect", "setup_environment", "setup_optimizers"),
    *("setup_precision_plugin", "model_to_device", "process_dataloader", "convert_module"),
)


class Planted(Exception):
    """An error of a user's code."""


@dataclass(frozen=True)
class Hook:
    """An error in a hook.

    Args:
        kind: Kind of the run, a key of `KINDS`.
        source: Object whose hook raises: a callback before or after the monitors, the model, the
            strategy or the precision plugin.
        name: Name of the hook.
        when: `"first"` or `"third"` call, or `"after"` the original hook in its first call.
    """

    kind: str
    source: str
    name: str
    when: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.source}-{self.name}-{self.when}".replace(" ", "_")

    def check(self) -> None:
        """Raise the error, look for changes that the run left, and train the same model again."""
        error = Planted("planted")
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run, call = _prepared(self.kind, Path(name))
            before = traces(run.model)
            target = _target(run, self.source)
            call(target, self.name, _raising(self.when, error))
            with pytest.raises(Planted) as raised:
                run.fit()
            assert raised.value is error
            assert error.__cause__ is None, error.__cause__
            vars(target).pop(self.name, None)
            found, usual = traces(run.model), _traces_after(self.kind)
            wrong = {k: v for k, v in found.items() if v not in (before.get(k), usual.get(k))}
            assert not wrong, wrong
            with tempfile.TemporaryDirectory() as again:
                second = Run(self.kind, Path(again))
                run.model.load_state_dict(second.model.state_dict())
                second.model = run.model
                second.fit()
                assert_same(second.end(), end_without_fault(self.kind))


def _hooks() -> list[Hook]:
    found = []
    for kind in KINDS:
        for source in ("callback before", "callback after", "module", "strategy", "precision"):
            for name in CALLED[source.partition(" ")[0]]:
                # If `teardown` of a strategy or plugin raises first, nothing can be restored.
                is_own = name == "teardown" and source in ("strategy", "precision")
                whens = [] if is_own else ["first"]
                whens += [] if name in _ONCE else ["third"]
                whens += [] if source.startswith("callback") or "context" in name else ["after"]
                if name == "save_checkpoint":
                    whens = ["third"]  # the first is a mark, whose failure `SpikeGuard` tolerates
                found += [Hook(kind, source, name, when) for when in whens]
    return found


HOOKS = _hooks()
SHORT = {
    *(
        "BalancedAMP-callback_before-on_before_optimizer_step-third",
        "PureFP16-module-backward-third",
    ),
    *("PureFP16-strategy-optimizer_step-after", "InfCLStrategy-module-training_step-after"),
    *(
        "BalancedAMP-precision-train_step_context-first",
        "InfCLStrategy-strategy-pre_backward-third",
    ),
    *("BalancedAMP-callback_after-on_fit_start-first", "PureFP16-precision-connect-after"),
}


def _raising(when: str, error: Planted) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    left = 3 if when == "third" else 1

    def wrap(work: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and when != "after":
                raise error
            result = work(*args, **kwargs)
            if left == 0:
                raise error
            return result

        return hook

    return wrap


def _prepared(kind: str, folder: Path) -> tuple[Run, Callable[..., None]]:
    """Return a run with a Trainer and two plain callbacks, and a function that wraps a hook."""
    run = Run(kind, folder, [pl.Callback()], [pl.Callback()])
    run.make_trainer()

    def plant(target: Any, name: str, wrap: Callable[..., Any]) -> None:
        vars(target)[name] = wrap(getattr(target, name))

    return run, plant


def _target(run: Run, source: str) -> Any:
    if source.startswith("callback"):
        plain = [each for each in run.trainer.callbacks if type(each) is pl.Callback]
        return plain[source.endswith("after")]
    found = {"module": run.model, "strategy": run.trainer.strategy}
    return found.get(source, run.trainer.precision_plugin)


def calls_of(kind: str, source: str) -> dict[str, int]:
    """Return how often a run without a fault calls each hook of a source."""
    counts = dict.fromkeys(CALLED[source], 0)

    def counting(name: str) -> Callable[..., Any]:
        def wrap(work: Callable[..., Any]) -> Callable[..., Any]:
            def hook(*args: Any, **kwargs: Any) -> Any:
                counts[name] += 1
                return work(*args, **kwargs)

            return hook

        return wrap

    with tempfile.TemporaryDirectory() as folder:
        run, plant = _prepared(kind, Path(folder))
        target = _target(run, source)
        for name in CALLED[source]:
            plant(target, name, counting(name))
        run.fit()
    return counts


def traces(model: nn.Module) -> dict[str, Any]:
    """Return all that a run might change for good: the model, torch's settings, this process."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        # Lightning keeps attributes of the root module.
        keys = sorted(vars(module)) if name else []
        found[name] = (type(module).__name__, type(module).__module__, hooks, keys)
    for name, p in model.named_parameters():
        hooks = [len(getattr(p, key) or ()) for key in _TENSOR_HOOKS]
        found[name] = (type(p), p.dtype, p.requires_grad, hooks, p.is_leaf)
    lists = {key: len(value) for key, value in vars(modules).items() if _is_hooks(key, value)}
    lists |= {key: len(value) for key, value in vars(optimizers).items() if _is_hooks(key, value)}
    found["hooks of torch"] = lists
    matmul = torch.backends.cuda.matmul
    found["settings"] = (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )
    found["threads"] = sorted(t.name for t in threading.enumerate() if not t.daemon)
    return found


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _is_hooks(key: str, value: Any) -> bool:
    return key.startswith("_global") and key.endswith("hooks") and hasattr(value, "__len__")


_TRACES_AFTER: dict[str, dict[str, Any]] = {}


def _traces_after(kind: str) -> dict[str, Any]:
    """Return the traces of a run without a fault."""
    if kind not in _TRACES_AFTER:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(kind, Path(folder))
            run.fit()
            _TRACES_AFTER[kind] = traces(run.model)
    return _TRACES_AFTER[kind]
