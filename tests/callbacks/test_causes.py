"""Alarms name the cause once, with a remedy that removes the alarm."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_mp import BalancedAMP
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    Alarm,
    LossScaleMonitor,
    NonFiniteLocator,
    SpikeGuard,
)
from tests.callbacks.models import Watched, watch

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


def said(*monitors: Any) -> list[Alarm]:
    """Return alarms that are not notes, by step."""
    alarms = [a for m in monitors for a in m.alarms if a.severity != "info"]
    return sorted(alarms, key=lambda alarm: alarm.step)


class Convolves(Watched):
    """A half-precision convolution of images, in which one pixel may be huge."""

    def __init__(self, pixel: float = 0.0, limit: float = math.inf) -> None:
        network = lambda: nn.Sequential(  # noqa: E731
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1)
        )
        super().__init__(network, steps=8)
        self.pixel, self.limit = pixel, limit

    def train_dataloader(self) -> Any:
        images = torch.randn(8, 32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        if self.pixel:
            images[4, 3, 0, 2, 2] = self.pixel
        return torch.utils.data.DataLoader(images.clamp(-self.limit, self.limit), batch_size=None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weight = next(self.parameters())
        return self.network(batch.to(weight.dtype)).float().square().mean()


def test_one_huge_pixel_is_named_instead_of_the_convolution() -> None:
    locator = NonFiniteLocator(repeated=1)
    watch(Convolves(pixel=1e6), [locator], BalancedAMP(loss_scale=1.0))
    (alarm,) = said(locator)
    assert (alarm.step, alarm.tensor) == (4, "batch[0]" if alarm.tensor == "batch[0]" else "batch")
    assert "held 1e+06 when it came from the data loader" in alarm.message
    limit = float(alarm.remedy.partition("clamp(-")[2].partition(",")[0])
    assert 2 < limit < 5  # 99.9% of normally distributed values are within 3.3
    cured = NonFiniteLocator(repeated=1)
    watch(Convolves(pixel=1e6, limit=limit), [cured], BalancedAMP(loss_scale=1.0))
    assert said(cured) == []


class Loud(nn.Module):
    """Multiplies in fp32, so that the input of the next layer exceeds fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.factor


def loud() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Loud(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def turn_up(module: Any, step: int) -> None:
    module.network[1].factor = 1e6 if step == 5 else 1.0


@pytest.mark.parametrize("kind", ["clamp", "advised"])
def test_nan_of_a_half_precision_linear_with_too_large_input_is_cured_by_fp32(kind: str) -> None:
    """A clamp does not remove NaN, so the alarm would repeat."""
    modules = ["norm", "network.2"]
    options: Any = {"inf_clamp": ["network.2"]} if kind == "clamp" else {"fp32_modules": modules}
    before, after = NonFiniteLocator(repeated=1), NonFiniteLocator(repeated=1)
    watch(Watched(loud, steps=8, sabotage=turn_up), [before], BalancedAMP(loss_scale=1.0))
    (alarm,) = said(before)
    assert (alarm.step, alarm.tensor) == (5, "network.2")
    assert "in float16 (limit 65504)" in alarm.message  # the limit of its input is that of fp32
    assert "Run the module in fp32 with `BalancedAMP(fp32_modules=" in alarm.remedy
    if "NaN" in alarm.message.partition("made ")[2][:12]:
        assert "inf_clamp" not in alarm.remedy
    watch(Watched(loud, steps=8, sabotage=turn_up), [after], BalancedAMP(loss_scale=1.0, **options))
    if kind == "advised":
        assert said(after) == []


def spoil(module: Any, step: int, layer: int = 0) -> None:
    if step == 20:
        with torch.no_grad():
            module.network[layer].weight[0, 0] = math.nan


# The step with a NaN in the last layer writes NaN to the first layer, too.
@pytest.mark.parametrize("layer", [0, 2])
def test_one_nan_weight_raises_one_alarm_and_the_rest_are_notes(layer: int) -> None:
    monitors = [
        NonFiniteLocator(),
        SpikeGuard(),
        ActivationRangeMonitor(every_n_steps=1),
        AdamStateMonitor(every_n_steps=1),
    ]
    watch(Watched(steps=60, sabotage=partial(spoil, layer=layer)), monitors)
    (alarm,) = said(*monitors)
    assert (alarm.step, alarm.kind, alarm.tensor) == (20, "non_finite", f"network.{layer}.weight")
    assert "NonFiniteLocator(" not in alarm.remedy  # the run has a locator
    notes = [a for m in monitors for a in m.alarms if a.severity == "info"]
    assert {note.kind for note in notes} >= {"non_finite_loss", "activation_non_finite"}
    assert all(f"`network.{layer}.weight`" in note.remedy for note in notes)
    assert not any("fp16" in a.remedy or "inf_clamp" in a.remedy for a in [alarm, *notes])


def test_replay_of_the_locator_is_not_measured_by_other_monitors() -> None:
    counts = []
    for locators in ([], [NonFiniteLocator()]):
        monitor = ActivationRangeMonitor(every_n_steps=1)
        watch(Watched(steps=21, sabotage=spoil), [monitor, *locators])
        counts.append([a.value for a in monitor.alarms if a.kind == "activation_non_finite"])
    assert counts[0] == counts[1]


def test_alarm_about_skipped_steps_says_that_weights_are_unchanged() -> None:
    factor = lambda step: math.inf if step >= 5 else 1.0  # noqa: E731
    guard, states = SpikeGuard(patience=8), []

    def keep(module: Any, step: int) -> None:
        states.append([p.detach().clone() for p in module.parameters()])

    model = Watched(steps=20, factor=factor, sabotage=keep)
    watch(model, [guard], BalancedAMP(loss_scale="dynamic"))
    run = next(alarm for alarm in guard.alarms if alarm.kind == "non_finite_run")
    assert run.step == 12
    assert "weights and optimizer states are unchanged" in run.message
    assert "Resume" not in run.remedy
    for before, after in zip(states[5], states[-1], strict=True):
        assert torch.equal(before, after)


class Half(Watched):
    """Has fp16 weights under plain AdamW, whose epsilon of 1e-8 is 0 in fp16."""

    def __init__(self) -> None:
        super().__init__(None, lambda p: AdamW(p, lr=1e-3), steps=8)
        self.half()


def test_fp16_weights_under_plain_adamw_name_epsilon_as_the_cause() -> None:
    locator = NonFiniteLocator(check_gradients=True)
    watch(Half(), [locator])
    alarm = said(locator)[0]
    assert alarm.step <= 2
    assert "Adam's eps=1e-08 is 0 in float16" in alarm.remedy
    cured = NonFiniteLocator()
    watch(Watched(None, lambda p: AdamW(p, lr=1e-3), steps=8), [cured], BalancedAMP())
    assert said(cured) == []


def test_epsilon_of_0_is_named_as_the_cause_of_nan_weights() -> None:
    def unused(module: Any, step: int) -> None:
        with torch.no_grad():
            module.network[0].weight.zero_()  # so that `network.2` gets no gradient
            module.network[0].bias.fill_(-1000.0)

    for plugin in (None, BalancedAMP(half="bf16")):
        locator, adam = NonFiniteLocator(), lambda p: AdamW(p, lr=1e-3, eps=0.0)
        model = Watched(None, adam, steps=8, sabotage=unused)
        watch(model, [locator], plugin)
        assert "Pass `eps=1e-8`" in said(locator)[0].remedy


@pytest.mark.parametrize("layer", [0, 2])
def test_dead_layer_is_named_instead_of_its_neighbors(layer: int) -> None:
    def kill(module: Any, step: int) -> None:
        if step == 20:
            with torch.no_grad():
                module.network[layer].bias.fill_(-1000.0)

    monitor = AdamStateMonitor(every_n_steps=5, zero_run_steps=30)
    watch(Watched(steps=80, sabotage=kill), [monitor])
    (alarm,) = [each for each in monitor.alarms if each.kind == "zero_run"]
    assert str(alarm.tensor).rpartition(".")[0] == f"network.{layer}"
    assert "There are" in alarm.message  # the number of affected tensors


def test_overflow_in_the_forward_is_not_attributed_to_gradients() -> None:
    monitor = LossScaleMonitor(min_scale=4096.0)
    factor = lambda step: math.inf if step in (3, 4) else 1.0  # noqa: E731
    watch(Watched(steps=8, factor=factor), [monitor], BalancedAMP(loss_scale="dynamic"))
    low = next(alarm for alarm in monitor.alarms if alarm.kind == "loss_scale_low")
    assert "The loss itself is not finite" in low.message
    assert "radients" not in low.message
