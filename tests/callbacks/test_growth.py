"""`GrowthRule` forecasts the step of an overflow from a trend, but not from noise."""

import json
import math

import numpy as np
import pytest

from lightning_mp.callbacks._rules.outputs import GrowthRule


def forecast(bits: list[float], every: int = 20) -> int | None:
    rule = GrowthRule()
    for at, each in enumerate(bits):
        rule.add("stream", every * at, each)
    return rule.overflow_step("stream")


def test_overflow_of_steady_growth_is_forecast_to_the_step() -> None:
    # The value doubles every 100 steps from 64 on and exceeds 65504 after almost 10 doublings.
    bits = [math.log2(65504 / 64) - 0.2 * at for at in range(10)]
    assert forecast(bits) == int(100 * math.log2(65504 / 64))


def test_shrinking_values_and_few_samples_have_no_forecast() -> None:
    assert forecast([5 + 0.1 * at for at in range(10)]) is None
    assert forecast([5 - 0.1 * at for at in range(4)]) is None
    assert forecast([5 - 0.1 * at for at in range(5)]) in (999, 1000)


@pytest.mark.parametrize("count", [5, 10])
def test_slope_is_significant_beyond_six_standard_errors(count: int) -> None:
    at = np.arange(count)
    noise = np.sin(3.0 * at)
    noise -= np.polyval(np.polyfit(at, noise, 1), at)  # without a slope of its own
    # The standard error of a slope, with n - 2 degrees of freedom.
    error = np.sqrt((noise**2).sum() / (count - 2) / ((at - at.mean()) ** 2).sum())
    assert forecast((100 + noise - 5.9 * error * at).tolist()) is None
    assert forecast((100 + noise - 6.1 * error * at).tolist()) is not None


def test_noise_has_a_forecast_in_fewer_than_one_of_200_cases() -> None:
    rng = np.random.default_rng(0)
    found = [forecast((5 + rng.standard_normal(10)).tolist()) for _ in range(1000)]
    # One-sided probability of 6 standard errors with 8 degrees of freedom: 1.6e-4.
    assert sum(each is not None for each in found) <= 5


def test_forecast_uses_unscaled_gradients() -> None:
    rule = GrowthRule()
    for at in range(12):
        scale = at  # doubles with every sample, while gradients are constant
        rule.add("g", at, (9.0 - scale) + scale)
    assert rule.overflow_step("g", left=11) is None
    for at in range(12, 28):
        rule.add("g", at, 9.0 - 0.5 * (at - 12))
    assert rule.overflow_step("g", left=1.0) == 28  # 9 - 0.5 * 16 = 1


def test_growth_continues_from_its_state() -> None:
    first, second = GrowthRule(), GrowthRule()
    for at in range(6):
        first.add("a", at, 9.0 - at)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.overflow_step("a") == first.overflow_step("a") == 9
