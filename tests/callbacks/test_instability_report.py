"""`InstabilityReport` records whole runs."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import SGD

from lightning_mp import BalancedAMP
from lightning_mp.callbacks._report.data import report_data
from lightning_mp.callbacks._rules.records import Sample, StepFacts
from lightning_mp.callbacks.adam_state_monitor import AdamStateMonitor
from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
from lightning_mp.callbacks.instability_report import InstabilityReport
from tests.callbacks.models import Watched, watch
from tests.callbacks.report_runs import RecordsCourse, read_data, values_of


def test_facts_show_the_configured_highest_and_current_rate(tmp_path: Path) -> None:
    class Scheduled(Watched):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.5)
            steps = torch.optim.lr_scheduler.LambdaLR(optimizer, [1.0, 0.5, 0.0, 0.0].__getitem__)
            return [optimizer], [{"scheduler": steps, "interval": "step"}]

    watch(Scheduled(steps=2), [InstabilityReport(dirpath=str(tmp_path))])
    said = dict(read_data(tmp_path)["run"]["facts"])["Optimizer"]
    assert said.startswith("SGD(lr=0.5, ")
    assert said.endswith("; its schedule reached 0.5 and is at 0")


def test_report_without_monitors_and_logger_has_loss_and_gradient_norm(tmp_path: Path) -> None:
    model = RecordsCourse(steps=13)
    report = InstabilityReport()
    watch(model, [report], default_root_dir=str(tmp_path), gradient_clip_val=0.01)
    assert report.path == tmp_path / "instability.html"
    assert "No alarms in 13 steps." in report.path.read_text()
    data = read_data(tmp_path)
    assert values_of(data, "loss") == pytest.approx(dict(enumerate(model.losses)), rel=1e-4)
    assert values_of(data, "gradient_norm") == pytest.approx(dict(enumerate(model.norms)), rel=1e-4)
    assert min(model.norms) > 0.02  # a norm after clipping would differ
    assert data["run"]["has_loss_scale"] is False
    assert dict(data["run"]["facts"])["Precision"] == "Precision(precision=32-true)"
    assert data["run"]["end"]["how"] == "finished"


class Validated(RecordsCourse):
    """Has a validation whose loss is 3 in the first epoch and 5 in the second.

    Args:
        is_returned: Whether `validation_step` returns its loss, or logs it.
    """

    def __init__(self, is_returned: bool) -> None:
        super().__init__(steps=6)
        self.is_returned = is_returned

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = torch.tensor(3.0 + 2.0 * self.current_epoch)
        self.log("a_loss_value", -loss)
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
    data = read_data(tmp_path)
    assert list(values_of(data, "validation_loss").values()) == [3.0, 5.0]
    first, second = (sum(model.losses[at : at + 6]) / 6 for at in (0, 6))
    gaps = list(values_of(data, "validation_gap").values())
    assert gaps == pytest.approx([3.0 - first, 5.0 - second], rel=1e-4)


def test_report_with_a_logger_is_in_its_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log")
    report = InstabilityReport(filename="page.htm")
    watch(Watched(steps=2), [report], logger=logger)
    assert report.path == Path(logger.log_dir) / "page.htm"
    assert report.path.is_file()
    assert read_data(Path(logger.log_dir) / "page.json")["run"]["steps"] == 2


def test_report_of_a_resumed_run_has_the_gap_to_its_own_epoch(tmp_path: Path) -> None:
    options = {"limit_val_batches": 2, "num_sanity_val_steps": 0}
    path, reports = tmp_path / "last.ckpt", [InstabilityReport(), InstabilityReport()]
    first = watch(Validated(True), [reports[0]], default_root_dir=tmp_path, **options, max_epochs=2)
    first.save_checkpoint(path)
    model, options["ckpt_path"] = Validated(True), str(path)  # type: ignore[assignment]
    watch(model, [reports[1]], default_root_dir=tmp_path, **options, max_epochs=3)
    *_, (_, gap) = reports[1].history.curves["validation_gap"]
    assert gap == pytest.approx(7.0 - sum(model.losses) / 6, rel=1e-4)


def test_report_of_a_second_run_counts_its_skipped_steps(tmp_path: Path) -> None:
    report = InstabilityReport()
    for _ in range(2):
        model = Watched(steps=6, factor=lambda step: math.inf if step == 3 else 1.0)
        watch(model, [report], BalancedAMP(), default_root_dir=tmp_path, max_epochs=1)
        assert report.history.curves["skipped"] == [(3, 1.0)]


def test_report_under_accumulation_has_the_mean_loss_of_each_step(tmp_path: Path) -> None:
    model = RecordsCourse(steps=8)
    watch(model, [InstabilityReport(dirpath=str(tmp_path))], accumulate_grad_batches=3)
    expected = [sum(part) / len(part) for part in (model.losses[:3], model.losses[3:6])]
    expected.append(sum(model.losses[6:]) / 2)  # the last step has two batches only
    assert values_of(read_data(tmp_path), "loss") == pytest.approx(
        dict(enumerate(expected)), rel=1e-4
    )


class Manual(RecordsCourse):
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
    assert values_of(read_data(tmp_path), "loss") == pytest.approx(expected, rel=1e-4)
    assert len(values_of(read_data(tmp_path), "gradient_norm")) == 7


def test_report_under_a_loss_scale_counts_skips_and_marks_non_finite_values(
    tmp_path: Path,
) -> None:
    factors = {3: math.inf, 4: math.inf, 7: math.inf}
    model = Watched(steps=10, factor=lambda i: factors.get(i, 1.0))
    watch(model, [InstabilityReport(dirpath=str(tmp_path))], BalancedAMP())
    data = read_data(tmp_path)
    assert values_of(data, "skipped") == {3: 1, 4: 2, 7: 3}
    scales = [1024] * 3 + [512] + [256] * 3 + [128] * 3
    assert values_of(data, "loss_scale") == dict(enumerate(scales))
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


def test_report_counts_every_skipped_and_non_finite_step_of_a_long_run() -> None:
    report = InstabilityReport()
    for step in range(9000):
        scales = {"loss_scale": 2.0, "next_loss_scale": 1.0, "skipped": True, "loss": math.nan}
        facts = StepFacts(step=step, global_step=0, epoch=0, batch_idx=step, rank=0, **scales)  # type: ignore[arg-type]
        report.judge(Sample(facts))
    skipped = report.history.curves["skipped"]
    assert len(skipped) < 4096
    assert all(count == step + 1 for step, count in skipped)
    assert report_data(report.history, [], {}, 1)["curves"]["loss"]["bad_count"] == 9000


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
    data = read_data(tmp_path)
    maps = {"gradient_zero_share", "update_rms", "update_to_weight"}
    assert {heat["name"] for heat in data["maps"]} == maps
    zeros = next(heat for heat in data["maps"] if heat["name"] == "gradient_zero_share")
    row = zeros["cells"][zeros["rows"].index("network.0.weight")]
    assert (row[0], row[-1]) == (pytest.approx(0, abs=0.5), 1)
    raised = [alarm for monitor in monitors for alarm in monitor.alarms]
    assert len(data["alarms"]) == len(raised) > 0
    assert set(values_of(data, "gradient_norm")) == {
        step for step, _ in monitors[1].history.curves["gradient_norm"]
    }
    page = (tmp_path / "instability.html").read_text()
    assert f"first at step {min(alarm.step for alarm in raised)}: " in page


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
    assert dict(read_data(tmp_path)["run"]["facts"])["Optimizer"].startswith(
        "SGD(lr=0.5, momentum=0.9"
    )
