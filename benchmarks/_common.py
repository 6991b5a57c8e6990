"""What every benchmark needs: fair timing, the machine's GEMM rate, its facts, CSV and tables.

Shapes:
    t: edge of a tile. D: feature width.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import lightning_mp

__all__ = [
    "CsvTable",
    "Spread",
    "environment",
    "format_table",
    "gemm_steps",
    "load_warning",
    "median_ratio",
    "pick_device",
    "time_alternately",
]

MIB = 2**20
# A core that is taken for half of the time stretches whatever two threads do together.
_BUSY_CORES = 0.5
# On a GPU, launching and waiting take some 20 us: a thousandth of this.
_LONG_ENOUGH = 0.02
_MOST_CALLS = 100


@dataclass(frozen=True)
class Spread:
    """The seconds that one contender took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)


def time_alternately(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    title: str,
    max_seconds: float | None = None,
) -> dict[str, Spread]:
    """Time all steps in turn, A B C A B C, after one round that does not count.

    Machines drift: clocks, temperature, neighbours. In turn, drift meets every step alike, and a
    ratio taken within a round does not see it. A step is over when the device is idle. On a GPU a
    short step is repeated for 20 ms and its mean taken, so that waiting and launching do not count.

    Args:
        steps: What to time, by name.
        rounds: Rounds that count.
        device: Where the steps compute.
        title: For the progress bar.
        max_seconds: What all rounds of one step may take together; a step that takes long sits the
            last ones out, but not the first. `None` is no limit.

    Returns:
        The times of the steps, without those that ran out of memory.
    """
    plans: dict[str, _Plan] = {}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with tqdm(total=(rounds + 1) * len(steps), desc=title, unit="step", leave=False) as bar:
        for index in range(rounds + 1):
            for name, step in steps.items():
                bar.set_postfix_str(name, refresh=False)
                if index == 0:
                    with contextlib.suppress(torch.OutOfMemoryError):
                        took = _seconds_of(step, 1, device)
                        plans[name] = _Plan.of(took, rounds, max_seconds, device)
                elif name in plans and index <= plans[name].rounds:
                    seconds[name].append(_seconds_of(step, plans[name].calls, device))
                bar.update()
    return {name: Spread(tuple(seconds[name])) for name in plans}


@dataclass(frozen=True)
class _Plan:
    """How many rounds a step takes part in, and how often it is called in each."""

    rounds: int
    calls: int

    @classmethod
    def of(
        cls, seconds: float, rounds: int, max_seconds: float | None, device: torch.device
    ) -> _Plan:
        """Plan for a step that took some seconds."""
        seconds = max(seconds, 1e-6)
        if max_seconds is not None:
            rounds = max(1, min(rounds, int(max_seconds / seconds)))
        calls = round(_LONG_ENOUGH / seconds) if device.type == "cuda" else 1
        return cls(rounds, max(1, min(calls, _MOST_CALLS)))


def _seconds_of(step: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the mean seconds of some calls in a row."""
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _wait_for(device)
    return (time.perf_counter() - start) / calls


def median_ratio(spread: Spread, base: Spread) -> float:
    """Return the median over common rounds of how many times as long as `base` a step took."""
    return statistics.median(
        mine / other for mine, other in zip(spread.seconds, base.seconds, strict=False)
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


def pick_device(name: str) -> str:
    """Return the device to use; `auto` is CUDA where there is a GPU.

    Raises:
        ValueError: The name asks for a GPU that is not there.
        RuntimeError: torch knows no such device.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"Passed --device {name}, but torch sees no GPU. Pass --device cpu.")
    return name


def environment(device: torch.device) -> dict[str, str]:
    """Return what a figure depends on: chip, threads, versions. No names of machines or people."""
    return {
        "device_name": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "lightning_mp": _version("lightning-mp") or lightning_mp.__version__,
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
    """A CSV file of rows from many runs and machines; what is measured again replaces the old row.

    Args:
        path: The file; made with its header when it is not there.
        columns: The header.
        measured: Columns that a run finds out. The others say what was measured where: rows that
            have all of these in common are of one thing, and the last one stays.

    Raises:
        ValueError: The file has another header. Rows under the wrong header would be read as what
            they are not, so this is checked before anything is measured.
    """

    def __init__(self, path: Path, columns: Sequence[str], measured: Collection[str] = ()) -> None:
        self.path = path
        self.columns = list(columns)
        self._key = [name for name in self.columns if name not in {"date", *measured}]
        found = self._read()[0]
        if found and found != self.columns:
            raise ValueError(
                f"Passed the CSV file {str(path)!r} with the header {','.join(found)!r}. Rows of "
                f"this benchmark need {','.join(self.columns)!r}. Pass another path, or move that "
                "file away."
            )

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows at the end, each with a value for every column, in place of older ones."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _, found = self._read()
        new = [{n: "" if row[n] is None else str(row[n]) for n in self.columns} for row in rows]
        by_key = {tuple(row[name] for name in self._key): row for row in [*found, *new]}
        part = self.path.with_suffix(".part")  # whoever is killed leaves the whole file or the old
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(by_key.values())
        part.replace(self.path)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return the header and the rows of the file."""
        if not self.path.exists():
            return [], []
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), list(reader)


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
