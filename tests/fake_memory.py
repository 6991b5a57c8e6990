"""A simulated CUDA device with limited memory."""

from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda import FakeCuda

__all__ = ["SmallCuda"]


class SmallCuda(FakeCuda):
    """Raises torch's error if live memory exceeds the limit; freed memory is reusable at once.

    Args:
        memory_bytes: Memory of the device.
        **kwargs: Arguments of `FakeCuda`.
    """

    def __init__(self, memory_bytes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.memory_bytes = memory_bytes
        self.times_full = 0

    def __enter__(self) -> "SmallCuda":
        super().__enter__()
        for name, value in {
            "empty_cache": lambda: None,
            "get_memory_info": lambda device=None: (
                self.memory_bytes - self.live_bytes,
                self.memory_bytes,
            ),
            "memory_allocated": lambda device=None: self.live_bytes,
            "memory_reserved": lambda device=None: self.live_bytes,
            "max_memory_allocated": lambda device=None: self.peak_bytes,
            "reset_peak_memory_stats": self._reset_peak,
        }.items():
            self._patch.setattr(torch.accelerator, name, value)
        return self

    def _reset_peak(self, device: Any = None) -> None:
        self.peak_bytes = self.live_bytes

    def _remember(self, tensor: Tensor, owner: int) -> None:
        super()._remember(tensor, owner)
        if self.live_bytes > self.memory_bytes:
            self.times_full += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
