"""The node that stands for a call in the graph of the loss."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_mp.gradient_cache._call.call import Call

if TYPE_CHECKING:
    from lightning_mp.gradient_cache.gradient_cache import GradientCache

__all__ = ["attach"]

_TWICE = (
    "Called a second derivative through a tower whose gradients are cached. Its replay leaves no "
    "graph behind, so there is only a first one. Leave the tower out of `towers` for a gradient "
    "penalty, or write the penalty on the features."
)


def attach(cache: "GradientCache", call: Call, outputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs as those of a node whose backward replays the call.

    What the call trains are its inputs. So autograd itself adds up what several calls and the rest
    of the loss give a parameter, accumulates it once, fires hooks once, and DDP finds the parameter
    in the graph and reduces it once, as if the tower had been called plainly.
    """
    # Of a sharded tower nothing may be left that is trained here.
    anchor = [torch.zeros((), requires_grad=True)] if call.is_sharded else []
    attached: tuple[Tensor, ...] = _Replay.apply(
        (cache, call, outputs), *call.inputs, *call.leaves.values(), *anchor
    )
    outputs.clear()  # else the node would hold itself
    return list(attached)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: tuple[Any, Call, list[Tensor]], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.cache, ctx.call, outputs = what
        # Zeros for outputs that the loss leaves out would be replayed for nothing.
        ctx.set_materialize_grads(False)
        # As after a plain call: else a loss would send gradients to labels and masks.
        ctx.mark_non_differentiable(*ctx.call.without_grad(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        # With `create_graph=True` grad mode is on here; a replay turns it on where it needs it.
        with torch.no_grad():
            gradients = (None, *ctx.cache._replay(ctx.call, cotangents))
        given = [gradient for gradient in gradients if gradient is not None]
        if not torch.is_grad_enabled() or not given:  # it is with `create_graph=True`
            return gradients
        # Cotangents lead back to the loss: `torch.autograd.grad` passes over a graph that does not
        # reach what it is asked for, as that of torch's `once_differentiable`.
        handle = torch.zeros((), requires_grad=True, device=given[0].device)
        reached = [each for each in cotangents if each is not None]
        refusing = iter(_Refuse.apply(given, handle, *reached))
        return tuple(None if gradient is None else next(refusing) for gradient in gradients)


class _Refuse(torch.autograd.Function):
    """Hands on gradients, in whose graph a backward raises an error."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(_TWICE)
