"""Verdicts of `AdamStateMonitor` on planted samples: what raises an alarm, and what does not."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_mp.callbacks import AdamStateMonitor
from lightning_mp.callbacks._rules.adam_statistics import AdamField
from lightning_mp.callbacks._rules.records import Sample, StepFacts, Verdict

SETTINGS = {"beta2": 0.99, "eps": 1e-8, "clip": math.inf}


def tensor(*, gradient: float = 1.0, numel: int = 10_000, **planted: float) -> dict[str, float]:
    """Return the numbers of a healthy tensor with the given RMS of its gradient."""
    moving = numel if gradient else 0
    sums = {
        "numel": numel,
        "non_zero": moving,
        "squared_ratio": moving,
        "squared_update": 1e-6 * moving,
        "squared_weight": numel,
        "squared_gradient": gradient**2 * numel,
        "second_moment": gradient**2 * numel,
    }
    return sums | planted


class Run:
    """A monitor and the step counts of its samples, one step apart."""

    def __init__(self, lr: float | None = 1e-3, **arguments: Any) -> None:
        self.monitor = AdamStateMonitor(**{"every_n_steps": 1, "baseline_samples": 4} | arguments)
        self.monitor.recorder.trainer = SimpleNamespace(log_every_n_steps=0)
        self.lr, self.step, self.highest = lr, 1000, lr

    def sample(
        self, *tensors: dict[str, float], steps: int = 1, clip: float = math.inf
    ) -> list[Verdict]:
        """Return the verdicts of a sample `steps` later."""
        self.step += steps
        array = np.zeros((1, len(tensors), len(AdamField)))
        for row, sums in enumerate(tensors):
            for name, value in sums.items():
                array[0, row, AdamField[name.upper()]] = value
        array[0, :, AdamField.STEP] = self.step
        facts = StepFacts(
            step=self.step, global_step=self.step, epoch=0, batch_idx=self.step, rank=0,
            lr=self.lr, highest_lr=self.highest,
        )  # fmt: skip
        context = {
            "names": [f"layers.{row}.weight" for row in range(len(tensors))],
            "settings": [SETTINGS | {"clip": clip}] * len(tensors),
        }
        return self.monitor.judge(Sample(facts, array, context))

    def learn(self, *tensors: dict[str, float], samples: int = 5, clip: float = math.inf) -> "Run":
        """Add healthy samples; fail if one has a verdict."""
        for _ in range(samples):
            assert self.sample(*(tensors or (tensor(),)), clip=clip) == []
        return self


def kinds(verdicts: list[Verdict]) -> list[str]:
    return [verdict.kind for verdict in verdicts]


def with_rms(rms: float, **planted: float) -> dict[str, float]:
    numbers = tensor(**planted)
    return numbers | {"squared_ratio": rms**2 * numbers["numel"]}


@pytest.mark.parametrize(
    ("usual", "high", "numel", "limit"),
    [
        (0.5, 2.4, 10**6, 2.3 * 1.01),  # `max_update_rms`, a little more for few values
        (1.0, 4.7, 100, 2.3 * 2),
        (1.4, 4.3, 10**6, 3 * 1.4),  # three times the median
    ],
)
def test_high_rms_is_an_alarm_once_it_is_confirmed(
    usual: float, high: float, numel: int, limit: float
) -> None:
    ordinary, below = with_rms(usual, numel=numel), with_rms(0.99 * limit, numel=numel)
    run = Run().learn(ordinary)
    run.learn(below, samples=2)
    run = Run().learn(ordinary)
    assert run.sample(with_rms(high, numel=numel)) == []
    (verdict,) = run.sample(with_rms(high, numel=numel), steps=10)
    assert (verdict.kind, verdict.tensor) == ("update_rms", "layers.0.weight")
    assert verdict.value == pytest.approx(high)
    assert verdict.threshold == pytest.approx(limit)


def test_odd_batches_far_apart_raise_no_update_rms() -> None:
    run = Run().learn()
    for _ in range(3):
        assert run.sample(with_rms(5.0), steps=11) == []


def test_tensor_of_the_highest_rms_relative_to_its_limit_is_named() -> None:
    few, many = {"numel": 100}, {"numel": 10**6}
    run = Run().learn(with_rms(0.5, **few), with_rms(0.5, **many), with_rms(0.5, **many))
    high = with_rms(5.0, **few), with_rms(4.0, **many), with_rms(3.0, **many)
    run.sample(*high)
    (verdict,) = run.sample(*high)
    assert (verdict.tensor, verdict.numbers["count"]) == ("layers.1.weight", 3)


def test_clipped_updates_raise_no_update_rms() -> None:
    run = Run().learn()
    assert [run.sample(with_rms(9.0), clip=1.0) for _ in range(3)] == [[]] * 3


def test_rms_of_the_first_samples_is_usual() -> None:
    run = Run().learn(with_rms(4.0), samples=4).learn(samples=32)
    run.learn(with_rms(5.9), samples=2)
    run.sample(with_rms(6.1))
    assert kinds(run.sample(with_rms(6.1))) == ["update_rms"]


def test_rms_is_usual_until_the_second_moment_has_a_memory() -> None:
    run = Run()
    run.step = 0
    run.learn(samples=4).learn(with_rms(5.0), samples=5)  # a tenth of the 100 steps of beta2 = 0.99
    run.learn(with_rms(7.4), samples=2)  # 1.5 times as high
    run = Run()
    run.step = 8
    run.learn(samples=4)
    run.sample(with_rms(5.0))
    assert kinds(run.sample(with_rms(5.0))) == ["update_rms"]


def test_tensor_with_few_gradients_has_a_larger_rms() -> None:
    # With a gradient in a quarter of the samples, the second moment is a quarter of its square.
    silent = tensor(gradient=0.0) | {"second_moment": 1e4}
    run = Run(zero_run_steps=10**6)
    for _ in range(8):
        for each in (tensor(), silent, silent, silent):
            assert run.sample(each, tensor()) == []
    high = with_rms(4.5)
    assert [run.sample(high, tensor()) for _ in range(2)] == [[], []]
    run.sample(with_rms(5.5), tensor())
    assert kinds(run.sample(with_rms(5.5), tensor())) == ["update_rms"]


def test_values_below_epsilon_are_judged_against_the_first_samples() -> None:
    usual, more = {"below_epsilon": 1000}, {"below_epsilon": 1600}  # of 10,000
    run = Run().learn(tensor(**usual)).learn(tensor(below_epsilon=1500))
    (verdict,) = run.sample(tensor(**more, gradient=1e-3))
    assert (verdict.kind, verdict.value) == ("below_epsilon", 0.16)
    assert verdict.threshold == pytest.approx(0.15)
    assert verdict.numbers["usual"] == 0.1
    assert verdict.numbers["lower_eps"] == SETTINGS["eps"] / 1000


def test_first_sample_with_all_values_below_epsilon_is_an_alarm() -> None:
    small = {"gradient": 3e-9}
    assert kinds(Run().sample(tensor(below_epsilon=9_899, **small))) == []
    (verdict,) = Run().sample(tensor(below_epsilon=9_900, **small))
    assert (verdict.kind, verdict.tags, verdict.threshold) == ("below_epsilon", ("all",), 0.99)
    # A thousandth of the gradient, as a power of ten.
    assert verdict.numbers["lower_eps"] == pytest.approx(1e-12)


def test_rounding_error_below_epsilon_raises_no_alarm_unless_it_was_a_gradient() -> None:
    below = {"below_epsilon": 10_000}
    ordinary = tensor(), tensor(gradient=2.0), tensor(gradient=3.0)
    rounding, real = tensor(gradient=0.0028, **below), tensor(gradient=0.005, **below)
    silent = [tensor(gradient=0.0)] * 9
    run = Run().learn(*ordinary, rounding, *silent)  # 2**-9 of the median of 1, 2, 3 and this
    assert kinds(run.sample(*ordinary, real, *silent)) == ["below_epsilon"]
    assert kinds(run.sample(*ordinary, rounding, *silent)) == ["below_epsilon"]


def silenced(run: Run, steps: int, *others: dict[str, float], moment: float = 0.0) -> list[Verdict]:
    """Return the verdicts of two samples without a gradient of the first tensor, `steps` apart."""
    silent = tensor(gradient=0.0, second_moment=moment)
    assert run.sample(silent, *others) == []
    return run.sample(silent, *others, steps=steps)


def test_gradient_that_never_paused_and_ends_is_an_alarm() -> None:
    assert silenced(Run().learn(tensor(), tensor(), samples=3), 499, tensor()) == []
    (verdict,) = silenced(Run().learn(tensor(), tensor(), samples=3), 500, tensor())
    assert (verdict.kind, verdict.value, verdict.threshold) == ("zero_run", 500, 500)
    assert verdict.tensor == "layers.0.weight"
    assert verdict.numbers["limit"] == pytest.approx(10.0)  # 1 / sqrt(1 - beta2)
    assert verdict.numbers["boost"] == pytest.approx((0.99**501 + 0.01) ** -0.5)


def test_layer_whose_units_died_is_named_before_the_layers_that_get_no_gradient() -> None:
    silent = tensor(gradient=0.0)
    run = Run().learn(*[tensor()] * 4)
    run.sample(silent, silent, silent, tensor())
    (verdict,) = run.sample(silent, silent, silent, tensor(), steps=600)
    assert (verdict.tensor, verdict.numbers["count"]) == ("layers.2.weight", 3)


def test_tensor_that_never_had_a_gradient_raises_no_zero_run() -> None:
    assert silenced(Run(), 5000, tensor()) == []
    assert silenced(Run(), 5000) == []  # nor if all gradients are zero


def test_two_gradients_are_too_few_to_call_a_pause_unusual() -> None:
    run = Run()
    run.sample(tensor(), tensor())
    run.sample(tensor(), tensor(), steps=10**6)  # rare: two in a million steps
    assert silenced(run, 600, tensor()) == []


def test_run_without_gradients_is_judged_by_their_rate() -> None:
    rare = Run()
    for _ in range(20):  # one sample in 100 steps has a gradient
        rare.sample(tensor(), tensor(), steps=50)
        rare.sample(tensor(gradient=0.0), tensor(), steps=50)
    assert silenced(rare, 800, tensor()) == []
    assert kinds(silenced(rare, 1200, tensor())) == ["zero_run"]


def test_second_moment_shows_gradients_between_samples() -> None:
    run = Run().learn(tensor(), tensor())
    for _ in range(4):  # each sample without a gradient, but the second moment does not decay
        assert silenced(run, 600, tensor(), moment=1e4) == []


def test_pause_of_all_gradients_is_judged_by_the_next_update() -> None:
    # The second moment falls to 0.99**172 + 0.01 = 2.3**-2 of the squared gradient.
    assert silenced(Run(zero_run_steps=1).learn(samples=3), 170) == []
    assert kinds(silenced(Run(zero_run_steps=1).learn(samples=3), 172)) == ["zero_run"]


def test_clipped_updates_raise_no_zero_run() -> None:
    run, silent = Run().learn(tensor(), tensor()), tensor(gradient=0.0)
    run.sample(silent, tensor(), clip=1.0)
    assert run.sample(silent, tensor(), clip=1.0, steps=5000) == []


def test_tensor_with_non_finite_sums_is_left_to_other_monitors() -> None:
    run = Run().learn(tensor(), tensor())
    lost = {"numel": 10_000, "non_finite": 1}
    for _ in range(3):
        assert run.sample(lost, tensor(), steps=1000) == []


def update_of(ratio: float) -> dict[str, float]:
    return tensor() | {"squared_update": ratio**2 * 1e4}


def test_update_that_is_large_for_its_weights_is_an_alarm_after_the_first_samples() -> None:
    run = Run().learn(update_of(11.0), samples=4)
    (verdict,) = run.sample(update_of(11.0))
    assert (verdict.kind, verdict.tags, verdict.threshold) == ("update_to_weight", (), 10.0)
    run.learn(update_of(10.0))
    large = {"squared_update": 19.0**2 * 1e4}
    run.learn(with_rms(2.0) | large, clip=1.0)  # scaled down by its RMS
    assert kinds(run.sample(with_rms(0.5) | large, clip=1.0)) == ["update_to_weight"]


def test_update_that_is_small_for_its_weights_is_an_alarm_unless_the_rate_is() -> None:
    small = update_of(0.9e-8)
    run = Run()
    assert run.sample(small) == []  # may be the beginning of a warm-up
    (verdict,) = run.sample(small)
    assert (verdict.kind, verdict.tags, verdict.threshold) == ("update_to_weight", ("low",), 1e-8)
    run.lr = 1e-6  # a thousandth of the highest rate
    assert run.sample(small) == []
    run.lr = 1.1e-6
    assert run.sample(small) == []  # rising again
    assert kinds(run.sample(small)) == ["update_to_weight"]
    no_rate = Run(lr=None).learn(small, samples=4)
    assert kinds(no_rate.sample(small)) == ["update_to_weight"]


def test_weights_of_zero_have_no_ratio() -> None:
    Run().learn(tensor() | {"squared_weight": 0.0}, samples=8)


def test_most_stagnant_tensor_is_named_with_the_number_of_stagnant_tensors() -> None:
    run = Run()
    still = [tensor(stagnant=n) for n in (9_000, 1_000, 5_001)]
    assert run.sample(*still) == []  # a warm-up may begin
    (verdict,) = run.sample(*still)
    assert (verdict.kind, verdict.tensor) == ("stagnant_weights", "layers.0.weight")
    assert verdict.value == pytest.approx(15_001 / 30_000)
    assert verdict.numbers["count"] == 2
    run.learn(tensor(stagnant=9_999), tensor(), samples=2)  # exactly half would still pass
    run.lr = 1e-6
    assert run.sample(*still) == []
    no_rate = Run(lr=None)
    assert kinds(no_rate.sample(*still)) == ["stagnant_weights"]


def test_bad_states_name_the_largest_of_their_tensors() -> None:
    bad = {"non_finite": 1, "bad_state": 1}
    run = Run().learn(tensor(), tensor(), tensor())
    (verdict,) = run.sample({"numel": 10} | bad, {"numel": 20} | bad, tensor(numel=30))
    assert (verdict.kind, verdict.severity) == ("optimizer_state_non_finite", "error")
    assert (verdict.tensor, verdict.numbers["count"]) == ("layers.1.weight", 2)
