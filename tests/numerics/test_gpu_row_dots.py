"""`row_dots` on a GPU."""

import pytest
import torch

from lightning_mp.contrastive._tiles.tile_backend import row_dots

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (4097, 768)])
def test_dots_equal_those_of_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape, device="cuda").to(dtype), torch.randn(shape, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        dots = row_dots(x, y, torch.float64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    terms = x.double() * y.double()
    bound = shape[1] * 2.0**-53 * terms.abs().sum(1)
    assert bool(((dots - terms.sum(1)).abs() <= bound).all())
