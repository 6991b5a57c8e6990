"""Finds the data of a report in a run's folder, and writes files that are never half there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_mp.callbacks._report.data import FORMAT
from lightning_mp.callbacks._report.page import report_page

__all__ = ["alarms_since", "claim", "rebuild_page", "write_atomically"]

_WRITTEN_BY = "It is written by the callback `InstabilityReport`"


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
            raise ValueError(
                f"Passed {str(path)!r}, which does not hold a report's data. {_WRITTEN_BY}, as "
                "`instability.json`. Pass the folder of a run."
            )
        source = path
    else:
        source, data = _search(path)
    page = source.with_suffix(".html")
    write_atomically(page, report_page(data))
    return page


def _search(folder: Path) -> tuple[Path, dict[str, Any]]:
    if not folder.is_dir():
        raise ValueError(f"Passed {str(folder)!r}, which does not exist. Pass the folder of a run.")
    for pattern in ("*.json", "**/*.json"):
        read = {path: _read(path) for path in sorted(folder.glob(pattern))}
        found = {path: data for path, data in read.items() if data is not None}
        if len(found) > 1:
            names = ", ".join(repr(str(each)) for each in list(found)[:5])
            raise ValueError(
                f"Passed {str(folder)!r}, which holds the data of {len(found)} reports: {names}. "
                "Pass one of them."
            )
        if found:
            return next(iter(found.items()))
    raise ValueError(
        f"Passed {str(folder)!r}, where no report's data is, nor in a folder below. {_WRITTEN_BY}, "
        "as `instability.json`. Add it to the callbacks of the run, or pass its `dirpath`."
    )


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


def claim(path: Path, earlier: str | None, create: Callable[[Path], object]) -> Path:
    """Return a path that no other run writes to, which is from then on taken.

    Args:
        path: What to call it; where another run has it, `-v1` or a higher number is put behind.
        earlier: What the run that is resumed wrote to; taken where it is in the same folder.
        create: Makes it, or raises a `FileExistsError`.
    """
    if earlier is not None and os.path.abspath(path.parent) == os.path.dirname(earlier):
        return Path(earlier)
    path.parent.mkdir(parents=True, exist_ok=True)
    mine, number = path, 0
    while True:
        try:
            create(mine)
        except FileExistsError:
            number += 1
            mine = path.with_name(f"{path.stem}-v{number}{path.suffix}")
        else:
            return mine


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that at any moment the old or the new one is there, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
