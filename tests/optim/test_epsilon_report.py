"""Thresholds and step sizes of `epsilon_report`, against torch's Adam."""

import math

import pytest
import torch
from torch import nn, optim

from lightning_mp.optim.epsilon_report import epsilon_report

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LR = 2.0**-10


@pytest.mark.parametrize(
    ("beta2", "blow_up", "overflow"),
    [(0.999, 5.46e-3, 8094.4), (0.95, 7.72e-4, 1144.7), (0.9999, 1.726e-2, 25596.9)],
)
def test_report_in_fp16_gives_the_known_thresholds(
    beta2: float, blow_up: float, overflow: float
) -> None:
    report = epsilon_report(eps=1e-8, beta2=beta2, state_dtype=FP16)
    assert report.blow_up_gradient == pytest.approx(math.sqrt(2**-25 / (1 - beta2)))
    assert report.blow_up_gradient == pytest.approx(blow_up, rel=1e-3)
    assert report.overflow_gradient == pytest.approx(overflow, rel=1e-4)
    assert (report.survives, report.stored_eps, report.largest_step) == (False, 0, math.inf)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("beta2", [0.9, 0.98, 0.9995])
def test_report_thresholds_equal_those_of_torch_adam(
    beta2: float, fused: bool, dtype: torch.dtype
) -> None:
    math_dtype = FP32 if fused else None
    report = epsilon_report(eps=1e-8, beta2=beta2, state_dtype=dtype, math_dtype=math_dtype)
    bits = torch.arange(0x7C00 if dtype == FP16 else 0x7F80, dtype=torch.int16)
    gradient = bits.view(dtype)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    optimizer = optim.Adam([parameter], betas=(0.9, beta2), fused=fused)
    parameter.grad = gradient
    optimizer.step()
    v = optimizer.state[parameter]["exp_avg_sq"]
    assert torch.equal(v == 0, gradient.double() <= report.blow_up_gradient * (1 + 1e-6))
    assert torch.equal(v.isinf(), gradient.double() >= report.overflow_gradient * (1 - 1e-6))


@pytest.mark.parametrize("eps", [3e-8, 1e-7, 1e-6, 1e-4, 1e-3, 5.5e-3, 0.1])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_report_gives_the_largest_step_of_torch_adam_in_fp16(beta2: float, eps: float) -> None:
    report = epsilon_report(eps=eps, beta2=beta2, state_dtype=FP16)
    gradient = torch.arange(0x7C00, dtype=torch.int16).view(FP16)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    optimizer = optim.Adam([parameter], lr=LR, betas=(0.9, beta2), eps=eps)
    parameter.grad = gradient
    optimizer.step()
    largest = parameter.abs().max().item() / LR
    # A second moment of one subnormal ULP may be rounded from 1.5 ULP.
    assert report.largest_step * (1 - 1e-3) <= largest or report.is_safe
    assert largest <= report.largest_step * math.sqrt(1.5) * (1 + 1e-3)
    assert report.is_safe == (eps >= math.sqrt(2**-25 / (1 - beta2)))


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_report_gives_the_largest_step_of_fused_adam(beta2: float) -> None:
    report = epsilon_report(eps=1e-8, beta2=beta2, state_dtype=FP16, math_dtype=FP32)
    assert report.survives
    assert not report.is_safe
    assert report.largest_step == pytest.approx((1 - beta2) ** -0.5, rel=1e-3)
    parameter = nn.Parameter(torch.zeros(1, dtype=FP16))
    optimizer = optim.Adam([parameter], lr=LR, betas=(0.9, beta2), fused=True)
    parameter.grad = torch.full_like(parameter, report.blow_up_gradient * 0.99)
    for _ in range(1000):
        parameter.data.zero_()
        optimizer.step()
    assert -parameter.item() / LR == pytest.approx(report.largest_step, rel=5e-3)


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64])
@pytest.mark.parametrize("eps", [1e-8, 1e-16])
def test_report_for_dtypes_with_a_wide_range_is_safe(eps: float, dtype: torch.dtype) -> None:
    report = epsilon_report(eps=eps, beta2=0.999, state_dtype=dtype)
    assert report.is_safe
    assert report.largest_step == 1
    assert report.blow_up_gradient < 1e-18
    assert report.overflow_gradient > 1e20


def test_report_string_states_effect_and_remedy() -> None:
    lost = str(epsilon_report(eps=1e-8, beta2=0.999, state_dtype=FP16))
    assert "eps=1e-08 is 0 in torch.float16" in lost
    assert "0.00546" in lost
    fused = str(epsilon_report(eps=1e-8, beta2=0.999, state_dtype=FP16, math_dtype=FP32))
    assert "0.00546" in fused
    assert "31.6 times the learning rate" in fused
    assert "fp32" in lost
    assert "fp32" in fused
    assert "1.01e+21" not in lost
    assert "8094" in str(epsilon_report(eps=0.01, beta2=0.999, state_dtype=FP16))


@pytest.mark.parametrize(
    "wrong", [{"eps": -1e-8}, {"eps": math.nan}, {"beta2": 1.0}, {"beta2": -0.1}]
)
def test_report_with_invalid_values_raises(wrong: dict[str, float]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        epsilon_report(**{"eps": 1e-8, "beta2": 0.9, **wrong}, state_dtype=FP16)
