"""Skipped steps change no weight, state, counter, schedule or average."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Adam

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.averages import weight_averaging
from tests.precision.models import Regression, fit, loader, parameters_of

BAD = (2, 3)
BATCHES = 6
Plugin = BalancedAMP | PureFP16
settings = pytest.mark.parametrize("weights", ["half", "full", "pure"])


def adam(parameters: Any) -> Adam:
    return Adam(parameters, lr=0.01)


def make_plugin(weights: str = "half") -> Plugin:
    """Return PureFP16 for `"pure"`, otherwise BalancedAMP with these weights."""
    config = LossScaleConfig(init_scale=2.0**10)
    if weights == "pure":
        return PureFP16(loss_scale=config)
    return BalancedAMP(weights=weights, loss_scale=config)


class WithScales(Regression):
    """Records the loss scale of every batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.scales = [*getattr(self, "scales", []), self.trainer.precision_plugin.scaler.scale]


@settings
def test_skipped_steps_change_no_weight_state_count_or_schedule(weights: str) -> None:
    """With torch's scaler, all 6 steps and decays count (Lightning#5558, 16228, 18828, 21339)."""
    plugin = make_plugin(weights)
    model = WithScales(make_optimizer=adam, bad_batches=BAD, interval="step")
    trainer = fit(model, plugin, loader(BATCHES))
    optimizer = trainer.optimizers[0]
    assert trainer.global_step == BATCHES - len(BAD) == 4
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**4)
    assert plugin.scaler.skipped_steps == len(BAD)
    assert model.scales == [2.0**10] * 3 + [2.0**9] + [2.0**8] * 2
    for batch in range(1, BATCHES):
        stood_still = torch.equal(model.weights[batch], model.weights[batch - 1])
        assert stood_still == (batch in BAD)


def test_run_with_skipped_batches_equals_a_run_without_them() -> None:
    data = loader(BATCHES)
    good = [batch for index, batch in enumerate(data) if index not in BAD]
    runs = []
    for batches, bad in ((list(data), BAD), (good, ())):
        model = Regression(make_optimizer=adam, bad_batches=bad, interval="step")
        # 2^10 and 2^8 unscale to the same values, unless a gradient is subnormal in fp16.
        fit(model, make_plugin("full"), torch.utils.data.DataLoader(batches, batch_size=None))
        runs.append(parameters_of(model))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-4)


@settings
def test_skipped_first_step_causes_no_scheduler_warning(weights: str) -> None:
    model = Regression(make_optimizer=adam, bad_batches=[0], interval="step")
    trainer = fit(model, make_plugin(weights), loader(3))
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)


def test_skipped_steps_do_not_delay_epoch_schedules() -> None:
    model = Regression(make_optimizer=adam, bad_batches=[1, 2], interval="epoch")
    trainer = fit(model, make_plugin(), loader(3), max_epochs=2)
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)


def test_skipped_steps_do_not_count_toward_max_steps() -> None:
    model = Regression(make_optimizer=adam, bad_batches=BAD)
    trainer = fit(model, make_plugin(), loader(10), max_steps=5, max_epochs=-1)
    assert trainer.global_step == 5
    assert len(model.losses) == 7


@settings
def test_skipped_step_under_accumulation_counts_once(weights: str) -> None:
    model = Regression(make_optimizer=adam, bad_batches=[2], interval="step")
    plugin = make_plugin(weights)
    trainer = fit(model, plugin, loader(6), accumulate_grad_batches=2)
    assert trainer.global_step == 2
    assert plugin.scaler.skipped_steps == 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)


@pytest.mark.filterwarnings("ignore:.*averages half weights")
@settings
def test_weight_average_ignores_skipped_steps_and_equals_fp32(
    weights: str,
) -> None:
    averages = weight_averaging()

    class RecordsAverage(averages.EMAWeightAveraging):
        def __init__(self) -> None:
            super().__init__(decay=0.5)
            self.averages: list[Tensor] = []

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self.averages.append(parameters_of(self._average_model.module))

    average, plain = RecordsAverage(), RecordsAverage()
    model = Regression(make_optimizer=adam, bad_batches=BAD)
    fit(model, make_plugin(weights), loader(BATCHES), callbacks=[average])
    for batch in range(1, BATCHES):
        stood_still = torch.equal(average.averages[batch], average.averages[batch - 1])
        assert stood_still == (batch in BAD)
    good = [batch for index, batch in enumerate(loader(BATCHES)) if index not in BAD]
    reference = Regression(make_optimizer=adam)
    data = torch.utils.data.DataLoader(good, batch_size=None)
    fit(reference, None, data, callbacks=[plain])
    torch.testing.assert_close(average.averages[-1], plain.averages[-1], rtol=2e-3, atol=1e-3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@settings
def test_manual_optimization_counts_the_steps_of_each_optimizer(weights: str) -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for index, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                is_bad = batch_idx == 1 and index == 0
                self.manual_backward(self.loss(batch) * (torch.inf if is_bad else 1.0))
                optimizer.step()

        def configure_optimizers(self) -> list[Adam]:
            return [adam(self.network[0].parameters()), adam(self.network[2:].parameters())]

    plugin = make_plugin(weights)
    model = Manual()
    trainer = fit(model, plugin, loader(3))
    counts = [{int(s["step"]) for s in o.state.values()} for o in trainer.optimizers]
    assert counts == [{2}, {3}]
    assert trainer.global_step == 5
    assert plugin.scaler.skipped_steps == 1
    assert plugin.scaler.scale == 2.0**9


def test_16_mixed_of_lightning_counts_skipped_steps() -> None:
    model = Regression(make_optimizer=adam, bad_batches=BAD, interval="step")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trainer = fit(model, MixedPrecision("16-mixed", "cpu", scaler), loader(BATCHES))
    assert trainer.global_step == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**6)


def test_skips_at_the_floor_raise_and_name_the_first_non_finite_gradient() -> None:
    scale = LossScaleConfig(init_scale=4.0, min_scale=2.0, patience=3)
    model = Regression(bad_batches=range(99))
    with pytest.raises(FloatingPointError, match=r"3 consecutive training steps.*'?network\.0\."):
        fit(model, BalancedAMP(loss_scale=scale), loader(10))
    assert len(model.losses) == 4  # one step halves the scale, three are at the floor
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@settings
def test_skipped_steps_in_hooks_are_not_subtracted(weights: str) -> None:
    """Lightning counts the steps of `training_step` only."""

    class InHook(Regression):
        def __init__(self) -> None:
            super().__init__(bad_batches=[1])
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))

        def on_train_batch_end(self, *_: Any) -> None:
            self.optimizers().step()
            self.optimizers().zero_grad()

    plugin = make_plugin(weights)
    assert fit(InHook(), plugin, loader(3)).global_step == 0
    assert plugin.scaler.skipped_steps == 1
