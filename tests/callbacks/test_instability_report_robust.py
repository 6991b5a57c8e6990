"""Reports of runs that share a folder, are killed or resumed, or cannot write to the disk."""

import json
import os
import shutil
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mp import (
    TensorCollector,
)
from lightning_mp.callbacks.instability_report import InstabilityReport, _Pace
from tests.callbacks.disks import full_disk
from tests.callbacks.models import Watched, watch
from tests.callbacks.report_runs import AlarmAt, read_data
from tests.processes import exit_code_of

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


def _train_until_killed(folder: str) -> None:
    def kill(module: Any, batch_idx: int) -> None:
        if batch_idx == 26:
            os.kill(os.getpid(), signal.SIGKILL)

    report = InstabilityReport(dirpath=folder)
    report._pace = _Pace(30, clock=lambda: 0.0)  # no further write is due
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=20)
    monitor = AlarmAt(10, 25)
    watch(
        Watched(steps=40, sabotage=kill),
        [report, saving, monitor],  # type: ignore[list-item]
        enable_checkpointing=True,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_killed_run_keeps_its_last_alarm_and_the_resumed_run_continues_the_page(
    tmp_path: Path, elsewhere: bool
) -> None:
    assert exit_code_of(_train_until_killed, str(tmp_path)) == -signal.SIGKILL
    data, page = read_data(tmp_path), tmp_path / "instability.html"
    assert [alarm["step"] for alarm in data["alarms"]] == [10, 25]
    assert data["curves"]["loss"]["steps"] == list(range(26))  # including the step of the alarm
    assert "It is odd." in page.read_text()
    folder = tmp_path / "version_1" if elsewhere else tmp_path  # a logger's new version
    resumed = InstabilityReport(dirpath=str(folder))
    watch(Watched(steps=40), [resumed, AlarmAt(30)], ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.path == folder / "instability.html"
    assert sorted(tmp_path.glob("*.html")) == [page]
    data = read_data(folder)
    assert data["curves"]["loss"]["steps"] == list(range(40))
    assert [start["step"] for start in data["run"]["starts"]] == [0, 20]
    said = [(alarm["step"], alarm["message"]) for alarm in data["alarms"]]
    assert said == [
        (10, "It is odd."),
        (25, "This alarm was raised before the run was resumed. It is odd."),
        (30, "It is odd."),
    ]


def test_runs_that_share_a_folder_have_separate_reports(tmp_path: Path) -> None:
    for steps in (3, 5, 7):
        watch(Watched(steps=steps), [InstabilityReport()], default_root_dir=str(tmp_path))
    counts = {path.name: read_data(path)["run"]["steps"] for path in tmp_path.glob("*.json")}
    assert counts == {"instability.json": 3, "instability-v1.json": 5, "instability-v2.json": 7}
    assert len(list(tmp_path.glob("*.html"))) == 3


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # Each write takes 1 s and is followed by at least 20 s without a write.
        ([(5, False), (29, False), (30, False)], [False, False, True]),
        ([(5, True), (20, True), (21, True)], [False, False, True]),
    ],
    ids=["by-time", "alarm"],
)
def test_pace_follows_time_and_alarms_and_limits_the_share_of_writes(
    times: list[tuple[int, bool]], expected: list[bool]
) -> None:
    clock = SimpleNamespace(now=0.0)
    pace = _Pace(29, clock=lambda: clock.now)
    with pace.measured():
        clock.now = 1.0
    due = []
    for clock.now, pace.has_news in times:
        due.append(pace.is_due())
    assert due == expected


def test_report_does_not_overwrite_another_page(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>My site</h1>")
    report = InstabilityReport(dirpath=str(tmp_path), filename="index.html")
    watch(Watched(steps=3), [report])
    assert report.path == tmp_path / "index-v1.html"
    assert (tmp_path / "index.html").read_text() == "<h1>My site</h1>"
    names = {"index.html", "index-v1.html", "index-v1.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


class ActsAt(pl.Callback):
    """Changes the disk at a step."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def on_train_batch_start(self, *args: Any) -> None:
        if act := self.acts.get(f"at_{args[-1]}"):
            act()


def texts_with(caught: list[warnings.WarningMessage], text: str) -> list[str]:
    return [str(each.message) for each in caught if text in str(each.message)]


def test_report_whose_folder_vanishes_is_written_later(tmp_path: Path, recwarn: Any) -> None:
    folder = tmp_path / "run"
    monitor, acts = AlarmAt(1, 4), ActsAt(at_3=lambda: shutil.rmtree(folder))
    report = InstabilityReport(dirpath=str(folder))
    report._pace = _Pace(1e9, clock=lambda: 0.0)
    collector = TensorCollector(every_n_steps=1, dirpath=str(folder / "tensors"))
    watch(Watched(steps=6), [report, monitor, collector, acts])  # type: ignore[list-item]
    assert [alarm["step"] for alarm in read_data(folder)["alarms"]] == [1, 4]
    assert "It is odd." in (folder / "instability.html").read_text()
    assert [path.name for path in sorted((folder / "tensors").iterdir())] == [
        *("00000003.npz", "00000004.npz", "00000005.npz")
    ]
    assert texts_with(list(recwarn), "could not") == []


def test_report_whose_folder_cannot_be_made_yet_is_written_later(
    tmp_path: Path, recwarn: Any
) -> None:
    (tmp_path / "run").write_text("in the way")
    monitor, acts = AlarmAt(1, 2, 4), ActsAt(at_3=(tmp_path / "run").unlink)
    report = InstabilityReport(dirpath=str(tmp_path / "run"))
    report._pace = _Pace(1e9, clock=lambda: 0.0)
    collector = TensorCollector(every_n_steps=1, dirpath=str(tmp_path / "run" / "tensors"))
    watch(Watched(steps=6), [report, monitor, collector, acts])  # type: ignore[list-item]
    alarms = read_data(tmp_path / "run")["alarms"]
    assert [alarm["step"] for alarm in alarms] == [1, 2, 4]
    assert len(list((tmp_path / "run" / "tensors").iterdir())) == 3
    # Writes are tried at the start, at two alarms, and at three samples.
    told = texts_with(list(recwarn), "could not")
    assert [text.split("`")[1] for text in told] == ["InstabilityReport", "TensorCollector"]


def test_report_on_a_full_disk_warns_once_and_keeps_the_old_page(tmp_path: Path) -> None:
    full = full_disk()
    monitor = AlarmAt(1, 4, 5, 6)
    acts = ActsAt(at_3=full.__enter__, at_8=lambda: full.__exit__(None, None, None))
    report = InstabilityReport(dirpath=str(tmp_path), every_n_seconds=1e9)
    report._pace = _Pace(1e9, clock=lambda: 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(Watched(steps=9), [report, monitor, acts])  # type: ignore[list-item]
    (told,) = texts_with(caught, "could not")
    assert "File too large. Training continues." in told
    assert {path.name for path in tmp_path.iterdir()} == {"instability.html", "instability.json"}
    alarms = read_data(tmp_path)["alarms"]
    assert [alarm["step"] for alarm in alarms] == [1, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("how", ["cut off", "cut off behind", "later", "not JSON", "empty"])
def test_resumed_report_is_written_despite_damaged_earlier_data(tmp_path: Path, how: str) -> None:
    saving = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=20)
    callbacks: list[Any] = [InstabilityReport(dirpath=str(tmp_path)), saving, AlarmAt(10, 25)]
    watch(Watched(steps=30), callbacks, enable_checkpointing=True)
    path = tmp_path / "instability.json"
    later = read_data(path)
    later["format"] = later["format"].replace(" 1", " 2")
    later["alarms"] = [{**alarm, "owner": "me"} for alarm in later["alarms"]] + ["gone"]
    text = path.read_text()
    texts = {"cut off": text[: text.index('"curves"') - 90], "cut off behind": text[:-300]}
    texts["later"] = json.dumps(later)
    path.write_text(texts.get(how, "" if how == "empty" else "\0\1"))
    resumed = InstabilityReport(dirpath=str(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(Watched(steps=40), [resumed, AlarmAt(30)], ckpt_path=str(tmp_path / "last.ckpt"))
    # The alarm that no checkpoint contains is read from the data of the same run.
    known = [25] if how in ("cut off behind", "later") else []
    assert [alarm["step"] for alarm in read_data(path)["alarms"]] == [10, *known, 30]
    assert "finished" in read_data(path)["run"]["end"]["how"]
    told = texts_with(caught, "are damaged or from another version")
    assert len(told) == (how in ("cut off", "later"))
    assert texts_with(caught, "could not") == []
