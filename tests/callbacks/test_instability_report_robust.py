"""Reports of runs that share a folder, are killed, or are resumed; loggers; alerts."""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_mp import (
    BalancedAMP,
    GradientUnderflowMonitor,
    LossScaleMonitor,
    SpikeGuard,
    TensorCollector,
)
from lightning_mp.callbacks import Alarm
from lightning_mp.callbacks._report.outlets import Alerts
from lightning_mp.callbacks.instability_report import InstabilityReport, _Pace
from lightning_mp.callbacks.monitor import InstabilityMonitor
from tests.callbacks.disks import full_disk
from tests.callbacks.models import Watched, watch
from tests.processes import exit_code_of

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


class AlarmAt(InstabilityMonitor):
    """Raises an alarm at some steps."""

    def __init__(self, *steps: int, value: float = 2.5) -> None:
        super().__init__(repeat_after_steps=1)
        self.steps, self.value = steps, value

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, *rest: Any) -> None:
        if rest[-1] in self.steps:
            self.alarm(trainer, "odd", "It is odd.", "Look.", value=self.value)


def _data(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# --- files ---------------------------------------------------------------------------------------


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
    data, page = _data(tmp_path / "instability.json"), tmp_path / "instability.html"
    assert [alarm["step"] for alarm in data["alarms"]] == [10, 25]
    assert data["curves"]["loss"]["steps"] == list(range(26))  # including the step of the alarm
    assert "It is odd." in page.read_text()
    folder = tmp_path / "version_1" if elsewhere else tmp_path  # as of a logger's new version
    resumed = InstabilityReport(dirpath=str(folder))
    watch(Watched(steps=40), [resumed, AlarmAt(30)], ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.path == folder / "instability.html"
    assert sorted(tmp_path.glob("*.html")) == [page]
    data = _data(folder / "instability.json")
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
    counts = {path.name: _data(path)["run"]["steps"] for path in tmp_path.glob("*.json")}
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


class Acts(pl.Callback):
    """Changes the disk at a step."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def on_train_batch_start(self, *args: Any) -> None:
        if act := self.acts.get(f"at_{args[-1]}"):
            act()


def _texts(caught: list[warnings.WarningMessage], text: str) -> list[str]:
    return [str(each.message) for each in caught if text in str(each.message)]


def test_report_whose_folder_vanishes_is_written_later(tmp_path: Path, recwarn: Any) -> None:
    folder = tmp_path / "run"
    monitor, acts = AlarmAt(1, 4), Acts(at_3=lambda: shutil.rmtree(folder))
    report = InstabilityReport(dirpath=str(folder))
    report._pace = _Pace(1e9, clock=lambda: 0.0)
    collector = TensorCollector(every_n_steps=1, dirpath=str(folder / "tensors"))
    watch(Watched(steps=6), [report, monitor, collector, acts])  # type: ignore[list-item]
    assert [alarm["step"] for alarm in _data(folder / "instability.json")["alarms"]] == [1, 4]
    assert "It is odd." in (folder / "instability.html").read_text()
    assert [path.name for path in sorted((folder / "tensors").iterdir())] == [
        *("00000003.npz", "00000004.npz", "00000005.npz")
    ]
    assert _texts(list(recwarn), "could not") == []


def test_report_whose_folder_cannot_be_made_yet_is_written_later(
    tmp_path: Path, recwarn: Any
) -> None:
    (tmp_path / "run").write_text("in the way")
    monitor, acts = AlarmAt(1, 2, 4), Acts(at_3=(tmp_path / "run").unlink)
    report = InstabilityReport(dirpath=str(tmp_path / "run"))
    report._pace = _Pace(1e9, clock=lambda: 0.0)
    collector = TensorCollector(every_n_steps=1, dirpath=str(tmp_path / "run" / "tensors"))
    watch(Watched(steps=6), [report, monitor, collector, acts])  # type: ignore[list-item]
    alarms = _data(tmp_path / "run" / "instability.json")["alarms"]
    assert [alarm["step"] for alarm in alarms] == [1, 2, 4]
    assert len(list((tmp_path / "run" / "tensors").iterdir())) == 3
    # Writes are tried at the start, at two alarms, and at three samples.
    told = _texts(list(recwarn), "could not")
    assert [text.split("`")[1] for text in told] == ["InstabilityReport", "TensorCollector"]


def test_report_on_a_full_disk_warns_once_and_keeps_the_old_page(tmp_path: Path) -> None:
    full = full_disk()
    monitor = AlarmAt(1, 4, 5, 6)
    acts = Acts(at_3=full.__enter__, at_8=lambda: full.__exit__(None, None, None))
    report = InstabilityReport(dirpath=str(tmp_path), every_n_seconds=1e9)
    report._pace = _Pace(1e9, clock=lambda: 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(Watched(steps=9), [report, monitor, acts])  # type: ignore[list-item]
    (told,) = _texts(caught, "could not")
    assert "File too large. Training continues." in told
    assert {path.name for path in tmp_path.iterdir()} == {"instability.html", "instability.json"}
    alarms = _data(tmp_path / "instability.json")["alarms"]
    assert [alarm["step"] for alarm in alarms] == [1, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("how", ["cut off", "cut off behind", "later", "not JSON", "empty"])
def test_resumed_report_is_written_despite_damaged_earlier_data(tmp_path: Path, how: str) -> None:
    saving = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=20)
    callbacks: list[Any] = [InstabilityReport(dirpath=str(tmp_path)), saving, AlarmAt(10, 25)]
    watch(Watched(steps=30), callbacks, enable_checkpointing=True)
    path = tmp_path / "instability.json"
    later = _data(path)
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
    assert [alarm["step"] for alarm in _data(path)["alarms"]] == [10, *known, 30]
    assert "finished" in _data(path)["run"]["end"]["how"]
    told = _texts(caught, "are damaged or from another version")
    assert len(told) == (how in ("cut off", "later"))
    assert _texts(caught, "could not") == []


# --- loggers -------------------------------------------------------------------------------------


class Kept(Logger):
    """Records its calls; its experiment has the given methods."""

    def __init__(self, folder: Path, **experiment: Any) -> None:
        super().__init__()
        self._folder = folder
        self.metrics: list[tuple[int, dict[str, Any]]] = []
        self.calls: list[tuple[Any, ...]] = []
        methods = {name: self._keep(name) for name in experiment.pop("methods", [])}
        self.experiment = SimpleNamespace(**methods, **experiment)

    def _keep(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    name, version = "kept", 0

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.metrics.append((step or 0, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_report_is_logged_through_the_interface_of_each_logger(tmp_path: Path) -> None:
    wandb = Kept(tmp_path, methods=["log_artifact"], id="ab12")
    mlflow = Kept(tmp_path, methods=["log_artifact", "log_text"])
    mlflow.run_id = "r7"  # type: ignore[attr-defined]
    comet = Kept(tmp_path, methods=["log_asset", "log_artifact"])
    board = TensorBoardLogger(tmp_path, name="board")
    plain = CSVLogger(tmp_path, name="csv")
    loggers = [wandb, mlflow, comet, board, plain]
    report = InstabilityReport(dirpath=str(tmp_path))
    watch(Watched(steps=4), [report, AlarmAt(2)], logger=loggers, log_every_n_steps=1)
    page = str(tmp_path / "instability.html")
    named = {"name": "instability-ab12", "type": "report"}
    assert wandb.calls == [("log_artifact", (page,), named)]
    assert mlflow.calls == [("log_artifact", ("r7", page), {})]
    shown = {"file_name": "instability.html", "overwrite": True}
    assert comet.calls == [("log_asset", (page,), shown)]
    events = EventAccumulator(board.log_dir).Reload()
    (text,) = events.Tensors("instability/report/text_summary")
    said = text.tensor_proto.string_val[0].decode()
    assert said.startswith("1 warning; first at step 2: It is odd.\n")
    assert "- warning at step 2: It is odd. Look." in said
    for logger in (wandb, mlflow, comet):  # every logger also gets the metrics
        assert (2, {"instability/odd": 2.5}) in logger.metrics


def test_failing_logger_warns_and_log_artifact_disables_logging(
    tmp_path: Path,
) -> None:
    class Broken(Kept):
        def _keep(self, name: str) -> Any:
            def fail(*args: Any, **kwargs: Any) -> None:
                raise ConnectionError("no route")

            return fail

    broken, after = Broken(tmp_path, methods=["log_artifact"]), Kept(tmp_path, methods=["add_text"])
    match = "could not log its page to Broken: ConnectionError: no route. Training continues"
    with pytest.warns(UserWarning, match=match):
        watch(Watched(steps=2), [InstabilityReport()], logger=[broken, after], log_every_n_steps=1)
    assert [call[0] for call in after.calls] == ["add_text"]
    silent = Kept(tmp_path, methods=["add_text"])
    report = InstabilityReport(log_artifact=False)
    watch(Watched(steps=2), [report], logger=silent, log_every_n_steps=1)
    assert silent.calls == []


def test_monitors_log_nothing_if_lightning_logs_nothing(tmp_path: Path) -> None:
    logger = Kept(tmp_path)
    monitors = [
        LossScaleMonitor(),
        GradientUnderflowMonitor(every_n_steps=1),
        SpikeGuard(),
        AlarmAt(3),
        InstabilityReport(),
    ]
    watch(Watched(steps=6), monitors, BalancedAMP(), logger=logger, log_every_n_steps=0)
    assert logger.metrics == []
    assert [alarm["step"] for alarm in _data(tmp_path / "instability.json")["alarms"]] == [3]


# --- alerts --------------------------------------------------------------------------------------


def test_alert_calls_a_function_with_warnings_and_errors(tmp_path: Path) -> None:
    told: list[Alarm] = []
    report = InstabilityReport(dirpath=str(tmp_path), alert=told.append)
    monitor = AlarmAt(1, 3)
    watch(Watched(steps=5), [report, monitor])
    assert told == monitor.alarms
    assert [alarm.step for alarm in told] == [1, 3]


def test_failing_alert_function_warns_once(tmp_path: Path) -> None:
    def fail(alarm: Alarm) -> None:
        raise OSError("no mail")

    report = InstabilityReport(dirpath=str(tmp_path), alert=fail)
    with pytest.warns(UserWarning, match="no mail") as caught:
        watch(Watched(steps=5), [report, AlarmAt(1, 3)])
    said = [str(each.message) for each in caught if "no mail" in str(each.message)]
    assert len(said) == 1
    assert "Training continues." in said[0]


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A local server that records the requests that it receives."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append({"type": self.headers["Content-Type"], **json.loads(body)})
            self.send_response(500 if self.path.startswith("/broken") else 204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", posted
        running.shutdown()
        thread.join()


def test_alert_posts_json_to_a_url(tmp_path: Path, server: tuple[str, list[Any]]) -> None:
    url, posted = server
    report = InstabilityReport(dirpath=str(tmp_path), alert=url)
    watch(Watched(steps=5), [report, AlarmAt(1, 3, value=math.inf)])
    assert [each["alarm"]["step"] for each in posted] == [1, 3]
    assert posted[0]["type"] == "application/json"
    assert posted[0]["text"] == "Watched: Step 1, epoch 0, batch 1, rank 0: It is odd. Look."
    assert posted[0]["alarm"]["value"] == "inf"
    assert posted[0]["alarm"]["remedy"] == "Look."


def test_alerts_pending_at_the_end_of_training_arrive(server: tuple[str, list[Any]]) -> None:
    url, posted = server
    alerts = Alerts(url)
    alarm = Alarm(step=0, monitor="A", kind="odd", severity="warning", message="Odd.", remedy="Go.")
    for step in range(8):
        alerts.send("Watched", dataclasses.replace(alarm, step=step))
    alerts.finish()
    assert [each["alarm"]["step"] for each in posted] == [*range(8)]


@pytest.mark.parametrize("target", ["answers-500", "nobody"])
def test_alert_that_does_not_arrive_warns_without_the_url_and_training_continues(
    tmp_path: Path, server: tuple[str, list[Any]], target: str
) -> None:
    # Port 1 is privileged, so no test listens there.
    url = f"{server[0]}/broken" if target == "answers-500" else "http://127.0.0.1:1/secret"
    report = InstabilityReport(dirpath=str(tmp_path), alert=url)
    with pytest.warns(UserWarning, match="could not send an alarm to a URL") as caught:
        watch(Watched(steps=5), [report, AlarmAt(1, 3)])
    assert not any(url in str(each.message) for each in caught)
    assert _data(tmp_path / "instability.json")["run"]["end"]["how"] == "finished"
    assert url not in report.state_key


SECRET = "T0KEN"
URLS = {
    "path": f"{{server}}/broken/{SECRET}",
    "query": f"{{server}}/broken?key={SECRET}",
    "user": f"http://me:{SECRET}@{{host}}/broken",
    "user, bad port": f"http://{SECRET}:{SECRET}@127.0.0.1/",
    "space": f"{{server}}/hooks/ {SECRET}",
    "line break": f"{{server}}/hooks/{SECRET}\n{SECRET}",
    "control": f"{{server}}/hooks/{SECRET}\x7f",
    "not ASCII": f"{{server}}/hooks/{SECRET}é",
    "no host": f"http:///{SECRET}",
    "bad host": f"http://[{SECRET}/",
    "bad label": f"http://{SECRET}{'a' * 80}/{SECRET}",
    "nobody": f"http://127.0.0.1:1/{SECRET}?{SECRET}",
    "no such host": f"http://{SECRET}.invalid/{SECRET}",
    "other scheme": f"https://127.0.0.1:1/{SECRET}",
}
ALARM = Alarm(step=0, monitor="A", kind="odd", severity="warning", message="Odd.", remedy="Go.")


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
def test_warning_of_an_alert_contains_no_secret_of_the_url(
    url: str,
    server: tuple[str, list[Any]],
    logged: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = server[0].removeprefix("http://")
    alerts = Alerts(url.format(server=server[0], host=host))
    alerts.send("Watched", ALARM)
    with pytest.warns(UserWarning, match="could not send an alarm to a URL: ") as caught:
        alerts.finish()
    said = [*(str(each.message) for each in caught), *logged, *capfd.readouterr()]
    assert not any(SECRET.lower() in text.lower() for text in said)
    (text,) = (each for each in said if "could not send an alarm" in each)
    # The warning contains the class of the error.
    assert re.search(r"URL: (HTTPError 500|gaierror|\w*(Error|URL)\b)", text)


def test_warning_of_an_alert_function_contains_no_secret() -> None:
    def post(url: str, alarm: Alarm) -> None:
        raise ConnectionError(f"no route to {url}")

    alerts = Alerts(functools.partial(post, f"https://hooks.example/{SECRET}"))
    with pytest.warns(UserWarning, match="an alarm to `partial`: .*: no route to a URL") as caught:
        alerts.send("Watched", ALARM)
    assert not any(SECRET in str(each.message) for each in caught)


@pytest.mark.parametrize(
    "arguments",
    [
        {"alert": f"htps://hooks.example/{SECRET}"},
        {"alert": f"hooks.example/{SECRET}"},
        {"alert": f"https://hooks.example/{SECRET}", "max_tensor": 5},
        {"alert": f"https://hooks.example/{SECRET}", "max_tensors": 0},
        {"alert": f"https://hooks.example/{SECRET}", "filename": "page"},
    ],
)
def test_error_of_a_wrong_url_contains_no_secret(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="Passed `InstabilityReport") as caught:
        InstabilityReport(**arguments)
    assert SECRET not in str(caught.value)


def test_page_and_checkpoint_contain_no_secret_of_the_url(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path), alert=f"http://127.0.0.1:1/{SECRET}")
    with pytest.warns(UserWarning, match="could not send an alarm to a URL"):
        trainer = watch(Watched(steps=3), [report, AlarmAt(1)])
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert content
        assert SECRET.encode() not in content
