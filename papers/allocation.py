"""Measures the peak memory of tensors, to the byte."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

from torch.autograd.profiler import profile

__all__ = ["peak_allocated"]


def peak_allocated(run: Callable[[], object]) -> int:
    """Return the peak bytes of the tensors that `run` allocates on a CPU.

    torch's profiler sees every allocation on a CPU, as the caching allocator does on CUDA. The
    resident set would include the libraries' work areas and freed blocks that the heap keeps.
    """
    # Silences Kineto, which reads the level once, at the first profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    gc.collect()  # garbage that is freed during the run would count
    # `torch.profiler` would build Python objects of all events, which takes five times as long for
    # a loss in small tiles.
    with profile(profile_memory=True) as profiled:
        run()
    events = profiled.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak
