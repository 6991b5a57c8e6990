"""Finds the data of a report in a run's folder, and makes its page."""

import json
from pathlib import Path
from typing import Any

from lightning_mp.callbacks._report.data import FORMAT
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks._report.writing import write_atomically
from lightning_mp.callbacks._rules.usage import usage

__all__ = ["alarms_since", "rebuild_page"]


def rebuild_page(run_dir: str | Path) -> Path:
    """Write the page of a run from the data that its `InstabilityReport` has left.

    Args:
        run_dir: The folder that the callback wrote to, or the data's file itself.

    Returns:
        Where the page is.

    Raises:
        ValueError: There is no such folder, no data in it, or more than one report's.
    """
    path = Path(run_dir)
    if path.is_file():
        data = _read(path)
        if data is None:
            raise ValueError(usage("no_report_data", path=str(path)))
        source = path
    else:
        source, data = _search(path)
    page = source.with_suffix(".html")
    write_atomically(page, report_page(data))
    return page


def _search(folder: Path) -> tuple[Path, dict[str, Any]]:
    if not folder.is_dir():
        raise ValueError(usage("no_folder", path=str(folder)))
    for pattern in ("*.json", "**/*.json"):
        read = {path: _read(path) for path in sorted(folder.glob(pattern))}
        found = {path: data for path, data in read.items() if data is not None}
        if len(found) > 1:
            names = ", ".join(repr(str(each)) for each in list(found)[:5])
            raise ValueError(
                usage("several_reports", path=str(folder), count=len(found), names=names)
            )
        if found:
            return next(iter(found.items()))
    raise ValueError(usage("no_report", path=str(folder)))


def _read(path: Path) -> dict[str, Any] | None:
    """Return a report's data; `None` for files of others."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def alarms_since(data: Path, step: int) -> list[dict[str, Any]]:
    """Return the alarms of a step and of later ones that a report's data holds."""
    found = _read(data)
    return [] if found is None else [a for a in found["alarms"] if a["step"] >= step]
