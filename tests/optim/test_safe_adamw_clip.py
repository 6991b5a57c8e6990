"""Clipping of the update's RMS, after zero gradients have made second moments decay."""

import copy
import math

import pytest
import torch

from lightning_mp.optim.safe_adamw import SafeAdamW

pytestmark = pytest.mark.slow  # left to `make test`

# |update| / lr of Adam with betas of 0.9 and 0.999 by the first gradient after N zero gradients, if
# the same gradient was constant before: 0.1 / sqrt(0.999^(N+1) + 0.001).
STARVED = {0: 0.100, 1000: 0.165, 5000: 1.14, 10_000: 3.09}
LIMIT = 3.162


GRADIENT = 1e-3


@pytest.fixture(scope="module")
def starved() -> dict[int, SafeAdamW]:
    """Return unclipped optimizers after N zero gradients, for each N of `STARVED`."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = SafeAdamW([parameter], lr=1.0, weight_decay=0.0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    state["step"].fill_(100_000)  # bias correction has ended
    state["exp_avg_sq"].fill_(GRADIENT**2)
    snapshots, zeros = {}, 0
    for num_zeros in STARVED:
        for _ in range(num_zeros - zeros):
            optimizer.step()
        zeros = num_zeros
        snapshots[num_zeros] = copy.deepcopy(optimizer)
    return snapshots


def next_update(optimizer: SafeAdamW, clip: float | None) -> float:
    """Return the RMS of the update by `GRADIENT`, in learning rates."""
    optimizer = copy.deepcopy(optimizer)
    group = optimizer.param_groups[0]
    group["clip_update_rms"] = clip
    (parameter,) = group["params"]
    assert not parameter.any()
    parameter.grad = torch.full_like(parameter, GRADIENT)
    optimizer.step()
    return parameter.detach().double().norm().item() / math.sqrt(3)


def test_unclipped_step_after_zero_gradients_is_too_large(
    starved: dict[int, SafeAdamW],
) -> None:
    for num_zeros, expected in STARVED.items():
        update = next_update(starved[num_zeros], None)
        assert abs(update / (0.1 / math.sqrt(0.999 ** (num_zeros + 1) + 0.001)) - 1) < 1e-3
        assert abs(update / expected - 1) < 5e-3
        assert update < LIMIT


@pytest.mark.parametrize("clip", [1.0, 0.5])
def test_clipped_step_after_zero_gradients_is_no_larger_than_without_zeros(
    starved: dict[int, SafeAdamW], clip: float
) -> None:
    for optimizer in starved.values():
        assert abs(next_update(optimizer, clip) / (0.1 * clip) - 1) < 1e-3


def test_loose_clip_bounds_the_starved_step_only(
    starved: dict[int, SafeAdamW],
) -> None:
    assert abs(next_update(starved[10_000], 3.0) / 0.3 - 1) < 1e-3
    assert next_update(starved[0], 3.0) == next_update(starved[0], None)


def test_inactive_clip_equals_torch_adamw() -> None:
    torch.manual_seed(0)
    weights = torch.randn(40, 30)
    parameters = [torch.nn.Parameter(weights.clone()) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW([parameters[0]], lr=1e-2),
        SafeAdamW([parameters[1]], lr=1e-2, clip_update_rms=3.0),
    ]
    for _ in range(100):
        gradient = torch.randn(40, 30)  # the RMS of 1200 elements is 1 within 10%
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # Each step has a few rounding errors of fp32.
    torch.testing.assert_close(parameters[1], parameters[0], rtol=100 * 2.0**-22, atol=2.0**-22)


def test_clipped_step_after_a_gradient_spike_is_bounded() -> None:
    """For a gradient 1000 times as large as usual, the RMS is 1 / sqrt(0.001) = 31.6."""
    moved = {}
    for clip in (None, 1.0):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.zeros(1000))
        optimizer = SafeAdamW([parameter], lr=1.0, weight_decay=0.0, clip_update_rms=clip)
        for _ in range(200):
            parameter.grad = torch.randn(1000) * 1e-3
            optimizer.step()
        optimizer.state[parameter]["step"].fill_(100_000)
        before = parameter.detach().clone()
        parameter.grad = torch.randn(1000)
        optimizer.step()
        moved[clip] = (parameter.detach() - before).norm().item() / math.sqrt(1000)
    # v is 0.001 g^2, so the update is 0.1 / sqrt(0.001) = 3.16 for every element.
    assert abs(moved[None] - LIMIT) < 0.05
    assert abs(moved[1.0] - 0.1) < 0.005


def test_clip_is_per_tensor_and_does_not_affect_weight_decay() -> None:
    calm, wild = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = SafeAdamW([calm, wild], lr=1e-3, weight_decay=0.5, clip_update_rms=1.0)
    calm.grad, wild.grad = torch.ones(4), torch.ones(4)
    optimizer.step()
    before = calm.detach().clone(), wild.detach().clone()
    wild.grad = torch.full((4,), 1e6)
    optimizer.step()
    # The bias-corrected v is g^2 (0.001 + 0.001 * 1e-12) / (1 - 0.999^2), so the RMS is 1.414.
    decay = 1e-3 * 0.5
    moves = [
        (b * (1 - decay) - p.detach()) / 1e-3 for b, p in zip(before, (calm, wild), strict=True)
    ]
    torch.testing.assert_close(moves[0], torch.ones(4), rtol=1e-3, atol=0)
    mean, root = 0.1 / 0.19, math.sqrt(1e-3 / (1 - 0.999**2))
    torch.testing.assert_close(moves[1], torch.full((4,), mean / root * root), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_clip_with_gradients_far_below_epsilon_is_inactive(dtype: torch.dtype) -> None:
    """In fp16, eps^2 = 1e-16 would be 0, g^2 / max(v, eps^2) would be NaN, and nothing clipped."""
    parameter = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = SafeAdamW([parameter], lr=0.5, weight_decay=0.0, clip_update_rms=1.0, eps=1e-8)
    reference = SafeAdamW(
        [torch.nn.Parameter(parameter.detach().clone())], lr=0.5, weight_decay=0.0
    )
    other = reference.param_groups[0]["params"][0]
    parameter.grad = other.grad = torch.tensor([0, 0, 6e-8, 0, 0]).to(dtype)
    optimizer.step()
    reference.step()
    assert parameter.isfinite().all()
    torch.testing.assert_close(parameter, other)  # the RMS is 6 / sqrt(5) / 6 < 1


@pytest.mark.parametrize("rule", ["adam", "atan2"])
def test_clip_with_epsilon_of_zero_ignores_zero_gradients(rule: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = SafeAdamW(
        [parameter], rule=rule, clip_update_rms=0.1, eps=0.0, lr=0.5, weight_decay=0
    )
    parameter.grad = torch.tensor([1.0, -1.0, 2.0, 1e-3])
    optimizer.step()
    rms_share = 0.1  # the RMS of g / sqrt(v) is 1 in the first step
    scale = 1.0 if rule == "adam" else 1.27 * math.atan(1)
    expected = 1 - 0.5 * rms_share * scale * parameter.grad.sign()
    torch.testing.assert_close(parameter.detach(), expected)
    state = optimizer.state[parameter]
    state["exp_avg_sq"][0] = 0.0
    state["exp_avg"][0] = 0.0
    parameter.grad = torch.tensor([0.0, 1.0, 1.0, 1.0])
    if rule == "atan2":  # "adam" would divide 0 by an epsilon of 0
        optimizer.step()
        assert parameter.isfinite().all()
