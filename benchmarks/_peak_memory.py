"""Peak extra memory of a piece of code: beyond what was there before and what it has to return.

On CUDA the caching allocator knows it: `peak_cuda_bytes`. On a CPU nobody counts, so
`peak_cpu_bytes` asks the kernel how far the resident set grew, each time in a process of its own
that is forked from one that has computed nothing yet:

1. It makes the inputs and warms up at a toy size, which loads code and starts threads.
2. It resets the high-water mark of its resident set (`5` into `/proc/self/clear_refs`), notes the
   resident set, runs the code, and reads the high-water mark (`VmHWM`).

So work areas of libraries count, not only tensors. glibc is told to map every block of 64 KiB
or more on its own (`MALLOC_MMAP_THRESHOLD_`), so a freed tensor is given back at once and what
is resident is what is alive; otherwise the figure would depend on how the heap had been cut up.
Where the mark cannot be reset, the figure is an upper bound; where there is no `/proc`, there is
none.

Run as a module, this file is the process that forks: jobs come in by stdin as JSON, a line each,
and figures leave by stdout.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

__all__ = ["Job", "Passes", "peak_cpu_bytes", "peak_cuda_bytes"]

ROOT = Path(__file__).resolve().parents[1]
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Passes:
    """Code to weigh; inputs exist before `run` is called.

    Args:
        warm_up: The same at a toy size.
        run: What is weighed.
        returned_bytes: What `run` leaves behind on purpose, such as gradients; not counted.
    """

    warm_up: Callable[[], object]
    run: Callable[[], object]
    returned_bytes: int


@dataclass(frozen=True)
class Job:
    """How another process makes the passes.

    Args:
        target: `package.module:function`, a function that returns `Passes`.
        arguments: Its keyword arguments, of plain types.
    """

    target: str
    arguments: dict[str, Any]


def peak_cuda_bytes(passes: Passes, device: torch.device) -> int:
    """Return the peak that `run` adds to the bytes in use by tensors, less what it returns."""
    passes.warm_up()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    passes.run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - passes.returned_bytes


def peak_cpu_bytes(jobs: Sequence[Job]) -> list[int | None]:
    """Return the same of each job on the CPU; `None` where it failed or cannot be told."""
    if not Path("/proc/self/status").exists():
        return [None] * len(jobs)
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name],
        cwd=ROOT,
        env={**os.environ, **_MALLOC},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures: list[int | None] = []
    with process, tqdm(total=len(jobs), desc="peak memory", unit="run", leave=False) as bar:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("The process that weighs has no pipes.")
        for job in jobs:
            bar.set_postfix_str(str(job.arguments.get("name", job.target)))
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            figures.append(json.loads(answer) if answer else None)
            bar.update()
        process.stdin.close()
    return figures


def _serve() -> None:
    """Answer every job on stdin by one line on stdout, from a fresh fork."""
    for line in sys.stdin:
        job = Job(**json.loads(line))
        module, _, function = job.target.partition(":")
        make_passes = getattr(importlib.import_module(module), function)
        figure_out, figure_in = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.write(figure_in, str(_grown_bytes(make_passes(**job.arguments))).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(figure_in)
        with os.fdopen(figure_out) as pipe:
            figure = pipe.read()
        os.waitpid(child, 0)
        print(figure or "null", flush=True)


def _grown_bytes(passes: Passes) -> int:
    passes.warm_up()
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    passes.run()
    return _status_bytes("VmHWM") - before - passes.returned_bytes


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; its lines are those of Linux's proc(5).")


if __name__ == "__main__":
    _serve()
