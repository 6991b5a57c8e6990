"""The record of which gradients are scaled and which are not."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision.loss_scaler import LossScaler

__all__ = ["UnscaledGradients"]


class UnscaledGradients:
    """Unscales every gradient once, in fp32, and scales it again for a further backward."""

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        # Keyed by `id`, because tensors are hashed by a Python function.
        self._unscaled: dict[int, Tensor] = {}
        # Gradients that backwards of scaled losses have left; weak, because `zero_grad` frees them.
        self._scaled: dict[int, weakref.ref[Tensor]] = {}
        self._has_run = False  # whether any backward of a scaled loss has run
        # The gradients and their versions before the running backward.
        self._before: dict[int, tuple[weakref.ref[Tensor], int]] | None = None

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._unscaled

    @contextlib.contextmanager
    def arriving(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Surround the backward of a scaled loss and record the gradients that it changes."""
        self._has_run = True
        # A backward outside the plugin, such as that of a probe, leaves unscaled gradients.
        self._before = {
            id(p): (weakref.ref(grad), grad._version)
            for p in parameters
            if (grad := p.grad) is not None
        }
        try:
            yield
        finally:
            self._note(self._arrived(parameters))
            self._before = None

    def _arrived(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        if self._before is None:
            return []
        grads = [
            (self._before.get(id(p)), grad) for p in parameters if (grad := p.grad) is not None
        ]
        return [g for old, g in grads if not old or old[0]() is not g or old[1] != g._version]

    def _note(self, gradients: list[Tensor]) -> None:
        self._scaled = {key: ref for key, ref in self._scaled.items() if ref() is not None}
        self._scaled.update(zip(map(id, gradients), map(weakref.ref, gradients), strict=True))

    def has_scaled(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any gradient is scaled; also during its backward, or of another tensor."""
        if self._scaler is None or self._scaler.scale == 1:
            return False
        parameters = list(parameters)
        # Python keeps one weak reference to an object, so `is` rules out a reused `id`.
        known = (self._scaled.get(id(grad)) is weakref.ref(grad) for grad in _gradients(parameters))
        return bool(self._arrived(parameters)) or any(known)

    def has_inf(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any unscaled gradient is NaN or inf, so that its step will be skipped."""
        ours = _gradients(p for p in parameters if p in self)
        return self._scaler is not None and self._scaler.unscale_(ours, scale=1).item() != 0

    def unscale(self, parameters: Iterable[Tensor], device: torch.device) -> Tensor | None:
        """Cast the gradients of parameters to fp32 and unscale those that are still scaled.

        Return 1 if any gradient is NaN or inf, else 0 (0-d tensor); `None` without loss scale.
        """
        parameters = list(parameters)
        is_scaled = self._scaler is not None and self._scaler.scale != 1
        if is_scaled and not self._has_run and _gradients(parameters):
            raise RuntimeError(
                "An optimizer step divides gradients by the loss scale, but no backward of a "
                "scaled loss has run. In manual optimization, call `self.manual_backward(loss)` "
                "instead of `loss.backward()`. For gradients of other functions, such as "
                "`torch.autograd.grad`, pass `loss_scale=1.0` to the plugin, or use bf16."
            )
        fresh: list[Tensor] = []
        before: list[Tensor] = []
        for p in parameters:  # a group may hold a shared weight twice
            (before if id(p) in self._unscaled else fresh).append(p)
            grad = p.grad
            self._scaled.pop(id(grad), None)
            if grad is not None and grad.dtype in HALF_DTYPES:
                p.grad = grad.float()
            # Also without a gradient: a gradient that a user sets from now on is not scaled.
            self._unscaled[id(p)] = p
        if self._scaler is None:
            return None
        found_inf = self._scaler.unscale_(_gradients(fresh), device=device)
        if _gradients(before):  # a user may have changed them since
            bad = self._scaler.unscale_(_gradients(before), device=device, scale=1.0)
            found_inf = torch.maximum(found_inf, bad)
        return found_inf

    def clip_(self, gradient: Tensor, limit: float) -> None:
        """Clip a gradient by value, but keep inf, by which the step finds the overflow."""
        clipped = gradient.clamp(-limit, limit)
        gradient.copy_(
            torch.where(gradient.isinf(), gradient, clipped) if self._scaler else clipped
        )

    def scale_again(self) -> None:
        """Scale the unscaled gradients that remain, before a backward adds to them."""
        gradients = _gradients(self._unscaled.values())
        if self._scaler is not None and gradients:
            torch._foreach_mul_(gradients, self._scaler.scale)
            self._note(gradients)
        self._unscaled.clear()

    def follow(self, ratio: float, parameters: Iterable[Tensor]) -> None:
        """Multiply the scaled gradients of a later step by the change of the loss scale."""
        if ratio == 1:
            return
        # Unscaled gradients do not follow the scale. Optimizers may share a parameter.
        waiting = {id(p): p for p in parameters if id(p) not in self._unscaled}
        gradients = _gradients(waiting.values())
        if gradients:
            torch._foreach_mul_(gradients, ratio)

    def clear(self) -> None:
        """Forget all gradients."""
        self._has_run = False
        self._unscaled.clear()
        self._scaled.clear()


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [grad for p in parameters if (grad := p.grad) is not None]
