"""What code allocates at its peak, to the byte."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

from torch.autograd.profiler import profile

__all__ = ["peak_allocated"]


def peak_allocated(run: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once, beyond those from before.

    torch's profiler sees every allocation on a CPU, as the caching allocator does on CUDA; a
    resident set would add libraries' work areas and what the heap keeps of freed blocks.
    """
    # Above all that Kineto says, which asks once, at the first profile, and notes starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    gc.collect()  # what is freed in between would count
    # The backend of `torch.profiler`: that one builds Python objects of all events, five times the
    # work for a loss in small tiles.
    with profile(profile_memory=True) as profiled:
        run()
    events = profiled.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak
