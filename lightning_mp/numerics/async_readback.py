"""Copies small tensors between host and device without waiting for the device."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["AsyncReadback", "Readback", "as_scalar", "send"]


class Readback(NamedTuple):
    """A tensor that has arrived on the host."""

    step: int  # step of the submission
    array: npt.NDArray[Any]  # a private copy of the values
    context: dict[str, Any]  # context of the submission


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting; later work on the device sees the copy."""
    if device.type != "cuda" or values.device == device:
        return values.to(device)
    # A copy from pageable memory would wait for the device.
    return values.pin_memory().to(device, non_blocking=True)


def as_scalar(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a 0-d tensor on a device, without waiting unless the host needs it."""
    if isinstance(number, Tensor):
        # A copy to the host must be synchronous.
        return number.detach().to(device, dtype, non_blocking=device.type != "cpu").reshape(())
    return torch.full((), number, dtype=dtype, device=device)


class _InFlight(NamedTuple):
    step: int
    host: Tensor
    done: Any  # a `torch.cuda.Event`; `None` if the copy is complete
    context: dict[str, Any]


class AsyncReadback:
    """Copies statistics to the host together with their step, without blocking a step.

    `tensor.item()` waits for all queued GPU work, and the GPU then idles while the host prepares
    the next kernels. This class queues a copy behind the kernels that compute the statistics, and
    reads it when it is complete, usually one or two steps later. Without CUDA, `submit` waits.
    """

    def __init__(self) -> None:
        self._in_flight: deque[_InFlight] = deque()
        # Buffers are reused, because allocating pinned memory is slow.
        self._free: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of submissions that have not been taken."""
        return len(self._in_flight)

    def submit(self, step: int, packed: Tensor, **context: Any) -> None:
        """Start to copy a tensor; work queued later may change the tensor.

        `context`, such as the names of rows, is returned with the values and must not be changed.
        """
        host, done = self._start_copy(packed.detach())
        self._in_flight.append(_InFlight(step, host, done, context))

    def ready(self) -> list[Readback]:
        """Take the copies that have arrived, in the order of submission, without waiting."""
        taken = []
        while self._in_flight:
            done = self._in_flight[0].done
            # Keep the order of steps.
            if done is not None and not done.query():
                break
            taken.append(self._take())
        return taken

    def drain(self) -> list[Readback]:
        """Wait for all copies and take them, at the end of training or after an exception."""
        for each in self._in_flight:
            if each.done is not None:
                each.done.synchronize()
        return self.ready()

    def _start_copy(self, packed: Tensor) -> tuple[Tensor, Any]:
        """Return the host copy, and the event after which it may be read."""
        # Also a copy on the CPU, because the caller may reuse its buffer.
        if packed.device.type != "cuda":
            return packed.to("cpu", copy=True), None
        host = self._buffer(packed)
        # The event must be recorded on the device of the tensor.
        with torch.accelerator.device_index(packed.device.index):
            host.copy_(packed, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return host, done

    def _buffer(self, packed: Tensor) -> Tensor:
        """Return a pinned buffer of the shape and dtype: a free one or a new one."""
        for index, host in enumerate(self._free):
            if host.shape == packed.shape and host.dtype == packed.dtype:
                return self._free.pop(index)
        return self._new_buffer(packed)

    def _new_buffer(self, packed: Tensor) -> Tensor:
        # Named, because the default device may be a GPU, whose memory cannot be pinned.
        return torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)

    def _take(self) -> Readback:
        step, host, done, context = self._in_flight.popleft()
        if done is None:
            return Readback(step, host.numpy(), context)
        array = np.array(host.numpy())  # a copy, because the buffer is reused
        self._free.append(host)
        return Readback(step, array, context)
