"""Inject faults into small runs; print the number of cases and of runs that kept the guarantees.

python -m tests.faults                     # all cases; 20 minutes on one core
python -m tests.faults --only kills disks
python -m tests.faults --short             # only the cases of `make test`
python -m tests.faults --count             # print the number of cases and exit
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from lightning_mp.plan.table import aligned
from tests.faults.table import CASES, counts, is_short, outcome, title_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a run broke a guarantee."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--short", action="store_true", help="only the cases of `make test`")
    parser.add_argument("--count", action="store_true", help="print the number of cases and exit")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.count:
        print("\n".join(aligned([["fault", "cases"], *_count_rows()])))
        return 0
    work = [
        (family, index)
        for family in options.only
        for index, case in enumerate(CASES[family])
        if is_short(case) or not options.short
    ]
    began, failures = time.monotonic(), []
    # Not `multiprocessing.Pool`, whose daemonic workers may not start processes of their own.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for (family, index), said in zip(work, pool.map(outcome, work), strict=True):
            if said:
                failures.append((family, index))
                print(f"{CASES[family][index]}: {said}", file=sys.stderr, flush=True)
    tried = Counter(title_of(family, CASES[family][index]) for family, index in work)
    failed = Counter(title_of(family, CASES[family][index]) for family, index in failures)
    rows = [[title, str(n), str(n - failed[title])] for title, n in tried.items()]
    total = ["total", str(len(work)), str(len(work) - len(failures))]
    print("\n".join(aligned([["fault", "cases", "passed"], *rows, total])))
    print(f"\n{time.monotonic() - began:.0f} s on {options.jobs} processes")
    return int(bool(failures))


def _count_rows() -> list[list[str]]:
    found = counts()
    return [*([title, str(n)] for title, n in found.items()), ["total", str(sum(found.values()))]]


if __name__ == "__main__":
    sys.exit(main())
