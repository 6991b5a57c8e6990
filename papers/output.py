"""Writes reproduced tables and figures: CSV files, pictures and printed tables."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lightning
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

import lightning_mp
from lightning_mp._files import save_new
from lightning_mp.plan.table import aligned
from papers.machine import cpu_name

__all__ = ["COMPUTED", "MEASURED", "PRINTED", "Output", "Row", "line_width"]

MEASURED = "measured"
COMPUTED = "computed"
PRINTED = "printed in the paper"
_MARK = "lightning-mp "  # in every file, so that only files of earlier runs are replaced

T = TypeVar("T")
Row: TypeAlias = dict[str, Any]
"""One row of a table by column name; `kind` is one of the three constants above."""


def _provenance() -> dict[str, str]:
    """Return hardware, versions and date, on which a figure depends beside its command."""
    hardware = f"{cpu_name()}, {_cores()} cores"
    if torch.cuda.is_available():
        hardware += f", {torch.cuda.get_device_name()}"
    versions = f"lightning-mp {lightning_mp.__version__}, torch {torch.__version__}, "
    versions += f"lightning {lightning.__version__}, python {platform.python_version()}"
    date = datetime.now(timezone.utc).date().isoformat()
    return {"hardware": hardware, "versions": versions, "date": date}


class Output:
    """A folder of files that record their provenance.

    Args:
        folder: The folder, which is created if it is missing.
        fast: Whether parts use sizes that only show that they run.
        title: Label of the progress bars.
    """

    def __init__(self, folder: Path, *, fast: bool, title: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.fast, self.title = folder, fast, title
        # Computed once, so that all files of a run have the same date.
        self.provenance = _provenance()

    def progress(self, items: Iterable[T], what: str) -> Iterator[T]:
        """Yield items with a progress bar if there is a terminal."""
        yield from tqdm(items, desc=f"{self.title}: {what}", leave=False, disable=None)

    def table(self, name: str, rows: Sequence[Row], title: str) -> Path:
        """Write rows and their provenance as CSV, and print them; the first row names all columns.

        Raises:
            ValueError: A row does not say whether it was measured, computed or printed.
        """
        kinds = {row.get("kind") for row in rows}
        if not kinds <= {MEASURED, COMPUTED, PRINTED}:
            raise ValueError(
                f"Passed rows of the kinds {sorted(map(str, kinds))} to `Output.table`. Each must "
                f"be {MEASURED!r}, {COMPUTED!r} or {PRINTED!r}. Set the row's `kind`."
            )
        path, columns = self.folder / f"{name}.csv", list(rows[0])
        text = io.StringIO(newline="")  # the csv module writes line ends
        writer = csv.DictWriter(text, [*columns, *self.provenance])
        writer.writeheader()
        writer.writerows({**row, **self.provenance} for row in rows)
        path = save_new(path, lambda file: file.write(text.getvalue().encode()), _MARK.encode())
        lines = [columns, *([_shown(row.get(key)) for key in columns] for row in rows)]
        print("", title, *aligned(lines), path.resolve(), sep="\n")
        return path

    @contextmanager
    def picture(self, name: str, panels: int, title: str) -> Iterator[Any]:
        """Yield the axes of a picture, then write the picture with its provenance below."""
        # Not pyplot, which looks for a display and keeps every figure in memory.
        from matplotlib.figure import Figure

        # Four panels in a row would be scaled down on a page until they are unreadable.
        rows = 1 if panels <= 3 else 2
        columns = -(-panels // rows)
        figure = Figure(figsize=(5.4 * columns, 4.6 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()[:panels]
        figure.suptitle(title, fontsize=12)
        yield axes
        for each in axes:
            each.grid(alpha=0.25)
        figure.supxlabel("; ".join(self.provenance.values()), fontsize=6, color="0.45")
        mark = {"Software": _MARK}
        path = save_new(
            self.folder / f"{name}.png",
            lambda file: figure.savefig(file, dpi=130, metadata=mark),
            _MARK.encode(),
        )
        print(f"{path.resolve()}")


def line_width(index: int, lines: Sized) -> float:
    """Return the width of a line; later lines are thinner, so that equal lines stay visible."""
    return 1 + 4 * (1 - (index + 1) / len(lines))


def _shown(value: object) -> str:
    if isinstance(value, float):
        # `.3g` would write larger numbers with an exponent.
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def _cores() -> int:
    # Only Linux reports the cores that this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
