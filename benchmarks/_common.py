"""Shared by all benchmarks: timing, facts about the machine, command line, CSV and tables.

Contenders run in turn, A B C A B C, because machines drift: clock rates, temperature, other work.
Drift then affects all contenders alike and cancels in a ratio within one round. `ms` is the median
and range over rounds, a ratio the median of the ratios within rounds.
"""

import argparse
import csv
import datetime
import faulthandler
import itertools
import os
import platform
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch.utils.benchmark.utils.timer import timer

from lightning_mp import __version__
from lightning_mp.plan.table import aligned
from papers.allocation import peak_allocated
from papers.machine import cpu_name

try:
    from tqdm import tqdm
except ImportError:  # the losses are measured with torch and Triton alone

    class tqdm(list):  # type: ignore[no-redef,type-arg]  # noqa: N801
        """Iterates over a list without a progress bar."""

        def __init__(self, turns: Iterable[Any], *_: Any, **__: Any) -> None:
            super().__init__(turns)

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            """Do nothing."""


ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
OUT_OF_MEMORY = "ran out of memory"
# Other work on half a core already slows down two threads that work together.
_BUSY_CORES = 0.5
# On a GPU, launching and waiting take some 20 us: a thousandth of this.
_LONG_ENOUGH = 0.02

Found = TypeVar("Found")


def take_turns(
    runs: Mapping[str, Callable[[], Found]],
    rounds: int = 1,
    max_seconds: float | None = None,
    title: str = "in turn",
    seconds_of: Callable[[Any], float] = float,
) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """Run all contenders in turn; return their results by round, and why others failed.

    The rounds of one contender together take about `max_seconds`, judged by `seconds_of` its first
    result: a slow contender skips the last rounds.
    """
    found: dict[str, list[Found]] = {name: [] for name in runs}
    failures: dict[str, str] = {}
    left = dict.fromkeys(runs, rounds)
    turns = tqdm([*itertools.product(range(rounds), runs)], title, leave=False)
    for index, name in turns:
        if name in failures or index >= left[name]:
            continue
        turns.set_postfix_str(name, refresh=False)
        try:
            found[name].append(runs[name]())
        except Exception as error:
            # Failures are named at the end, and the other contenders go on.
            failures[name] = error_words(error)
            continue
        if index == 0 and max_seconds is not None:
            # The first round has been run already.
            left[name] = max(1, int(max_seconds / max(seconds_of(found[name][0]), 1e-6)))
    return {name: each for name, each in found.items() if name not in failures}, failures


def time_in_turn(
    steps: Mapping[str, Callable[[], object]], device: torch.device, *limits: Any
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds of all steps, run in turn after two rounds that do not count.

    A round is one call, timed by the clock of torch's benchmarks, which waits for the device. For a
    step that takes a GPU less than 20 ms, it is Triton's `do_bench`, which repeats the step for
    that long and clears the cache in between. The limits and the result are those of `take_turns`.
    """
    calls = {name: partial(_seconds_of_call, step) for name, step in steps.items()}
    # The first round may compile; the second one decides which steps are repeated.
    warm, failures = take_turns(calls, rounds=2)
    for name, seconds in warm.items():
        # The shorter one, because the first round may have compiled.
        if device.type == "cuda" and min(seconds) < _LONG_ENOUGH:
            calls[name] = partial(_seconds_of_many, steps[name])
    spreads, later = take_turns({name: calls[name] for name in warm}, *limits)
    return spreads, failures | later


def _seconds_of_call(step: Callable[[], object]) -> float:
    start = timer()
    step()
    return timer() - start


def _seconds_of_many(step: Callable[[], object]) -> float:
    from triton.testing import do_bench  # only Linux has Triton

    return 1e-3 * float(do_bench(step, warmup=0, rep=1e3 * _LONG_ENOUGH, return_mode="median"))


def time_columns(seconds: Sequence[float]) -> dict[str, float]:
    """Return the timing columns of a CSV file."""
    ms = [1e3 * each for each in seconds]
    return {"rounds": len(ms), "ms_median": median(ms), "ms_min": min(ms), "ms_max": max(ms)}


def median_ratio(above: Sequence[float] | None, below: Sequence[float]) -> Any:
    """Return the median of the ratios within common rounds; `None` if `above` is empty."""
    # Not strict, because slow contenders skip the last rounds.
    return above and median(a / b for a, b in zip(above, below, strict=False))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of the tensors that `run` makes, including those that it leaves.

    The figure comes from the allocator on CUDA and from torch's profiler on a CPU; it is `None` on
    other devices.
    """
    if device.type == "cuda":
        # A cached block may be larger than the tensor in it, and would count in full.
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run()
        return torch.accelerator.max_memory_allocated(device) - before
    return peak_allocated(run) if device.type == "cpu" else None


def environment(device: torch.device) -> dict[str, str]:
    """Return what a figure depends on: chip, threads and versions."""
    return {
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: _version_of(name) for name in ("torch", "triton", "lightning")},
        "lightning_mp": __version__,
    }


def append_rows(
    path: Path,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, object]],
    measured: Collection[str] = (),
) -> None:
    """Append rows to a CSV file, and add columns that it lacks.

    If rows differ only in the date and in the `measured` columns, only the last one is kept.
    """
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    old = list(csv.DictReader(lines))
    new = [{n: "" if v is None else str(v) for n, v in row.items()} for row in rows]
    columns = list(dict.fromkeys([*(old[0] if old else ()), *columns]))
    key = [name for name in columns if name not in {"date", *measured}]
    by_key = {tuple(row.get(name, "") for name in key): row for row in [*old, *new]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # an interrupted run leaves the old file or the new one
    with part.open("w", newline="", encoding="utf-8") as file:
        # Not the CRLF of the csv module, because git tracks the files.
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(by_key.values())
    part.replace(path)


@dataclass
class Report:
    """The result of one problem."""

    rows: list[tuple[dict[str, Any], dict[str, Any]]]  # the problem and the figures
    table: Mapping[str, str]  # the format of each column, by header
    said: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)  # the reason, by name
    sound: bool = True  # whether all of this package's code ran and was right


@dataclass(frozen=True)
class Benchmark:
    """A script: its name, its docstring, its options and its measurement."""

    name: str
    doc: str | None
    measure: Callable[[argparse.Namespace], Iterable[Report]]
    # Arguments of argparse, by default positive integers; `toy` is the default with `--quick`.
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line; `--quick` replaces the defaults."""
        parser = argparse.ArgumentParser(
            description=str(self.doc).partition("\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add = parser.add_argument
        is_quick = "--quick" in (sys.argv[1:] if argv is None else argv)
        for name, option in self.options.items():
            kept = {"type": str if "choices" in option else positive, "default": None, **option}
            toy = kept.pop("toy", kept["default"])
            kept["default"] = toy if is_quick else kept["default"]
            add(f"--{name}", nargs="+" if isinstance(toy, list) else None, **kept)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        add("--device", type=_device, default=device, help="cpu, cuda or cuda:N")
        add("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
        results = ROOT / "benchmarks" / "results" / f"{self.name}.csv"
        add(
            "--csv",
            type=Path,
            default=None if is_quick else results,
            help="CSV file to which rows are added",
        )
        add("--quick", action="store_true", help="run at toy size; rows are kept only with --csv")
        return parser.parse_args(argv)

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; the exit status is 1 if the package's code failed or was wrong."""
        if argv is None:  # an interrupt inside of a kernel prints a traceback as well
            faulthandler.register(signal.SIGINT, chain=True)
        args = self.parse(argv)
        if (load := os.getloadavg()[0]) > _BUSY_CORES:
            print(f"Other work is running (load {load:.1f}). Measure again on an idle machine.")
        torch.set_num_threads(args.threads)
        facts = environment(args.device)
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        all_sound = True
        for report in self.measure(args):
            date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            rows = [{"date": date, **what, **found, **facts} for what, found in report.rows]
            if rows:
                cells = [[cell(form, row) for form in report.table.values()] for row in rows]
                print("", *aligned([list(report.table), *cells]), "", sep="\n")
                if args.csv is not None:
                    append_rows(args.csv, list(rows[0]), rows, report.rows[0][1])
            missing = [f"Left out: {name}: {why}." for name, why in report.left_out.items()]
            print("\n".join([*missing, *report.said]), flush=True)
            all_sound &= report.sound
        return 0 if all_sound else 1


def _version_of(package: str) -> str | None:
    try:
        return str(torch.__version__) if package == "torch" else version(package)
    except PackageNotFoundError:
        return None


def cell(form: str, row: Mapping[str, Any]) -> str:
    """Return a row in a format; a dash if the value is `None`."""
    try:
        return form.format(**row)
    except TypeError:  # `None` takes no format
        return "-"


def verdict(figure: str, target: str, met: bool) -> str:
    """Return a sentence that compares a figure with its target."""
    return f"{figure} (target: {target}): {'met' if met else 'missed'}."


def positive(text: str) -> int:
    """Parse a positive integer of a command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"torch has no device {name}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"torch sees no GPU for {name}; pass --device cpu")
    return device


class LeftOut(ValueError):
    """A contender does not run here; the message says why."""


def error_words(error: Exception) -> str:
    """Return a readable reason of a failure."""
    if isinstance(error, LeftOut):
        return str(error)
    # On a CPU it is a plain RuntimeError with this message.
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return f"failed: {type(error).__name__}: {str(error).partition('. ')[0]}"
