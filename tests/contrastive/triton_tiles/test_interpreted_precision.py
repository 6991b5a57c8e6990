"""Precision for each `tile_dtype` and dtype of features, in Triton's interpreter.

Shapes:
    b: rows. m: columns. D: width.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.literals import TileDtype
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    force_variant,
    make_shard,
    shard_of,
)
from tests.contrastive.visible import loss_on
from tests.reference.contrastive import Reference, reference, relative_error

pytestmark = pytest.mark.interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_tile_dtype_fp32_has_fp32_softmax_precision_for_half_features(
    dtype: torch.dtype, arch: int
) -> None:
    shard = make_shard(140, 150, 72, dtype)
    tiles = TritonTiles(tile_dtype="fp32", arch=arch)
    gradients, features = shard.grad_sweep(tiles), (shard.columns, shard.rows)
    for gradient, softmax, other in zip(
        gradients, (shard.softmax, shard.softmax.T), features, strict=True
    ):
        # fp32 values near 100 log2(e) are 1.5e-5 apart, a relative 1.1e-5 of the softmax.
        assert relative_error(gradient, softmax @ other.double()) < 8e-6
    assert shard.grad_error(gradients) < GRADIENT_ERROR[FP32]


@pytest.mark.parametrize(
    ("tile_dtype", "features", "rounded", "arch"),
    [
        ("bf16", FP32, BF16, 80),
        ("fp16", FP32, FP16, 90),
        ("bf16", FP16, BF16, 90),
        ("fp16", BF16, FP16, 80),
        ("auto", BF16, BF16, 90),
        ("tf32", BF16, BF16, 80),
    ],
    ids=str,
)
def test_half_tile_dtype_equals_float64_of_rounded_features(
    tile_dtype: TileDtype, features: torch.dtype, rounded: torch.dtype, arch: int
) -> None:
    shard = make_shard(65, 140, 72, features)
    exact = shard_of(shard.rows.to(rounded), shard.columns.to(rounded), 100.0)
    tiles = TritonTiles(tile_dtype=tile_dtype, arch=arch)
    # Errors are relative to the rounded features; the backend gets the features before rounding.
    expected = exact.rows, exact.columns
    exact.rows, exact.columns = shard.rows, shard.columns
    lses, gradients = exact.lse_sweep(tiles), exact.grad_sweep(tiles)
    exact.rows, exact.columns = expected
    assert exact.lse_error(lses) < LSE_ERROR
    assert exact.grad_error(gradients) < GRADIENT_ERROR[rounded]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("tile_dtype", ["tf32", "fp32", "auto"])
def test_fp32_features_keep_fp32_precision(tile_dtype: TileDtype, arch: int) -> None:
    # The interpreter multiplies fp32 in fp32, so "tf32" only tests the sums of its code path.
    shard = make_shard(65, 140, 72, FP32)
    tiles = TritonTiles(tile_dtype=tile_dtype, arch=arch)
    assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[FP32]


@pytest.mark.parametrize(
    ("row_size", "column_size"),
    [(1e-4, 1e-4), (1e4, 1e4), (1e-12, 1e-12), (1e15, 1e15), (1e-4, 1e4), (1e4, 1e-4)],
)
def test_fp32_features_of_any_magnitude_keep_fp32_precision(
    row_size: float, column_size: float
) -> None:
    shard = shard_of(
        normalize(torch.randn(65, 72), dim=1) * row_size,
        normalize(torch.randn(70, 72), dim=1) * column_size,
        100.0 / (row_size * column_size),
    )
    assert shard.lse_error(shard.lse_sweep(TritonTiles())) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(TritonTiles())) < GRADIENT_ERROR[FP32]


def test_fp32_rows_of_mixed_magnitudes_keep_fp32_precision() -> None:
    rows, columns = (
        normalize(torch.randn(n, 72), dim=1) * torch.logspace(-8, 8, n, base=2.0)[:, None]
        for n in (65, 70)
    )
    shard = shard_of(rows, columns[torch.randperm(70)], 100.0 / 2**16)
    assert shard.lse_error(shard.lse_sweep(TritonTiles())) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(TritonTiles())) < GRADIENT_ERROR[FP32]


@pytest.mark.parametrize("is_wide", [False, True])
def test_no_common_fp32_rounding_error_in_a_row_or_shard(
    is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This scale times log2(e) is half way between two fp32 values. A single fp32 value would give
    # all log-sum-exps an equal error of 6e-6 nats, and softmax values a relative error of 6e-6.
    scale = 89.75372314453125
    direction = torch.randn(1, 72)
    rows, columns = (normalize(direction + 0.1 * torch.randn(n, 72), dim=1) for n in (100, 110))
    rows[:, 0] = columns[:, 0] = 0.5
    shard = shard_of(rows, columns, scale, diagonal=None)
    for start in shard.start:
        start.fill_(-torch.inf)
    for lse, dim in zip(shard.lse_sweep(TritonTiles()), (1, 0), strict=True):
        assert (lse - shard.logits.logsumexp(dim)).mean().abs() < 3e-6

    force_variant(monkeypatch, is_wide=is_wide)
    gradients = shard.grad_sweep(TritonTiles())
    for gradient, lse, dim in zip(gradients, shard.lse, (1, 0), strict=True):
        sums = 0.5 * shard.softmax.sum(dim)
        errors = (gradient[:, 0].double() - sums) / sums
        assert errors.mean().abs() < 3e-6
        # Rounding a log-sum-exp to fp32 would change the softmax of its row by 0.69 of the error.
        lse = lse * math.log2(math.e)
        rounding = lse.float().double() - lse
        assert abs(errors @ rounding) < 0.2 * (rounding @ rounding)


def _loss(image: Tensor, text: Tensor, scale: float, tiles: TritonTiles) -> Reference:
    """Return loss and gradients by the Triton backend."""
    inputs = [x.detach().clone().requires_grad_() for x in (image, text, torch.tensor(scale))]
    loss = loss_on(tiles, *inputs)
    loss.backward()
    return Reference(loss.detach(), *(x.grad for x in inputs))


def _errors(value: Reference, expected: Reference) -> dict[str, float]:
    """Return the relative errors by name."""
    return {
        name: relative_error(getattr(value, name), getattr(expected, name))
        for name in ("loss", "d_image", "d_text", "d_scale")
    }


@pytest.mark.parametrize("arch", [80, 90])
def test_loss_and_gradients_of_fp32_features_have_five_digits(arch: int) -> None:
    image, text = (normalize(torch.randn(130, 72), dim=1) for _ in range(2))
    errors = _errors(
        _loss(image, text, 100.0, TritonTiles(arch=arch)), reference(image, text, 100.0)
    )
    assert max(errors.values()) < 1e-5, errors


def _converged(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Reference]:
    """Return pairs that are far from all other pairs, and their loss and gradients in float64."""
    image = normalize(torch.eye(48, 72) + 0.03 * torch.randn(48, 72), dim=1)
    text = normalize(image + 0.03 * torch.randn(48, 72), dim=1)
    image, text = image.to(dtype), text.to(dtype)
    return image, text, reference(image, text, scale)


# Losses of about 3e-7, 3e-11 and 5e-15.
@pytest.mark.parametrize("scale", [20.0, 30.0, 40.0])
@pytest.mark.parametrize("arch", [80, 90])
def test_converged_fp32_pairs_keep_relative_precision_of_loss_and_gradients(
    arch: int, scale: float
) -> None:
    image, text, expected = _converged(FP32, scale)
    assert expected.loss < 1e-6
    errors = _errors(_loss(image, text, scale, TritonTiles(arch=arch)), expected)
    assert errors["loss"] < 4e-6
    assert errors["d_scale"] < 4e-6
    # Most errors are below 3e-6. If one pair dominates, its softmax value and its features have the
    # rounding error of two bf16 halves, up to 2^-17 each.
    assert max(errors["d_image"], errors["d_text"]) < 2e-5, errors


@pytest.mark.parametrize("scale", [20.0, 30.0, 40.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_converged_half_pairs_keep_relative_precision_of_the_loss(
    dtype: torch.dtype, scale: float
) -> None:
    image, text, expected = _converged(dtype, scale)
    value = _loss(image, text, scale, TritonTiles())
    assert relative_error(value.loss, expected.loss) < 4e-6
    # Softmax values below 4e-12 and small gradients underflow in fp16, but not in bf16.
    if dtype == BF16:
        assert relative_error(value.d_scale, expected.d_scale) < 2**-8
        assert relative_error(value.d_image, expected.d_image) < 2**-7
        assert relative_error(value.d_text, expected.d_text) < 2**-7
