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
    """Unscales gradients in place and in fp32, and scales them again for a further backward.

    A backward adds scaled gradients, a step wants them unscaled, and in between a user may clip,
    edit or keep them.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        self._parameters: set[Tensor] = set()
        # What a backward of a scaled loss has left in `p.grad`. Weak, as `zero_grad` frees it.
        self._scaled: dict[Tensor, weakref.ref[Tensor]] = {}
        # The gradients, and their versions, from before the backward that is running.
        self._before: dict[Tensor, tuple[weakref.ref[Tensor], int]] | None = None

    @contextlib.contextmanager
    def arriving(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Surround the backward of a scaled loss, and note the gradients that it changes."""
        # A plain backward beside it, such as that of a probe, leaves gradients that are not scaled.
        self._before = {
            p: (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None
        }
        try:
            yield
        finally:
            self._note(p for p in parameters if self._has_arrived(p))
            self._before = None

    def _has_arrived(self, parameter: Tensor) -> bool:
        if self._before is None or parameter.grad is None:
            return False
        old, version = self._before.get(parameter, (None, 0))
        return old is None or old() is not parameter.grad or version != parameter.grad._version

    def _note(self, parameters: Iterable[Tensor]) -> None:
        self._scaled.update({p: weakref.ref(p.grad) for p in parameters if p.grad is not None})

    def has_scaled(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any gradient is that of a scaled loss, also while its backward runs.

        Also one that a user has handed on to fp32 weights beside the model: `master.grad = p.grad`.
        """
        given = [p for p in parameters if p.grad is not None]
        if self._scaler is None or self._scaler.scale == 1 or not given:
            return False
        scaled = {id(grad) for grad in (noted() for noted in self._scaled.values())}
        return any(self._has_arrived(p) or id(p.grad) in scaled for p in given)

    def unscale(self, parameters: Iterable[Tensor], device: torch.device) -> Tensor | None:
        """Widen and unscale the gradients of parameters, those that are not yet.

        Returns:
            1 if a gradient is NaN or inf, also one that was unscaled before, else 0: fp32, of
            shape []. `None` without loss scale.
        """
        parameters = list(parameters)
        fresh = [p for p in parameters if p not in self._parameters]
        before = [p for p in parameters if p in self._parameters]
        for p in fresh:
            if p.grad is not None and p.grad.dtype in HALF_DTYPES:
                p.grad = p.grad.float()
        # Those without a gradient too: one that a user sets now is not scaled.
        self._parameters.update(fresh)
        for p in fresh:
            self._scaled.pop(p, None)
        if self._scaler is None:
            return None
        found_inf = self._scaler.unscale_(_gradients(fresh), device=device)
        if _gradients(before):  # they may have been changed since
            bad = self._scaler.find_inf(_gradients(before), device=device)
            found_inf = torch.maximum(found_inf, bad)
        return found_inf

    def scale_again(self) -> None:
        """Scale what was unscaled and is still there; call it before every backward."""
        # So both add up to what they would without a loss scale.
        gradients = _gradients(self._parameters)
        if self._scaler is not None and gradients:
            torch._foreach_mul_(gradients, self._scaler.scale)
            self._note(self._parameters)
        self._parameters.clear()

    def follow(self, ratio: float, parameters: Iterable[Tensor]) -> None:
        """Move scaled gradients that wait for a later step to a scale `ratio` times the old one."""
        if ratio == 1:
            return
        # What is unscaled is in no scale, and must not move with it.
        gradients = _gradients(set(parameters) - self._parameters)
        if gradients:
            torch._foreach_mul_(gradients, ratio)

    def clear(self) -> None:
        """Forget the parameters."""
        self._parameters.clear()
        self._scaled.clear()


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
