"""`NonFiniteLocator` with a finite forward and non-finite gradients."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from tests.callbacks.non_finite_models import WIDTH, Model, data, fit, locate, mixed

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")


class Root(nn.Module):
    """The square root of 0, whose derivative is inf."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.root, self.last = nn.Linear(8, WIDTH), Root(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + self.last(self.root(h))  # `h` is used twice


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [None, BalancedAMP, PureFP16, mixed])
def test_locator_names_the_module_whose_backward_makes_inf(plugin: Any) -> None:
    options = {"check_gradients": True} if plugin is None else {"repeated": 1}
    (alarm,) = locate(Model(Body), plugin and plugin(), max_replays=1, **options).alarms
    assert (alarm.step, alarm.tensor) == (0, "body.root")
    assert "`body.root` (Root) made NaN in the backward" in alarm.message
    assert "The gradient of its output is finite" in alarm.message
    if plugin is not None:
        assert "at a loss scale of 1." in alarm.message  # no scale is low enough


def test_locator_does_not_name_a_module_that_shares_the_input_of_the_source() -> None:
    class Beside(Body):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h) + self.root(h)

    (alarm,) = locate(Model(Beside), check_gradients=True, max_replays=1).alarms
    assert alarm.tensor == "body.root"


def test_locator_replays_manual_optimization_at_the_failed_scale() -> None:
    model = Model(lambda: nn.Linear(8, WIDTH), automatic=False)
    plugin = BalancedAMP(loss_scale=LossScaleConfig(init_scale=2.0**24))
    (alarm,) = locate(model, plugin, data(1), repeated=1, max_replays=1).alarms
    assert "at a loss scale of 1.67772e+07. " in alarm.message
    assert "all gradients of this batch are finite" in alarm.message


@pytest.mark.parametrize("action", ["warn", "stop"])
@pytest.mark.parametrize("automatic", [True, False])
def test_locator_finds_non_finite_gradients_by_default(automatic: bool, action: str) -> None:
    model = Model(Body, automatic=automatic)
    locator = locate(model, loader=data(2), action=action)
    (alarm,) = locator.alarms  # the NaN weights of the next step follow from this step
    assert (alarm.step, alarm.tensor) == (0, "body.root")
    assert bool(model.weights[-1].isfinite().all()) == (action == "stop")


def test_locator_names_the_weight_after_a_step_whose_source_was_not_found() -> None:
    calls = itertools.count()

    def loss_of(out: Tensor, y: Tensor) -> Tensor:  # NaN in the first step, but not in its replay
        return (out - y).mean() * (math.nan if next(calls) == 0 else 1.0)

    first, second = locate(Model(loss_of=loss_of), loader=data(2)).alarms
    assert (first.step, first.tensor) == (0, None)
    assert second.step == 1
    assert second.tensor is not None
    assert second.tensor.endswith("weight")


def test_locator_without_check_gradients_names_the_weight_and_the_argument() -> None:
    locator = locate(Model(Body), loader=data(2), check_gradients=False)
    (alarm,) = locator.alarms
    assert (alarm.step, alarm.tensor) == (1, "body.first.weight")
    assert "NonFiniteLocator(check_gradients=True)" in alarm.remedy
    assert "gradient_clip_val" not in alarm.remedy


@pytest.mark.parametrize("large", [1.0, 1e25])
def test_locator_raises_no_alarm_for_large_finite_gradients(large: float) -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).mean() * large  # 1e25 squared overflows fp32

    locator = locate(Model(loss_of=loss_of), loader=data(1))
    assert locator.replays == 0


def test_locator_names_the_loss_computation_for_a_square_root_of_zero() -> None:
    model = Model(loss_of=lambda out, y: torch.sqrt(out * 0).mean())
    (alarm,) = locate(model, check_gradients=True, max_replays=1).alarms
    assert alarm.tensor == "Model"
    assert "The loss computation in `training_step` of the root `Model`" in alarm.message


def test_locator_names_the_module_of_an_overflowing_weight_gradient() -> None:
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, (gradient.sum(0) + 1) * 1e38 * 1e38

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Sums.apply(x, self.weight)

    class Stack(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, WIDTH), Scale(), nn.Linear(WIDTH, WIDTH))

    (alarm,) = locate(Model(Stack), check_gradients=True, max_replays=1).alarms
    assert alarm.tensor == "body.1"
    assert "The gradient of `body.1.weight` is not finite." in alarm.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda scale: BalancedAMP(loss_scale=scale),
        lambda scale: BalancedAMP(loss_scale=scale, weights="full"),
        lambda scale: PureFP16(loss_scale=scale),
    ],
    ids=["balanced", "full", "pure"],
)
def test_locator_names_a_loss_scale_that_fits(make: Any) -> None:
    def model() -> Model:
        return Model(lambda: nn.Linear(8, WIDTH))

    locator = locate(model(), make(2.0**24), data(1), max_epochs=4)
    (alarm,) = locator.alarms
    assert alarm.step == 2  # the third consecutive skipped step
    assert "Gradients overflowed in 3 consecutive steps." in alarm.message
    assert alarm.threshold == 65504  # also if autocast casts gradients to fp32
    assert "at a loss scale of 1.67772e+07" in alarm.message
    fitting = float(alarm.message.partition("At a loss scale of ")[2].partition(",")[0])
    assert f"(loss_scale={fitting:g})" in alarm.remedy
    for scale, skipped in ((fitting, 0), (fitting * 8, 1)):
        plugin = make(scale)
        fit(model(), data(1), plugin)
        assert plugin.scaler.skipped_steps == skipped


@pytest.mark.slow
def test_locator_names_a_module_whose_backward_overflows_at_the_loss_scale() -> None:
    class Shrinks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0**-6 * 2.0**10 * 2.0**-4

    class Stack(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, WIDTH), Shrinks(), nn.Linear(WIDTH, WIDTH))

    plugin = BalancedAMP(loss_scale=2.0**17)
    (alarm,) = locate(Model(Stack), plugin, repeated=1, max_replays=1).alarms
    assert alarm.tensor == "body.1"
    assert alarm.threshold == 65504
    assert "all gradients of this batch are finite" in alarm.message


def test_locator_ignores_single_overflows() -> None:
    config = LossScaleConfig(init_scale=2.0**17)  # falls until gradients fit
    plugin = BalancedAMP(loss_scale=config)
    locator = locate(Model(), plugin, data(8))
    assert plugin.scaler.skipped_steps >= 1
    expected = int(plugin.scaler.skipped_steps >= 3)
    assert locator.replays == expected


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_locator_counts_skips_of_a_grad_scaler(fused: bool) -> None:
    def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr, fused=fused)

    at = {}

    def spoil(model: Any, index: int) -> None:
        at[index] = model.head.weight.detach().clone()

    def make(repeated: int) -> tuple[Any, Model]:
        model = Model(change=spoil, make_optimizer=adam)
        return locate(model, mixed(2.0**22), data(3), repeated=repeated, max_replays=1), model

    locator, model = make(2)
    (alarm,) = locator.alarms
    assert alarm.step == 1
    assert "batch 1, rank 0: Gradients overflowed in 2 consecutive steps. " in alarm.message
    assert torch.equal(at[2], at[0])  # both were skipped
    assert set(range(3)) < set(model.runs) | {3}
    assert model.runs.count(1) > 1
    assert make(4)[0].replays == 0
