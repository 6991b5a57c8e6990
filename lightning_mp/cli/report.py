"""`lightning-mp report` rebuilds the report of a run, also from damaged data."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

from lightning_mp._files import save_new
from lightning_mp.callbacks._report.data import NAME, parts_of
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks._words.usage import usage

__all__ = ["rebuild_page"]

_WRITTEN_BY = "The callback `InstabilityReport` writes it as `instability.json`."


def rebuild_page(run_dir: str | Path) -> Path:
    """Write the page of a report again, from its data file or the folder that contains it."""
    path = Path(run_dir)
    source, data = (path, _report_parts(path)) if path.is_file() else _search(path)
    if data is None:
        raise ValueError(
            f"Passed {str(path)!r}, which is not the data of a report. {_WRITTEN_BY} Pass the "
            "folder of a run."
        )
    content = report_page(data).encode()
    page = source.with_suffix(".html")
    # A file of another program is kept; the name then gets a number.
    return save_new(page, lambda file: file.write(content), mark=NAME.encode())


def _search(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    if not folder.is_dir():
        raise ValueError(f"Passed {str(folder)!r}, which does not exist. Pass the folder of a run.")
    # The folder first, because folders below it may contain reports of other runs.
    for pattern in ("*.json", "**/*.json"):
        read = {path: _report_parts(path) for path in sorted(folder.glob(pattern))}
        found = {path: data for path, data in read.items() if data is not None}
        if len(found) > 1:
            names = ", ".join(repr(str(each)) for each in list(found)[:5])
            raise ValueError(
                f"Passed {str(folder)!r}, which contains data of {len(found)} reports: {names}. "
                "Pass one of them."
            )
        if found:
            return next(iter(found.items()))
    raise ValueError(
        f"Passed {str(folder)!r}. This folder and the folders below it contain no report data. "
        f"{_WRITTEN_BY} Add the callback to the run, or pass its `dirpath`."
    )


_EMPTY_REPORT: dict[str, Any] = {  # the data of an empty report
    "run": {
        **{"title": "A model", "steps": 0, "starts": [], "written": "an unknown time"},
        **{"end": {"how": "running"}, "has_loss_scale": False, "facts": [], "monitors": []},
    },
    **{"alarms": [], "counts": dict.fromkeys(("error", "warning", "info"), 0), "first": None},
    **{"curves": {}, "maps": []},
}


def _report_parts(path: Path) -> dict[str, Any] | None:
    """Return the parts of a report's data that a page can show; `None` for other files."""
    parts = parts_of(path, *_EMPTY_REPORT)
    if parts is None:
        return None
    known = dict(_EMPTY_REPORT)
    for key in _EMPTY_REPORT:
        if key == "counts":  # if the counts are lost, count the alarms
            levels = [alarm["severity"] for alarm in known["alarms"]]
            known[key] = {level: levels.count(level) for level in _EMPTY_REPORT[key]}
            known["first"] = next((a for a in known["alarms"] if a["severity"] != "info"), None)
        known[key] = _renderable(known, key, parts.get(key) or known[key])
    if known != parts:
        warnings.warn(usage("report_read_in_part", path=str(path)), stacklevel=2)
    return known


def _renderable(data: dict[str, Any], key: str, value: Any) -> Any:
    """Return the elements of a part that can be shown together with the other parts."""
    default = data[key]
    if _can_render({**data, key: value}):
        return value
    if isinstance(value, list) and isinstance(default, list):
        return [each for each in value if _can_render({**data, key: [each]})]
    if isinstance(value, dict) and isinstance(default, dict):
        items = ({name: each} for name, each in value.items())
        shown = [item for item in items if _can_render({**data, key: default | item})]
        return default | {name: each for item in shown for name, each in item.items()}
    return default


def _can_render(data: dict[str, Any]) -> bool:
    """Return whether a page and its charts can be rendered from the data."""
    with contextlib.suppress(Exception):
        report_page(data)
        for curve in data["curves"].values():
            list(zip(curve["steps"], curve["values"], strict=True))
            len(curve["bad"]), curve["bad_count"]
        for heat in data["maps"]:
            for row in (heat["steps"], *heat["cells"]):
                list(zip(heat["steps"], row, strict=True))
            list(zip(heat["rows"], heat["positions"], heat["cells"], strict=True))
        return True
    return False
