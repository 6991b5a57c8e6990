"""`SpikeGuard` reports and skips spikes of the loss and of the gradient norm."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_mp import BalancedAMP
from lightning_mp.callbacks.spike_guard import SpikeGuard
from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.callbacks.spike_models import PlantedModel, StepRecorder, fit, kinds, make_batches

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=3e-3),
    "fused adamw": lambda p: AdamW(p, lr=3e-3, fused=True),
    "fused sgd": lambda p: SGD(p, lr=0.03, momentum=0.9, fused=True),
    "safe adamw": lambda p: SafeAdamW(p, lr=3e-3),
}


def grad_scaling() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0))


# Case -> plugin, optimizer, whether `global_step` and the LR schedule wait for a skipped step.
SETUPS: dict[str, tuple[Callable[[], Any] | None, str, bool]] = {
    "plain": (None, "adamw", True),
    "fused": (None, "fused adamw", False),
    "fused sgd": (None, "fused sgd", False),
    "safe": (None, "safe adamw", False),
    "16-mixed": (grad_scaling, "adamw", True),
    "16-mixed safe": (grad_scaling, "safe adamw", False),
    "16-mixed fused": (grad_scaling, "fused adamw", False),
    "balanced": (lambda: BalancedAMP(half="fp16", loss_scale=128.0, device="cpu"), "adamw", True),
}


def quick(**options: Any) -> SpikeGuard:
    """Return a guard with a short window."""
    return SpikeGuard(**({"window_steps": 32, "judge_after_steps": 16} | options))


def warm_up(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 1000)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`SpikeGuard.action='skip'.` reads one flag")
@pytest.mark.parametrize("setup", SETUPS)
def test_nan_and_spikes_are_reported_and_skipped_at_their_steps_only(
    tmp_path: Path, setup: str
) -> None:
    make_plugin, optimizer, waits = SETUPS[setup]
    planted = {40: "nan", 45: "nan gradient", 60: "spike", 63: "loss only", 66: "gradient only"}
    guard, recorder = quick(action="skip"), StepRecorder()
    fit(
        PlantedModel(planted, OPTIMIZERS[optimizer], warm_up),
        make_batches(70),
        guard,
        recorder,
        plugins=[make_plugin()] if make_plugin else [],
        default_root_dir=tmp_path,
    )
    assert kinds(guard) == [
        (40, "non_finite_loss"),
        (45, "non_finite_gradient"),
        (60, "loss_spike"),
        (63, "loss_spike"),
        (66, "gradient_spike"),
    ]
    assert [step for step, moved in enumerate(recorder.moved) if not moved] == list(planted)
    steps = 70 - len(planted) if waits else 70
    assert recorder.global_steps[-1] == steps
    # After the first step the schedule is at 2 / 1000.
    assert recorder.lrs[-1] / recorder.lrs[0] == pytest.approx((steps + 1) / 2)


@pytest.mark.parametrize("make_plugin", [grad_scaling, lambda: None], ids=["16-mixed", "plain"])
def test_first_step_of_fused_sgd_is_skipped_before_a_momentum_exists(
    tmp_path: Path, make_plugin: Any
) -> None:
    recorder, plugin = StepRecorder(), make_plugin()
    fit(
        PlantedModel({0: "nan"}, OPTIMIZERS["fused sgd"]),
        make_batches(6),
        quick(action="skip"),
        recorder,
        plugins=[plugin] if plugin else [],
        default_root_dir=tmp_path,
    )
    assert recorder.moved == [False, True, True, True, True, True]
    assert recorder.global_steps[-1] == 5


def test_step_of_a_fused_optimizer_with_the_state_of_another_is_skipped(tmp_path: Path) -> None:
    class Loads(PlantedModel):
        def on_train_start(self) -> None:
            plain = AdamW(PlantedModel().parameters(), lr=3e-3)
            self.optimizer.load_state_dict(plain.state_dict())  # with `fused=None`

    recorder = StepRecorder()
    model = Loads({2: "nan"}, OPTIMIZERS["fused adamw"])
    fit(model, make_batches(4), quick(action="skip"), recorder, default_root_dir=tmp_path)
    assert recorder.moved == [True, True, False, True]


@pytest.mark.filterwarnings("ignore:`SpikeGuard.action=.skip..` reads one flag")
def test_clipping_by_value_accepts_a_skipped_step(tmp_path: Path) -> None:
    """torch's clipping by value raises if there are no gradients."""
    recorder = StepRecorder()
    fit(
        PlantedModel({1: "nan"}, OPTIMIZERS["adamw"]),
        make_batches(4),
        quick(action="skip"),
        recorder,
        gradient_clip_val=0.1,
        gradient_clip_algorithm="value",
        default_root_dir=tmp_path,
    )
    assert recorder.moved == [True, False, True, True]


@pytest.mark.filterwarnings("ignore:`SpikeGuard.action=.skip..` reads one flag")
def test_schedules_that_are_replaced_in_training_wait_for_skipped_steps(tmp_path: Path) -> None:
    class Replaces(PlantedModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.strategy.setup_optimizers(self.trainer)

    recorder = StepRecorder()
    model = Replaces({3: "nan", 4: "nan"}, OPTIMIZERS["adamw"], warm_up)
    fit(model, make_batches(6), quick(action="skip"), recorder, default_root_dir=tmp_path)
    assert recorder.moved == [True, True, True, False, False, True]
    # Two of the four steps of the new schedule are skipped.
    assert recorder.lrs[-1] == recorder.lrs[1]


@pytest.mark.slow
def test_warn_by_default_changes_no_weight(tmp_path: Path) -> None:
    def train(*callbacks: pl.Callback) -> PlantedModel:
        model = PlantedModel({40: "spike", 50: "loss only"}, OPTIMIZERS["adamw"])
        fit(model, make_batches(60), *callbacks, default_root_dir=tmp_path)
        return model

    guard = quick()
    guard.action = SpikeGuard().action
    watched, alone = train(guard), train()
    assert {step for step, _ in kinds(guard)} >= {50}
    for p, q in zip(watched.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@pytest.mark.slow
def test_gradient_spike_sentence_suggests_the_highest_healthy_norm(tmp_path: Path) -> None:
    guard = SpikeGuard(action="skip")
    model = PlantedModel({100: "gradient only"}, OPTIMIZERS["fused adamw"], warm_up)
    fit(model, make_batches(105), guard, default_root_dir=tmp_path)
    (alarm,) = guard.alarms
    norms = [value for step, value in guard.history.curves["gradient_norm"] if step < 100]
    assert alarm.kind == "gradient_spike"
    assert alarm.tensor in ("net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias")
    assert alarm.value == pytest.approx(guard.history.curves["gradient_norm"][100][1])
    assert alarm.threshold is not None
    assert alarm.threshold > max(norms)
    assert f"limit of {alarm.threshold:.4g}" in alarm.message
    start = "Try these remedies one at a time. Set "
    assert alarm.remedy.startswith(f"{start}`Trainer(gradient_clip_val={max(norms):.2g})`. ")
    assert "warm-up from 100 steps or more to 200" in alarm.remedy
    assert "Lower the learning rate from 0.000303 to " in alarm.remedy
    assert "SafeAdamW(clip_update_rms=1.0)" in alarm.remedy


def test_gradient_spike_that_was_clipped_is_a_note(tmp_path: Path) -> None:
    guard, model = SpikeGuard(), PlantedModel({100: "gradient only"}, None, warm_up)
    fit(model, make_batches(102), guard, default_root_dir=tmp_path, gradient_clip_val=0.1)
    (note,) = guard.alarms
    assert (note.step, note.kind, note.severity) == (100, "gradient_spike", "info")
    assert "It is clipped to 0.1. This needs no remedy." in note.message


def test_clipping_by_value_does_not_make_a_gradient_spike_a_note(tmp_path: Path) -> None:
    guard, model = SpikeGuard(), PlantedModel({100: "gradient only"}, None, warm_up)
    clips = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    fit(model, make_batches(102), guard, default_root_dir=tmp_path, **clips)
    (alarm,) = guard.alarms
    assert (alarm.kind, alarm.severity) == ("gradient_spike", "warning")
    assert ", gradient_clip_algorithm='norm')`" in alarm.remedy


@pytest.mark.parametrize("clip_val", [None, 1e-4])
def test_remedy_for_growing_gradients_is_no_looser_clip(tmp_path: Path, clip_val: Any) -> None:
    class Grows(PlantedModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss, at = super().training_step(batch, batch_idx), batch_idx
            growth = math.exp(max(at - 200, 0) / 60)
            return loss + (growth - 1) * (loss - loss.detach()) + (at > 300)

    guard, options = SpikeGuard(), {"gradient_clip_val": clip_val, "default_root_dir": tmp_path}
    fit(Grows(make_optimizer=lambda p: SGD(p, lr=1e-5)), make_batches(480), guard, **options)
    (alarm,) = (each for each in guard.alarms if each.kind == "gradient_trend")
    assert ("gradient_clip_val" in alarm.remedy) == (clip_val is None)


def test_remedy_in_manual_optimization_clips_there(tmp_path: Path) -> None:
    class ByHand(PlantedModel):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()  # type: ignore[union-attr]

    guard = SpikeGuard()
    fit(ByHand({100: "explosion"}), make_batches(102), guard, default_root_dir=tmp_path)
    # Lightning refuses `Trainer(gradient_clip_val=...)` in manual optimization.
    assert "`self.clip_gradients(optimizer, gradient_clip_val=" in guard.alarms[0].remedy
    assert "Trainer(" not in guard.alarms[0].remedy


def test_signals_are_unscaled_and_summed_over_micro_batches(tmp_path: Path) -> None:
    def curves(**options: Any) -> list[Tensor]:
        guard = SpikeGuard()
        model = PlantedModel(None, OPTIMIZERS["fused adamw"])
        batches = options.pop("batches", make_batches(12))
        fit(model, batches, guard, default_root_dir=tmp_path, **options)
        found = (guard.history.curves[name] for name in ("loss", "gradient_norm"))
        return [torch.tensor([value for _, value in curve]) for curve in found]

    plain = curves(accumulate_grad_batches=3)
    scaled = curves(accumulate_grad_batches=3, plugins=[grad_scaling()])
    merged = [list(map(torch.cat, zip(*three, strict=True))) for three in _threes(make_batches(12))]
    whole = curves(batches=merged)
    for ours, mixed, expected in zip(plain, scaled, whole, strict=True):
        assert len(ours) == 4
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=1e-2)


def _threes(batches: list[list[Tensor]]) -> list[list[list[Tensor]]]:
    return [batches[at : at + 3] for at in range(0, len(batches), 3)]


@pytest.mark.slow
def test_consecutive_spikes_are_one_event_and_then_a_new_level(tmp_path: Path) -> None:
    guard, recorder = quick(action="skip", patience=5), StepRecorder()
    planted = dict.fromkeys(range(40, 70), "explosion")
    fit(
        PlantedModel(planted, OPTIMIZERS["fused adamw"]),
        make_batches(70),
        guard,
        recorder,
        default_root_dir=tmp_path,
    )
    assert kinds(guard) == [(40, "loss_spike"), (44, "level_shift"), (44, "level_shift")]
    assert [step for step, moved in enumerate(recorder.moved) if not moved] == [*range(40, 45)]


@pytest.mark.slow
def test_lasting_nan_is_one_event_and_one_alarm_about_the_run(tmp_path: Path) -> None:
    guard = quick(patience=5)
    fit(PlantedModel({40: "nan"}), make_batches(60), guard, default_root_dir=tmp_path)
    assert kinds(guard) == [(40, "non_finite_loss"), (44, "non_finite_run")]


@pytest.mark.slow
def test_overflow_under_a_loss_scale_is_a_note(tmp_path: Path) -> None:
    guard = quick()
    plugin = BalancedAMP(half="fp16", loss_scale="dynamic", device="cpu")
    fit(
        PlantedModel({40: "nan gradient"}),
        make_batches(45),
        guard,
        plugins=[plugin],
        default_root_dir=tmp_path,
    )
    assert (40, "non_finite_gradient") in kinds(guard)
    assert {alarm.severity for alarm in guard.alarms} == {"info"}


@pytest.mark.sweep
def test_healthy_training_of_2000_steps_raises_no_alarm(tmp_path: Path) -> None:
    guard = SpikeGuard()
    model = PlantedModel(None, OPTIMIZERS["fused adamw"], warm_up)
    fit(model, make_batches(2000, size=8), guard, default_root_dir=tmp_path)
    assert guard.alarms == []
    assert len(guard.history.curves["loss"]) == 2000


class TwoPlayers(pl.LightningModule):
    """Steps two optimizers manually; the loss of the second explodes once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.one, self.two = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for at, (net, optimizer) in enumerate(zip((self.one, self.two), optimizers, strict=True)):
            loss = (net(batch[0]) - batch[1]).square().mean() * (1 + 99 * at)
            if at == 1 and batch_idx == 40:
                loss = loss * 1000
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD(net.parameters(), lr=1e-4, fused=True) for net in (self.one, self.two)]


@pytest.mark.slow
def test_manual_optimization_judges_each_optimizer_by_its_own_loss(tmp_path: Path) -> None:
    guard, model = quick(action="skip"), TwoPlayers()
    moved = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.before = [p.detach().clone() for p in model.parameters()]

        def on_train_batch_end(self, *_: Any) -> None:
            pairs = zip(self.before, model.parameters(), strict=True)
            moved.append([not torch.equal(before, p) for before, p in pairs])

    fit(model, make_batches(45), guard, Watch(), default_root_dir=tmp_path)
    assert kinds(guard) == [(40, "loss_spike")]
    assert "of optimizer 1" in guard.alarms[0].message
    assert moved[40] == [True, True, False, False]
    assert all(all(step) for at, step in enumerate(moved) if at != 40)
    assert guard.history.curves["loss_1"][0][1] > 10 * guard.history.curves["loss"][0][1]


def test_restart_is_advised_at_half_of_the_rate_before_the_schedule_lowered_it() -> None:
    guard = SpikeGuard()
    model = PlantedModel(
        dict.fromkeys(range(4, 60), "loss only"),
        make_schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    )
    fit(model, make_batches(60, size=512), guard)
    (alarm,) = guard.alarms
    assert "Restart with a learning rate of 0.0015 or less" in alarm.remedy
