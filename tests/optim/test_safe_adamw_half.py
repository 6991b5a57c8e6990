"""Half weights under `SafeAdamW` keep updates that torch's AdamW loses."""

import math

import pytest
import torch

from lightning_mp.numerics.split_weights import join_weight
from lightning_mp.optim._adamw.foreach import mix_seed
from lightning_mp.optim.safe_adamw import SafeAdamW

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rule", ["adam", "atan2"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("eps", [1e-8, 1e-30])
def test_zero_gradients_leave_weights_finite_and_unchanged(
    dtype: torch.dtype, rule: str, clip: float | None, eps: float
) -> None:
    parameter = torch.nn.Parameter(torch.randn(33).to(dtype))
    before = parameter.detach().clone()
    optimizer = SafeAdamW([parameter], rule=rule, clip_update_rms=clip, eps=eps, weight_decay=0.0)
    for _ in range(3):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("gradient", "is_lost"), [(0.0, "nan"), (5.4e-3, "inf")])
def test_fp16_weights_train_where_torch_adamw_fails(
    gradient: float, is_lost: str, foreach: bool
) -> None:
    """Lightning#20619: with states in fp16, epsilon and the squares of gradients are 0."""
    ours = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    theirs = torch.nn.Parameter(ours.detach().clone())
    ours.grad = theirs.grad = torch.full_like(ours, gradient)
    SafeAdamW([ours], lr=0.5, weight_decay=0.0, foreach=foreach).step()
    torch.optim.AdamW([theirs], lr=0.5, weight_decay=0.0, foreach=foreach).step()
    assert str(theirs[0].abs().item()) == is_lost
    expected = 1.0 if gradient == 0 else 0.5
    torch.testing.assert_close(ours.detach(), torch.full_like(ours, expected))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("write_back", ["kahan", "nearest", "stochastic"])
def test_half_parameters_have_fp32_moments_and_a_half_residual(
    dtype: torch.dtype, write_back: str
) -> None:
    parameter = torch.nn.Parameter(torch.randn(7, 3).to(dtype))
    parameter.grad = torch.randn_like(parameter)
    optimizer = SafeAdamW([parameter], write_back=write_back)
    optimizer.step()
    dtypes = {name: value.dtype for name, value in optimizer.state[parameter].items()}
    expected = {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    if write_back == "kahan":
        expected["residual"] = dtype
    assert dtypes == expected
    held = [parameter, *optimizer.state[parameter].values()]
    num_bytes = sum(t.numel() * t.element_size() for t in held if t.dim() > 0)
    assert num_bytes == (12 if write_back == "kahan" else 10) * parameter.numel()
    assert all(t.shape == parameter.shape for t in held if t.dim() > 0)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("dtype", "lr"), [(torch.float16, 1e-5), (torch.bfloat16, 1.5e-4)])
def test_small_updates_of_half_weights_accumulate(
    dtype: torch.dtype, lr: float, foreach: bool
) -> None:
    """With a constant gradient each update is lr, 2% to 4% of a ULP of the weight."""
    num_steps, size = 300, 2048
    moved = {}
    for write_back in ("kahan", "nearest", "stochastic"):
        parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        optimizer = SafeAdamW(
            [parameter], lr=lr, weight_decay=0.0, write_back=write_back, foreach=foreach
        )
        parameter.grad = torch.ones_like(parameter)
        for _ in range(num_steps):
            optimizer.step()
        weight = parameter.detach()
        moved[write_back] = 1 - weight.double().mean().item()
        if write_back == "kahan":
            joined = join_weight(weight, optimizer.state[parameter]["residual"])
            moved["joined"] = 1 - joined.double().mean().item()
    expected, last_bit = lr * num_steps, torch.finfo(dtype).eps / 2  # ULP below 1
    # A ULP of the residual is up to 5% of an update.
    assert abs(moved["joined"] / expected - 1) < 0.03
    assert abs(moved["kahan"] - moved["joined"]) <= last_bit / 2
    assert moved["nearest"] == 0
    # 5 standard deviations of the mean of `size` weights whose last bits are random.
    assert abs(moved["stochastic"] - expected) < 5 * math.sqrt(expected * last_bit / size)


@pytest.mark.parametrize("foreach", [True, False])
def test_stochastic_write_back_draws_new_noise_for_each_step_and_tensor(foreach: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(512, dtype=torch.float16)) for _ in range(4)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    arguments = {"lr": 2.0**-12, "weight_decay": 0.0, "write_back": "stochastic"}
    optimizer = SafeAdamW(groups, **arguments, foreach=foreach)
    patterns = []
    for _ in range(3):
        for parameter in parameters:
            parameter.data.fill_(1.0)
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        patterns += [parameter.detach().clone() for parameter in parameters]
    for index, one in enumerate(patterns):
        assert 0.4 < (one < 1).float().mean() < 0.6
        for other in patterns[:index]:
            assert 0.35 < (one == other).float().mean() < 0.65


def test_stochastic_write_back_is_independent_of_the_global_seed() -> None:
    """Otherwise the weights of DDP's ranks, which have different seeds, would diverge."""
    rounded = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        parameter = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
        optimizer = SafeAdamW([parameter], lr=1e-3, write_back="stochastic")
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        rounded.append(parameter.detach())
    assert torch.equal(*rounded)
    assert rounded[0].unique().numel() > 1


def test_mixed_seeds_differ_in_the_low_32_bits() -> None:
    seeds = [mix_seed(seed, index) for seed in range(100) for index in range(100)]
    seeds += [mix_seed(0, index << 32) for index in range(1, 100)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("dtype", HALVES)
def test_overwritten_weight_drops_its_residual(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.full((9,), math.pi).to(dtype))
    optimizer = SafeAdamW([parameter], lr=1e-3, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.data.zero_()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.state[parameter]["exp_avg"].zero_()
    optimizer.step()
    assert not parameter.any()
    assert not optimizer.state[parameter]["residual"].any()


def test_weights_cast_after_construction_get_residuals_of_their_new_dtype() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SafeAdamW([parameter])
    dtypes = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float32):
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        residual = optimizer.state[parameter].get("residual")
        dtypes.append(None if residual is None else residual.dtype)
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float32
    assert dtypes == [None, torch.float16, torch.bfloat16, None]


def test_second_moment_of_small_gradients_does_not_stall() -> None:
    """With fp16 states, v stays 0 for g = 1e-3, and fused Adam's step grows to 9.7 lr."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = SafeAdamW([parameter], lr=2.0**-10, weight_decay=0.0)
    parameter.grad = torch.full_like(parameter, 1e-3)
    gradient = parameter.grad.float()
    for _ in range(100):
        optimizer.step()
    torch.testing.assert_close(
        optimizer.state[parameter]["exp_avg_sq"], gradient**2 * (1 - 0.999**100)
    )
    torch.testing.assert_close(
        parameter.detach().float(), torch.tensor([-100 * 2.0**-10]), rtol=1e-3, atol=0
    )
