"""Loss and gradient norm of a step, on the device, the same on all ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mp.callbacks._step.training_state import NamedTensors, gather_ranks, is_sharded

__all__ = ["LossSum", "Signals", "measure"]


class Signals(NamedTuple):
    """What a step is judged by.

    Args:
        values: Loss and gradient norm, fp32, of shape [2].
        judged: Whether there is a loss, and a gradient norm.
        largest: Index and norm of the gradient with the largest norm; NaN is larger than all.
    """

    values: Tensor
    judged: Tensor
    largest: Tensor


class LossSum:
    """Sums the unscaled losses that were backpropagated since the last optimizer step.

    Lightning hands `on_before_backward` the loss after the loss scale, and with accumulation
    divided by the number of micro-batches.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, trainer: pl.Trainer, loss: Tensor) -> None:
        """Add a loss on its way to backward."""
        unscaled = loss.detach().float().mean() / _loss_scale(trainer)
        self._sum = unscaled if self._sum is None else self._sum + unscaled

    def take(self) -> Tensor | None:
        """Return the sum and start anew; `None` where nothing was backpropagated."""
        taken, self._sum = self._sum, None
        return taken


def _loss_scale(trainer: pl.Trainer) -> float | Tensor:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        return scaler._scale.reshape(()) if scaler._scale is not None else 1.0
    return 1.0 if scaler is None else float(scaler.scale)


def measure(trainer: pl.Trainer, found: NamedTensors, loss: Tensor | None) -> Signals:
    """Return the signals of a step: the loss averaged over ranks, the norm of all gradients.

    One multi-tensor norm a dtype, and with several ranks one collective of 8 bytes a rank. Shards
    of FSDP are summed; where it replicates, the norm is larger by a constant factor.

    Args:
        trainer: The trainer.
        found: The gradients.
        loss: Of this rank; `None` where there is none.
    """
    # With FSDP a rank may hold no gradient at all, and must still join the collective.
    norms = (
        _norms(found.gradients)
        if found.gradients
        else torch.zeros(1, device=trainer.strategy.root_device)
    )
    norms = norms * found.unscale
    device = norms.device
    norm = torch.linalg.vector_norm(norms)
    has_loss = torch.full((), loss is not None, device=device)
    local = loss.to(device, non_blocking=True) if loss is not None else torch.zeros_like(norm)
    ranks = gather_ranks(torch.stack([local, norm]))
    if is_sharded(trainer):
        total_norm = torch.linalg.vector_norm(ranks[:, 1])
    else:
        total_norm = ranks[:, 1].amax()
    index = norms.argmax()
    return Signals(
        values=torch.stack([ranks[:, 0].mean(), total_norm]),
        judged=torch.stack([has_loss, torch.ones_like(has_loss)]),
        largest=torch.stack([index.to(norms.dtype), norms.gather(0, index[None])[0]]),
    )


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the fp32 norm of each; half gradients are summed in fp32."""
    local = [_local(gradient) for gradient in gradients]
    norms: list[Tensor | None] = [None] * len(local)
    for dtype in {gradient.dtype for gradient in local}:
        rows = [row for row, gradient in enumerate(local) if gradient.dtype == dtype]
        same = _norms_of([local[row] for row in rows])
        for row, norm in zip(rows, same, strict=True):
            norms[row] = norm
    device = local[0].device
    return torch.stack(
        [norm.to(device, torch.float32, non_blocking=True) for norm in norms if norm is not None]
    )


def _norms_of(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the norms of gradients of one dtype."""
    first = gradients[0]
    if first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64):
        # Unlike torch's norm, its product runs on all cores: 4 ms for 20M values on two, not 8.
        flat = [_in_order(gradient) for gradient in gradients]
        return [torch.dot(values, values).sqrt_() for values in flat]
    in_fp32 = torch.float32 if first.dtype.itemsize < 4 else None
    return torch._foreach_norm(gradients, 2, dtype=in_fp32)


def _in_order(gradient: Tensor) -> Tensor:
    """Return all values in the order of memory, copied only where there are gaps."""
    order = sorted(range(gradient.ndim), key=gradient.stride, reverse=True)
    return gradient.permute(order).reshape(-1)


def _local(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):
        return gradient.to_local()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
