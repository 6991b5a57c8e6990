"""The fused step on the CPU interpreter, against torch and float64 on fresh random data."""

import math
from itertools import product

import pytest
import torch
import triton.language as tl

from lightning_mp.numerics.split_weights import residual_unit
from lightning_mp.optim._adamw import tables as adamw_tables
from lightning_mp.optim._adamw.adamw_kernels import BLOCK, CHUNK
from lightning_mp.optim._adamw.foreach import AdamWOptions, foreach_adamw_step
from lightning_mp.optim._adamw.fused import fused_adamw_step
from lightning_mp.optim._adamw.tables import tables_of
from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.optim.adamw_problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    OPTIONS,
    Problem,
    agreeing_step,
    disagreement,
    fresh,
    make_problem,
    off_by_one_element,
)

pytestmark = pytest.mark.interpreted

LONG = (CHUNK.value + BLOCK.value + 1,)
HALVES = FP16, BF16
CASES = [
    # The last three values repeat every eight cases; 3 and 8 have no common divisor.
    (*dtypes, rule, (3 * index & 1) > 0, (3 * index & 2) > 0, (3 * index & 4) > 0)
    for index, (rule, dtypes) in enumerate(product(("adam", "atan2"), DTYPES))
]


@pytest.mark.parametrize(
    ("half", "grad", "write_back", "rule", "is_clipped", "maximize", "is_scaled"), CASES
)
def test_step_agrees_with_torch_and_float64(
    half, grad, write_back, rule, is_clipped, maximize, is_scaled
):
    options = {
        "write_back": write_back,
        "rule": rule,
        "clip_update_rms": 0.5 if is_clipped else None,  # active, because the RMS is about 3
        "maximize": maximize,
        "grad_scale": torch.tensor(3.0) if is_scaled else None,
        "found_inf": torch.tensor(0.0) if is_scaled else None,
    }
    problem = fresh(half, grad, write_back)
    fused = agreeing_step(problem, **options)
    assert all(map(torch.equal, fused.grads, problem.grads))
    assert all(map(torch.equal, fused.steps, problem.steps))


@pytest.mark.parametrize(
    ("half", "write_back"), [(FP32, "nearest"), (FP16, "kahan"), (BF16, "stochastic")]
)
def test_chunks_and_remainders_are_stepped_once(half, write_back):
    problem = fresh(half, half, write_back, [LONG, (CHUNK.value,), (7,)])
    options = {"write_back": write_back, "clip_update_rms": 0.5}
    fused = problem.after(fused_adamw_step, **options)
    assert disagreement(fused, problem.in_float64(**options)) < 1


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.4, 0.95), (0.9, 0.999), (0.99, 0.9999)])
def test_bias_corrections_are_accurate_from_step_1_to_10_million(betas):
    counts = [1.0, 2.0, 7.0, 30.0, 693.0, 1e4, 123_457.0, 1e7]
    options = {"beta1": betas[0], "beta2": betas[1], "lr": 1.0, "weight_decay": 0.0}
    problem = make_problem([(64,)] * len(counts))
    for index, count in enumerate(counts):
        problem.params[index].zero_()
        problem.grads[index].abs_()  # no cancellation
        problem.exp_avgs[index].abs_()
        problem.steps[index].fill_(count)
    fused = problem.after(fused_adamw_step, **options)
    for param, made in zip(fused.params, problem.in_float64(**options), strict=True):
        assert ((param.double() / made.weight - 1).abs().amax()) < 1.5e-6


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("write_back", ["kahan", "stochastic"])
def test_step_with_found_inf_changes_no_bit(write_back, is_clipped):
    problem = fresh(FP16, FP16, write_back)
    problem.grads[0][1, 2], problem.grads[3][5] = math.nan, math.inf
    options = {"write_back": write_back, "clip_update_rms": 1.0 if is_clipped else None}
    for sign in (1.0, 2.0, math.nan):
        skipped = problem.after(fused_adamw_step, found_inf=torch.tensor(sign), **options)
        assert skipped.is_same(problem)
    assert not problem.after(fused_adamw_step, found_inf=torch.tensor(0.0), **options).is_same(
        problem
    )


@pytest.mark.parametrize(("rule", "clip"), [("adam", None), ("adam", 1.0), ("atan2", None)])
def test_non_finite_gradient_propagates_as_in_torch(rule, clip):
    problem = fresh(FP16, FP16)
    problem.grads[0][1, 2], problem.grads[3][5] = math.nan, math.inf
    fused = problem.after(fused_adamw_step, rule=rule, clip_update_rms=clip)
    foreach = problem.after(foreach_adamw_step, rule=rule, clip_update_rms=clip)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "residuals"):
        for mine, other in zip(getattr(fused, name), getattr(foreach, name), strict=True):
            assert torch.equal(mine.isfinite(), other.isfinite())
    assert not all(param.isfinite().all() for param in fused.params)


def test_power_of_two_scale_changes_no_bit():
    problem = fresh(FP16, FP32)
    scaled = problem.copy()
    scaled.grads = [grad * 2**16 for grad in problem.grads]
    scale = torch.tensor([2.0**16], dtype=torch.float64)
    plain = problem.after(fused_adamw_step)
    unscaled = scaled.after(fused_adamw_step, grad_scale=scale)
    unscaled.grads = plain.grads
    assert unscaled.is_same(plain)


@pytest.mark.parametrize("dtype", [FP32, torch.float64, FP16])
def test_learning_rate_may_be_a_tensor(dtype):
    problem, lr = fresh(), torch.tensor(0.125, dtype=dtype)
    expected = problem.after(fused_adamw_step, lr=0.125)
    assert problem.after(fused_adamw_step, lr=lr).is_same(expected)
    assert problem.after(fused_adamw_step, lr=lr.reshape(1)).is_same(expected)


# --- clipping ------------------------------------------------------------------------------------


def test_rms_over_parts_equals_the_rms_of_the_tensor(monkeypatch):
    monkeypatch.setattr(adamw_tables, "MAX_PARTS", tl.constexpr(2))
    problem = make_problem([(2 * CHUNK.value + 1,), (5,)], FP32, BF16)
    with tables_of(problem.lists, problem.steps) as (_, _, parts):
        assert parts.tolist() == [[0, 0], [0, 1], [1, 0]]
    for shift in (lambda t: t, off_by_one_element):
        moved = problem.map(shift)
        expected = moved.in_float64(clip_update_rms=0.5)
        fused_adamw_step(moved, AdamWOptions(**OPTIONS | {"clip_update_rms": 0.5}))
        assert disagreement(moved, expected) < 1


def test_clip_applies_to_each_tensor_separately():
    problem = make_problem([(5000,), (3000,)])
    problem.grads[1] *= 0.01
    clipped = problem.after(fused_adamw_step, clip_update_rms=1.0)
    plain = problem.after(fused_adamw_step)
    assert not torch.equal(clipped.params[0], plain.params[0])
    assert torch.equal(clipped.params[1], plain.params[1])
    assert problem.after(fused_adamw_step, clip_update_rms=1.0).is_same(clipped)


def test_zero_second_moments_give_finite_updates():
    problem = fresh(FP16, FP16, "nearest")
    for tensor in problem.grads + problem.exp_avgs + problem.exp_avg_sqs:
        tensor.zero_()
    for rule, eps in (("adam", 1e-8), ("atan2", 0.0)):
        options = {"rule": rule, "eps": eps, "clip_update_rms": 1.0, "weight_decay": 0.0}
        options["write_back"] = "nearest"
        assert problem.after(fused_adamw_step, **options).is_same(problem)


# --- write-back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_residual_of_an_overwritten_weight_is_ignored(half):
    problem = make_problem([(4000,)], half, half)
    problem.params[0][::2] = 0
    # Residuals of the other weights are just below and just above half a ULP of the weight.
    others = problem.params[0][1::2].float()
    half_step = others.frexp().exponent.exp2() / 4 * torch.finfo(half).eps
    near = half_step * torch.linspace(0.98, 1.02, 2000) / residual_unit(half)
    problem.residuals[0][1::2] = near.to(half)
    options = {"lr": 0.0, "weight_decay": 0.0}
    fused = problem.after(fused_adamw_step, **options)
    foreach = problem.after(foreach_adamw_step, **options)
    assert torch.equal(fused.params[0], foreach.params[0])
    assert torch.equal(fused.residuals[0], foreach.residuals[0])
    assert not fused.params[0][::2].any()
    assert 0.2 < (fused.residuals[0][1::2] == 0).float().mean() < 0.8


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-15])  # 2^-15 is subnormal in fp16
def test_stochastic_rounding_is_unbiased(half, magnitude):
    count, part = 24_000, 0.3
    low = torch.tensor(magnitude * 1.25, dtype=half)
    high = low + low * torch.finfo(half).eps if magnitude == 1 or half == BF16 else low + 2.0**-24
    problem = make_problem([(count // 2,)] * 2, half, half, has_residuals=False)
    fp32 = low.float() + (high.float() - low.float()) * part
    for param, grad, exp_avg, exp_avg_sq in zip(*problem.lists, strict=True):
        param.fill_(low.item())
        # With v of 1 the update is m, exactly `part` of a ULP.
        exp_avg.fill_((low.float() - fp32).item())
        exp_avg_sq.fill_(1.0)
        grad.zero_()
    for step in problem.steps:
        step.fill_(1e7)
    options = {"lr": 1.0, "weight_decay": 0.0, "eps": 0.0, "beta1": 0.999999, "beta2": 0.999999}
    options["write_back"] = "stochastic"
    rounded = problem.after(fused_adamw_step, **options).params
    values = torch.cat(rounded)
    assert set(values.unique().tolist()) == {low.item(), high.item()}
    is_up = (values == high).float()
    spread = math.sqrt(part * (1 - part) / count)
    assert abs(is_up.mean().item() - part) < 5 * spread
    # The noise of neighbors, groups of four, blocks, chunks and tensors is independent.
    for distance in (1, 2, 3, 4, BLOCK.value, CHUNK.value, count // 2):
        both = (is_up[distance:] * is_up[:-distance]).mean().item()
        assert abs(both - part**2) < 6 * math.sqrt(part**2 / (count - distance))


def test_stochastic_rounding_keeps_non_finite_values():
    problem = make_problem([(3000,)], BF16, FP32, has_residuals=False)
    problem.params[0][::2] = -torch.inf
    # The NaN of GPUs: adding noise to its bits would give a small number.
    problem.grads[0] = torch.full((3000,), 2**31 - 1, dtype=torch.int32).view(FP32)
    problem.grads[0][::2] = 1.0
    rounded = problem.after(fused_adamw_step, write_back="stochastic").params[0]
    assert rounded[::2].isneginf().all()
    assert rounded[1::2].isnan().all()


def test_noise_depends_on_the_seed_only():
    problem = fresh(BF16, BF16, "stochastic")
    first, again, other = (
        problem.after(fused_adamw_step, write_back="stochastic", seed=seed) for seed in (3, 3, 4)
    )
    assert again.is_same(first)
    assert not torch.equal(other.params[0], first.params[0])


# --- the optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [FP16, FP32])
def test_optimizer_trains_equally_with_fused_and_foreach(half):
    weights = [torch.randn(shape) for shape in ((17, 5), (5,), (1100,))]
    gradients = [[torch.randn_like(w).to(half) for w in weights] for _ in range(6)]
    trained = []
    for fused in (True, False):
        params = [torch.nn.Parameter(w.to(half)) for w in weights]
        optimizer = SafeAdamW(params, lr=0.01, fused=fused, foreach=not fused, clip_update_rms=0.7)
        for step in gradients:
            for param, gradient in zip(params, step, strict=True):
                param.grad = gradient.clone()
            optimizer.step()
        states = [optimizer.state[p] for p in params]
        residuals = [state["residual"] for state in states] if half == FP16 else []
        trained.append(
            Problem(
                params,
                gradients[-1],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                residuals,
                [state["step"] for state in states],
            )
        )
    assert disagreement(*trained) < 2
    assert trained[0].steps == trained[1].steps == [6.0] * 3
