"""Effects of torch's Adam on half parameters, which the guard and SafeAdamW prevent.

A failure means that torch has changed and that the docstring with the same number is outdated.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam

from lightning_mp.numerics.floats import rounded
from tests.precision.models import Regression, loader, make_trainer

EAGER = {"single": {"foreach": False}, "foreach": {"foreach": True}}
EVERY = {**EAGER, "fused": {"fused": True}}
eager = pytest.mark.parametrize("options", EAGER.values(), ids=EAGER)
every = pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)

LR = 2.0**-10  # a power of two, so that no update is rounded twice

# Documented thresholds, sqrt(2^-25 / (1 - beta2)), by beta2.
THRESHOLDS = {0.999: 5.46e-3, 0.95: 7.7e-4, 0.9999: 1.73e-2}


def every_gradient() -> Tensor:
    """Return all 31744 nonnegative finite fp16 numbers, in ascending order."""
    return torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)


def first_step(gradient: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return |update| / lr of the first step by each gradient, and the states after it."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    optimizer = Adam([parameter], lr=LR, **options)
    parameter.grad = gradient.clone()
    optimizer.step()
    return -parameter.detach().double() / LR, optimizer.state[parameter]


def steps_at(
    value: float, steps: int, *, dtype: torch.dtype = torch.float16, **options: Any
) -> list[tuple[float, float]]:
    """Return |update| / lr and the second moment of every step at a constant gradient."""
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = Adam([parameter], lr=LR, **options)
    parameter.grad = torch.full_like(parameter, value)
    history = []
    for _ in range(steps):
        parameter.data.zero_()
        optimizer.step()
        second_moment = optimizer.state[parameter]["exp_avg_sq"].item()
        history.append((-parameter.item() / LR, second_moment))
    return history


def test_fp16_range_has_its_known_values() -> None:
    one = torch.ones((), dtype=torch.float16)
    assert torch.finfo(torch.float16).max == 65504
    assert torch.finfo(torch.float16).tiny == 2.0**-14
    assert (one * 2.0**-24).item() == 2.0**-24 == pytest.approx(5.96e-8, rel=1e-3)
    assert (one * 2.0**-25).item() == 0


@pytest.mark.parametrize(
    ("eps", "stored"), [(1e-8, 0.0), (3e-8, 5.96e-8), (1e-7, 1.19e-7), (1e-6, 1.013e-6)]
)
def test_epsilon_added_to_an_fp16_zero_is_rounded(eps: float, stored: float) -> None:
    denominator = torch.zeros(1, dtype=torch.float16).add_(eps).item()
    assert denominator == pytest.approx(stored, rel=2e-3)
    assert denominator == rounded(eps, torch.float16)


@pytest.mark.parametrize("beta2", THRESHOLDS)
@eager
def test_adam_in_fp16_blows_up_only_below_the_threshold(
    options: dict[str, bool], beta2: float
) -> None:
    """Lightning#20619."""
    gradient = every_gradient()
    update, _ = first_step(gradient, betas=(0.9, beta2), **options)
    threshold = math.sqrt(2**-25 / (1 - beta2))
    assert threshold == pytest.approx(THRESHOLDS[beta2], rel=5e-3)
    # Up to 5 subnormal ULP, the first moment, a tenth of the gradient, is 0 as well: 0 / 0 = NaN.
    is_nan = gradient.double() <= 5 * 2.0**-24
    is_inf = (gradient.double() <= threshold) & ~is_nan
    assert torch.equal(update.isnan(), is_nan)
    assert torch.equal(update.isinf(), is_inf)
    assert is_inf.sum() > 4000
    assert torch.equal(gradient[update.isfinite()], gradient[gradient.double() > threshold])


@pytest.mark.parametrize(
    ("eps", "largest"), [(3e-8, 91584), (1e-7, 45792), (1e-6, 5388), (1e-4, 54.59375)]
)
@eager
def test_larger_epsilon_still_allows_huge_first_updates(
    options: dict[str, bool], eps: float, largest: float
) -> None:
    update, _ = first_step(every_gradient(), eps=eps, **options)
    assert update.max().item() == pytest.approx(largest, rel=1e-3)
    assert update.isfinite().all()
    assert every_gradient()[update.argmax()].item() == pytest.approx(5.459e-3, rel=1e-3)


def test_fused_adam_in_fp16_takes_a_correct_first_step() -> None:
    gradient = every_gradient()
    update, state = first_step(gradient, fused=True)
    exact = gradient.double() / (gradient.double() + 1e-8)
    torch.testing.assert_close(update, exact, rtol=2**-10, atol=2**-14)
    assert torch.equal(state["exp_avg_sq"] == 0, gradient.double() <= 5.459e-3)


@pytest.mark.slow
def test_fused_adam_in_fp16_loses_its_second_moment_and_steps_grow() -> None:
    history = steps_at(1e-3, 3000, fused=True)
    assert {second_moment for _, second_moment in history} == {0.0}
    assert history[0][0] == 1
    assert history[99][0] == pytest.approx(9.7, abs=0.05)
    assert history[2999][0] == pytest.approx(30.7, abs=0.05)
    assert all(math.isfinite(update) for update, _ in history)


@every
def test_gradient_above_8094_overflows_the_second_moment_and_freezes_the_weight(
    options: dict[str, bool],
) -> None:
    gradient = every_gradient()
    _, state = first_step(gradient, **options)
    assert torch.equal(state["exp_avg_sq"].isinf(), gradient.double() > 8094)

    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = Adam([parameter], lr=0.125, **options)
    parameter.grad = torch.tensor([8096.0, 8092.0]).half()
    optimizer.step()
    after_spike = parameter.detach().clone()
    parameter.grad.fill_(1.0)
    for _ in range(50):
        optimizer.step()
    assert parameter[0] == after_spike[0]
    assert parameter[1] < after_spike[1]


@pytest.mark.slow
def test_constant_gradient_above_256_overflows_the_second_moment_eventually() -> None:
    history = steps_at(300.0, 1331, fused=True)
    assert math.isfinite(history[1329][1])
    assert history[1330][1] == math.inf
    assert all(
        second_moment <= 65504 for _, second_moment in steps_at(255.0, 200, betas=(0.9, 0.5))
    )


@every
def test_load_state_dict_casts_fp32_states_to_the_parameter_dtype(
    options: dict[str, bool],
) -> None:
    wide = nn.Parameter(torch.zeros(3))
    saved = Adam([wide], **options)
    wide.grad = torch.full_like(wide, 1e-3)
    saved.step()
    assert saved.state[wide]["exp_avg_sq"].dtype == torch.float32

    half = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    loaded = Adam([half], **options)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state[half]["exp_avg_sq"].dtype == torch.float16
    assert (loaded.state[half]["exp_avg_sq"] == 0).all()  # 1e-9 before loading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "stall"), [(EAGER["single"], 0.5), (EAGER["foreach"], 0.5), (EVERY["fused"], 0.25)]
)
def test_bf16_second_moment_stalls_below_the_squared_gradient(
    options: dict[str, bool], stall: float
) -> None:
    history = steps_at(1.0, 1200, dtype=torch.bfloat16, **options)
    assert [second_moment for _, second_moment in history[-300:]] == [stall] * 300


def test_lightning_16_true_with_adam_makes_every_weight_non_finite_in_three_steps() -> None:
    """Lightning#20619."""
    model = Regression(make_optimizer=Adam)
    make_trainer(precision="16-true", max_steps=3).fit(model, loader(3))
    assert not model.weights[-1].isfinite().any()


@pytest.fixture(scope="module")
def updates_after_zeros() -> dict[int, float]:
    """Return |update| / lr of the usual gradient after N zero gradients late in training."""
    parameter, gradient = nn.Parameter(torch.zeros(1)), 0.7
    optimizer = Adam([parameter], lr=LR)
    parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    state = optimizer.state[parameter]
    state["step"].fill_(1e5)  # bias correction has ended
    state["exp_avg"].fill_(gradient)
    state["exp_avg_sq"].fill_(gradient**2)
    parameter.grad.zero_()
    updates, zeros = {}, 0
    for count in (0, 1000, 5000, 10000):
        for _ in range(count - zeros):
            optimizer.step()
        zeros = count
        probe = copy.deepcopy(optimizer)
        (copied,) = probe.param_groups[0]["params"]
        copied.data.zero_()
        copied.grad = torch.full_like(copied, gradient)
        probe.step()
        updates[count] = -copied.item() / LR
    return updates


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 computes in fp32")
def test_fused_adagrad_on_a_cpu_rounds_epsilon_to_half() -> None:
    parameter = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = Adagrad([parameter], eps=1e-10, fused=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameter.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(("zeros", "growth"), [(1000, 0.165), (5000, 1.14), (10000, 3.09)])
def test_zero_gradients_starve_the_second_moment(
    updates_after_zeros: dict[int, float], zeros: int, growth: float
) -> None:
    """This occurs in every dtype, also in fp32: the next update is up to 31 times as large."""
    update = updates_after_zeros[zeros]
    assert update == pytest.approx(growth, rel=5e-3)
    # The first moment holds only the share of the new gradient, 1 - beta1 = 0.1.
    assert update == pytest.approx(0.1 / math.sqrt(0.999 ** (zeros + 1) + 0.001), rel=1e-3)


@pytest.mark.slow
def test_formula_for_starved_moments_has_known_limits(
    updates_after_zeros: dict[int, float],
) -> None:
    assert 0.1 / math.sqrt(0.999**1 + 0.001) == pytest.approx(0.100, abs=5e-4)
    assert 0.1 / math.sqrt(0.001) == pytest.approx(3.162, abs=5e-4)
    # Without zero gradients, the first moment has not decayed and the update is as usual.
    assert updates_after_zeros[0] == pytest.approx(1.0, rel=1e-3)
