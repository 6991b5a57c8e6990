"""`InstabilityReport` is written when a run fails, is killed, resumes or starts again."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_mp.callbacks._step import recorder
from lightning_mp.callbacks.instability_report import InstabilityReport, _Pace
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.cli.report import rebuild_page
from lightning_mp.numerics.async_readback import AsyncReadback
from tests.callbacks.models import Watched, watch
from tests.callbacks.report_runs import RecordsCourse, read_data, values_of
from tests.processes import exit_code_of


class AlarmOnException(InstabilityMonitor):
    """Raises an alarm in `on_exception`."""

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.alarm(trainer, "last_words", "It is over.", "Rest.", severity="error")


class Failing(Watched):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 5:
            raise ValueError("<b>bad</b> batch\nmore of it")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Step 5")
def test_report_of_a_failed_run_has_the_exception_and_the_last_alarms(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    with pytest.raises(ValueError, match="bad</b> batch"):
        watch(Failing(steps=9), [report, AlarmOnException()])  # the report comes first
    page = (tmp_path / "instability.html").read_text()
    assert "<code>ValueError: &lt;b&gt;bad&lt;/b&gt; batch</code>" in page
    assert "more of it" not in page
    assert "1 error; first at step 5: It is over." in page
    data = read_data(tmp_path)
    assert data["run"]["end"]["how"] == "failed"
    assert list(values_of(data, "loss")) == [0, 1, 2, 3, 4]


def test_report_that_cannot_be_written_warns_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = RecordsCourse(steps=3)
    with pytest.warns(UserWarning, match=r"could not write .*Training continues"):
        watch(model, [InstabilityReport(dirpath=str(tmp_path / "file"))])
    assert len(model.losses) == 3
    report = InstabilityReport(dirpath=str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not write"), pytest.raises(ValueError, match="bad"):
        watch(Failing(steps=9), [report])


class BrokenReadback(AsyncReadback):
    """Fails as a GPU does after a device-side assertion."""

    def drain(self) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_report_is_written_after_the_device_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "AsyncReadback", BrokenReadback)
    report = InstabilityReport(dirpath=str(tmp_path))
    with pytest.raises(ValueError, match="bad</b> batch"):
        watch(Failing(steps=9), [report])
    assert read_data(tmp_path)["run"]["end"]["how"] == "failed"
    assert list(values_of(read_data(tmp_path), "loss")) == [0, 1, 2, 3, 4]


class WritesReport(pl.Callback):
    def __init__(self, report: InstabilityReport) -> None:
        self.report = report
        self.written: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if args[-1] == 3:
            path = self.report.write(trainer)
            self.written += [path, json.loads(path.with_suffix(".json").read_text())]


def test_report_can_be_written_during_training(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    writing = WritesReport(report)
    watch(Watched(steps=6), [report, writing])
    path, data = writing.written
    assert path == tmp_path / "instability.html"
    assert max(values_of(data, "loss")) in (2, 3)
    assert data["run"]["end"] == {"how": "running"}


def _train_until_killed(folder: str) -> None:
    def kill(module: Any, batch_idx: int) -> None:
        if batch_idx == 25:
            os.kill(os.getpid(), signal.SIGKILL)

    report = InstabilityReport(dirpath=folder, every_n_seconds=10)
    report._pace = _Pace(10, clock=lambda: float(report._steps))  # one second per step
    watch(Watched(steps=40, sabotage=kill), [report])


@pytest.mark.slow
def test_report_of_a_killed_run_was_written_at_an_interval(tmp_path: Path) -> None:
    assert exit_code_of(_train_until_killed, str(tmp_path)) == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {"instability.html", "instability.json"}
    assert list(values_of(read_data(tmp_path), "loss")) == list(range(20))
    page = (tmp_path / "instability.html").read_text()
    assert "No alarms in 20 steps." in page
    assert "still running or killed" in page
    assert rebuild_page(tmp_path).read_text() == page


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_report_of_a_resumed_run_shows_the_whole_run(tmp_path: Path) -> None:
    first = RecordsCourse(steps=10)
    saving = ModelCheckpoint(
        tmp_path / "checkpoints", filename="{step}", every_n_train_steps=6, save_top_k=-1
    )
    report = InstabilityReport(dirpath=str(tmp_path))
    watch(first, [report, saving], enable_checkpointing=True)  # type: ignore[list-item]
    assert list(values_of(read_data(tmp_path), "loss")) == list(range(10))
    second = RecordsCourse(steps=12, factor=lambda _: 100.0)
    path = str(tmp_path / "checkpoints" / "step=6.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[InstabilityReport(dirpath=str(tmp_path))],
    )
    trainer.fit(second, ckpt_path=path)
    expected = dict(enumerate([*first.losses[:6], *second.losses]))
    assert len(expected) == 12
    data = read_data(tmp_path)
    assert values_of(data, "loss") == pytest.approx(expected, rel=1e-4)
    assert [start["step"] for start in data["run"]["starts"]] == [0, 6]
    assert "at step 6, " in (tmp_path / "instability.html").read_text()


def test_report_used_for_a_second_run_forgets_the_first(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    watch(RecordsCourse(steps=9, factor=lambda i: math.inf if i == 7 else 1.0), [report])
    assert read_data(tmp_path)["curves"]["loss"]["bad_count"] >= 1
    model = RecordsCourse(steps=4)
    watch(model, [report])
    assert report.path == tmp_path / "instability-v1.html"  # the first run keeps its page
    data = read_data(tmp_path / "instability-v1.json")
    assert values_of(data, "loss") == pytest.approx(dict(enumerate(model.losses)), rel=1e-4)
    assert data["curves"]["loss"]["bad"] == []
    assert len(data["run"]["starts"]) == 1
    assert read_data(tmp_path)["run"]["steps"] == 9


def test_report_in_test_and_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    class Tested(Watched):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            pass

        test_dataloader = Watched.train_dataloader

    report = InstabilityReport(dirpath=str(tmp_path))
    model = Tested(steps=2)
    watch(model, [report], fast_dev_run=True).test(model, verbose=False)
    assert list(tmp_path.iterdir()) == []
