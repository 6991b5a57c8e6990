"""Half weights and residuals on a GPU: equal to those of the CPU."""

import pytest
import torch

from lightning_mp.numerics.split_weights import join_weight, split_weight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(), (0,), (5, 37), (4097, 768)])
def test_parts_and_values_equal_those_of_the_cpu(half: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape) * 10.0 ** torch.randint(-8, 5, shape)
    expected = split_weight(values, half)
    on_gpu = values.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = split_weight(on_gpu, half)
        value = join_weight(*parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found, each in zip((*parts, value), (*expected, join_weight(*expected)), strict=True):
        torch.testing.assert_close(found.cpu(), each, rtol=0, atol=0)
