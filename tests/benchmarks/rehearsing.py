"""Helpers that run benchmarks at toy size on one CPU thread and read their results."""

import csv
from pathlib import Path

QUICK = ["--quick", "--device", "cpu", "--threads", "1"]


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
