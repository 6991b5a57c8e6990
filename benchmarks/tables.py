"""Turn the CSV files of all benchmarks into the tables and plots of the documentation.

    python benchmarks/tables.py --plots plots

Every file becomes Markdown tables, one for each problem, chip and set of versions, under the
command that measures them. The line above a table ends with the day of the measurement.
"""

import argparse
import contextlib
import csv
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._common import MIB, cell

NAMES = {
    "dense, formula": "dense (open_clip's formula)",
    "torch chunked": "torch's `linear_cross_entropy`, chunked, once a direction",
}
# Rows with the same problem, chip and versions form a table.
APART = ("objective", "batch", "width", "dtype", "device_name", "threads", "torch", "triton")
# By file: the columns of the x and y axes, and the columns whose values name a line.
PLOTS = {
    "contrastive_loss": ("batch", "ms_median", ("contender", "width", "dtype", "device_name")),
    "optimizer_step": ("parameters", "gb_per_second", ("contender", "device_name")),
    "precision": ("parameters", "images_per_second", ("precision", "optimizer", "device_name")),
}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, with numbers as numbers and empty cells as `None`."""

    def value(text: str) -> Any:
        # `int` first, so that a batch size has no decimals.
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text or None

    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def loss_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of losses, this package's first."""
    yield "| | ms, median | ours is | of the GEMM rate | extra memory |\n|---|---|---|---|---|"
    for row in rows:
        name = NAMES.get(row["contender"], row["contender"])
        if row["time_ratio"] == 1:  # the row that the others are compared with
            name = "`ContrastiveLoss`"
        if row["objective"] == "sigmoid":
            name = name.replace("`Contr", "`SigmoidContr")
        ratio = "" if row["time_ratio"] == 1 else f"{row['time_ratio']:.2f}x as fast"
        peak = row["peak_extra_bytes"]
        form = ",.0f" if row["ms_median"] >= 100 else ".1f"
        cells = [name, format(row["ms_median"], form), ratio, f"{row['gemm_fraction']:.0%}"]
        yield _table_line([*cells, "" if peak is None else f"{peak / MIB:,.0f} MiB"])


def lines_of(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of any other benchmark, with the columns that it prints."""
    table = importlib.import_module(f"benchmarks.{name}").TABLE
    yield _table_line(table) + "\n" + "|---" * len(table) + "|"
    for row in rows:
        yield _table_line(cell(form, row) for form in table.values())


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def markdown_tables(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table for each problem, chip and set of versions."""

    def key(row: dict[str, Any]) -> list[tuple[str, str]]:
        return [(column, str(row[column])) for column in APART if row.get(column)]

    # `groupby` joins neighbors only.
    for facts, group in groupby(sorted(rows, key=key), key):
        found = list(group)
        said = ", ".join(" ".join(fact) for fact in facts)
        yield f"\n{said}; {str(found[0]['date'])[:10]}:\n"
        yield from loss_lines(found) if name == "contrastive_loss" else lines_of(name, found)


def plot(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the figures of a benchmark by size, on logarithmic axes."""
    # Imported here, because tables need no matplotlib.
    from matplotlib.figure import Figure

    across, upwards, columns = PLOTS[name]
    # A column with the same value in all rows names no line.
    telling = [c for c in columns if c == columns[0] or len({row.get(c) for row in rows}) > 1]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = ", ".join(NAMES.get(row[c], str(row[c])) for c in telling)
        lines.setdefault(label, []).append((row[across], row[upwards]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel=across, ylabel=upwards, title=name)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of all CSV files in the folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--plots", type=Path, help="folder for pictures")
    parser.add_argument("--chip", default="", help="only chips whose name contains this text")
    args = parser.parse_args(argv)
    for path in sorted(args.results.glob("*.csv")):
        rows = [row for row in read(path) if args.chip in str(row.get("device_name", ""))]
        if not rows:
            continue
        print(f"\n## `python benchmarks/{path.stem}.py`")
        print("\n".join(markdown_tables(path.stem, rows)))
        if args.plots is not None and path.stem in PLOTS:
            plot(path.stem, rows, args.plots)


if __name__ == "__main__":
    main()
