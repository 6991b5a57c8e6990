"""`GradientUnderflowMonitor` reports underflow in fp16 and ignores other zeros."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD, AdamW

from lightning_mp import BalancedAMP, LossScaleConfig
from lightning_mp.callbacks import GradientUnderflowMonitor
from lightning_mp.callbacks._rules.underflow import UnderflowJudge
from tests.callbacks.models import Watched, first, perceptron, watch

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


def shrinking(from_step: int, per_step: float = 0.7) -> Any:
    """Return a factor of the loss that falls from a step on."""
    return lambda step: per_step ** max(step - from_step, 0)


def monitor(**kwargs: Any) -> GradientUnderflowMonitor:
    return GradientUnderflowMonitor(every_n_steps=5, baseline_samples=5, **kwargs)


def still(parameters: Any) -> SGD:
    return SGD(parameters, lr=1e-6)


@pytest.mark.slow
def test_shrinking_gradients_raise_a_warning_and_then_an_error() -> None:
    watcher = monitor(repeat_after_steps=1)
    model = Watched(None, still, steps=120, factor=shrinking(40))
    watch(model, [watcher], BalancedAMP(loss_scale=64.0))
    alarms = [a for a in watcher.alarms if a.tensor == "all gradients"]
    assert {a.severity for a in alarms} >= {"error"}
    assert first(watcher, "gradient_underflow").step > 40
    shares = dict(watcher.history.curves["gradient_zero_share"])
    assert shares[115] > 0.9 > 0.5 > shares[20]
    alarm = alarms[-1]
    assert alarm.value == pytest.approx(shares[alarm.step])
    assert f"{alarm.value:.1%} of all gradients is exactly zero" in alarm.message
    assert "LossScaleConfig(init_scale=4096)" in alarm.remedy


def test_remedy_above_the_usual_limit_of_the_loss_scale_is_accepted() -> None:
    watcher = monitor()
    model = Watched(None, still, steps=80, factor=lambda step: 1e-3 * shrinking(30, 0.5)(step))
    watch(model, [watcher], BalancedAMP(loss_scale=2.0**20))
    advice = first(watcher, "gradient_underflow").remedy.split("`")[1]
    assert eval(advice).scaler.scale == pytest.approx(2**26, rel=1e-5)  # written in six digits


@pytest.mark.slow
def test_first_alarm_comes_before_most_gradients_are_zero() -> None:
    watcher = monitor()
    model = Watched(None, still, steps=160, factor=shrinking(40, 0.85))
    watch(model, [watcher], BalancedAMP(loss_scale=64.0))
    alarm = first(watcher, "gradient_underflow")
    shares = dict(watcher.history.curves["gradient_zero_share"])
    assert shares[alarm.step] - shares[20] < 0.25


@pytest.mark.slow
def test_parameter_whose_gradient_stops_is_named() -> None:
    def stop(module: Any, step: int) -> None:
        if step >= 40:
            module.network[0].weight.register_hook(torch.zeros_like)

    watcher = monitor()
    watch(Watched(None, still, steps=80, sabotage=stop), [watcher])
    alarm = first(watcher, "gradient_underflow")
    assert (alarm.tensor, alarm.value, alarm.severity) == ("network.0.weight", 1.0, "error")
    # Six consecutive samples: after n samples with a gradient, k without have chance (n + 2)^-k.
    assert 40 < alarm.step <= 70
    assert "No gradient reaches the parameter" in alarm.remedy


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_gradients_under_lightnings_mixed_precision_are_judged_unscaled(fused: bool) -> None:
    watcher = monitor()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    make = lambda p: AdamW(p, lr=1e-4, fused=fused)  # noqa: E731
    norms: list[float] = []

    class Model(Watched):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            squares = sum(float(p.grad.double().square().sum()) for p in self.parameters())
            norms.append(squares**0.5 / (2.0**10 if fused else 1))

    watch(Model(None, make, steps=11), [watcher], plugin)
    seen = watcher.history.curves["gradient_norm"]
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4, 5, 10]
    for step, norm in seen:
        assert norm == pytest.approx(norms[step], rel=1e-4)


@pytest.mark.parametrize("is_torchs", [False, True], ids=["BalancedAMP", "16-mixed"])
def test_headroom_includes_the_loss_scale(is_torchs: bool) -> None:
    watcher = monitor()
    largest: list[float] = []

    class Model(Watched):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            groups = optimizer.param_groups
            largest.append(max(float(p.grad.abs().max()) for g in groups for p in g["params"]))

    # torch's scaler keeps its scale on the device.
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    torchs = MixedPrecision("16-mixed", "cpu", scaler)
    watch(
        Model(None, still, steps=3),
        [watcher],
        torchs if is_torchs else BalancedAMP(loss_scale=256.0),
    )
    assert len(watcher.history.curves["gradient_headroom_bits"]) == 3
    for step, bits in watcher.history.curves["gradient_headroom_bits"]:
        expected = torch.log2(torch.tensor(65504 / (largest[step] * 256)))
        assert bits == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.slow
def test_state_survives_a_resume(tmp_path: Any) -> None:
    def make() -> tuple[Watched, GradientUnderflowMonitor, BalancedAMP]:
        plugin = BalancedAMP(loss_scale=LossScaleConfig(init_scale=2.0**10))
        return Watched(None, still, steps=23), monitor(), plugin

    (model, whole, plugin), (early, before, other), (late, after, last) = make(), make(), make()
    watch(model, [whole], plugin, max_epochs=2)
    watch(early, [before], other).save_checkpoint(tmp_path / "run.ckpt")
    watch(late, [after], last, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert after.state_dict() == whole.state_dict()
    assert after.samples > before.samples


def judged(shares: list[tuple[float, float]], is_absolute: bool = False) -> list[bool | None]:
    judge = UnderflowJudge(3, 0.01, 0.05, is_absolute=is_absolute)
    verdicts = [judge.judge("t", zeros, subnormals) for zeros, subnormals in shares]
    return [None if verdict is None else verdict.severity == "error" for verdict in verdicts]


def test_zeros_from_the_start_raise_no_alarm() -> None:
    assert judged([(0.97, 0.3)] * 9) == [None] * 9
    scattered = [(0.5, 0.3), (0.56, 0.3), (0.52, 0.3)]
    assert judged([*scattered, (0.6, 0.3), (0.61, 0.3)]) == [None] * 5


def test_zeros_without_subnormals_are_not_underflow() -> None:
    assert judged([(0.1, 0.0)] * 3 + [(0.5, 0.01)] * 5) == [None] * 8


def test_zeros_with_subnormals_raise_an_error_from_five_percent_on() -> None:
    assert judged([(0.0, 0.1)] * 3 + [(0.06, 0.1)] * 3) == [None] * 4 + [True] * 2


def test_expert_is_dead_only_if_no_batch_uses_it() -> None:
    generator = torch.Generator().manual_seed(0)
    for share in (0.85, 0.5, 0.2):
        used = (torch.rand(400, generator=generator) < share).tolist()
        assert judged([(0.2 if each else 1.0, 0.0) for each in used]) == [None] * 400, share
        # The larger of 1 / (n + 2) and the share without gradient, to the power k, is below 1e-6.
        said = judged([(0.2 if each else 1.0, 0.0) for each in [*used, *[False] * 120]])[400:]
        first = next(at for at, each in enumerate(said) if each is not None)
        unused = 1 - sum(used) / 400
        assert first <= math.log(1e-6) / math.log(max(unused, 1 / 402)) + 3


def test_two_percent_raise_a_warning_only_if_rising() -> None:
    flat = [(0.0, 0.1)] * 3 + [(0.02, 0.1)] * 5
    assert judged(flat) == [None] * 8
    rising = [(0.0, 0.1)] * 3 + [(0.01 + 0.002 * i, 0.1) for i in range(6)]
    assert judged(rising)[-2:] == [False, False]


def test_alarm_states_the_usual_share_and_the_limit() -> None:
    judge = UnderflowJudge(3, 0.01, 0.05)
    shares = 0.02, 0.04, 0.03, 0.08, 0.09, 0.10, 0.11, 0.2, 0.2
    warning, *_, error = filter(None, (judge.judge("t", zeros, 0.1) for zeros in shares))
    for found, value, excess in ((warning, 0.11, 0.01), (error, 0.2, 0.05)):
        assert (found.value, found.threshold) == (value, pytest.approx(0.04 + excess))
        assert found.numbers == {"usual": 0.04, "excess": excess, "subnormal": 0.1}


def test_one_odd_batch_raises_no_alarm() -> None:
    assert judged([(0.0, 0.5)] * 4 + [(0.9, 0.5)] + [(0.0, 0.5)] * 3) == [None] * 8


@pytest.mark.parametrize("shares", [(0.85, 0.15), (0.3, 0.3), (0.06, 0.9), (0.99, 0.01)])
def test_zeros_with_as_many_subnormals_raise_an_alarm_in_the_first_sample(shares: Any) -> None:
    assert judged([shares] * 3, is_absolute=True) == [True] * 3


def test_zeros_without_as_many_subnormals_raise_no_alarm() -> None:
    assert judged([(0.97, 0.02), (0.3, 0.2), (0.04, 0.9), (1.0, 0.0)] * 2, True)[:3] == [None] * 3
    odd = [(0.0, 0.3), (0.5, 0.5), (0.0, 0.3)]
    assert judged(odd, is_absolute=True) == [None] * 3


def test_gradients_too_small_for_fp16_from_the_start_get_a_loss_scale_that_fits() -> None:
    watcher = monitor()
    model = Watched(None, still, steps=3, factor=lambda _: 1e-6)
    watch(model, [watcher], BalancedAMP(loss_scale=1.0))
    alarms = {alarm.tensor: alarm for alarm in watcher.alarms}
    assert {alarm.step for alarm in watcher.alarms} == {0}
    assert "fp32_modules" not in alarms["all gradients"].remedy
    assert "init_scale=64)" in alarms["all gradients"].remedy
    assert "subnormal" in alarms["all gradients"].message


def test_zero_gradients_at_a_nonzero_loss_raise_an_alarm() -> None:
    watcher = monitor()
    model = Watched(None, still, steps=3, factor=lambda _: 1e-12)
    watch(model, [watcher], BalancedAMP(loss_scale=1.0))
    assert (watcher.alarms[0].step, watcher.alarms[0].value) == (0, 1.0)


def test_loss_of_exactly_zero_is_no_underflow() -> None:
    watcher = monitor()
    watch(Watched(None, still, steps=60, factor=lambda step: float(step < 30)), [watcher])
    assert watcher.alarms == []
    assert dict(watcher.history.curves["gradient_zero_share"])[50] == 1


def test_remedy_for_lost_gradients_in_fp32_is_no_loss_scale() -> None:
    def stop(module: Any, step: int) -> None:
        for parameter in module.parameters() if step == 60 else []:
            parameter.register_hook(torch.zeros_like)

    watcher = monitor()
    watch(Watched(lambda: nn.Linear(16, 1), still, steps=100, sabotage=stop), [watcher])
    (alarm,) = (a for a in watcher.alarms if a.tensor == "all gradients")
    assert "There are 2 such tensors." in alarm.message
    assert "loss_scale" not in alarm.remedy


def test_frozen_parameter_is_not_measured() -> None:
    network = perceptron()
    network[0].requires_grad_(False)
    watcher = monitor()
    watch(Watched(lambda: network, still, steps=2), [watcher])
    assert "network.0.weight" not in watcher.history.maps["gradient_zero_share"]["names"]
    assert isinstance(network[0], nn.Linear)


@pytest.mark.parametrize(
    "argument", [{"warn_share": 0.1}, {"alarm_share": 0}, {"every_n_steps": 0}]
)
def test_arguments_out_of_range_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        GradientUnderflowMonitor(**argument)
