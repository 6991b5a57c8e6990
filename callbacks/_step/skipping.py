"""Skips an optimizer step if a flag on the device is set."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.callbacks._step.recorder import recorder_of
from lightning_mp.callbacks._step.training_state import scaler_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.optim._found_inf import takes_found_inf, takes_grad_scale
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._scaling.step_control import held, hold_global_step
from lightning_mp.precision._weights.ledger import parameters_of

__all__ = ["StepSkipper"]


class StepSkipper:
    """Skips a step through the precision plugin, through `found_inf`, or without gradients."""

    def __init__(self) -> None:
        self._flags: dict[Optimizer, Tensor] = {}
        self._seen: set[Optimizer] = set()  # optimizers with hooks or a warning
        self._held = False

    def attach(self, trainer: pl.Trainer) -> None:
        """Make LR schedules wait for skipped steps; call it when training starts."""
        if not isinstance(trainer.precision_plugin, ScaledPrecision):
            strategy = trainer.strategy
            strategy.lr_scheduler_configs = held(strategy.lr_scheduler_configs, lambda: self._held)

    def skip(self, trainer: pl.Trainer, optimizer: Optimizer, flag: Tensor | None = None) -> None:
        """Skip the next step if `flag`, an fp32 scalar on the device, is 1.

        Without a flag, skip the step for certain; LR schedules and `global_step` then wait.
        """
        plugin, is_certain = trainer.precision_plugin, flag is None
        self._held = False
        scaler = scaler_of(trainer)
        has_scaler = isinstance(scaler, torch.amp.GradScaler)
        if flag is None:
            flag = torch.ones((), device=trainer.strategy.root_device)
        if isinstance(plugin, ScaledPrecision):  # skips on the device, together with overflows
            plugin.request_skip(flag)
        elif takes_found_inf(optimizer):
            if optimizer not in self._seen:
                self._seen.add(optimizer)
                hooks = recorder_of(trainer).step_hooks
                hooks.enter_context(optimizer.register_step_pre_hook(self._merge))
                hooks.enter_context(optimizer.register_step_post_hook(self._clear))
            self._flags[optimizer] = flag
            # A `GradScaler` sets `found_inf` just before the step; a hook merges the two.
            if not has_scaler:
                optimizer.found_inf = flag  # type: ignore[attr-defined]
            if is_certain:
                self._hold(trainer)
        else:
            if not is_certain and optimizer not in self._seen and not takes_grad_scale(optimizer):
                self._seen.add(optimizer)
                rank_zero_warn(usage("skip_sync", optimizer=type(optimizer).__name__))
            if flag.item() != 0:
                # Before the gradients are gone, because a `GradScaler` must see them at each step.
                if takes_grad_scale(optimizer) and has_scaler:
                    scaler.unscale_(optimizer)
                # Without gradients, no optimizer changes weights or states.
                for parameter in parameters_of(optimizer):
                    parameter.grad = None
                _clip_no_gradients(trainer)
                self._hold(trainer)

    def _hold(self, trainer: pl.Trainer) -> None:
        self._held = True
        self.attach(trainer)  # again, because schedules may have been replaced
        hold_global_step(trainer.lightning_module)

    def _merge(self, optimizer: Optimizer, *_: object) -> None:
        """Set `found_inf` to the flag, merged with the value that a `GradScaler` has set."""
        flag, found_inf = self._flags.get(optimizer), getattr(optimizer, "found_inf", None)
        if flag is None:
            return
        if found_inf is None:
            optimizer.found_inf = flag  # type: ignore[attr-defined]
        elif found_inf is not flag:  # set by the scaler, which removes it itself
            del self._flags[optimizer]
            optimizer.found_inf = torch.maximum(found_inf, flag.to(found_inf).view_as(found_inf))  # type: ignore[attr-defined]

    def _clear(self, optimizer: Optimizer, *_: object) -> None:
        if self._flags.pop(optimizer, None) is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def detach(self) -> None:
        self._seen.clear()
        self._flags.clear()


def _clip_no_gradients(trainer: pl.Trainer) -> None:
    """Let clipping by value accept an optimizer without gradients, for which torch raises."""
    plugin = trainer.precision_plugin
    original = plugin.clip_grad_by_value

    def clip(optimizer: Optimizer, clip_val: int | float) -> None:
        if any(parameter.grad is not None for parameter in plugin.main_params(optimizer)):
            original(optimizer, clip_val)

    if "clip_grad_by_value" not in vars(plugin):
        plugin.clip_grad_by_value = clip  # type: ignore[method-assign]
        recorder_of(trainer).step_hooks.callback(delattr, plugin, "clip_grad_by_value")
