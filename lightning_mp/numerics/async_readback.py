"""Copies small tensors between host and device without waiting for the device."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["AsyncReadback", "Readback", "send"]


class Readback(NamedTuple):
    """One tensor that has arrived on the host."""

    step: int  # the step it was submitted under
    array: npt.NDArray[Any]  # a copy of its values that nothing else writes to
    context: dict[str, Any]  # what was passed with it


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; what is queued there next may read it."""
    if device.type != "cuda":
        return values.to(device)
    # From pageable memory the copy would wait for the device.
    return values.pin_memory().to(device, non_blocking=True)


class _InFlight(NamedTuple):
    step: int
    host: Tensor
    done: Any  # a `torch.cuda.Event`; `None` for a copy that has been made
    context: dict[str, Any]


class AsyncReadback:
    """Brings statistics to the host under the step they came from, and never makes a step wait.

    `tensor.item()` in a training step waits until the GPU has done everything asked of it so far,
    so that it idles while the host prepares the next kernels. Here a copy is queued behind the
    kernels that make the numbers, and is looked at when it is done, mostly one or two steps later.

    On the CPU a tensor is cloned and ready at once. Devices other than CUDA have no pinned memory
    here: `submit` waits for them.
    """

    def __init__(self) -> None:
        self._in_flight: deque[_InFlight] = deque()
        # Pinned memory is slow to get: buffers are used again. Where all are in flight another one
        # is made, so that nothing is lost.
        self._free: list[Tensor] = []

    def __len__(self) -> int:
        """Return how many submissions have not been taken."""
        return len(self._in_flight)

    def submit(self, step: int, packed: Tensor, **context: Any) -> None:
        """Start to copy a tensor; it may be changed by whatever is queued after this.

        `context`, such as the names of the rows, is handed back with the values: do not change it.
        """
        host, done = self._start_copy(packed.detach())
        self._in_flight.append(_InFlight(step, host, done, context))

    def ready(self) -> list[Readback]:
        """Take what has arrived, in the order of submission, without waiting for the rest."""
        taken = []
        while self._in_flight:
            done = self._in_flight[0].done
            # Later ones wait for it, so that steps are judged in their order.
            if done is not None and not done.query():
                break
            taken.append(self._take())
        return taken

    def drain(self) -> list[Readback]:
        """Wait for everything and take it: at the end of training, or after an exception."""
        for each in self._in_flight:
            if each.done is not None:
                each.done.synchronize()
        return self.ready()

    def _start_copy(self, packed: Tensor) -> tuple[Tensor, Any]:
        """Return the host's copy, and the event after which it may be read."""
        # A copy on the CPU too: the caller's buffer changes before the host looks at it.
        if packed.device.type != "cuda":
            return packed.to("cpu", copy=True), None
        host = self._buffer(packed)
        # An event is recorded on the current device's stream, which may be another's.
        with torch.accelerator.device_index(packed.device.index):
            host.copy_(packed, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return host, done

    def _buffer(self, packed: Tensor) -> Tensor:
        """Return a pinned buffer that nothing is copied to: a free one that fits, or a new one."""
        for index, host in enumerate(self._free):
            if host.shape == packed.shape and host.dtype == packed.dtype:
                return self._free.pop(index)
        return self._new_buffer(packed)

    def _new_buffer(self, packed: Tensor) -> Tensor:
        return torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)

    def _take(self) -> Readback:
        step, host, done, context = self._in_flight.popleft()
        if done is None:
            return Readback(step, host.numpy(), context)
        array = np.array(host.numpy())  # a copy: the buffer will be overwritten
        self._free.append(host)
        return Readback(step, array, context)
