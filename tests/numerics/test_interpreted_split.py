"""The kernels of `split_weights` in Triton's interpreter: equal to torch's operations."""

import pytest
import torch
from torch import Tensor

from lightning_mp.numerics.split_kernels import BLOCK, fused_join, fused_split
from lightning_mp.numerics.split_weights import join_weight, residual_unit, split_weight

pytestmark = pytest.mark.interpreted

halves = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def _values(count: int, half: torch.dtype) -> Tensor:
    """Return fp32 values of all magnitudes, values near ties of `half`, and special values."""
    exponents = torch.randint(-40, 17, (count,))
    spread = torch.ldexp((1 + torch.rand(count)) * (1 - 2 * torch.randint(2, (count,))), exponents)
    lower = spread.to(half)
    middle = (lower.float() + (lower.view(torch.int16) + 1).view(half).float()) / 2
    near = middle.view(torch.int32) + torch.randint(-5, 6, (count,), dtype=torch.int32)
    largest = torch.finfo(half).max
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, largest, -largest, 3e38, 65520.0]
    return torch.cat([spread, near.view(torch.float32), torch.tensor(special)])


def _assert_equal(found: Tensor, expected: Tensor) -> None:
    # A weight of -0 whose residual is ignored may lose its sign.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@halves
@pytest.mark.parametrize("count", [3, BLOCK.value, 3 * BLOCK.value + 17])
def test_kernels_equal_torch_without_a_tolerance(half: torch.dtype, count: int) -> None:
    torch.seed()
    values, unit = _values(count, half), residual_unit(half)
    for found, expected in zip(
        fused_split(values, half, unit), split_weight(values, half), strict=True
    ):
        _assert_equal(found, expected)
    weight, residual = split_weight(values, half)
    _assert_equal(fused_join(weight, residual, unit), join_weight(weight, residual))
    # Weights that were overwritten after the split.
    others = weight[torch.randperm(len(weight))]
    _assert_equal(fused_join(others, residual, unit), join_weight(others, residual))


@halves
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5, 7)])
def test_kernels_keep_shapes(half: torch.dtype, shape: tuple[int, ...]) -> None:
    values, unit = torch.randn(shape), residual_unit(half)
    weight, residual = fused_split(values, half, unit)
    assert weight.shape == residual.shape == shape
    _assert_equal(fused_join(weight, residual, unit), join_weight(weight, residual))
