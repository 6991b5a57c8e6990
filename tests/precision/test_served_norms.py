"""Norms of torch apply the op policy in their forward; norms of any class accept half weights."""

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.precision.op_policy import OpPolicy, serve_norms
from tests.precision.models import Regression, fit, loader, parameters_of, relative
from tests.precision.working_models import HALVES

NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "layer without weights": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 6),
    "rms": lambda: nn.RMSNorm(8, eps=1e-6),
}
X = 300 * torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def outputs(
    norm: nn.Module, policy: OpPolicy, half: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output and the gradients of input and weights."""
    x = X.to(dtype, copy=True).requires_grad_()
    with policy.context("cpu", half):
        output = norm(x)
    output.float().square().sum().backward()
    gradients = [p.grad for p in norm.parameters()]
    norm.zero_grad()
    return [output.detach(), x.grad, *gradients]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "policy",
    [OpPolicy(), OpPolicy(norm_output="fp32"), OpPolicy(half_ops=["layer_norm"])],
    ids=["input", "fp32", "moved"],
)
def test_served_norm_equals_the_function_mode(name: str, half: str, policy: OpPolicy) -> None:
    for dtype in (HALVES[half], torch.float32):
        norm = NORMS[name]()
        expected = outputs(norm, policy, HALVES[half], dtype)
        with contextlib.ExitStack() as undo:
            serve_norms([norm], undo)
            results = [
                outputs(each, policy, HALVES[half], dtype) for each in (norm, copy.deepcopy(norm))
            ]
            loaded = pickle.loads(pickle.dumps(norm))
            results.append(outputs(loaded, policy, HALVES[half], dtype))
        assert "forward" not in norm.__dict__
        for result in results:
            for value, other in zip(result, expected, strict=True):
                assert value.dtype == other.dtype
                assert torch.equal(value, other)


def test_served_norm_without_a_policy_equals_torch() -> None:
    norm = nn.LayerNorm(8)
    expected = norm(X)
    with contextlib.ExitStack() as undo:
        serve_norms([norm], undo)
        assert torch.equal(norm(X), expected)


@pytest.mark.parametrize("name", ["layer", "group", "rms"])
def test_frozen_half_norm_keeps_its_own_forward(name: str) -> None:
    norm = NORMS[name]().half().requires_grad_(False)
    with contextlib.ExitStack() as undo, OpPolicy().context("cpu", torch.float16):
        expected = norm(X.half())
        serve_norms([norm], undo)
        assert torch.equal(norm(X.half()), expected)


class _Standardizing(nn.Module):
    """A batch norm of a class that is no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, self.training)


class _AfterABuffer(nn.InstanceNorm1d):
    """An instance norm whose input is a sum with an fp32 buffer."""

    def __init__(self) -> None:
        super().__init__(1, affine=True)
        self.register_buffer("shift", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x + self.shift)[:, None]).squeeze(1)


@pytest.mark.parametrize("norm", [_Standardizing, _AfterABuffer])
@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", [BalancedAMP, PureFP16])
def test_half_weights_of_norms_with_statistics_train_as_in_fp32(
    kind: Any, half: Any, norm: Any
) -> None:
    def make() -> Regression:
        return Regression(lambda: nn.Sequential(nn.Linear(8, 16), norm(), nn.Linear(16, 1)))

    reference, model, start = make(), make(), parameters_of(make())
    fit(reference, None, loader(8))
    fit(model, kind(half=half), loader(8))
    assert relative(model, reference, start) < {"fp16": 2**-7, "bf16": 2**-4}[half]
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-8)


def test_served_norm_accepts_its_input_by_name() -> None:
    norms = nn.ModuleList([nn.RMSNorm(8), nn.LayerNorm(8)])
    with contextlib.ExitStack() as undo:
        serve_norms(norms, undo)
        with OpPolicy().context("cpu", torch.float16):
            assert torch.equal(norms[0](x=X), norms[0](X))
            assert torch.equal(norms[1](input=X), norms[1](X))
