"""Gradient scaling under `SafeAdamW`: skips that move nothing, without a host sync."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.numerics.split_weights import join_weight
from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.reference.adamw import AdamWReference, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MODES = [{"foreach": True}, {"foreach": False}, {"foreach": True, "capturable": True}]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


class CountSyncs(TorchDispatchMode):
    """Counts operations by name, to find those that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def bits(optimizer: SafeAdamW) -> list[Tensor]:
    """Return parameters and states as integers, so that NaN and -0 are compared as well."""
    states = [
        [p, *optimizer.state[p].values()] for g in optimizer.param_groups for p in g["params"]
    ]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.detach().clone().view(integers[t.element_size()]) for each in states for t in each]


@pytest.mark.parametrize("mode", MODES, ids=["foreach", "single", "capturable"])
@pytest.mark.parametrize("write_back", ["kahan", "nearest", "stochastic"])
@pytest.mark.parametrize("arguments", [{}, {"rule": "atan2", "clip_update_rms": 0.1, "eps": 0.0}])
def test_step_with_found_inf_changes_nothing(
    arguments: dict[str, object], write_back: str, mode: dict[str, bool]
) -> None:
    if write_back == "stochastic":  # capturable steps refuse it
        mode = {"foreach": mode["foreach"]}
    parameters = [torch.nn.Parameter(torch.randn(9, 5).to(dtype)) for dtype in DTYPES]
    parameters[0].data[0, :2] = torch.tensor([0.0, -0.0])
    optimizer = SafeAdamW(parameters, lr=0.1, write_back=write_back, **arguments, **mode)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = bits(optimizer)
    for found, gradient in ((1.0, math.nan), (2.0, math.inf), (1.0, 3.0)):
        for parameter in parameters:
            parameter.grad.fill_(gradient)
        # GradScaler passes the sum over several devices, such as 2.
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, bits(optimizer), strict=True))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, bits(optimizer), strict=True))
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_first_step_with_found_inf_leaves_step_counts_at_zero() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SafeAdamW([parameter])
    parameter.grad = torch.full((3,), math.nan)
    optimizer.found_inf = torch.ones(1)  # GradScaler's may have the shape [1]
    optimizer.step()
    assert torch.equal(parameter, torch.ones(3))
    assert not any(value.any() for value in optimizer.state[parameter].values())


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=["foreach", "single", "capturable"])
def test_step_reads_no_value_on_the_host(mode: dict[str, bool], found: float | None) -> None:
    parameters = [torch.nn.Parameter(torch.randn(9).to(dtype)) for dtype in DTYPES]
    optimizer = SafeAdamW(parameters, lr=torch.tensor(0.1), clip_update_rms=1.0, **mode)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    if found is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
    with CountSyncs() as counted:
        optimizer.step()
        assert not counted.calls["aten::_local_scalar_dense"]
        assert not counted.calls["aten::nonzero"]
        assert not counted.calls["aten::item"]
        parameters[0].sum().item()
    assert counted.calls["aten::_local_scalar_dense"] == 1  # the mode counts such reads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES, ids=["foreach", "single", "capturable"])
def test_grad_scaler_on_cpu_skips_overflows_and_steps_as_without_scale(
    dtype: torch.dtype, mode: dict[str, bool]
) -> None:
    """Calls 2 and 3 of 6 overflow, so there are four steps, and the scale is halved twice."""
    parameter = torch.nn.Parameter(torch.randn(17).to(dtype))
    reference = AdamWReference(parameter, lr=1e-2)
    optimizer = SafeAdamW([parameter], lr=1e-2, **mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for call in range(6):
        scales.append(scaler.get_scale())
        factor = torch.randn(17).to(dtype)
        optimizer.zero_grad()
        loss = (parameter * factor).sum() * (math.inf if call in (2, 3) else 1.0)
        scaler.scale(loss).backward()
        before = bits(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if call in (2, 3):
            assert all(torch.equal(a, b) for a, b in zip(before, bits(optimizer), strict=True))
        else:
            reference.step(factor)
    assert scales == [1024, 1024, 1024, 512, 256, 256]
    state = optimizer.state[parameter]
    assert state["step"].item() == 4
    weight = parameter.detach()
    if "residual" in state:
        weight = join_weight(weight, state["residual"])
    tolerance = {torch.float16: 1e-6, torch.bfloat16: 5e-5, torch.float32: 1e-6}
    assert relative_error(weight, reference.weight, floor=1.0) < tolerance.get(dtype, 1e-14)
    assert not hasattr(optimizer, "grad_scale")  # GradScaler removes the attribute after the step
    optimizer.step()
    assert state["step"].item() == 5


def test_fp16_gradients_are_unscaled_in_fp32() -> None:
    """Unscaled in place in fp16, gradients from N(0, 1e-9) would all be 0."""
    parameter = torch.nn.Parameter(torch.randn(1000).half())
    optimizer = SafeAdamW([parameter])
    scaled = (torch.randn(1000) * 1e-9 * 2**16).half()
    parameter.grad = scaled.clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**16), torch.tensor(0.0)
    optimizer.step()
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["exp_avg"], 0.1 * scaled.float() / 2**16, rtol=1e-6, atol=0)
    assert torch.equal(parameter.grad, scaled)


def test_unscaled_gradients_after_unscale_are_not_divided_again() -> None:
    """`GradScaler.unscale_`, for clipping, leaves `grad_scale` at None."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SafeAdamW([parameter])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale((2 * parameter).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full((3,), 0.2))
