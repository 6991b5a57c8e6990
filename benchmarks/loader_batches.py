"""Host memory of a step's batch: one big loader batch against N small ones that are gathered.

Run: `python benchmarks/loader_batches.py`. Memory is what the process and its workers hold together
(PSS, which counts shared pages once), above what they hold before the first batch, sampled every
5 ms over four steps. A step keeps its batch for a while, so that workers get as far ahead as they
can.
"""

import argparse
import gc
import multiprocessing
import threading
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_mp.strategies._inf_cl.loader_batches import gather_batches

STEPS = 4


class Rows(Dataset[Tensor]):
    """Rows of random bytes."""

    def __init__(self, count: int, row_bytes: int) -> None:
        self._count, self._row_bytes = count, row_bytes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 255, (self._row_bytes,), dtype=torch.uint8)


def held_bytes() -> int:
    """Return what this process and its children hold."""
    total = 0
    for pid in ["self", *(str(child.pid) for child in multiprocessing.active_children())]:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def peak_bytes(rows: int, row_bytes: int, batches_per_step: int, workers: int) -> int:
    """Return the most that four steps add to what the loader and its workers hold at rest."""
    data = Rows(STEPS * rows, row_bytes)
    loader = DataLoader(data, batch_size=rows // batches_per_step, num_workers=workers)
    at_rest, peak, stop = held_bytes(), 0, threading.Event()
    # A worker that holds nothing yet still takes a share of the interpreter.
    list(DataLoader(Rows(2 * workers, 1), num_workers=workers))

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, held_bytes() - at_rest)

    watcher = threading.Thread(target=watch)
    watcher.start()
    batches = iter(gather_batches(loader, batches_per_step, pin=False))
    for _ in range(STEPS):
        batch = next(batches)
        time.sleep(1.0)
        del batch
    stop.set()
    watcher.join()
    del batches, loader
    gc.collect()
    return peak


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="of a step's batch")
    parser.add_argument("--row-bytes", type=int, default=2**17)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    whole = arguments.rows * arguments.row_bytes
    print(f"A batch of {whole / 2**20:.0f} MiB, {arguments.workers} workers")
    print("| loader batches a step | peak MiB | in batches |\n|---|---|---|")
    for count in (1, 2, 4, 8, 16, 32):
        peak = peak_bytes(arguments.rows, arguments.row_bytes, count, arguments.workers)
        print(f"| {count} | {peak / 2**20:.0f} | {peak / whole:.2f} |", flush=True)


if __name__ == "__main__":
    main()
