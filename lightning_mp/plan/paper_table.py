"""`plan --check-paper` as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from lightning_mp.plan.paper import FITTED, SLIPS, Cell, all_cells
from lightning_mp.plan.table import aligned

__all__ = ["paper_lines"]


def paper_lines() -> Iterator[str]:
    """Yield every cell of the paper beside its prediction, then what was fitted, and the slips."""
    cells = all_cells()
    for table in dict.fromkeys(cell.table for cell in cells):
        of_table = [cell for cell in cells if cell.table == table]
        yield f"{table} (computed)"
        yield from aligned([("", "paper", "predicted", "error", ""), *map(_row, of_table)], left=2)
        yield ""
    yield from aligned([("errors", "cells", "median", "mean", "worst"), *_summaries(cells)], left=1)
    yield ""
    yield "Fitted, and to which cells; all other cells are predicted:"
    yield from (f"  {name}: {where}" for name, where in FITTED.items())
    yield "Counted, not fitted: 16 bytes a parameter beside the loss, 602,728 bytes a pair as data."
    yield ""
    yield "Slips of the paper, kept as printed:"
    yield from (f"  {slip}" for slip in SLIPS)


def _row(cell: Cell) -> tuple[str, ...]:
    predicted = "-" if cell.predicted is None else f"{cell.predicted:,.2f}"
    error = "-" if cell.error is None else f"{cell.error:+.1%}"
    return f"  {cell.label}", f"{cell.paper:,.2f}", predicted, error, f"  {cell.note}"


def _summaries(cells: Sequence[Cell]) -> Iterator[tuple[str, ...]]:
    for name, tables in (
        ("loss, Tables 1 and 2", ("Table 1, loss, GB", "Table 2, loss, GB")),
        ("  of them not fitted", ("Table 1, loss, GB", "Table 2, loss, GB")),
        ("peak, Table 1", ("Table 1, peak, GB",)),
        ("  of them not fitted", ("Table 1, peak, GB",)),
        ("iteration, Figure 4", ("Figure 4, iteration, s",)),
        ("epoch, Figure 4", ("Figure 4, epoch, h",)),
    ):
        only_predicted = name.startswith(" ")
        errors = [
            abs(cell.error)
            for cell in cells
            if cell.table in tables and cell.error is not None
            if not (only_predicted and cell.note == "fitted")
        ]
        middle, mean, worst = statistics.median(errors), statistics.fmean(errors), max(errors)
        yield name, str(len(errors)), f"{middle:.1%}", f"{mean:.1%}", f"{worst:.1%}"
