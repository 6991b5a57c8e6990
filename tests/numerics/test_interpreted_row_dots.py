"""The Triton kernel of `row_dots` in Triton's interpreter, against products in float64."""

import itertools

import pytest
import torch

from lightning_mp.contrastive._tiles.tile_backend import row_dots
from lightning_mp.numerics.row_dots import fused_row_dots
from lightning_mp.numerics.row_dots_kernels import COLUMNS, ROWS

pytestmark = pytest.mark.interpreted

FORMATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    (1, 1), (ROWS.value, COLUMNS.value), (ROWS.value + 1, 37), (23, 2 * COLUMNS.value + 5),
)  # fmt: skip


@pytest.mark.parametrize(("left", "right"), list(itertools.product(FORMATS, repeat=2)))
def test_dots_equal_those_of_float64(left: torch.dtype, right: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for n, width in SHAPES:
        parts = [torch.randn(n, width, generator=generator) for _ in range(2)]
        x, y = parts[0].to(left), (100 * parts[1]).to(right)
        dots = fused_row_dots(x, y)
        assert dots.dtype == torch.float64
        # Products are exact; each of `width` additions has an error of half a ULP of the sum.
        bound = width * 2.0**-53 * (x.double() * y.double()).abs().sum(1)
        assert bool(((dots - (x.double() * y.double()).sum(1)).abs() <= bound).all())
        torch.testing.assert_close(row_dots(x, y, torch.float64), dots, rtol=0, atol=bound.max())


def test_rows_may_have_any_stride_and_columns_are_made_contiguous() -> None:
    wide = torch.randn(9, 60)
    for x in (wide[:, 3:40], wide[::2, :37], wide.T[:9, :7], wide[:1].expand(9, -1)):
        torch.testing.assert_close(
            fused_row_dots(x, torch.ones_like(x)), x.double().sum(1), rtol=1e-13, atol=1e-13
        )


def test_non_finite_values_stay_in_their_row() -> None:
    x = torch.ones(6, 300)
    x[1, 299], x[4, 0] = torch.nan, torch.inf
    dots = fused_row_dots(x, torch.ones_like(x))
    assert dots.isnan().tolist() == [False, True, False, False, False, False]
    assert dots.isinf().tolist() == [False, False, False, False, True, False]
    assert dots[[0, 2, 3, 5]].tolist() == [300.0] * 4


def test_no_rows_give_no_dots() -> None:
    assert fused_row_dots(torch.empty(0, 8), torch.empty(0, 8)).shape == (0,)
