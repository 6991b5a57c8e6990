"""Whether a loss scaler skipped a step, with any precision plugin and without a host sync."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.precision.scaled_precision import ScaledPrecision

__all__ = ["SkippedSteps"]


class SkippedSteps:
    """Follows the optimizers of a run, and tells which of their steps were skipped.

    The plugins of this package say so. torch's `GradScaler` does not, but asks the device before it
    calls `optimizer.step()`: a step that was due and not called was skipped. It always calls fused
    optimizers, which skip on the device; there a fall of the scale tells, one step later.
    """

    def __init__(self) -> None:
        self._due: set[Optimizer] = set()
        self._handles: list[RemovableHandle] = []
        self._scales = AsyncReadback()

    def attach(self, trainer: pl.Trainer) -> None:
        """Start to follow the optimizers."""
        self.detach()
        if isinstance(_scaler_of(trainer), torch.amp.GradScaler):
            hooks = (each.register_step_pre_hook(self._called) for each in trainer.optimizers)
            self._handles += hooks

    def detach(self) -> None:
        """Stop following them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._due.clear()
        self._scales.drain()

    def expect(self, optimizer: Optimizer) -> None:
        """Note that a step is due; call it in `on_before_optimizer_step`."""
        self._due.add(optimizer)

    def outcome(self, trainer: pl.Trainer, scale: float | Tensor | None) -> bool | None:
        """Return whether the newest step was skipped; `None` where only `late` can tell.

        Args:
            trainer: The trainer.
            scale: The loss scale that the step was made with.
        """
        due, self._due = self._due, set()
        scaler = _scaler_of(trainer)
        if isinstance(trainer.precision_plugin, ScaledPrecision):
            return scaler is not None and bool(scaler.last_step_skipped)
        if not isinstance(scaler, torch.amp.GradScaler) or scale is None:
            return False
        if scaler._scale is None or not due:
            return False
        if not any(_is_fused(each) for each in due):
            return True
        now = scaler._scale.reshape(())
        before = (
            scale.reshape(()) if isinstance(scale, Tensor) else torch.full_like(now, scale or 0)
        )
        self._scales.submit(0, torch.stack([before, now]))
        return None

    def late(self) -> bool:
        """Return whether the step that `outcome` could not judge was skipped."""
        return any(arrived.array[1] < arrived.array[0] for arrived in self._scales.drain())

    def _called(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_fused(optimizer):
            self._due.discard(optimizer)


def _is_fused(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _scaler_of(trainer: pl.Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)
