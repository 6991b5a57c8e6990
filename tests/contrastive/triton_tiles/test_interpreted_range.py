"""Logits outside the range of the fast path: recomputed tiles and the wide variant.

Shapes:
    b: rows. m: columns. D: width.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import Prepared, TileBackend, Vectors
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles, lse_kernels, softmax_kernels
from lightning_mp.contrastive._tiles.triton_tiles import tiles as tiles_module
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import SoftmaxFactors
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    Shard,
    force_variant,
    make_shard,
    shard_of,
)
from tests.contrastive.visible import loss_on

pytestmark = pytest.mark.interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES = pytest.mark.parametrize(
    ("dtype", "arch"), [(BF16, 80), (BF16, 90), (FP16, 90), (FP32, 80)], ids=str
)


class _Noting:
    """Replaces a kernel: records and forwards its launches."""

    def __init__(self, kernel: Any, note: Callable[..., None]) -> None:
        self._kernel, self._note = kernel, note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self._note(*arguments, **options)
            self._kernel[grid](*arguments, **options)

        return launch


class _Redone(_Noting):
    """Replaces the kernel that merges tiles, and records which tiles are recomputed."""

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel, lambda *arguments, **_: self._flags.append(arguments[2].clone()))
        self._flags: list[Tensor] = []

    def tiles(self, column_tiles: int) -> list[list[int]]:
        """Return the flags of the only block, by rows of tiles."""
        (flags,) = self._flags
        return flags.view(-1, column_tiles).tolist()


@pytest.fixture
def redone(monkeypatch: pytest.MonkeyPatch) -> _Redone:
    recorder = _Redone(lse_kernels.merge_kernel)
    monkeypatch.setattr(lse_kernels, "merge_kernel", recorder)
    return recorder


def _set_reference(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    prepare = TritonTiles.prepare

    def prepared(*arguments: Tensor) -> Prepared:
        pos_b, (log2_scale, _) = prepare(*arguments)
        return Prepared(pos_b, (log2_scale, torch.tensor([value])))

    monkeypatch.setattr(TritonTiles, "prepare", staticmethod(prepared))


@MODES
def test_logits_up_to_ten_thousand_have_fp32_precision(dtype: torch.dtype, arch: int) -> None:
    rows, columns = torch.randn(130, 72).to(dtype), torch.randn(140, 72).to(dtype)
    largest = (rows.double() @ columns.double().T).abs().amax().item()
    shard, tiles = shard_of(rows, columns, 1e4 / largest), TritonTiles(arch=arch)
    # fp32 values near 1e4 log2(e) are 9.8e-4 apart (7e-4 nats), like 100 times the logits of 100.
    assert shard.lse_error(shard.lse_sweep(tiles)) < 100 * LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[dtype] + 100 * LSE_ERROR


# In powers of two, logits are within 3 of 0, and sums of up to 128 terms are below 2^9.
# Tiles of 257 columns by architecture: tiles have 256 columns on 80 and 128 on 90.
ACROSS = {80: 2, 90: 3}


@pytest.mark.parametrize(
    ("dtype", "arch", "reference", "is_redone"),
    [
        (BF16, 90, -1e4, 1),
        (FP32, 80, -125.0, 1),  # 2^122 is above the range of sums
        (BF16, 90, -105.0, 0),
        (FP32, 80, 80.0, 0),
        (BF16, 90, 105.0, 1),  # 2^-96 is below the range of sums
        (FP32, 80, 1e4, 1),
    ],
    ids=str,
)
def test_recomputed_tiles_equal_float64_and_the_fast_path(
    dtype: torch.dtype,
    arch: int,
    reference: float,
    is_redone: int,
    redone: _Redone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard, tiles = make_shard(130, 257, 72, dtype, scale=5.0), TritonTiles(arch=arch)
    _set_reference(monkeypatch, reference)
    lses = shard.lse_sweep(tiles)
    # On 90, there are more tiles to recompute than programs.
    assert redone.tiles(ACROSS[arch]) == [[is_redone] * ACROSS[arch]] * 2
    assert shard.lse_error(lses) < LSE_ERROR
    monkeypatch.undo()
    for slow, fast in zip(lses, shard.lse_sweep(tiles), strict=True):
        torch.testing.assert_close(slow, fast, rtol=0, atol=LSE_ERROR / 4)


@pytest.mark.parametrize("reference", [0.0, 1e4])
@pytest.mark.parametrize("is_tall", [False, True])
def test_many_tiles_are_merged_in_several_rounds(
    is_tall: bool, reference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With 32 tiles per round, several rounds would need more than 4096 columns.
    monkeypatch.setattr(lse_kernels, "_MERGE_PARTS", 2)
    _set_reference(monkeypatch, reference)
    one = normalize(torch.randn(1, 8), dim=1)
    few, many = torch.cat([one, -one]), one * torch.linspace(-1.0, 1.0, 600)[:, None]
    # The tile with the largest logits is the last tile of one row, and the first of the other row.
    rows, columns = (many, few) if is_tall else (few, many)
    shard = shard_of(rows, columns, 40.0, diagonal=None)
    assert shard.lse_error(shard.lse_sweep(TritonTiles(tile_dtype="tf32"))) < LSE_ERROR


def _outliers(dtype: torch.dtype, row: int | None, column: int | None) -> Shard:
    """Return a shard of logits within +-20, except for a row and a column near -200."""
    rows, columns = (normalize(torch.randn(n, 72), dim=1) for n in (193, 257))
    rows[:, :2], columns[:, :2] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    if row is not None:
        rows[row, 1] = -10.0
    if column is not None:
        columns[column, 0] = -10.0
    return shard_of(rows.to(dtype), columns.to(dtype), 20.0, diagonal=-3)


@pytest.mark.parametrize(
    ("row", "column", "expected", "dtype", "arch"),
    [
        (None, None, [[0, 0, 0], [0, 0, 0]], FP32, 80),
        (None, 130, [[0, 1, 0], [0, 1, 0]], BF16, 90),
        (5, None, [[1, 1, 1], [0, 0, 0]], FP32, 80),
        (192, 256, [[0, 0, 1], [1, 1, 1]], BF16, 90),
        (192, 256, [[0, 0, 1], [1, 1, 1]], FP32, 80),
    ],
    ids=str,
)
def test_mixed_plain_and_recomputed_tiles_equal_float64(
    row: int | None,
    column: int | None,
    expected: list[list[int]],
    dtype: torch.dtype,
    arch: int,
    redone: _Redone,
) -> None:
    shard = _outliers(dtype, row, column)
    lses = shard.lse_sweep(TritonTiles(arch=arch))
    # Recomputed tiles are as accurate in all rows and columns as other tiles.
    if ACROSS[arch] == 2:  # the first two tiles of a row are one
        expected = [[max(first, second), third] for first, second, third in expected]
    assert redone.tiles(ACROSS[arch]) == expected
    assert shard.lse_error(lses) < 2 * LSE_ERROR  # logits near -200
    assert shard.grad_error(shard.grad_sweep(TritonTiles(arch=arch))) < 2 * GRADIENT_ERROR[dtype]


def _is_wide(shard: Shard) -> bool:
    return bool(SoftmaxFactors.of(Vectors(*shard.lse), shard.scale, 0).is_wide)


@MODES
def test_both_variants_are_accurate_for_close_log_sum_exps(
    dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, tiles = make_shard(65, 140, 72, dtype, diagonal=1), TritonTiles(arch=arch)
    assert not _is_wide(shard)
    for is_wide in (False, True):
        force_variant(monkeypatch, is_wide=is_wide)
        assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[dtype]
        monkeypatch.undo()


@MODES
def test_only_the_wide_variant_is_accurate_for_distant_log_sum_exps(
    dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = (normalize(torch.randn(n, 72), dim=1) for n in (65, 140))
    rows *= torch.linspace(0.1, 5.0, 65)[:, None]
    shard = shard_of(rows.to(dtype), columns.to(dtype), 100.0)
    tiles = TritonTiles(arch=arch)
    assert _is_wide(shard)
    limit = GRADIENT_ERROR[dtype] + 4 * LSE_ERROR  # logits up to 500
    assert shard.grad_error(shard.grad_sweep(tiles)) < limit
    force_variant(monkeypatch, is_wide=False)
    assert not shard.grad_error(shard.grad_sweep(tiles)) < 10 * limit


@MODES
def test_small_shards_use_the_wide_variant_only(
    dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, tiles = make_shard(65, 140, 72, dtype, diagonal=1), TritonTiles(arch=arch)
    force_variant(monkeypatch, is_wide=True)
    expected = shard.grad_sweep(tiles)
    monkeypatch.undo()  # the log-sum-exps are close enough for one exponential
    twins: list[bool] = []
    kernel = _Noting(softmax_kernels.softmax_kernel, lambda *_, WIDE, **__: twins.append(WIDE))
    monkeypatch.setattr(softmax_kernels, "softmax_kernel", kernel)
    monkeypatch.setattr(tiles_module, "_HOST_BOUND", 65 * 140 * 72)
    made = shard.grad_sweep(tiles)
    assert twins == [True]
    assert all(map(torch.equal, made, expected))
    monkeypatch.setattr(tiles_module, "_HOST_BOUND", 65 * 140 * 72 - 1)
    shard.grad_sweep(tiles)
    assert twins == [True, False, True]


# In nats. Other shards may raise the log-sum-exps of all rows or columns far above this shard's.
@pytest.mark.parametrize(
    ("row_rise", "column_rise", "wide"),
    [
        (50.0, 0.0, False),
        (70.0, 0.0, True),
        (0.0, 70.0, False),
        (0.0, 90.0, True),
        (0.0, torch.inf, False),  # texts without an image, or one direction of the loss
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_wide_variant_takes_over_before_the_narrow_one_loses_digits(
    dtype: torch.dtype, row_rise: float, column_rise: float, wide: bool
) -> None:
    shard = make_shard(40, 50, 72, dtype, scale=10.0)
    shard.lse = shard.lse[0] + row_rise, shard.lse[1] + column_rise
    assert _is_wide(shard) == wide
    assert shard.grad_error(shard.grad_sweep(TritonTiles())) < GRADIENT_ERROR[dtype]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_wide_variant_handles_rows_far_above_all_columns(dtype: torch.dtype) -> None:
    rows, columns = (normalize(torch.randn(n, 72), dim=1) for n in (40, 50))
    rows[7, 0], columns[:, 0] = -100.0, 1.0
    shard = shard_of(rows.to(dtype), columns.to(dtype), 2.0)
    # In powers of two, row 7 is 290 below the other rows, which are 86 above the columns.
    shard.lse = shard.lse[0] + 57.0, shard.lse[1]
    assert _is_wide(shard)
    assert shard.grad_error(shard.grad_sweep(TritonTiles())) < GRADIENT_ERROR[dtype] + LSE_ERROR


def _loss_and_gradients(
    tiles: TileBackend, image: Tensor, text: Tensor, scale: float
) -> tuple[Tensor, ...]:
    inputs = [x.clone().requires_grad_() for x in (image, text, torch.tensor(scale))]
    loss = loss_on(tiles, *inputs)
    loss.backward()
    return loss.detach(), *(x.grad for x in inputs)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["image", "text", "scale"])
@pytest.mark.parametrize(("dtype", "arch"), [(BF16, 90), (FP32, 80)], ids=str)
def test_non_finite_values_propagate_as_in_the_torch_backend(
    dtype: torch.dtype, arch: int, place: str, bad: float
) -> None:
    features = {name: normalize(torch.randn(40, 72), dim=1) for name in ("image", "text")}
    if place != "scale":
        features[place][7, 5] = bad
    inputs = (*(x.to(dtype) for x in features.values()), bad if place == "scale" else 100.0)
    ours = _loss_and_gradients(TritonTiles(arch=arch), *inputs)
    torchs = _loss_and_gradients(TorchTiles(), *inputs)
    assert not ours[0].isfinite()
    for value, expected in zip(ours, torchs, strict=True):
        # The low half of an infinite fp32 feature is NaN, which affects more values than inf.
        reached = value.isfinite() < expected.isfinite() if dtype == FP32 else False
        assert torch.equal(value.isfinite() | reached, expected.isfinite())
