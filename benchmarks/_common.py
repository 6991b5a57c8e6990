"""What every benchmark shares: fair timing, the machine's facts, command line, CSV and tables."""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import faulthandler
import importlib.metadata
import itertools
import os
import platform
import re
import signal
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark.utils.timer import timer
from tqdm import tqdm
from triton.testing import do_bench

from lightning_mp.plan.allocation import peak_allocated

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
OUT_OF_MEMORY = "ran out of memory"
# A core that is taken for half of the time stretches whatever two threads do together.
_BUSY_CORES = 0.5
# On a GPU, launching and waiting take some 20 us: a thousandth of this.
_LONG_ENOUGH = 0.02


@dataclass(frozen=True)
class Spread:
    """The seconds that one contender took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def columns(self) -> dict[str, float]:
        """The columns of a CSV file that tell it."""
        times = {"ms_median": self.median, "ms_min": min(self.seconds), "ms_max": max(self.seconds)}
        return {"rounds": len(self.seconds)} | {name: 1e3 * t for name, t in times.items()}


def time_alternately(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    title: str = "",
    max_seconds: float | None = None,
) -> dict[str, Spread]:
    """Time all steps in turn, A B C A B C, after one round that does not count.

    Machines drift: clocks, temperature, neighbours. In turn, drift meets every step alike, and a
    ratio taken within a round does not see it. A round is a call by the clock of torch's
    benchmarks, which waits for the device; of a step that takes a GPU less than 20 ms it is
    Triton's `do_bench`, which repeats it for that long and clears the cache in between.

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
    seconds: dict[str, list[float]] = {}
    left, once = dict.fromkeys(steps, rounds), dict.fromkeys(steps, True)
    turns = tqdm([*itertools.product(range(rounds + 1), steps)], title, unit="step", leave=False)
    for index, name in turns:
        turns.set_postfix_str(name, refresh=False)
        if index == 0:
            with contextlib.suppress(torch.OutOfMemoryError):
                took = min(_seconds_of(steps[name], once=True) for _ in range(2))
                seconds[name] = []
                once[name] = device.type != "cuda" or took > _LONG_ENOUGH
                if max_seconds is not None:
                    left[name] = max(1, min(rounds, int(max_seconds / max(took, 1e-6))))
        elif name in seconds and index <= left[name]:
            seconds[name].append(_seconds_of(steps[name], once=once[name]))
    return {name: Spread(tuple(found)) for name, found in seconds.items()}


def _seconds_of(step: Callable[[], object], *, once: bool) -> float:
    """Return the seconds of one call, or the median of many on a GPU."""
    if once:
        start = timer()
        step()
        return timer() - start
    return 1e-3 * float(do_bench(step, warmup=0, rep=1e3 * _LONG_ENOUGH, return_mode="median"))


def median_ratio(spread: Spread, base: Spread) -> float:
    """Return the median over common rounds of how many times as long as `base` a step took."""
    return statistics.median(
        mine / other for mine, other in zip(spread.seconds, base.seconds, strict=False)
    )


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that tensors made by `run` take at a time, those that it leaves too.

    On CUDA the allocator knows it, on a CPU torch's profiler; of other devices nobody does.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    return peak_allocated(run)


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
    versions = {name: _version(name) for name in ("torch", "triton", "lightning", "lightning-mp")}
    return {
        "device_name": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name.replace("-", "_"): version for name, version in versions.items()},
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

    Columns that the file has not are added to it, empty for older rows.

    Args:
        path: The file; made when it is not there.
        columns: Those that it has at least.
        measured: Columns that a run finds out. The others say what was measured where: rows that
            have all of these in common are of one thing, and the last one stays.
    """

    def __init__(self, path: Path, columns: Sequence[str], measured: Collection[str] = ()) -> None:
        self.path, self.columns, self._measured = path, columns, {"date", *measured}

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows at the end, in place of older ones."""
        old: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                old = list(csv.DictReader(file))
        new = [{n: "" if v is None else str(v) for n, v in row.items()} for row in rows]
        columns = list(dict.fromkeys([*(old[0] if old else ()), *self.columns]))
        key = [name for name in columns if name not in self._measured]
        by_key = {tuple(row.get(name, "") for name in key): row for row in [*old, *new]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")  # whoever is killed leaves the whole file or the old
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(by_key.values())
        part.replace(self.path)


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


@dataclass
class Report:
    """What is found out about one problem.

    Args:
        rows: What was measured, by the names of columns, and what was found.
        table: Headers, and how a row stands under them; what has no value is a dash.
        said: What the figures say.
        sound: Whether all that is ours ran and was right.
    """

    rows: list[tuple[dict[str, Any], dict[str, Any]]]
    table: Mapping[str, str]
    said: list[str] = field(default_factory=list)
    sound: bool = True


@dataclass(frozen=True)
class Benchmark:
    """A script: its name and docstring, its options, what it measures, and defaults for toys."""

    name: str
    doc: str | None
    add_options: Callable[[Callable[..., Any]], object]
    measure: Callable[[argparse.Namespace], Iterable[Report]]
    quick: Mapping[str, Any]

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the command line; `--quick` replaces what was not given."""
        parser = argparse.ArgumentParser(
            description=str(self.doc).partition("\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.add_options(parser.add_argument)
        add = parser.add_argument
        results = ROOT / "benchmarks" / "results" / f"{self.name}.csv"
        add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        add("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
        add("--csv", type=Path, default=results.relative_to(ROOT), help="file of the rows")
        add("--quick", action="store_true", help="rehearse at toy size; only a given --csv is kept")
        if "--quick" in (sys.argv[1:] if argv is None else argv):
            parser.set_defaults(**self.quick, csv=None)
        args = parser.parse_args(argv)
        if args.csv == results.relative_to(ROOT):
            args.csv = results
        try:
            args.device = pick_device(args.device)
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))
        return args

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; the exit status is 1 if something of ours failed or was wrong."""
        if argv is None:  # what is interrupted inside of a kernel says where, too
            faulthandler.register(signal.SIGINT, chain=True)
        args = self.parse(argv)
        if (warning := load_warning()) is not None:
            print(warning)
        torch.set_num_threads(args.threads)
        facts = environment(torch.device(args.device))
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        all_sound = True
        for report in self.measure(args):
            date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            rows = [{"date": date, **what, **found, **facts} for what, found in report.rows]
            if args.csv is not None and rows:
                CsvTable(args.csv, list(rows[0]), report.rows[0][1]).append(rows)
            if rows:
                lines = [[cell(form, row) for form in report.table.values()] for row in rows]
                print(f"\n{format_table(list(report.table), lines)}\n")
            print("\n".join(report.said), flush=True)
            all_sound &= report.sound
        return 0 if all_sound else 1


def cell(form: str, row: Mapping[str, Any]) -> str:
    """Return a row in a form, a dash if it has no value for it."""
    fields = re.findall(r"{(\w+)", form)
    return "-" if any(row[name] is None for name in fields) else form.format(**row)


def positive(text: str) -> int:
    """Return a positive whole number, for a command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def error_words(error: Exception) -> str:
    """Return why something did not finish, in words for the eye."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return f"failed: {type(error).__name__}: {str(error).partition('. ')[0]}"
