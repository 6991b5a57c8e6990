"""`InstabilityReport` records and writes whole runs, and runs that fail."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_mp import BalancedAMP
from lightning_mp.callbacks._step import recorder
from lightning_mp.callbacks.adam_state_monitor import AdamStateMonitor
from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
from lightning_mp.callbacks.instability_report import InstabilityReport, _Pace
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.cli.report import rebuild_page
from lightning_mp.numerics.async_readback import AsyncReadback
from tests.callbacks.models import Watched, watch
from tests.processes import exit_code_of


class Told(Watched):
    """Records its losses, and the norms of its gradients in float64."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        squares = [p.grad.double().square().sum() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


def _data(folder: Path, name: str = "instability.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def _values(data: dict[str, Any], name: str) -> dict[int, float]:
    curve = data["curves"][name]
    return dict(zip(curve["steps"], curve["values"], strict=True))


def test_facts_show_the_configured_highest_and_current_rate(tmp_path: Path) -> None:
    class Scheduled(Watched):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.5)
            steps = torch.optim.lr_scheduler.LambdaLR(optimizer, [1.0, 0.5, 0.0, 0.0].__getitem__)
            return [optimizer], [{"scheduler": steps, "interval": "step"}]

    watch(Scheduled(steps=2), [InstabilityReport(dirpath=str(tmp_path))])
    said = dict(_data(tmp_path)["run"]["facts"])["Optimizer"]
    assert said.startswith("SGD(lr=0.5, ")
    assert said.endswith("; its schedule reached 0.5 and is at 0")


def test_report_without_monitors_and_logger_has_loss_and_gradient_norm(tmp_path: Path) -> None:
    model = Told(steps=13)
    report = InstabilityReport()
    watch(model, [report], default_root_dir=str(tmp_path), gradient_clip_val=0.01)
    assert report.path == tmp_path / "instability.html"
    assert "No alarms in 13 steps." in report.path.read_text()
    data = _data(tmp_path)
    assert _values(data, "loss") == pytest.approx(dict(enumerate(model.losses)), rel=1e-4)
    assert _values(data, "gradient_norm") == pytest.approx(dict(enumerate(model.norms)), rel=1e-4)
    assert min(model.norms) > 0.02  # a norm after clipping would differ
    assert data["run"]["has_loss_scale"] is False
    assert dict(data["run"]["facts"])["Precision"] == "Precision(precision=32-true)"
    assert data["run"]["end"]["how"] == "finished"


class Validated(Told):
    """Has a validation whose loss is 3 in the first epoch and 5 in the second.

    Args:
        is_returned: Whether `validation_step` returns its loss, or logs it.
    """

    def __init__(self, is_returned: bool) -> None:
        super().__init__(steps=6)
        self.is_returned = is_returned

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = torch.tensor(3.0 + 2.0 * self.current_epoch)
        if not self.is_returned:
            self.log("val_loss", loss)
        return loss if self.is_returned else None

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize("is_returned", [True, False], ids=["returned", "logged"])
def test_report_has_the_gap_between_validation_and_training(
    tmp_path: Path, is_returned: bool
) -> None:
    model = Validated(is_returned)
    options = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    watch(model, [InstabilityReport(dirpath=str(tmp_path))], **options)
    data = _data(tmp_path)
    assert list(_values(data, "validation_loss").values()) == [3.0, 5.0]
    first, second = (sum(model.losses[at : at + 6]) / 6 for at in (0, 6))
    gaps = list(_values(data, "validation_gap").values())
    assert gaps == pytest.approx([3.0 - first, 5.0 - second], rel=1e-4)


def test_report_with_a_logger_is_in_its_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log")
    report = InstabilityReport(filename="page.htm")
    watch(Watched(steps=2), [report], logger=logger)
    assert report.path == Path(logger.log_dir) / "page.htm"
    assert report.path.is_file()
    assert _data(Path(logger.log_dir), "page.json")["run"]["steps"] == 2


def test_report_under_accumulation_has_the_mean_loss_of_each_step(tmp_path: Path) -> None:
    model = Told(steps=8)
    watch(model, [InstabilityReport(dirpath=str(tmp_path))], accumulate_grad_batches=3)
    expected = [sum(part) / len(part) for part in (model.losses[:3], model.losses[3:6])]
    expected.append(sum(model.losses[6:]) / 2)  # the last step has two batches only
    assert _values(_data(tmp_path), "loss") == pytest.approx(dict(enumerate(expected)), rel=1e-4)


class Manual(Told):
    """Returns a dict, and `None` in every third batch."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None if batch_idx % 3 == 2 else {"loss": loss.detach()}


@pytest.mark.parametrize("backward", ["manual_backward", "tensor"])
def test_report_in_manual_optimization_has_the_backpropagated_losses(
    tmp_path: Path, backward: str
) -> None:
    model = Manual(steps=7)
    if backward == "tensor":  # Lightning sees only the returned loss
        model.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign]
    watch(model, [InstabilityReport(dirpath=str(tmp_path))])
    is_known = lambda step: backward != "tensor" or step % 3 != 2  # noqa: E731
    expected = {step: loss for step, loss in enumerate(model.losses) if is_known(step)}
    assert _values(_data(tmp_path), "loss") == pytest.approx(expected, rel=1e-4)
    assert len(_values(_data(tmp_path), "gradient_norm")) == 7


def test_report_under_a_loss_scale_counts_skips_and_marks_non_finite_values(
    tmp_path: Path,
) -> None:
    factors = {3: math.inf, 4: math.inf, 7: math.inf}
    model = Watched(steps=10, factor=lambda i: factors.get(i, 1.0))
    watch(model, [InstabilityReport(dirpath=str(tmp_path))], BalancedAMP())
    data = _data(tmp_path)
    assert _values(data, "skipped") == {3: 1, 4: 2, 7: 3}
    scales = [1024] * 3 + [512] + [256] * 3 + [128] * 3
    assert _values(data, "loss_scale") == dict(enumerate(scales))
    assert data["curves"]["loss"]["bad"] == [[3, "inf"], [4, "inf"], [7, "inf"]]
    assert [step for step, _ in data["curves"]["gradient_norm"]["bad"]] == [3, 4, 7]
    assert data["run"]["has_loss_scale"] is True
    facts = dict(data["run"]["facts"])
    assert "half=fp16" in facts["Precision"]
    assert "min_scale=1," in facts["Precision"]
    assert "lr=0.001, betas=[0.9, 0.999], eps=1e-08" in facts["Optimizer"]
    assert facts["Model"].startswith("Watched, ")
    assert "world size 1" in facts["Strategy"]
    assert torch.__version__ in facts["Versions"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")
def test_report_with_monitors_has_their_maps_alarms_and_norm(tmp_path: Path) -> None:
    def kill(module: pl.LightningModule, batch_idx: int) -> None:
        if batch_idx == 30:
            with torch.no_grad():
                module.network[2].bias -= 1e3

    monitors = [
        InstabilityReport(dirpath=str(tmp_path)),
        GradientUnderflowMonitor(every_n_steps=5),
        AdamStateMonitor(every_n_steps=5, zero_run_steps=20),
    ]
    model = Watched(steps=80, sabotage=kill)
    watch(model, monitors)
    data = _data(tmp_path)
    maps = {"gradient_zero_share", "update_rms", "update_to_weight"}
    assert {heat["name"] for heat in data["maps"]} == maps
    zeros = next(heat for heat in data["maps"] if heat["name"] == "gradient_zero_share")
    row = zeros["cells"][zeros["rows"].index("network.0.weight")]
    assert (row[0], row[-1]) == (pytest.approx(0, abs=0.5), 1)
    raised = [alarm for monitor in monitors for alarm in monitor.alarms]
    assert len(data["alarms"]) == len(raised) > 0
    assert set(_values(data, "gradient_norm")) == {
        step for step, _ in monitors[1].history.curves["gradient_norm"]
    }
    page = (tmp_path / "instability.html").read_text()
    assert f"first at step {min(alarm.step for alarm in raised)}: " in page


class LastWords(InstabilityMonitor):
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
        watch(Failing(steps=9), [report, LastWords()])  # the report comes first
    page = (tmp_path / "instability.html").read_text()
    assert "<code>ValueError: &lt;b&gt;bad&lt;/b&gt; batch</code>" in page
    assert "more of it" not in page
    assert "1 error; first at step 5: It is over." in page
    data = _data(tmp_path)
    assert data["run"]["end"]["how"] == "failed"
    assert list(_values(data, "loss")) == [0, 1, 2, 3, 4]


def test_report_that_cannot_be_written_warns_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = Told(steps=3)
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
    assert _data(tmp_path)["run"]["end"]["how"] == "failed"
    assert list(_values(_data(tmp_path), "loss")) == [0, 1, 2, 3, 4]


class Writing(pl.Callback):
    def __init__(self, report: InstabilityReport) -> None:
        self.report = report
        self.written: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if args[-1] == 3:
            path = self.report.write(trainer)
            self.written += [path, json.loads(path.with_suffix(".json").read_text())]


def test_report_can_be_written_during_training(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    writing = Writing(report)
    watch(Watched(steps=6), [report, writing])
    path, data = writing.written
    assert path == tmp_path / "instability.html"
    assert max(_values(data, "loss")) in (2, 3)
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
    assert list(_values(_data(tmp_path), "loss")) == list(range(20))
    page = (tmp_path / "instability.html").read_text()
    assert "No alarms in 20 steps." in page
    assert "still running or killed" in page
    assert rebuild_page(tmp_path).read_text() == page


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_report_of_a_resumed_run_shows_the_whole_run(tmp_path: Path) -> None:
    first = Told(steps=10)
    saving = ModelCheckpoint(
        tmp_path / "checkpoints", filename="{step}", every_n_train_steps=6, save_top_k=-1
    )
    report = InstabilityReport(dirpath=str(tmp_path))
    watch(first, [report, saving], enable_checkpointing=True)  # type: ignore[list-item]
    assert list(_values(_data(tmp_path), "loss")) == list(range(10))
    second = Told(steps=12, factor=lambda _: 100.0)
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
    data = _data(tmp_path)
    assert _values(data, "loss") == pytest.approx(expected, rel=1e-4)
    assert [start["step"] for start in data["run"]["starts"]] == [0, 6]
    assert "at step 6, " in (tmp_path / "instability.html").read_text()


def test_report_used_for_a_second_run_forgets_the_first(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    watch(Told(steps=9, factor=lambda i: math.inf if i == 7 else 1.0), [report])
    assert _data(tmp_path)["curves"]["loss"]["bad_count"] >= 1
    model = Told(steps=4)
    watch(model, [report])
    assert report.path == tmp_path / "instability-v1.html"  # the first run keeps its page
    data = _data(tmp_path, "instability-v1.json")
    assert _values(data, "loss") == pytest.approx(dict(enumerate(model.losses)), rel=1e-4)
    assert data["curves"]["loss"]["bad"] == []
    assert len(data["run"]["starts"]) == 1
    assert _data(tmp_path)["run"]["steps"] == 9


def test_report_in_test_and_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    class Tested(Watched):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            pass

        test_dataloader = Watched.train_dataloader

    report = InstabilityReport(dirpath=str(tmp_path))
    model = Tested(steps=2)
    watch(model, [report], fast_dev_run=True).test(model, verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_report_stays_before_checkpoints_and_after_monitors() -> None:
    report, saving, monitor = InstabilityReport(), ModelCheckpoint(), GradientUnderflowMonitor()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, callbacks=[report, monitor, saving], max_steps=1
    )
    report.setup(trainer, Watched(), "fit")
    order = [trainer.callbacks.index(each) for each in (monitor, report, saving)]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("filename", "a/b.html"),
        ("filename", "page.json"),
        ("filename", 3),
        ("every_n_seconds", 0),
        ("every_n_seconds", "1"),
        ("alert", 5),
        ("max_tensors", 0),
        ("max_tensors", 501),
    ],
)
def test_report_with_a_wrong_argument_raises_an_error(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"InstabilityReport\({argument}={value!r}\)"):
        InstabilityReport(**{argument: value})


def test_report_with_sgd_names_its_settings(tmp_path: Path) -> None:
    model = Watched(make_optimizer=lambda p: SGD(p, lr=0.5, momentum=0.9), steps=2)
    watch(model, [InstabilityReport(dirpath=str(tmp_path))])
    assert dict(_data(tmp_path)["run"]["facts"])["Optimizer"].startswith("SGD(lr=0.5, momentum=0.9")
