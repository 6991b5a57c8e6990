"""Reduces gradients that are complete already, where DDP could not be prepared for a backward."""

from typing import Any

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.contrastive._cache.graph import hooks_held

__all__ = ["reduce_gradients"]


def reduce_gradients(model: DistributedDataParallel) -> None:
    """All-reduce every bucket of gradients once; users' hooks have had their gradients before."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    touched: Tensor = _Touch.apply(*trained)
    prepare_for_backward(model, touched)
    with hooks_held(trained):
        touched.backward()


class _Touch(torch.autograd.Function):
    """A graph that reaches every parameter and gives none of them a gradient.

    Its backward makes DDP's hooks fire once a parameter, and so reduces the gradients that the
    parameters hold by then, without reading a parameter or writing a gradient.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, ...]:
        count: int = ctx.count
        return (None,) * count
