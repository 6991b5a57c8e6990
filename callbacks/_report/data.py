"""Turns the histories of all monitors into the data of a report: plain, bounded, for JSON.

Legend: `R` rows (tensors) and `C` columns (steps) of a heat map.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # `lightning-mp report` needs no torch
    from lightning_mp.callbacks.monitor import Alarm, History

__all__ = ["HISTOGRAM", "NAME", "parts_of", "report_data"]

NAME = "lightning-mp instability report"
HISTOGRAM = "histogram of "  # prefix of the names of maps whose rows are powers of two
MAX_ALARMS = 500
# Together at most a few MB, which a browser opens at once.
_MAX_CURVES, _MAX_POINTS = 40, 1500
_MAX_MAPS, _MAX_CELLS, _ALL_CELLS = 32, 25_600, 204_800  # cells of one map, and of all
_MAX_NAME, _MAX_MESSAGE = 200, 800  # characters
_NON_FINITE = "_not_finite"
_SHOWN = ("step", "epoch", "batch_idx", "rank", "monitor", "kind", "severity", "remedy", "tensor")
_OWN = ("loss", "loss_scale", "skipped")  # curves for which only the report has every step

_Cells = npt.NDArray[np.float64]
_Points = list[tuple[int, float]]


def report_data(
    own: "History", others: Iterable["History"], run: dict[str, Any], max_tensors: int
) -> dict[str, Any]:
    """Return the data of a page: facts about the run, and all histories."""
    histories = [own, *others]
    alarms = sorted((a for h in histories for a in h.alarms), key=lambda alarm: alarm.step)
    curves = _pick_curves(histories)
    alarmed = {alarm.tensor for alarm in alarms if alarm.tensor}
    maps = dict(list(_name_maps(histories).items())[:_MAX_MAPS])
    most_cells = min(_MAX_CELLS, _ALL_CELLS // max(len(maps), 1))
    counts = {s: sum(a.severity == s for a in alarms) for s in ("error", "warning", "info")}
    first = next((alarm for alarm in alarms if alarm.severity != "info"), None)
    return {
        "format": f"{NAME} 1",
        "run": run,
        "counts": counts,
        "first": None if first is None else _alarm_fields(first),
        "alarms": [_alarm_fields(alarm) for alarm in _choose_alarms(alarms)],
        "curves": dict(list(_plain_curves(curves, own).items())[:_MAX_CURVES]),
        "maps": [
            _plain_map(name, heat, max_tensors, most_cells, alarmed) for name, heat in maps.items()
        ],
    }


def parts_of(data: Path, *keys: str) -> dict[str, Any] | None:
    """Return the readable parts of a report's data; `None` if the file is not a report."""
    text, parts = "", {}
    with suppress(OSError):
        text = data.read_text(encoding="utf-8", errors="replace")
    for key in keys:  # one by one, because the file may be damaged or truncated
        with suppress(ValueError):
            start = text.index(f'"{key}": ') + len(f'"{key}": ')
            parts[key] = json.JSONDecoder().raw_decode(text, start)[0]
    return parts if NAME in text[:100] else None


def _name_maps(histories: Sequence["History"]) -> dict[str, dict[str, Any]]:
    """Return all heat maps; further maps of the same name, from other monitors, are numbered."""
    maps: dict[str, dict[str, Any]] = {}
    for history in histories:
        for name, heat in history.maps.items():
            names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            maps[next(each for each in names if each not in maps)] = heat
    return maps


def _choose_alarms(alarms: list["Alarm"]) -> list["Alarm"]:
    """Return the first and the latest alarms if there are too many; prefer errors."""
    if len(alarms) <= MAX_ALARMS:
        return alarms
    errors = [alarm for alarm in alarms if alarm.severity == "error"]
    rest = [alarm for alarm in alarms if alarm.severity != "error"]
    chosen = _ends(errors, max(MAX_ALARMS // 2, MAX_ALARMS - len(rest)))
    chosen += _ends(rest, MAX_ALARMS - len(chosen))
    return sorted(chosen, key=lambda alarm: alarm.step)


def _ends(alarms: list["Alarm"], count: int) -> list["Alarm"]:
    newest = max(len(alarms) - (count - count // 2), count // 2)
    return alarms[: count // 2] + alarms[newest:]


def _alarm_fields(alarm: "Alarm") -> dict[str, Any]:
    # The page shows place and remedy in fields of their own.
    message = alarm.message.removeprefix(f"{alarm.place}: ")
    if alarm.remedy:
        message = message.removesuffix(alarm.remedy)
    fields = {name: getattr(alarm, name) for name in _SHOWN} | {"message": message.strip()}
    most = dict.fromkeys(("message", "remedy"), _MAX_MESSAGE)
    return {
        name: _cut(value, most.get(name, _MAX_NAME)) if isinstance(value, str) else value
        for name, value in fields.items()
    }


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _pick_curves(histories: Sequence["History"]) -> dict[str, _Points]:
    """Return each curve from the history with the most points; `_OWN` curves from the report."""
    curves: dict[str, _Points] = {}
    for index, history in enumerate(histories):
        for name, points in history.curves.items():
            if index > 0 and name in _OWN:
                continue
            if name not in curves or len(points) > len(curves[name]):
                curves[name] = points
    return curves


def _plain_curves(curves: dict[str, _Points], own: "History") -> dict[str, Any]:
    plain = {}
    for name, points in curves.items():
        if name.endswith(_NON_FINITE):
            continue
        # Non-finite values are separate, because JSON lacks them.
        bad = dict(curves.get(name + _NON_FINITE, []))
        bad |= {step: value for step, value in points if not math.isfinite(value)}
        digits = 9 if name == "loss_scale" else 5  # 9 digits are exact for powers of two to 2^29
        good = _thin([point for point in points if math.isfinite(point[1])])
        chosen = sorted(bad.items())
        chosen = chosen[:: math.ceil(len(chosen) / _MAX_POINTS) or 1]
        plain[_cut(name, _MAX_NAME)] = {
            "steps": [step for step, _ in good],
            "values": [_digits(value, digits) for _, value in good],
            "bad": [[step, str(value)] for step, value in chosen],
            "bad_count": max(len(bad), own.count(name + _NON_FINITE)),  # a long curve drops points
        }
    return plain


def _thin(points: _Points) -> _Points:
    """Keep the lowest and the highest point of each range of steps, so that no spike is lost."""
    if len(points) <= _MAX_POINTS:
        return points
    kept: set[int] = {0, len(points) - 1}
    values = np.array([value for _, value in points])
    # Two points of each range, and both ends.
    for bucket in np.array_split(np.arange(len(points)), _MAX_POINTS // 2 - 1):
        kept |= {int(bucket[values[bucket].argmin()]), int(bucket[values[bucket].argmax()])}
    return [points[index] for index in sorted(kept)]


def _digits(value: float, digits: int) -> float:
    """Round to significant digits, because more digits would only make the page larger."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _plain_map(
    name: str, heat: dict[str, Any], max_tensors: int, most_cells: int, alarmed: set[str]
) -> dict[str, Any]:
    names, steps = heat["names"], [step for step, _ in heat["columns"]]
    cells_RC = np.full((len(names), len(steps)), math.nan)
    for at, (_, column) in enumerate(heat["columns"]):
        cells_RC[: len(column), at] = column  # rows that were added later have no value
    interest_R = _interest(name, names, cells_RC)
    # Tensors with an alarm come first. Rows may end with a dtype in parentheses, which names in
    # alarms lack.
    interest_R += [1e6 * (row.partition(" (")[0] in alarmed) for row in names]
    # Stable, so that equal tensors stay in the order of the model.
    rows = np.argsort(-interest_R, kind="stable")[:max_tensors]
    most = max(most_cells // max(len(rows), 1), 2)
    # Evenly spaced, including the first and the latest column.
    columns = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
    return {
        "name": _cut(name, _MAX_NAME),
        "rows": [_cut(names[row], _MAX_NAME) for row in rows],
        "positions": rows.tolist(),  # in the order of the model
        "of": len(names),
        "steps": [steps[column] for column in columns],
        "cells": [[_cell(cells_RC[row, column]) for column in columns] for row in rows],
    }


def _interest(name: str, rows: Sequence[str], cells_RC: _Cells) -> npt.NDArray[np.float64]:
    """Return the priority of rows: risen zeros, low headroom, or a large value come first."""
    if name.startswith(HISTOGRAM):  # the exponents of rows such as `2^-3`; zeros come last
        return np.array([float(row[2:]) if row.startswith("2^") else -1e3 for row in rows])
    if not cells_RC.size:
        return np.zeros(len(cells_RC))
    lacks = np.isnan(cells_RC)
    highest = np.where(np.isfinite(cells_RC), cells_RC, -np.inf).max(axis=1)
    lowest = np.where(lacks, np.inf, cells_RC).min(axis=1)
    if "headroom" in name:
        interest = -lowest
    elif "zero_share" in name:
        # A rise has more weight than the level, because an embedding has zeros from the start.
        usual = np.where(lacks[:, :5], -np.inf, cells_RC[:, :5]).max(axis=1)
        interest = highest - np.where(np.isfinite(usual), usual, 0) + 0.01 * highest
    else:
        interest = np.where(np.isinf(cells_RC).any(axis=1), np.inf, highest)
    # Less than the 1e6 of an alarm, so that tensors with alarms come before infinite values.
    filled: _Cells = np.nan_to_num(interest, nan=-1e3, posinf=1e3, neginf=-1e3)
    return filled


def _cell(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return _digits(float(value), 3) if math.isfinite(value) else str(float(value))
