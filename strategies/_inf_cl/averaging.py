"""Averages the gradients of all parameters that currently train, whatever DDP registered.

DDP's reducer knows the parameters that trained when DDP was constructed. The gradients of a tower
that is unfrozen later would not be averaged, and DDP would wait for a tower that is frozen later.
So `GradientAverage` looks up the trained parameters at each step, in the order of the model, which
is equal on all ranks. Gradients are averaged in flat buckets and through DDP's communication hook,
as in DDP.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.numerics.async_readback import send

__all__ = ["GradientAverage", "sparse_weights"]

_BUCKET_BYTES = 25 * 2**20  # the default of DDP
_IN_FLIGHT = 2  # buckets: one is filled during the all-reduce of another

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class GradientAverage:
    """Averages gradients over all ranks, in place; remembers which parameters trained last."""

    def __init__(self) -> None:
        self._trained: list[str] | None = None

    def over_ranks(
        self,
        parameters: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        hook: tuple[Hook, Any] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        sparse: Collection[int] = (),
    ) -> None:
        """Average the gradients of the parameters that require grad.

        A rank without a gradient contributes zeros, and gets the average if any rank has one.
        DDP's communication `hook`, with its state, replaces the all-reduce. The `sparse` gradients,
        by the identities of their parameters, are reduced one by one.
        """
        if not parameters:
            return
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        # A gradient that is `None` on all ranks stays `None`: with zeros, weight decay would act.
        facts = [
            [p.grad is not None, p.requires_grad, not p.requires_grad] for p in parameters.values()
        ]
        device = next(iter(parameters.values())).device
        on_any_rank = send(torch.tensor(facts, dtype=torch.int32, device="cpu"), device)
        agreement = dist.all_reduce(on_any_rank, dist.ReduceOp.MAX, group=group, async_op=True)
        # Checked only if the trained parameters changed, because reading waits for the device.
        if device.type == "cpu" or self._trained != list(trained):
            agreement.wait()
            _check_agreement(parameters, on_any_rank)
            self._trained = list(trained)
        missing = [p for p in trained.values() if p.grad is None]
        for parameter in missing:
            zeros = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            parameter.grad = zeros.to_sparse(1) if id(parameter) in sparse else zeros
        _average(list(trained.values()), group, hook, bucket_bytes, sparse)
        agreement.wait()
        if missing:
            has_gradient = on_any_rank[:, 0].tolist()
            for parameter, is_kept in zip(parameters.values(), has_gradient, strict=True):
                parameter.grad = parameter.grad if is_kept else None


def _check_agreement(parameters: Mapping[str, Tensor], on_any_rank: Tensor) -> None:
    for name, (_, is_trained, is_frozen) in zip(parameters, on_any_rank.tolist(), strict=True):
        if is_trained and is_frozen:
            raise RuntimeError(
                f"The parameter {name!r} is trained on some ranks and frozen on others, so its "
                "gradients cannot be averaged. Call `requires_grad_` on all ranks alike."
            )


@torch.no_grad()
def _average(
    trained: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    hook: tuple[Hook, Any] | None,
    bucket_bytes: int,
    sparse: Collection[int],
) -> None:
    world_size = dist.get_world_size(group)
    buckets = list(_buckets([p for p in trained if id(p) not in sparse], bucket_bytes))
    in_flight: deque[tuple[_Bucket, Any]] = deque()
    for index, members in enumerate(buckets):
        bucket = _Bucket(index, index == len(buckets) - 1, members)
        if hook is None:
            # Divided before the sum, which could overflow in half precision.
            flat = bucket.buffer().mul_(1.0 / world_size)
            in_flight.append((bucket, dist.all_reduce(flat, group=group, async_op=True)))
        else:
            in_flight.append((bucket, hook[0](hook[1], bucket)))
        # A hook may start a collective when another ends, in a different order on each rank.
        if hook is not None or len(in_flight) == _IN_FLIGHT:
            _write_averages(*in_flight.popleft())
    for bucket, work in in_flight:
        _write_averages(bucket, work)
    for parameter in trained:
        if id(parameter) in sparse:
            _average_sparse(parameter, world_size, group)


def sparse_weights(module: nn.Module) -> set[int]:
    """Return the identities of weights whose gradients are sparse on every rank."""
    kinds = nn.Embedding, nn.EmbeddingBag
    return {id(m.weight) for m in module.modules() if isinstance(m, kinds) and m.sparse}


class _Bucket:
    """Gradients in one flat tensor, with the interface of `dist.GradBucket` for hooks."""

    def __init__(self, index: int, is_last: bool, parameters: list[Tensor]) -> None:
        self._index, self._is_last, self._parameters = index, is_last, parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._buffer = torch.cat(
            [x.to(p.dtype).flatten() for p, x in zip(parameters, gradients, strict=True)]
        )

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        return self.split(self._buffer)

    def split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


def _buckets(parameters: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        members: list[Tensor] = []
        size = 0
        for parameter in (p for p in parameters if p.dtype == dtype):
            parameter_bytes = parameter.numel() * parameter.element_size()
            if members and size + parameter_bytes > max_bytes:
                yield members
                members, size = [], 0
            members.append(parameter)
            size += parameter_bytes
        yield members


def _write_averages(bucket: _Bucket, work: Any) -> None:
    """Copy the averages of a bucket to the gradients."""
    result = work.wait()
    # An all-reduce writes to the buffer; a hook returns a tensor or a list with one tensor.
    if isinstance(result, (list, tuple)):
        result = result[0]
    means = bucket.split(result if isinstance(result, Tensor) else bucket.buffer())
    torch._foreach_copy_([p.grad for p in bucket.parameters() if p.grad is not None], means)


def _average_sparse(parameter: Tensor, world_size: int, group: dist.ProcessGroup | None) -> None:
    gradient = parameter.grad
    assert gradient is not None
    mean = gradient * (1.0 / world_size)
    # The gradient is dense if the weight is also used densely.
    mean = (mean if mean.is_sparse else mean.to_sparse(1)).coalesce()
    dist.all_reduce(mean, group=group)
    parameter.grad = mean if gradient.is_sparse else gradient.copy_(mean.to_dense())
