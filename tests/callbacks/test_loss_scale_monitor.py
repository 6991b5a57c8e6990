"""`LossScaleMonitor` warns before the floor, with plugins of this package and of Lightning."""

import csv
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import SGD, AdamW

from lightning_mp import BalancedAMP, LossScaleConfig
from lightning_mp.callbacks import InstabilityWarning, LossScaleMonitor
from tests.callbacks.models import Watched, first, kinds, watch

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_mp.callbacks.InstabilityWarning",
    "ignore:.*lr_scheduler.step.*before.*optimizer.step",
)


def ours(**config: Any) -> BalancedAMP:
    return BalancedAMP(loss_scale=LossScaleConfig(init_scale=2.0**16, patience=999, **config))


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def fused(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, fused=True)


def overflowing(first_step: int, count: int) -> Any:
    return lambda step: torch.inf if first_step <= step < first_step + count else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, fused], ids=["foreach", "fused"])
@pytest.mark.parametrize("plugin", [ours, stock], ids=["BalancedAMP", "16-mixed"])
def test_seventeen_overflows_raise_an_alarm_before_the_floor(plugin: Any, optimizer: Any) -> None:
    monitor = LossScaleMonitor()
    watch(Watched(None, optimizer, steps=30, factor=overflowing(5, 17)), [monitor], plugin())
    low = first(monitor, "loss_scale_low")
    assert (low.step, low.value, low.severity) == (11, 512.0, "warning")  # seventh overflow
    assert monitor.skipped_steps == 17
    assert kinds(monitor)[0][:2] == (11, "loss_scale_low")
    floor = first(monitor, "loss_scale_floor")
    assert (floor.step, floor.severity) == (21, "error")  # the sixteenth overflow led to 1
    assert monitor.skipped_in_a_row == 0
    assert monitor.scale == (1.0 if isinstance(plugin(), BalancedAMP) else 0.5)
    assert "fp32_modules" in floor.remedy
    assert "The loss itself is not finite, so no loss scale helps." in low.message
    assert "learning rate" not in low.remedy


@pytest.mark.slow
def test_skip_rate_raises_an_alarm_after_calibration() -> None:
    monitor = LossScaleMonitor(window_steps=100, max_skip_rate=0.05, calibration_steps=50)
    factor = lambda step: torch.inf if step in {3, 9, 12, 20, 30, 40, *range(60, 74, 2)} else 1.0  # noqa: E731
    plugin = BalancedAMP(loss_scale=LossScaleConfig(growth_interval=2, max_scale=2.0**16))
    watch(Watched(steps=120, factor=factor), [monitor], plugin)
    alarm = first(monitor, "skip_rate")
    # Steps 50 to 100 count: 60, 62, ... 70 are the first six, more than 5 of 100.
    assert (alarm.step, alarm.value, alarm.threshold) == (70, 0.06, 0.05)
    assert "growth_interval=4000" in alarm.remedy


def test_overflow_at_a_static_scale_is_an_error() -> None:
    monitor = LossScaleMonitor()
    plugin = BalancedAMP(loss_scale=256.0)
    watch(Watched(steps=5, factor=overflowing(2, 1)), [monitor], plugin)
    assert kinds(monitor) == [(2, "loss_scale_floor", None)]
    assert "dynamic" in monitor.alarms[0].remedy


def test_run_without_loss_scale_raises_no_alarm() -> None:
    monitor = LossScaleMonitor()
    watch(Watched(steps=3), [monitor])
    watch(Watched(steps=3), [monitor], BalancedAMP(half="bf16"))
    assert monitor.steps == 0
    assert monitor.alarms == []


def test_accumulated_batches_count_as_one_step() -> None:
    for plugin in (ours(), stock()):
        monitor = LossScaleMonitor()
        watch(Watched(steps=12), [monitor], plugin, accumulate_grad_batches=4)
        assert monitor.steps == 3


def test_floor_raises_an_alarm_although_the_plugin_raises_an_error() -> None:
    monitor = LossScaleMonitor()
    config = LossScaleConfig(init_scale=2.0, patience=3)
    model = Watched(steps=30, factor=overflowing(0, 30))
    with pytest.raises(FloatingPointError):
        watch(model, [monitor], BalancedAMP(loss_scale=config))
    assert [a.kind for a in monitor.alarms] == ["loss_scale_low", "loss_scale_floor"]
    assert monitor.skipped_steps >= 3


@pytest.mark.slow
def test_state_survives_a_resume(tmp_path: Any) -> None:
    whole, before, after = LossScaleMonitor(), LossScaleMonitor(), LossScaleMonitor()
    model = lambda: Watched(None, lambda p: SGD(p, 0.01), steps=20, factor=overflowing(15, 2))  # noqa: E731
    watch(model(), [whole], ours(), max_epochs=2)
    trainer = watch(model(), [before], ours(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    watch(model(), [after], ours(), max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert after.state_dict() == whole.state_dict()
    assert after.skipped_steps == 4


@pytest.mark.slow
def test_alarms_are_warnings_and_metrics(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    model = Watched(steps=20, factor=overflowing(5, 9))
    with pytest.warns(
        InstabilityWarning, match="Step 11, .*rank 0: The loss scale fell to 512"
    ) as caught:
        watch(model, [LossScaleMonitor()], ours(), logger=logger, log_every_n_steps=5)
    assert len([w for w in caught if w.category is InstabilityWarning]) == 1
    with open(logger.experiment.metrics_file_path, newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {name: [int(row["step"]) for row in rows if row[name]] for name in rows[0]}
    assert steps["instability/loss_scale"] == [4, 9, 14, 19]
    assert steps["instability/loss_scale_low"] == [11]


@pytest.mark.parametrize(
    "argument", [{"max_skip_rate": 0}, {"window_steps": 0}, {"min_scale": -1.0}]
)
def test_arguments_out_of_range_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        LossScaleMonitor(**argument)
