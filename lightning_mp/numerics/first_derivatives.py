"""Says in words that a function has first derivatives only, where somebody asks for second ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_derivatives_only"]


_Backward = Callable[..., tuple[Any, ...]]


def first_derivatives_only(message: str) -> Callable[[_Backward], _Backward]:
    """Run the backward of an autograd function without a graph, and refuse to differentiate it.

    Without that, a backward through a backward of ours would fail in torch's words, or be zero.
    """

    def decorate(backward: _Backward) -> _Backward:
        @functools.wraps(backward)
        def refusing(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            with torch.no_grad():
                gradients = backward(ctx, *cotangents)
            if torch.is_grad_enabled():  # `create_graph=True`
                # What was saved leads back to the inputs: `torch.autograd.grad` passes over a graph
                # that does not reach them, as that of torch's `once_differentiable`.
                inputs = [x for x in (*ctx.saved_tensors, *cotangents) if x is not None]
                return tuple(_refusing(gradients, inputs, message))
            return gradients

        return refusing

    return decorate


def _refusing(
    gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], message: str
) -> list[Tensor | None]:
    """Return gradients in whose graph a backward raises an error."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return list(gradients)
    handle = torch.zeros((), requires_grad=True, device=given[0].device)
    refusing = iter(_Refuse.apply(message, given, handle, *inputs))
    return [None if gradient is None else next(refusing) for gradient in gradients]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, message: str, gradients: Sequence[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(ctx.message)
