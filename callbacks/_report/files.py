"""Finds and reads the files of reports, also those that are damaged or of a later version."""

import contextlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

from lightning_mp._files import save_new
from lightning_mp.callbacks._report.data import NAME, readable
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks._rules.sentences import usage

__all__ = ["alarms_since", "create_both", "rebuild_page"]


def rebuild_page(run_dir: str | Path) -> Path:
    """Write the page of a run anew from a report's data, or from the folder that holds one's."""
    path = Path(run_dir)
    source, data = (path, _read(path)) if path.is_file() else _search(path)
    if data is None:
        raise ValueError(usage("no_report_data", path=str(path)))
    content = report_page(data).encode()
    page = source.with_suffix(".html")  # where somebody else's is there, one with a number
    return save_new(page, lambda file: file.write(content), mark=NAME.encode())


def _search(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    if not folder.is_dir():
        raise ValueError(usage("no_folder", path=str(folder)))
    # The folder itself first: reports of other runs may lie below it.
    for pattern in ("*.json", "**/*.json"):
        read = {path: _read(path) for path in sorted(folder.glob(pattern))}
        found = {path: data for path, data in read.items() if data is not None}
        if len(found) > 1:
            names = ", ".join(repr(str(each)) for each in list(found)[:5])
            text = usage("several_reports", path=str(folder), count=len(found), names=names)
            raise ValueError(text)
        if found:
            return next(iter(found.items()))
    raise ValueError(usage("no_report", path=str(folder)))


def _read(path: Path) -> dict[str, Any] | None:
    """Return a report's data, as far as it can be read; `None` for files of others."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if NAME not in text[:100]:
        return None
    data = _parsed(text)
    known = readable(data)
    if known != data:
        warnings.warn(usage("report_read_in_part", path=str(path)), stacklevel=2)
    return known


def _parsed(text: str) -> Any:
    """Return the values in JSON; where it is damaged, those before."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        text = text[: error.pos]
    # Closed behind the last value that is whole: before a comma, or at a bracket.
    end, open_there, is_open = 0, "", ""
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[][{},]', text):
        if token[0] in "[{":
            is_open = {"[": "]", "{": "}"}[token[0]] + is_open
        elif token[0] in "]},":
            is_open = is_open if token[0] == "," else is_open[1:]
            end, open_there = token.start() if token[0] == "," else token.end(), is_open
    with contextlib.suppress(ValueError):
        return json.loads(text[:end] + open_there)
    return {}


def alarms_since(data: Path, step: int) -> list[dict[str, Any]]:
    """Return the alarms of a step and of later ones that a report's data holds."""
    found = _read(data)
    return [] if found is None else [a for a in found["alarms"] if a["step"] >= step]


def create_both(page: Path) -> None:
    """Create an empty page and its data; `FileExistsError` where one of them is there."""
    data = page.with_suffix(".json")
    data.touch(exist_ok=False)
    try:
        page.touch(exist_ok=False)
    except OSError:
        data.unlink()
        raise
