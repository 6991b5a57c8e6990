"""Logs the report and sends alarms to a function or URL; failures do not end the run."""

import dataclasses
import json
import math
import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mp.callbacks._report.page import headline
from lightning_mp.callbacks._rules.records import Alarm
from lightning_mp.callbacks._words.usage import usage

__all__ = ["Alerts", "log_report"]

_TIMEOUT_S = 5.0  # only the end of training waits


class Alerts:
    """Passes alarms to a function, or sends them to a URL from another thread."""

    def __init__(self, alert: Callable[[Alarm], object] | str | None) -> None:
        self._alert = alert
        self._threads: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # one thread sends all alarms in order
        self._error = ""
        self._has_warned = False

    def send(self, title: str, alarm: Alarm) -> None:
        if isinstance(self._alert, str):
            self._threads = self._threads or ThreadPoolExecutor(1, "alerts")
            body = {"text": f"{title}: {alarm.message}", "alarm": _json_fields(alarm)}
            self._last = self._threads.submit(self._try, _post, self._alert, body)
        elif self._alert is not None:
            self._try(self._alert, alarm)
            self.check()

    def _try(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # `check` warns in the training thread
            text = re.sub(r"\w+://\S+", "a URL", str(error))
            self._error = _kind(error) if call is _post else f"{type(error).__name__}: {text}"

    def check(self) -> None:
        """Warn once per run if an alarm could not be sent."""
        if self._error and not self._has_warned:
            self._has_warned = True
            # The URL, and the text of a callable object, may contain a secret.
            name = getattr(self._alert, "__qualname__", type(self._alert).__name__)
            what = "a URL" if isinstance(self._alert, str) else f"`{name}`"
            rank_zero_warn(usage("alert_not_sent", alert=what, error=self._error))

    def finish(self) -> None:
        """Wait briefly for pending alarms and drop the rest."""
        if self._threads is not None and self._last is not None:
            # Enough for the alarm that is being sent and for one more.
            wait([self._last], timeout=2 * _TIMEOUT_S)
            # Otherwise Python would send all pending alarms before it exits.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self.check()


def _json_fields(alarm: Alarm) -> dict[str, object]:
    fields = dataclasses.asdict(alarm).items()
    # JSON has neither NaN nor inf.
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields}


def _kind(error: Exception) -> str:
    """Return the class of an error without its text, which may contain the URL and a secret."""
    reason = getattr(error, "reason", None)  # the cause of a `URLError`
    error = reason if isinstance(reason, Exception) else error
    return f"{type(error).__name__} {getattr(error, 'code', '')}".rstrip()


def _post(url: str, body: Any) -> None:
    data = json.dumps(body, allow_nan=False).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()


def log_report(logger: Any, page: Path, data: dict[str, Any]) -> None:
    """Log the page as a file, or as text with TensorBoard."""
    # Loggers are recognized by their methods, so that none needs to be installed.
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "log_asset"):  # Comet
        experiment.log_asset(str(page), file_name=page.name, overwrite=True)
    elif hasattr(experiment, "log_artifact") and hasattr(logger, "run_id"):  # MLflow
        experiment.log_artifact(logger.run_id, str(page))
    elif hasattr(experiment, "log_artifact"):  # Weights & Biases
        name = f"{page.stem}-{getattr(experiment, 'id', 'report')}"
        experiment.log_artifact(str(page), name=name, type="report")
    elif hasattr(experiment, "add_text"):  # TensorBoard
        experiment.add_text("instability/report", _markdown(page, data), data["run"]["steps"])


def _markdown(page: Path, data: dict[str, Any]) -> str:
    alarms = (
        f"- {alarm['severity']} at step {alarm['step']}: {alarm['message']} {alarm['remedy']}"
        for alarm in data["alarms"]
    )
    return "\n".join([headline(data), "", usage("report_logged", page=page.name), "", *alarms])
