"""`CourseRule` finds divergence, stalls and trends, and ignores noise and healthy changes."""

import json

import numpy as np
import numpy.typing as npt
import pytest

from lightning_mp.callbacks._rules.course import CourseRule, noise_of

Series = npt.NDArray[np.float64]
STEPS = np.arange(1500)


def judged(
    loss: Series, norm: Series | None = None, rule: CourseRule | None = None
) -> list[tuple[int, str, str]]:
    rule = rule or CourseRule()
    norms = [None] * len(loss) if norm is None else norm.tolist()
    pairs = enumerate(zip(loss.tolist(), norms, strict=True))
    found = [(step, v) for step, pair in pairs for v in rule.judge(step, *pair)]
    return [(step, v.kind, v.severity) for step, v in found]


def kinds(loss: Series, norm: Series | None = None) -> set[str]:
    return {kind for _, kind, severity in judged(loss, norm) if severity != "info"}


def falling(to: float = 0.2) -> Series:
    return to + 3 * np.exp(-STEPS / 80)


@pytest.mark.parametrize("offset", [0.0, -1.0, -5.0], ids=["positive", "crossing", "negative"])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_divergence_is_found_for_any_sign_and_noise(offset: float, noise: float) -> None:
    rng = np.random.default_rng(0)
    rise = np.where(STEPS > 600, 0.01 * (STEPS - 600), 0.0)
    loss = offset + falling() + rise + noise * rng.standard_normal(len(STEPS))
    found = judged(loss)
    assert [kind for _, kind, _ in found] == ["divergence"]
    # Half of the improvement is lost at step 750; a level is 16 steps late and must last 32 steps.
    assert 750 <= found[0][0] <= 750 + 16 + 32 + 32


def test_growth_of_four_percent_per_step_is_found_below_ten_times_the_start() -> None:
    found = judged(0.3 * np.exp(-STEPS[:300]) + 0.02 * 1.04 ** STEPS[:300])
    step = next(step for step, kind, _ in found if kind == "divergence")
    assert 0.02 * 1.04**step < 10 * 0.3


def test_divergence_states_level_and_limit() -> None:
    loss = np.where(STEPS < 600, np.where(STEPS < 8, 4.0, 1.0), 3.0)
    rule = CourseRule()
    (found,) = (
        v for step, value in enumerate(loss.tolist()) for v in rule.judge(step, value, None)
    )
    # Half of the improvement from 4 to 1 is lost at 2.5.
    assert (found.value, found.threshold, found.tags) == (3.0, 2.5, ())
    assert found.numbers.items() >= {"best": 1.0, "best_step": 31, "window": 32}.items()


def test_divergence_from_the_start_says_so() -> None:
    rule = CourseRule()
    found = [v for step in range(400) for v in rule.judge(step, 1 + 0.01 * step, None)]
    assert [(v.kind, v.tags) for v in found if v.kind == "divergence"] == [
        ("divergence", ("from start",))
    ]
    assert found[-1].kind == "divergence"  # not a stall as well


def test_rise_at_the_start_must_exceed_the_unknown_noise_by_more() -> None:
    noise = 0.1 * np.random.default_rng(4).standard_normal(400)
    for rise, is_found in ((0.45, False), (0.9, True)):
        loss = 1 + np.where(STEPS[:400] < 4, -rise, 0.0) + noise
        assert ("divergence" in kinds(loss)) == is_found


def test_loss_that_the_first_step_multiplies_is_judged_by_its_first_value() -> None:
    noise = np.random.default_rng(5).standard_normal(200)
    for first, expected in ((3.3, {"stalled_loss", "divergence"}), (0.6, set()), (0.0, set())):
        # At a learning rate that is far too high, and a first batch that is an easy one.
        level = 30 + 3 * noise if expected else 1 + 0.3 * noise
        loss = np.concatenate([[first], level])
        assert kinds(loss) <= expected
        assert bool(kinds(loss)) == bool(expected)


@pytest.mark.slow
def test_healthy_streams_of_1500_steps_raise_no_alarm() -> None:
    """Noise of many kinds, steep starts, swings, and jumps to harder data; 20 streams of each."""
    rng = np.random.default_rng(5)
    count = len(STEPS)
    said = []
    for _ in range(20):
        normal = rng.standard_normal(count)
        slow = np.convolve(rng.standard_normal(count + 15), np.ones(16) / 4, "valid")
        harder = np.where(STEPS > 500, 0.3, 0.0) + np.where(STEPS > 1000, 0.3, 0.0)
        streams = {
            "constant": np.full(count, 0.693),
            "zero": np.zeros(count),
            "normal": 1 + 0.1 * normal,
            "around zero": normal,
            "falling": falling() * np.exp(0.1 * normal),
            "to zero": falling(0.0),
            "one sample": rng.chisquare(1, count),
            "exponential": rng.exponential(1, count),
            "dependent": falling() + 0.2 * slow,
            "harder data": falling() + harder + 0.05 * normal,
            "hinge": np.maximum(0, normal - 1.5),
            "swings": falling() + 0.05 * normal + 0.5 * np.sin(STEPS / 60),
        }
        said += [(name, kinds(loss, np.abs(loss) + 0.1)) for name, loss in streams.items()]
    assert [each for each in said if each[1]] == []


def test_loss_that_rises_and_stays_at_its_start_has_stalled() -> None:
    rng = np.random.default_rng(1)
    loss = 3.26 + np.where(STEPS < 12, 1.5, 0.0) * (STEPS > 2) + 0.1 * rng.standard_normal(1500)
    assert judged(loss)[0] == (95, "stalled_loss", "warning")


def test_loss_that_stays_at_its_start_is_noted_after_the_horizon() -> None:
    rng = np.random.default_rng(2)
    found = judged(3.26 + 0.1 * rng.standard_normal(1500))
    assert found == [(999, "stalled_loss", "info")]


def test_growing_gradient_norm_is_a_trend_unless_the_loss_is_at_its_best() -> None:
    norm = 0.5 * np.exp(np.maximum(STEPS - 400, 0) / 150)
    flat, rising = falling(1.0), falling(1.0) + np.where(STEPS > 600, 0.3, 0.0)
    assert kinds(flat, norm) == set()
    assert kinds(rising, norm) == {"gradient_trend"}
    assert kinds(rising, np.minimum(norm, 4.5)) == set()  # below ten times the start
    assert kinds(rising, np.where(STEPS < 700, 0.5, 20.0)) == set()  # does not rise any more


def test_trend_states_its_growth() -> None:
    norm = np.maximum(0.5, 0.5 + 0.02 * (STEPS - 700))
    pairs = zip((1 + 0.01 * STEPS).tolist(), norm.tolist(), strict=True)
    rule = CourseRule()
    found = [v for step, pair in enumerate(pairs) for v in rule.judge(step, *pair)]
    (trend,) = (v for v in found if v.kind == "gradient_trend")
    assert trend.value is not None
    assert trend.value > trend.threshold == 5.0
    numbers = {"lowest": 0.5, "lowest_step": 31, "times": 2 * trend.value, "span": 128}
    assert trend.numbers.items() >= numbers.items()


def judged_together(*losses: Series) -> set[int]:
    """Return the optimizers whose losses diverge."""
    rules = [CourseRule() for _ in losses]
    for rule in rules:
        rule.rivals = [other for other in rules if other is not rule]
    steps = enumerate(zip(*(loss.tolist() for loss in losses), strict=True))
    return {
        index
        for step, values in steps
        for index, (rule, value) in enumerate(zip(rules, values, strict=True))
        if any(verdict.kind == "divergence" for verdict in rule.judge(step, value, None))
    }


def test_rival_losses_that_trade_places_do_not_diverge() -> None:
    rise = 0.5 + 0.01 * STEPS
    swings = falling() + np.sin(STEPS / 60)
    assert judged(rise)[0][1] == "divergence"
    assert judged_together(rise, -rise) == set()
    assert judged_together(rise, falling()) == set()
    assert judged_together(swings, -swings) == set()


def test_rivals_whose_losses_all_rise_diverge() -> None:
    rise = falling() + np.where(STEPS > 600, 0.1 * (STEPS - 600), 0.0)
    assert judged_together(rise, 2 * rise - 1) == {0, 1}


def test_rivals_may_lose_ten_times_as_much() -> None:
    rise = falling() + np.where(STEPS > 600, 6.0, 0.0)
    assert judged(rise)
    assert judged_together(rise, rise) == set()
    assert judged_together(rise, falling() + 10 * (rise - falling())) == set()


def test_rivals_never_stall() -> None:
    rival = CourseRule()
    judged(falling(), rule=rival)
    rule = CourseRule(rivals=[rival])
    assert judged(np.full(1500, 0.693), rule=rule) == []


def test_optimizer_without_loss_hides_no_divergence() -> None:
    rise = falling() + np.where(STEPS > 600, 0.01 * (STEPS - 600), 0.0)
    alone, second = judged(rise), CourseRule()
    for step in range(1500):
        second.judge(step, None, 1.0)
    assert alone
    assert judged(rise, rule=CourseRule(rivals=[second])) == alone


def test_divergence_is_reported_once_until_it_ends() -> None:
    rise = np.where((STEPS > 600) & (STEPS < 900) | (STEPS > 1200), 5.0, 0.0)
    found = judged(falling() + rise)
    assert [kind for _, kind, _ in found] == ["divergence", "divergence"]


def test_course_continues_identically_from_its_state() -> None:
    loss = falling() + np.where(STEPS > 600, 0.01 * (STEPS - 600), 0.0)
    first, second = CourseRule(), CourseRule()
    assert judged(loss[:700], loss[:700], first) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = judged(loss[700:], loss[700:], second)
    assert rest
    assert rest == judged(loss[700:], loss[700:], first)


def test_noise_does_not_depend_on_slope_and_outliers() -> None:
    rng = np.random.default_rng(3)
    values = 7 * STEPS + rng.standard_normal(len(STEPS))
    values[::50] += 1e6
    # The median deviation of n values has a relative error of 1.17 / sqrt(n); differences overlap.
    assert noise_of(values.tolist()) == pytest.approx(1.0, rel=4 * 1.17 / len(STEPS) ** 0.5)
