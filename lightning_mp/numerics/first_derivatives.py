"""Says in words that a function has first derivatives only, where somebody asks for second ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["refuse_second_derivatives"]


def refuse_second_derivatives(
    gradients: Sequence[Tensor | None], message: str
) -> list[Tensor | None]:
    """Return gradients in whose graph a backward raises an error.

    Without that, a backward through a backward of ours would fail in torch's words, or be zero.

    Args:
        gradients: What a custom backward returns.
        message: Of the error.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return list(gradients)
    handle = torch.zeros((), requires_grad=True, device=given[0].device)
    refusing = iter(_Refuse.apply(message, handle, *given))
    return [None if gradient is None else next(refusing) for gradient in gradients]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, handle: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(ctx.message)
