"""The data of a report are bounded and lose no event; the page is self-contained and safe."""

import base64
import hashlib
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.callbacks._report.data import report_data
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks.monitor import Alarm, History
from lightning_mp.cli.report import rebuild_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028"


def _run(**changes: Any) -> dict[str, Any]:
    run = {
        "title": "Model",
        "steps": 100,
        "starts": [{"step": 0, "time": "then"}],
        "written": "now",
        "end": {"how": "finished", "time": "now"},
        "has_loss_scale": True,
        "facts": [["Device", "cpu"]],
        "monitors": ["M"],
    }
    return {**run, **changes}


def _alarm(step: int, severity: Any = "warning", text: str = "Seen.", **more: Any) -> Alarm:
    more = {"tensor": None, "remedy": "Do it.", **more}
    message = f"Step {step}: {text} {more['remedy']}"
    return Alarm(
        step=step, monitor="M", kind="some_kind", severity=severity, message=message, **more
    )


def _data(own: History | None = None, *others: History, tensors: int = 100, **run: Any) -> Any:
    return report_data(own or History(), others, _run(**run), tensors)


def _with_alarms(*alarms: Alarm) -> History:
    history = History()
    for alarm in alarms:
        history.add_alarm(alarm)
    return history


def _embedded(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def _text(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


# --- the page ------------------------------------------------------------------------------------


def test_page_makes_no_requests() -> None:
    page = report_page(_data(_with_alarms(_alarm(3))))
    assert all(target.startswith("#") for target in re.findall(r'(?:href|src)="([^"]*)"', page))
    assert set(re.findall(r"https?://[^\"'` )]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|@import|url\(|@font-face|<iframe|<img", page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_page_escapes_texts_from_users() -> None:
    history = _with_alarms(_alarm(1, text=EVIL, tensor=EVIL, remedy=EVIL))
    history.add_point(EVIL, 1, 1.0)
    history.add_column(EVIL, 1, {EVIL: 1.0})
    failed = {"how": "failed", "time": EVIL, "exception": EVIL}
    page = report_page(
        _data(
            history,
            title=EVIL,
            facts=[[EVIL, EVIL]],
            monitors=[EVIL],
            end=failed,
            starts=[{"step": 0, "time": EVIL}],
        )
    )
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "\"'&" not in page.partition("<script")[0]
    embedded = _embedded(page)
    assert embedded["maps"][0]["rows"] == [EVIL]


def test_page_scripts_never_insert_markup() -> None:
    page = report_page(_data())
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


@pytest.mark.parametrize(
    ("alarms", "expected"),
    [
        ([], "No alarms in 2,000 steps."),
        ([_alarm(5, "info")], "No alarms in 2,000 steps."),
        ([_alarm(7)], "1 warning; first at step 7: Seen."),
        (
            [_alarm(2, "info"), _alarm(150, "error"), _alarm(160), _alarm(1700, "error")],
            "2 errors, 1 warning; first at step 150: Seen.",
        ),
    ],
    ids=["none", "notes", "one", "many"],
)
def test_page_verdict_is_one_line(alarms: list[Alarm], expected: str) -> None:
    page = report_page(_data(_with_alarms(*alarms), steps=2000))
    (verdict,) = re.findall(r'<p class="verdict.*?</p>', page, re.DOTALL)
    assert _text(verdict)[2:] == expected


def test_page_lists_each_alarm_once_with_its_remedy() -> None:
    page = report_page(_data(_with_alarms(_alarm(1234, tensor="a.b", text="`a.b` is bad."))))
    (item,) = re.findall(r'<li id="alarm-0".*?</li>', page, re.DOTALL)
    assert "<code>a.b</code> is bad.</p>" in item
    assert '<p class="remedy">Do it.</p>' in item
    assert item.count("Do it.") == 1
    assert "Step 1,234" in item
    assert 'title="a.b"' in item
    assert _embedded(page)["alarms"][0][:2] == [1234, "warning"]


def test_page_of_an_empty_run_says_what_is_missing() -> None:
    page = report_page(_data(starts=[], steps=0, facts=[], monitors=[], has_loss_scale=False))
    assert "No alarms in 0 steps." in page
    assert "none except this report" in page
    absent = _embedded(page)["absent"]
    assert absent["loss_scale"] == "This run has no loss scale."
    assert "no step is skipped" in absent["skipped"]


# --- the data ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_and_page_of_the_largest_run_take_at_most_five_megabytes() -> None:
    histories = []
    for name in ("gradient_zero_share", "headroom", "update_rms", *"abcdefg"):
        history = History()
        names = [f"{row}{'n' * 300}" for row in range(1500)]
        for step in range(40):
            history.add_column(name, 1000 * step, {n: 1 / 3 + row for row, n in enumerate(names)})
        for curve in range(6):
            history.curves[f"{name}{curve}"] = [(s, math.sin(s)) for s in range(4000)]
        for step in range(200):
            text, remedy = "A sentence. " * 300, "Do it. " * 300
            history.add_alarm(_alarm(step, text=text, remedy=remedy, tensor="t" * 300))
        histories.append(history)
    data = _data(*histories, tensors=500)
    assert len(data["alarms"]) == 500
    assert data["counts"] == {"error": 0, "warning": 2000, "info": 0}
    assert len(json.dumps(data)) < 5e6
    assert len(report_page(data)) < 5e6


def test_data_of_a_long_curve_keep_spikes_and_non_finite_values() -> None:
    own = History()
    own.curves["loss"] = [(step, 1.0) for step in range(4000)]
    own.curves["loss"][1717] = (1717, 50.0)
    own.curves["loss"][2929] = (2929, -3.0)
    own.curves["loss"][333] = (333, math.inf)
    own.curves["loss_not_finite"] = [(333, math.inf), (5000, math.nan)]
    curve = _data(own)["curves"]["loss"]
    assert len(curve["steps"]) <= 1500
    points = dict(zip(curve["steps"], curve["values"], strict=True))
    assert (points[1717], points[2929]) == (50, -3)
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 3999)
    assert curve["bad"] == [[333, "inf"], [5000, "nan"]]


def test_data_of_the_loss_scale_is_exact() -> None:
    own = History()
    own.curves["loss_scale"] = [(0, 2.0**24), (1, 2.0**17), (2, 0.25)]
    assert _data(own)["curves"]["loss_scale"]["values"] == [16777216, 131072, 0.25]


def test_data_use_the_reports_loss_and_the_densest_gradient_norm() -> None:
    own, sparse, dense = History(), History(), History()
    own.curves = {"loss": [(0, 1.0)]}
    sparse.curves = {"loss": [(0, 7.0), (1, 7.0)], "gradient_norm": [(0, 1.0)]}
    dense.curves = {"gradient_norm": [(0, 2.0), (1, 2.0)]}
    curves = _data(own, sparse, dense)["curves"]
    assert curves["loss"]["values"] == [1]
    assert curves["gradient_norm"]["values"] == [2, 2]


def test_data_of_a_map_merge_optimizers_and_mark_missing_values() -> None:
    monitor = History()
    monitor.add_column("gradient_headroom_bits", 0, {"a": 3.14159, "b": math.inf})
    monitor.add_column("gradient_headroom_bits", 0, {"c": 5.0})
    monitor.add_column("gradient_headroom_bits", 4, {"c": math.nan})
    (heat,) = _data(None, monitor)["maps"]
    rows = dict(zip(heat["rows"], heat["cells"], strict=True))
    assert heat["steps"] == [0, 4]
    assert rows == {"a": [3.14, None], "b": ["inf", None], "c": [5, None]}


@pytest.mark.parametrize(
    ("name", "values", "first"),
    [
        # The embedding has zeros from the start; the zeros of `sinking` are new.
        ("gradient_zero_share", {"embedding": [0.9, 0.9], "sinking": [0.0, 0.3]}, "sinking"),
        ("gradient_headroom_bits", {"far": [9.0, 8.0], "near": [12.0, 1.0]}, "near"),
        ("update_rms", {"calm": [1.0, 1.1], "wild": [1.0, 4.0]}, "wild"),
        ("update_rms", {"wild": [1.0, 4.0], "lost": [math.inf, math.inf]}, "lost"),
        ("update_rms", {"wild": [1.0, 4.0], "alarmed": [1.0, 1.1]}, "alarmed"),
    ],
    ids=["zeros", "headroom", "update", "infinite", "alarm"],
)
def test_data_of_a_map_have_the_most_notable_rows_first(
    name: str, values: dict[str, list[float]], first: str
) -> None:
    monitor = _with_alarms(_alarm(1, tensor="alarmed"))
    others = {f"other{i}": [0.5, 0.5] if "head" not in name else [10.0, 10.0] for i in range(5)}
    rows = {**others, **values}
    for step in range(12):
        monitor.add_column(name, step, {row: pair[step > 7] for row, pair in rows.items()})
    (heat,) = _data(None, monitor, tensors=3)["maps"]
    assert heat["rows"][0] == first
    assert heat["positions"][0] == list(rows).index(first)
    assert (len(heat["rows"]), heat["of"]) == (3, 7)


# --- files ---------------------------------------------------------------------------------------


def test_rebuild_finds_data_under_any_name_and_one_folder_below(tmp_path: Path) -> None:
    folder = tmp_path / "log" / "version_0"
    folder.mkdir(parents=True)
    (folder / "other.json").write_text('{"format": "another"}')
    (folder / "broken.json").write_text("{")
    (folder / "mine.json").write_text(json.dumps(_data()))
    for path in (tmp_path, folder, folder / "mine.json"):
        assert rebuild_page(path) == folder / "mine.html"
    assert (folder / "mine.html").read_text() == report_page(_data())


def test_rebuild_without_or_with_several_reports_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which does not exist"):
        rebuild_page(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no report data.*InstabilityReport"):
        rebuild_page(tmp_path)
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match="is not the data of a report"):
        rebuild_page(other)
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(_data()))
    with pytest.raises(ValueError, match=r"2 reports: .*a\.json', '.*b\.json'"):
        rebuild_page(tmp_path)


# --- damaged data, and data of another version ---------------------------------------------------


def whole() -> dict[str, Any]:
    """Return data with every kind of content."""
    own = _with_alarms(_alarm(3, "error"), _alarm(5, tensor="a.weight"), _alarm(7, "info"))
    for step in range(9):
        own.add_point("loss", step, 1.0 / (step + 1))
        own.add_point("gradient_norm", step, math.nan if step == 4 else 2.0)
        own.add_column("gradient_zero_share", step, {"a.weight": 0.1, "b.weight": math.nan})
    return json.loads(json.dumps(_data(own)))


def test_rebuild_uses_all_data_of_this_version(tmp_path: Path, recwarn: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps(whole()))
    assert rebuild_page(tmp_path).read_text() == report_page(whole())
    assert not recwarn


def test_rebuild_of_a_later_version_shows_the_known_parts(tmp_path: Path) -> None:
    later = whole()
    later["format"] = "lightning-mp instability report 7"
    later["run"] |= {"cluster": "north", "facts": [["Model", "Net"], ["GPUs", "8", "H200"]]}
    later["run"]["monitors"] = {"SpikeGuard": {}}
    later["alarms"] += [{**later["alarms"][0], "severity": "fatal"}, {"step": "9"}, "alarm"]
    later["alarms"][0]["owner"] = "me"
    later["curves"]["loss"]["unit"] = "nats"
    later["curves"]["bits"] = {"values_bf16": "AAAA"}
    later["maps"] += [{"name": "sparse", "rows": ["a"]}, {**later["maps"][0], "cells": [[0.5]]}]
    del later["counts"], later["first"], later["run"]["written"]
    (tmp_path / "run.json").write_text(json.dumps(later))
    with pytest.warns(UserWarning, match=r"run.json' are damaged or from another version"):
        page = rebuild_page(tmp_path).read_text()
    expected = whole()
    expected["run"] |= {
        "facts": [],
        "monitors": ["SpikeGuard"],
        "written": "an unknown time",
    }
    expected["curves"]["loss"]["unit"] = "nats"
    assert page == report_page(expected)


def test_rebuild_of_a_truncated_file_shows_the_parts_before(
    tmp_path: Path,
) -> None:
    text, path = json.dumps(whole()), tmp_path / "run.json"
    counts = []
    for end in range(60, len(text), 151):
        path.write_text(text[:end])
        with pytest.warns(UserWarning, match="are damaged"):
            page = rebuild_page(path).read_text()
        counts.append(page.count('<li id="alarm-'))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize("part", ["run", "counts", "first", "alarms", "curves", "maps"])
def test_rebuild_of_a_file_damaged_in_one_part_shows_the_others(tmp_path: Path, part: str) -> None:
    text, path = json.dumps(whole()), tmp_path / "run.json"
    at = text.index(f'"{part}": ') + len(part) + 5
    path.write_text(text[:at] + "\0\1" + text[at + 2 :])
    with pytest.warns(UserWarning, match="are damaged"):
        page = rebuild_page(path).read_text()
    data = _embedded(page)
    assert data["lines"][0]["curve"] == (None if part == "curves" else whole()["curves"]["loss"])
    assert len(data["maps"]) == (part != "maps")
    assert page.count('<li id="alarm-') == (0 if part == "alarms" else 3)
    assert "first at step 3" in page  # with and without the alarms


@pytest.mark.parametrize("part", ["run", "counts", "first", "alarms", "curves", "maps"])
@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": 1}, [[]], {"a": {"b": []}}])
def test_rebuild_of_data_with_a_part_of_a_wrong_type_writes_the_page(
    tmp_path: Path, part: str, value: Any
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**whole(), part: value}))
    with pytest.warns(UserWarning, match="are damaged"):
        page = rebuild_page(tmp_path).read_text()
    assert page.count('<li id="alarm-') == (0 if part == "alarms" else 3)
    curve = _embedded(page)["lines"][0]["curve"]
    assert curve == (None if part == "curves" else whole()["curves"]["loss"])


def test_rebuild_keeps_a_page_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(whole()))
    (tmp_path / "run.html").write_text("<h1>My run</h1>")
    assert rebuild_page(tmp_path) == tmp_path / "run-v1.html"
    assert (tmp_path / "run.html").read_text() == "<h1>My run</h1>"
    (tmp_path / "run.html").write_text(report_page(_data()))  # an earlier report
    assert rebuild_page(tmp_path) == tmp_path / "run.html"
    assert (tmp_path / "run.html").read_text() == report_page(whole())
