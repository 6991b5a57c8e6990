"""Arguments, host syncs and remedies of `SpikeGuard`."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.callbacks.spike_guard import SpikeGuard
from tests.callbacks.spike_models import PlantedModel, fit, kinds, make_batches

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")

SYNCS = ("_local_scalar_dense", "is_nonzero", "nonzero", "item", "equal", "masked_select")


class CountSyncs(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in SYNCS
        return func(*args, **(kwargs or {}))


def count_syncs(tmp_path: Path, *callbacks: pl.Callback) -> int:
    class Watched(pl.Callback):
        """The first and last callback's hooks lie inside of it."""

        mode = CountSyncs()

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 30:
                self.mode.__enter__()

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 40:
                self.mode.__exit__(None, None, None)

    model = PlantedModel(None, lambda p: AdamW(p, lr=1e-3, fused=True))
    watched = Watched()
    fit(model, make_batches(41), *callbacks, watched, default_root_dir=tmp_path)
    return watched.mode.count


@pytest.mark.slow
@pytest.mark.parametrize("action", ["warn", "skip", "rewind"])
def test_guard_adds_no_host_sync_to_a_step(tmp_path: Path, action: Any) -> None:
    alone = count_syncs(tmp_path)
    guard = SpikeGuard(action=action, window_steps=32, judge_after_steps=16)
    assert count_syncs(tmp_path, guard) == alone
    assert len(guard.history.curves["loss_z"]) == 41 - 16


def test_guard_warns_about_one_host_sync_per_step_for_an_optimizer_that_cannot_skip(
    tmp_path: Path,
) -> None:
    model = PlantedModel(None, lambda p: AdamW(p, lr=1e-3))
    with pytest.warns(UserWarning, match="reads one flag from the device in every step") as told:
        fit(model, make_batches(5), SpikeGuard(action="skip"), default_root_dir=tmp_path)
    assert len([w for w in told if "reads one flag" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "ignore"}, "must be one of 'warn', 'skip', 'stop', 'raise', 'rewind'"),
        ({"z_threshold": 0}, "`z_threshold` must be a finite number above 0"),
        ({"z_threshold": float("nan")}, "`z_threshold` must be a finite number above 0"),
        ({"window_steps": 1}, "`window_steps` must be an integer of at least 2"),
        ({"judge_after_steps": 200}, "`judge_after_steps` must be at most"),
        ({"patience": 0}, "`patience` must be an integer of at least 1"),
        ({"rewind_steps": 1.5}, "`rewind_steps` must be an integer of at least 1"),
        ({"skip_batches": -1}, "`skip_batches` must be an integer of at least 0"),
        ({"max_rewinds": True}, "`max_rewinds` must be an integer of at least 0"),
        ({"checkpoint_every_n_steps": 0}, "`checkpoint_every_n_steps` must be an integer"),
    ],
)
def test_error_of_a_wrong_argument_lists_accepted_values(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SpikeGuard(**arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by jsonargparse
def test_guard_is_instantiated_from_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-mp"])
    guard = {
        "class_path": "lightning_mp.callbacks.spike_guard.SpikeGuard",
        "init_args": {"action": "rewind", "rewind_steps": 50, "dirpath": "marks"},
    }
    trainer = {"callbacks": [guard], "accelerator": "cpu", "logger": False}
    trainer["default_root_dir"] = str(tmp_path)
    cli = LightningCLI(
        PlantedModel, run=False, args={"trainer": trainer}, seed_everything_default=False
    )
    (made,) = (each for each in cli.trainer.callbacks if isinstance(each, SpikeGuard))
    assert made.action == "rewind"
    assert made.window_steps == 128


@pytest.mark.slow
def test_window_survives_a_resume(tmp_path: Path) -> None:
    """A spike right after the resume is judged by the steps before it."""
    trainer = fit(
        PlantedModel({35: "nan"}, fused_adamw),
        make_batches(40),
        SpikeGuard(action="skip", window_steps=32, judge_after_steps=32),
        default_root_dir=tmp_path,
    )
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    second = SpikeGuard(action="skip", window_steps=32, judge_after_steps=32)
    fit(
        PlantedModel({42: "explosion"}, fused_adamw),
        make_batches(40),
        second,
        default_root_dir=tmp_path,
        max_epochs=2,
        ckpt_path=tmp_path / "last.ckpt",
    )
    assert kinds(second) == [(35, "non_finite_loss"), (42, "loss_spike")]


def fused_adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, fused=True)


def rises_and_falls(optimizer: Optimizer) -> Any:
    """A long warm-up, until the learning rate falls by a factor of 125."""
    return LambdaLR(optimizer, lambda step: (step + 1) / 400 if step < 50 else 0.001)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")
def test_lower_rate_is_recommended_unless_the_schedule_is_ending(tmp_path: Path) -> None:
    def make() -> tuple[SpikeGuard, PlantedModel]:
        model = PlantedModel(
            dict.fromkeys((30, 90), "explosion"), lambda p: SGD(p, lr=1e-3), rises_and_falls
        )
        return SpikeGuard(window_steps=32, judge_after_steps=16), model

    guard, model = make()
    fit(model, make_batches(50), guard).save_checkpoint(tmp_path / "run.ckpt")
    (alarm,) = guard.alarms
    assert alarm.step == 30
    assert "ower the learning rate" in alarm.remedy
    guard, model = make()
    fit(model, make_batches(50), guard, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    alarm = guard.alarms[-1]
    assert alarm.step == 90
    assert alarm.remedy
    assert "the learning rate" not in alarm.remedy
