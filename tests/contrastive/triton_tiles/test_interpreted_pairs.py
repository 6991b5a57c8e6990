"""The kernels beside the sweeps, in Triton's interpreter, against torch in float64.

Shapes:
    b: images. n: texts, of which the first b, or q, belong to images. D: width.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import RowsColumns, Vectors
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.contrastive._tiles.triton_tiles import pair_kernels
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import SoftmaxFactors

pytestmark = pytest.mark.interpreted(rows=None)

LOG2_E = math.log2(math.e)
EPS_64, EPS_32 = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Less than, exactly, and more than the rows and the slice of a program.
SHAPES = [(1, 1, 8), (16, 16, 128), (33, 50, 130)]
HAS_TERMS = [RowsColumns(True, True), RowsColumns(True, False), RowsColumns(False, True)]


def features(b: int, n: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    image, text = (normalize(torch.randn(rows, width), dim=1).to(dtype) for rows in (b, n))
    return image, text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("b", "n", "width"), SHAPES)
def test_prepare_returns_positive_logits_and_a_two_part_scale(
    b: int, n: int, width: int, dtype: torch.dtype
) -> None:
    image, text = features(b, n, width, dtype)
    scale = torch.tensor(99.7)
    pos_b, (log2_scale, reference) = pair_kernels.prepare(image, text, scale)
    expected = scale.double() * (image.double() * text[:b].double()).sum(1)
    # Products are exact, and each of `width` sums is rounded by at most half a ULP of the total.
    torch.testing.assert_close(pos_b, expected, rtol=0, atol=100 * width * EPS_64)
    exact = scale.double() * LOG2_E
    assert log2_scale.double().sum() == pytest.approx(exact.item(), rel=2.0**-47)
    # For unit features the bound is the scale; sums of 2^8 terms at the bound are still in range.
    norms = (image.double().norm(dim=1).amax() * text.double().norm(dim=1).amax()).item()
    assert reference.item() == pytest.approx(exact.item() * norms - 111, abs=144 * width * EPS_32)


@pytest.mark.parametrize("scale", [3.0, -3.0])
def test_reference_of_large_logits_is_below_the_sampled_maximum(scale: float) -> None:
    image, text = torch.randn(2, 40, 64).mul_(8.0)
    logits = scale * LOG2_E * image.double() @ text.double().T
    _, (_, reference) = pair_kernels.prepare(image, text, torch.tensor(scale))
    # A program of 16 pairs samples all of their logits except those of the positives.
    seen = [block.fill_diagonal_(-torch.inf) for block in _blocks(logits)]
    largest = max(block.amax().item() for block in seen)
    assert logits.abs().max() > 160
    # The sample is multiplied in tf32, whose values have eleven bits.
    assert reference.item() == pytest.approx(largest - 101, rel=2.0**-9, abs=2.0**-9 * largest)


def _blocks(logits: Tensor) -> list[Tensor]:
    return [logits[i : i + 16, i : i + 16].clone() for i in range(0, len(logits), 16)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_reference_of_non_finite_features_is_finite(bad: float) -> None:
    image, text = torch.randn(2, 20, 8)
    image[3, 2] = bad
    pos_b, (_, reference) = pair_kernels.prepare(image, text, torch.tensor(100.0))
    assert reference.isfinite()
    assert pos_b.isfinite().tolist() == [i != 3 for i in range(20)]


def _vectors(b: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exps and positives: ordinary, converged, without negatives, with overflow."""
    row, column, pos = (30 * torch.randn(size, dtype=torch.float64) for size in (b, n, b))
    if b > 20:
        pos[0], row[1], column[1] = 80.0, -torch.inf, -torch.inf
        pos[2], row[3], column[4], pos[5] = torch.inf, torch.nan, torch.inf, -torch.inf
        row[6], column[6], pos[6] = -1e4, 1e4, 9e3
    return row, column, pos


@pytest.mark.parametrize("has_terms", HAS_TERMS)
@pytest.mark.parametrize(
    ("b", "n", "parts"), [(1, 1, 1), (128, 128, 1), (129, 300, 3), (129, 130, 40)]
)
def test_pair_terms_equal_the_torch_backend(
    b: int, n: int, parts: int, has_terms: RowsColumns
) -> None:
    row, column, pos = _vectors(b, n)
    columns = column + 30 * torch.randn(parts, n, dtype=torch.float64)
    columns[0, 11:15] = -torch.inf  # in one part; `_vectors` has values of -inf in all parts
    if parts > 1 and n > 20:
        columns[:, 8], columns[1, 9], columns[-1, 10] = 900.0, torch.inf, torch.nan
    losses = torch.empty(2, dtype=torch.float64)
    expected = TorchTiles().pair_terms(row, columns, pos, has_terms, 2 * b, losses[0])
    made = pair_kernels.pair_terms(row, columns, pos, has_terms, 2 * b, losses[1])
    torch.testing.assert_close(made.row_lse_b, expected.row_lse_b, equal_nan=True)
    torch.testing.assert_close(made.column_lse_n, expected.column_lse_n, equal_nan=True)
    torch.testing.assert_close(made.weight_b, expected.weight_b, equal_nan=True, rtol=1e-13, atol=0)
    torch.testing.assert_close(*losses, equal_nan=True)


def test_pair_terms_of_converged_pairs_keep_relative_precision() -> None:
    margin = torch.linspace(-700.0, 2.0, 40, dtype=torch.float64)
    pos, made = torch.full((40,), 50.0, dtype=torch.float64), torch.empty_like(margin)
    for neg, loss in zip(pos + margin, made, strict=True):
        one = neg[None], neg[None, None], pos[:1]
        pair_kernels.pair_terms(*one, RowsColumns(True, False), 1, loss)
    expected = [math.log1p(math.exp(x)) for x in ((pos + margin) - pos).tolist()]
    torch.testing.assert_close(
        made, torch.tensor(expected, dtype=torch.float64), rtol=8 * EPS_64, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("needs_grad", HAS_TERMS)
@pytest.mark.parametrize(
    ("b", "n", "q", "width"), [(1, 1, 1, 8), (4, 4, 4, 256), (9, 14, 5, 260), (14, 5, 5, 8)]
)
def test_finish_equals_the_torch_backend(
    b: int, n: int, q: int, width: int, needs_grad: RowsColumns, dtype: torch.dtype
) -> None:
    image, text = features(b, n, width, dtype)
    gradients = [
        torch.randn(x.shape) if needed else None
        for x, needed in zip((image, text), needs_grad, strict=True)
    ]
    copies = [None if gradient is None else gradient.clone() for gradient in gradients]
    # Memory past the weights, which kernels must not read.
    weights = torch.cat([torch.rand(q), torch.full((20,), torch.nan)]).double()
    rest = (weights[:q], torch.tensor(20.0), 2 * b, 3)
    d_scales = torch.empty(2, dtype=torch.float64)
    TorchTiles().finish(image, text, *copies, *rest, d_scales[0])
    pair_kernels.finish(image, text, *gradients, *rest, d_scales[1])
    for one, other in zip(gradients, copies, strict=True):
        if one is not None:
            # One sum and two products are each rounded by half a ULP.
            torch.testing.assert_close(one, other, rtol=2 * EPS_32, atol=60 * EPS_32 / b)
    # torch additionally rounds weights and sums.
    atol = 10 * EPS_32 * (n * width) ** 0.5
    torch.testing.assert_close(*d_scales, rtol=0, atol=atol)


def test_factors_are_powers_of_the_distance_to_the_first_row() -> None:
    row, column = (40 + 5 * torch.randn(size, dtype=torch.float64) for size in (130, 300))
    made = SoftmaxFactors.of(Vectors(row, column), torch.tensor(7.0), 14)
    rows, columns = row * LOG2_E, column * LOG2_E
    power, gain, factor = made.rows_3n.double()
    torch.testing.assert_close(power - gain.log2(), rows - 14, rtol=0, atol=EPS_32)
    torch.testing.assert_close(factor, (gain.log2() + rows - rows[0]).exp2(), rtol=EPS_32, atol=0)
    power, gain, factor = made.columns_3m.double()
    torch.testing.assert_close(power - gain.log2(), columns - 14, rtol=0, atol=EPS_32)
    torch.testing.assert_close(factor, (rows[0] - columns).exp2(), rtol=EPS_32, atol=0)
    assert made.is_wide.tolist() == [0]
