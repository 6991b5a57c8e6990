"""What every benchmark needs: fair timing, the machine's GEMM rate, its facts, CSV and tables.

Shapes:
    t: edge of a tile. D: feature width.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

__all__ = [
    "CsvTable",
    "Spread",
    "environment",
    "format_table",
    "gemm_steps",
    "load_warning",
    "median_ratio",
    "time_alternately",
]

MIB = 2**20
# A core that is taken for half of the time stretches whatever two threads do together.
_BUSY_CORES = 0.5


@dataclass(frozen=True)
class Spread:
    """The seconds that one contender took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)


def time_alternately(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device, title: str
) -> dict[str, Spread]:
    """Time all steps in turn, A B C A B C, after one round that does not count.

    Machines drift: clocks, temperature, neighbours. In turn, drift meets every step alike, and a
    ratio taken within a round does not see it. A step is over when the device is idle.

    Args:
        steps: What to time, by name.
        rounds: Rounds that count.
        device: Where the steps compute.
        title: For the progress bar.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with tqdm(total=(rounds + 1) * len(steps), desc=title, unit="step", leave=False) as bar:
        for index in range(rounds + 1):
            for name, step in steps.items():
                bar.set_postfix_str(name, refresh=False)
                _wait_for(device)
                start = time.perf_counter()
                step()
                _wait_for(device)
                if index > 0:
                    seconds[name].append(time.perf_counter() - start)
                bar.update()
    return {name: Spread(tuple(values)) for name, values in seconds.items()}


def median_ratio(spread: Spread, base: Spread) -> float:
    """Return the median over rounds of how many times as long as `base` a step took."""
    return statistics.median(
        mine / other for mine, other in zip(spread.seconds, base.seconds, strict=True)
    )


def gemm_steps(
    *, tile: int, width: int, square: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[[], object]], float]:
    """Return plain matrix products to time, and the FLOP that each step does at least.

    Three shapes: `(t, D) x (D, t)`, the logits of a tile; `(t, t) x (t, D)`, its gradients; and a
    big square. Small products are repeated until all steps do about the same work.
    """
    shapes = {
        f"gemm {tile}x{width}x{tile}": (tile, width, tile),
        f"gemm {tile}x{tile}x{width}": (tile, tile, width),
        f"gemm {square}x{square}x{square}": (square, square, square),
    }
    flop = max(2.0 * rows * inner * columns for rows, inner, columns in shapes.values())
    steps: dict[str, Callable[[], object]] = {}
    for name, (rows, inner, columns) in shapes.items():
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(inner, columns, device=device).to(dtype)
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        calls = max(1, round(flop / (2 * rows * inner * columns)))
        steps[name] = _repeated_product(left, right, out, calls)
    return steps, flop


def _repeated_product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, calls: int
) -> Callable[[], object]:
    def step() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=out)

    return step


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device: torch.device) -> dict[str, str]:
    """Return what a figure depends on: chip, threads, versions. No names of machines or people."""
    return {
        "device_name": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "lightning_mp": _version("lightning-mp"),
    }


def load_warning() -> str | None:
    """Return a sentence if other work keeps the cores busy; ask before any work of one's own."""
    if not hasattr(os, "getloadavg") or os.getloadavg()[0] < _BUSY_CORES:
        return None
    return (
        f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before the start: other "
        "work is running. Losses that take many small steps suffer most; run again when it is "
        "quiet, or with --threads 1."
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


class CsvTable:
    """A CSV file that rows are appended to, over many runs and machines.

    Args:
        path: The file; made with its header when it is not there.
        columns: The header.

    Raises:
        ValueError: The file has another header. Rows under the wrong header would be read as what
            they are not, so this is checked before anything is measured.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)
        found = self._header()
        if found is not None and found != self.columns:
            raise ValueError(
                f"Passed the CSV file {str(path)!r} with the header {','.join(found)!r}. Rows of "
                f"this benchmark need {','.join(self.columns)!r}. Pass another path, or move that "
                "file away."
            )

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows at the end; each has a value for every column."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = self._header() is None
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)

    def _header(self) -> list[str] | None:
        if not self.path.exists():
            return None
        with self.path.open(newline="") as file:
            return next(csv.reader(file), None)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header in columns: the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])
