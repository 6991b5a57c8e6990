"""Reports are logged, and alarms are sent to a function or a URL."""

import dataclasses
import functools
import json
import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_mp import (
    BalancedAMP,
    GradientUnderflowMonitor,
    LossScaleMonitor,
    SpikeGuard,
)
from lightning_mp.callbacks import Alarm
from lightning_mp.callbacks._report.outlets import Alerts
from lightning_mp.callbacks.instability_report import InstabilityReport
from tests.callbacks.models import Watched, watch
from tests.callbacks.report_runs import AlarmAt, read_data

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


class RecordsCalls(Logger):
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
    wandb = RecordsCalls(tmp_path, methods=["log_artifact"], id="ab12")
    mlflow = RecordsCalls(tmp_path, methods=["log_artifact", "log_text"])
    mlflow.run_id = "r7"  # type: ignore[attr-defined]
    comet = RecordsCalls(tmp_path, methods=["log_asset", "log_artifact"])
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
    class Broken(RecordsCalls):
        def _keep(self, name: str) -> Any:
            def fail(*args: Any, **kwargs: Any) -> None:
                raise ConnectionError("no route")

            return fail

    broken, after = (
        Broken(tmp_path, methods=["log_artifact"]),
        RecordsCalls(tmp_path, methods=["add_text"]),
    )
    match = "could not log its page to Broken: ConnectionError: no route. Training continues"
    with pytest.warns(UserWarning, match=match):
        watch(Watched(steps=2), [InstabilityReport()], logger=[broken, after], log_every_n_steps=1)
    assert [call[0] for call in after.calls] == ["add_text"]
    silent = RecordsCalls(tmp_path, methods=["add_text"])
    report = InstabilityReport(log_artifact=False)
    watch(Watched(steps=2), [report], logger=silent, log_every_n_steps=1)
    assert silent.calls == []


def test_monitors_log_nothing_if_lightning_logs_nothing(tmp_path: Path) -> None:
    logger = RecordsCalls(tmp_path)
    monitors = [
        LossScaleMonitor(),
        GradientUnderflowMonitor(every_n_steps=1),
        SpikeGuard(),
        AlarmAt(3),
        InstabilityReport(),
    ]
    watch(Watched(steps=6), monitors, BalancedAMP(), logger=logger, log_every_n_steps=0)
    assert logger.metrics == []
    assert [alarm["step"] for alarm in read_data(tmp_path)["alarms"]] == [3]


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
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
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
    assert read_data(tmp_path)["run"]["end"]["how"] == "finished"
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
