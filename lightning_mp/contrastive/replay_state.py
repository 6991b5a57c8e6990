"""What a second run of the same code needs to give the same numbers: generators, buffers, autocast.

Gradient caching runs a tower twice, first without and then with a graph. The second run must draw
the dropout masks of the first and must leave no second trace in running statistics.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["AutocastState", "BufferState", "RngState"]


class RngState:
    """The states of all generators that a forward may draw from, as they are now.

    Those of torch on the CPU and on `device`, of Python, and of numpy where it is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._accelerator = (
            None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        )
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Set the generators back to the states held here."""
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class AutocastState:
    """Autocast for a device type as it is now, to be entered again at another time."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run under this state, without the cache of cast weights.

        A weight that was cast without grad and cached would cut the graph of the run with grad.
        """
        dtype = self._dtype if self._enabled else None
        with torch.autocast(
            self._device_type, dtype=dtype, enabled=self._enabled, cache_enabled=False
        ):
            yield


class BufferState:
    """The buffers of a module as they are now, so that micro-batches together update them once.

    Every micro-batch starts from these values, as every row of a whole batch would. `commit` then
    sets floating-point buffers to the mean of what the micro-batches made of them, weighted by
    rows, and all others (such as `num_batches_tracked`) to what the last one did. For a running
    average of per-row statistics, that is the update of the whole batch.

    Args:
        module: Whose buffers to hold; `None` for a function without a module.
    """

    def __init__(self, module: nn.Module | None) -> None:
        # Modules and names, not tensors alone: a forward may also assign a new tensor.
        self._places = [
            (owner, name, buffer)
            for owner in (() if module is None else module.modules())
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._values = [buffer.clone() for _, _, buffer in self._places]
        self._means: list[Tensor] | None = None
        self._rows = 0

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back to the values held here."""
        self._write(self._values)

    @torch.no_grad()
    def collect(self, rows: int) -> None:
        """Take in what a micro-batch of `rows` rows made of the buffers."""
        self._rows += rows
        now = [owner._buffers[name] for owner, name, _ in self._places]
        if self._means is None:
            self._means = [
                held if value is None else value.clone()
                for value, held in zip(now, self._values, strict=True)
            ]
            return
        for mean, value in zip(self._means, now, strict=True):
            if value is None or value.shape != mean.shape:
                continue
            if mean.is_floating_point():
                mean.lerp_(value.to(mean.dtype), rows / self._rows)
            else:
                mean.copy_(value)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the collected values into the buffers."""
        if self._means is not None:
            self._write(self._means)
            self._means = None

    def _write(self, values: list[Tensor]) -> None:
        for (owner, name, buffer), value in zip(self._places, values, strict=True):
            owner._buffers[name] = buffer
            buffer.copy_(value)
