"""Count false alarms: train healthy models under all monitors, and print one table.

Every model is trained in every precision with all monitors at their default settings. Every alarm
is a false alarm; notes of severity `info` do not count. Rows that did not learn are marked, because
their alarms may be right.

    python -m tests.monitors.table
    python -m tests.monitors.table --only GPT-2 GAN --precision fp32 --steps 200 -j 1
    python -m tests.monitors.table --csv alarms.csv --markdown alarms.md
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks._common import append_rows
from lightning_mp.callbacks import Alarm
from lightning_mp.plan.table import aligned
from tests.monitors.healthy_models import MODELS, PRECISIONS, healthy_run

Row = tuple[str, str, int, int | None]  # model, precision, steps, `every_n_steps`
HEADER = ["model", "precision", "steps", "false alarms", "per 1000", "learned", "rules"]
ALARMS = ["model", "precision", "step", "monitor", "kind", "tensor", "message"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a run failed or did not learn."""
    options = _parse(arguments)
    rows = [
        (m, p, options.steps, options.every_n_steps)
        for m in options.only
        for p in options.precision
    ]
    results = _run(rows, options.jobs)
    print("\n".join(aligned([HEADER, *map(_cells, results)])))
    total = sum(len(result.alarms) for result in results)
    steps = sum(result.steps for result in results)
    above = sum(1000 * len(result.alarms) > result.steps for result in results)
    print(f"\n{total} false alarms in {steps} healthy steps: {1000 * total / steps:.3g} per 1000")
    print(f"{above} of {len(results)} runs have more than one per 1000")
    if options.messages:
        print("\n".join(["", *(_sentence(r, a) for r in results for a in r.alarms)]))
    if options.csv:
        options.csv.unlink(missing_ok=True)
        append_rows(options.csv, ALARMS, [_fields(r, a) for r in results for a in r.alarms])
    if options.markdown:
        options.markdown.write_text(_markdown(results))
    return int(not all(result.is_healthy for result in results))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.monitors.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default: 1000)")
    parser.add_argument(
        "--only", nargs="+", metavar="MODEL", choices=list(MODELS), default=list(MODELS),
        help=f"models to train: {', '.join(MODELS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS),
        help="(default: all)",
    )  # fmt: skip
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: CPUs)"
    )
    parser.add_argument(
        "--every-n-steps", type=int, help="how often monitors sample (default: as each does)"
    )
    parser.add_argument("--messages", action="store_true", help="print every false alarm in full")
    parser.add_argument("--csv", type=Path, help="write a row for each false alarm to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    for name in ("steps", "jobs", "every_n_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    return options


class Result:
    """A row of the table, small enough to be sent from another process."""

    def __init__(self, model: str, precision: str, steps: int, every: int | None) -> None:
        outcome = healthy_run(model, precision, steps, every)
        self.model, self.precision, self.steps = model, precision, steps
        self.alarms: list[Alarm] = outcome.alarms
        self.is_healthy = outcome.is_healthy
        self.note = outcome.error.partition("\n")[0][:60] or (
            "yes" if outcome.is_healthy else f"no: {outcome.measured:.3g} of {outcome.bound:.3g}"
        )


def _work(row: Row) -> Result:
    return Result(*row)


def start_worker() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _run(rows: list[Row], jobs: int) -> list[Result]:
    """Train all rows and return them in order."""
    done: dict[tuple[str, str], Result] = {}
    with contextlib.ExitStack() as stack:
        results: Iterable[Result] = map(_work, rows)
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(min(jobs, len(rows)), start_worker))
            results = pool.imap_unordered(_work, rows)
        for result in tqdm(results, total=len(rows), unit="run"):
            done[result.model, result.precision] = result
            tqdm.write("  ".join(_cells(result)), file=sys.stderr)  # kept if the run is killed
    return [done[model, precision] for model, precision, *_ in rows]


def _cells(result: Result) -> list[str]:
    count = len(result.alarms)
    kinds = Counter(f"{alarm.monitor}.{alarm.kind}" for alarm in result.alarms)
    rules = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
    rate = f"{1000 * count / result.steps:.3g}"
    return [
        result.model, result.precision, str(result.steps), str(count), rate, result.note, rules,
    ]  # fmt: skip


def _fields(result: Result, alarm: Alarm) -> dict[str, object]:
    values = {name: getattr(alarm, name) for name in ALARMS[2:]}
    return {"model": result.model, "precision": result.precision, **values}


def _sentence(result: Result, alarm: Alarm) -> str:
    return f"{result.model} in {result.precision}, {alarm.monitor}.{alarm.kind}: {alarm.message}"


def _markdown(results: list[Result]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(_cells(result) for result in results)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
