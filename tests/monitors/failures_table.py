"""Train planted failures under all monitors, apply each remedy, and print a table.

A row contains the failure, the step at which it begins, the step and kind of the first alarm that
names it, the tensor in the alarm, the remedy, and whether the run learns with the remedy.

    python -m tests.monitors.failures_table
    python -m tests.monitors.failures_table --only "square root at 0" "dead units" -j 1
    python -m tests.monitors.failures_table --markdown failures.md
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lightning_mp.plan.table import aligned
from tests.monitors.planted_failures import FAILURES, Planted
from tests.monitors.table import start_worker

HEADER = ["failure", "from step", "alarm at", "alarm", "names", "remedy", "cured"]
BY_NAME: dict[str, Planted] = {planted.name: planted for planted in FAILURES}


class Row(NamedTuple):
    """The result of one planted failure."""

    cells: list[str]
    is_found: bool
    is_cured: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a failure was not found or not cured."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.monitors.failures_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FAILURE", choices=list(BY_NAME), default=list(BY_NAME),
        help="failures to plant (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: CPUs)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    with contextlib.ExitStack() as stack:
        runs: Iterable[Row] = map(_run, options.only)
        if options.jobs > 1:
            context = multiprocessing.get_context("spawn")
            runs = stack.enter_context(context.Pool(options.jobs, start_worker)).imap(
                _run, options.only
            )
        rows = list(tqdm(runs, total=len(options.only), unit="failure"))
    print("\n".join(aligned([HEADER, *(row.cells for row in rows)])))
    found, cured = sum(row.is_found for row in rows), sum(row.is_cured for row in rows)
    print(f"\n{found} of {len(rows)} failures named in time; {cured} cured by their remedy")
    if options.markdown is not None:
        lines = [HEADER, ["---"] * len(HEADER), *(row.cells for row in rows)]
        options.markdown.write_text("".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return int(found < len(rows) or cured < len(rows))


def _run(name: str) -> Row:
    planted = BY_NAME[name]
    outcome = planted.fail()
    alarm, cured = planted.found(outcome), planted.cured().is_healthy
    is_found = alarm is not None and not outcome.is_healthy and alarm.step <= planted.step
    cells = [name, str(planted.from_step), "never", "", "", planted.cure, "yes" if cured else "no"]
    if alarm is not None:
        cells[2:5] = str(alarm.step), f"`{alarm.kind}`", f"`{alarm.tensor}`" if alarm.tensor else ""
    return Row(cells, is_found, cured)


if __name__ == "__main__":
    sys.exit(main())
