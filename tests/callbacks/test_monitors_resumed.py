"""A resumed run raises the same alarms, and ends in the same states, as a run without a break."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp import BalancedAMP
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityMonitor,
    LossScaleMonitor,
    NonFiniteLocator,
    ParameterMonitor,
    RepresentationMonitor,
    SpikeGuard,
)
from tests.callbacks.spike_models import PlantedModel, fit, make_batches

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_mp.callbacks.InstabilityWarning",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:`SpikeGuard.action=.skip..` reads one flag",
)
BATCHES = make_batches(40)
NANS = dict.fromkeys(range(37, 44), "nan")  # before and after the break at step 40


class Frozen(PlantedModel):
    """The first layer is frozen, but the optimizer holds it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.net[0].requires_grad_(False)


def monitors(action: Any) -> list[InstabilityMonitor]:
    often = {"every_n_steps": 5}
    return [
        SpikeGuard(action=action, window_steps=32, judge_after_steps=16, patience=6),
        LossScaleMonitor(window_steps=20, calibration_steps=5),
        AdamStateMonitor(**often),
        GradientUnderflowMonitor(**often),
        ActivationRangeMonitor(**often),
        ParameterMonitor(**often),
        RepresentationMonitor(modules=["net"], **often),
        NonFiniteLocator(),
    ]


def plain(value: Any) -> Any:
    """Return a state whose tensors are lists, which `==` compares; NaN equals NaN."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def warm_up(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.99**step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "planted", "plugin", "action"),
    [
        (PlantedModel, {}, None, "warn"),
        (Frozen, {}, None, "warn"),
        (PlantedModel, {25: "spike", 60: "explosion"}, None, "skip"),
        (PlantedModel, NANS, BalancedAMP, "warn"),
        (PlantedModel, {37: "nan"}, None, "warn"),
        (PlantedModel, {39: "nan"}, None, "warn"),
    ],
    ids=["healthy", "frozen layer", "spikes", "NaN that the loss scaler skips", "NaN", "last NaN"],
)
def test_resumed_run_equals_a_run_without_a_break(
    tmp_path: Path,
    model: type[PlantedModel],
    planted: dict[int, str],
    plugin: Callable[[], Any] | None,
    action: str,
) -> None:
    def run(epochs: int, **options: Any) -> tuple[Any, list[InstabilityMonitor]]:
        options |= {} if plugin is None else {"plugins": plugin()}
        made = monitors(action)
        trained = model(dict(planted), make_schedule=warm_up)
        options |= {"max_epochs": epochs, "default_root_dir": tmp_path}
        return fit(trained, BATCHES, *made, **options), made

    _, whole = run(2)
    trainer, _ = run(1)
    trainer.save_checkpoint(tmp_path / "broken.ckpt")
    _, resumed = run(2, ckpt_path=tmp_path / "broken.ckpt")
    for one, other in zip(whole, resumed, strict=True):
        assert [alarm.message for alarm in one.alarms] == [a.message for a in other.alarms]
        assert plain(one.state_dict()) == plain(other.state_dict())
    assert bool(sum(len(monitor.alarms) for monitor in whole)) == (model is Frozen or bool(planted))


@pytest.mark.slow
def test_monitors_that_have_seen_another_run_start_over(tmp_path: Path) -> None:
    def run(made: list[InstabilityMonitor], planted: dict[int, str]) -> None:
        trained = PlantedModel(planted, make_schedule=warm_up)
        fit(trained, BATCHES, *made, max_epochs=1, default_root_dir=tmp_path)

    used, new = monitors("warn"), monitors("warn")
    run(used, {25: "spike", 30: "nan"})
    assert any(monitor.alarms for monitor in used)
    for made in (used, new):
        run(made, {35: "nan"})
    for one, other in zip(used, new, strict=True):
        assert [alarm.message for alarm in one.alarms] == [a.message for a in other.alarms]
        assert plain(one.state_dict()) == plain(other.state_dict())
    assert any(monitor.alarms for monitor in used)
