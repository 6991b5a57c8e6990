"""Which gradients are scaled at the moment, and which are not; each is unscaled once."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision.loss_scaler import LossScaler

__all__ = ["UnscaledGradients"]


class UnscaledGradients:
    """Unscales gradients in fp32, for a step or a user, and scales them for a further backward."""

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        # By `id`, as tensors are hashed in Python, and this is done for each of them in each step.
        self._unscaled: dict[int, Tensor] = {}
        # The gradients that backwards of scaled losses have left. Weak, as `zero_grad` frees them.
        self._scaled: dict[int, weakref.ref[Tensor]] = {}
        # The gradients, and their versions, from before the backward that is running.
        self._before: dict[int, tuple[weakref.ref[Tensor], int]] | None = None

    @contextlib.contextmanager
    def arriving(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Surround the backward of a scaled loss, and note the gradients that it changes."""
        # A plain backward beside it, such as that of a probe, leaves gradients that are not scaled.
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
        before = self._before
        return [
            grad
            for p in parameters
            if before is not None and (grad := p.grad) is not None
            if (old := before.get(id(p))) is None or old[0]() is not grad or old[1] != grad._version
        ]

    def _note(self, gradients: list[Tensor]) -> None:
        self._scaled = {key: ref for key, ref in self._scaled.items() if ref() is not None}
        self._scaled.update(zip(map(id, gradients), map(weakref.ref, gradients), strict=True))

    def has_scaled(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any gradient is that of a scaled loss, also while its backward runs.

        Or is one that a user has handed on to weights beside the model: `master.grad = p.grad`.
        """
        if self._scaler is None or self._scaler.scale == 1:
            return False
        parameters = list(parameters)
        # Python keeps one weak reference to an object, so `is` rules out a reused `id`.
        known = (self._scaled.get(id(grad)) is weakref.ref(grad) for grad in _gradients(parameters))
        return bool(self._arrived(parameters)) or any(known)

    def unscale(self, parameters: Iterable[Tensor], device: torch.device) -> Tensor | None:
        """Widen and unscale the gradients of parameters, those that are not yet.

        Returns:
            1 if a gradient is NaN or inf, also one that was unscaled before, else 0: fp32, of
            shape []. `None` without loss scale.
        """
        parameters = list(parameters)
        fresh = [p for p in parameters if id(p) not in self._unscaled]
        before = [p for p in parameters if id(p) in self._unscaled]
        for p in fresh:
            grad = p.grad
            self._scaled.pop(id(grad), None)
            if grad is not None and grad.dtype in HALF_DTYPES:
                p.grad = grad.float()
            # Without a gradient too: one that a user sets now is not scaled.
            self._unscaled[id(p)] = p
        if self._scaler is None:
            return None
        found_inf = self._scaler.unscale_(_gradients(fresh), device=device)
        if _gradients(before):  # they may have been changed since
            bad = self._scaler.unscale_(_gradients(before), device=device, scale=1.0)
            found_inf = torch.maximum(found_inf, bad)
        return found_inf

    def scale_again(self) -> None:
        """Scale what was unscaled and is still there; call it before every backward."""
        # So both add up to what they would without a loss scale.
        gradients = _gradients(self._unscaled.values())
        if self._scaler is not None and gradients:
            torch._foreach_mul_(gradients, self._scaler.scale)
            self._note(gradients)
        self._unscaled.clear()

    def follow(self, ratio: float, parameters: Iterable[Tensor]) -> None:
        """Move scaled gradients that wait for a later step to a scale `ratio` times the old one."""
        if ratio == 1:
            return
        # What is unscaled is in no scale, and must not move with it. A parameter may be of several.
        waiting = {id(p): p for p in parameters if id(p) not in self._unscaled}
        gradients = _gradients(waiting.values())
        if gradients:
            torch._foreach_mul_(gradients, ratio)

    def clear(self) -> None:
        """Forget the parameters."""
        self._unscaled.clear()
        self._scaled.clear()


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [grad for p in parameters if (grad := p.grad) is not None]
