"""What code allocates at its peak, to the byte."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_allocated"]


def peak_allocated(run: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once, beyond those from before.

    torch's profiler sees every allocation on a CPU, as the caching allocator does on CUDA; a
    resident set would add libraries' work areas and what the heap keeps of freed blocks.

    Args:
        run: What to weigh.
    """
    gc.collect()  # what is freed in between would count
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak
