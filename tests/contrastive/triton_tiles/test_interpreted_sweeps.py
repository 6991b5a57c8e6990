"""Both sweeps of the Triton backend on the CPU interpreter, against float64 on fresh random data.

Shapes:
    b: rows. m: columns. D: width.
"""

import pytest
import torch
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Logits, RowsColumns, Vectors
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    gradient_error,
    make_shard,
    shard_of,
)
from tests.reference.contrastive import relative_error

pytestmark = pytest.mark.interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Every pair of values of any two settings occurs. Architecture 90 uses tensor descriptors.
CASES = [
    # b, m, diagonal, D, dtype, scale, arch
    (1, 300, -30, 8, FP16, 100, 90),
    (1, 300, 0, 72, FP16, 100, 80),
    (1, 300, 21, 130, FP16, -100, 90),
    (1, 300, 400, 512, BF16, 100, 80),
    (1, 300, None, 512, FP32, -100, 90),
    (300, 1, -30, 8, BF16, -100, 90),
    (300, 1, 0, 8, FP16, -100, 80),
    (300, 1, 21, 130, BF16, 100, 90),
    (300, 1, 400, 512, FP32, -100, 90),
    (300, 1, None, 72, BF16, -100, 90),
    (63, 65, -30, 72, BF16, -100, 80),
    (63, 65, 0, 72, BF16, -100, 80),
    (63, 65, 21, 8, FP16, -100, 80),
    (63, 65, 400, 130, FP32, 100, 90),
    (63, 65, None, 512, FP32, -100, 90),
    (64, 64, -30, 512, FP32, 100, 80),
    (64, 64, 0, 72, FP32, 100, 90),
    (64, 64, 21, 130, BF16, -100, 80),
    (64, 64, 400, 8, FP16, -100, 90),
    (64, 64, None, 72, FP16, 100, 80),
    (65, 63, -30, 130, FP32, 100, 90),
    (65, 63, 0, 512, FP16, 100, 90),
    (65, 63, 21, 72, FP32, -100, 80),
    (65, 63, 400, 8, FP16, 100, 80),
    (65, 63, None, 8, BF16, -100, 80),
    (193, 257, -130, 512, FP16, -100, 90),
    (193, 257, 0, 72, FP16, -100, 80),
    (193, 257, 140, 512, FP16, -100, 90),
    (193, 257, 400, 8, FP32, 100, 80),
    (193, 257, None, 130, BF16, -100, 80),
    (257, 193, -130, 130, FP16, -100, 80),
    (257, 193, -30, 72, BF16, 100, 90),
    (257, 193, 0, 130, FP32, -100, 90),
    (257, 193, 140, 512, FP16, -100, 90),
    (257, 193, -400, 72, BF16, -100, 90),
    (257, 193, None, 8, BF16, 100, 90),
]


@pytest.mark.parametrize(("b", "m", "diagonal", "width", "dtype", "scale", "arch"), CASES)
def test_sweeps_of_a_shard_equal_float64(
    b: int, m: int, diagonal: int | None, width: int, dtype: torch.dtype, scale: int, arch: int
) -> None:
    shard, tiles = make_shard(b, m, width, dtype, scale, diagonal), TritonTiles(arch=arch)
    assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[dtype]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_grad_sweep_accumulates_and_none_skips_a_gradient(dtype: torch.dtype) -> None:
    shard, tiles = make_shard(65, 63, 72, dtype, diagonal=2), TritonTiles()
    start = torch.randn(65, 72), torch.randn(63, 72)
    both = [x.clone() for x in start]
    only_rows, only_columns = (x.clone() for x in start)
    for gradients in (both, (only_rows, None), (None, only_columns), (None, None)):
        tiles.grad_sweep(shard.swept, Vectors(*shard.lse), Derivatives(*gradients))
    for total, before, added in zip(both, start, shard.grad_sweep(tiles), strict=True):
        # Three products are added to values of up to 5; fp32 values near 5 are 4.8e-7 apart.
        torch.testing.assert_close(total, before + added, rtol=0, atol=2e-6)
        assert added.abs().amax() > 0.01
    assert torch.equal(only_rows, both[0])
    assert torch.equal(only_columns, both[1])


@pytest.mark.parametrize("workspace_bytes", [1, None])  # blocks of 128 x 64; one block
@pytest.mark.parametrize("fresh", [RowsColumns(True, False), RowsColumns(False, True)])
def test_lse_sweep_overwrites_fresh_outputs(
    fresh: RowsColumns, workspace_bytes: int | None
) -> None:
    shard, tiles = make_shard(140, 70, 8, BF16, diagonal=3), TritonTiles(workspace_bytes)
    starts = [lse.clone() for lse in shard.start]
    expected = [
        lse.fill_(-torch.inf) if is_fresh else lse
        for lse, is_fresh in zip(shard.start, fresh, strict=True)
    ]
    for start, is_fresh in zip(starts, fresh, strict=True):
        if is_fresh:
            start.fill_(torch.nan)
    # Three blocks of rows: without positives in this shard, with positives, without positives.
    logits = shard.swept._replace(positive_rows=slice(20, 60))
    tiles.lse_sweep(logits, Vectors(*expected))
    tiles.lse_sweep(logits._replace(fresh=fresh), Vectors(*starts))
    assert all(map(torch.equal, starts, expected))


@pytest.mark.parametrize(("dtype", "arch"), [(BF16, 90), (FP32, 80)], ids=str)
def test_sweeps_are_bitwise_reproducible(dtype: torch.dtype, arch: int) -> None:
    shard = make_shard(70, 150, 72, dtype)
    tiles = TritonTiles(1, arch=arch)  # three blocks of columns
    results = [[*shard.lse_sweep(tiles), *shard.grad_sweep(tiles)] for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


# Blocks of 128 x 64 in both sweeps; or one block, and in the second sweep 128 x 128 or 128 x 64.
@pytest.mark.parametrize(
    ("dtype", "diagonal", "workspace_bytes"),
    [(BF16, 20, 2**15), (FP32, -100, 1), (FP32, -100, 2**15)],
    ids=str,
)
def test_sweeps_in_small_blocks_equal_float64_and_one_block(
    dtype: torch.dtype, diagonal: int, workspace_bytes: int
) -> None:
    shard = make_shard(200, 130, 72, dtype, diagonal=diagonal)
    small = TritonTiles(workspace_bytes)
    lses, gradients = shard.lse_sweep(small), shard.grad_sweep(small)
    assert shard.lse_error(lses) < LSE_ERROR
    assert shard.grad_error(gradients) < GRADIENT_ERROR[dtype]
    for split, whole in zip(lses, shard.lse_sweep(TritonTiles()), strict=True):
        torch.testing.assert_close(split, whole, rtol=0, atol=LSE_ERROR / 4)
    for split, whole in zip(gradients, shard.grad_sweep(TritonTiles()), strict=True):
        assert relative_error(split, whole) < GRADIENT_ERROR[dtype] / 8


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_one_pair_has_no_negatives(dtype: torch.dtype, arch: int) -> None:
    shard, tiles = make_shard(1, 1, 8, dtype), TritonTiles(arch=arch)
    nothing, something = torch.tensor([-torch.inf]).double(), torch.randn(1).double()
    for start in (nothing, something):
        row_lse, column_lse = start.clone(), start.clone()
        tiles.lse_sweep(shard.swept, Vectors(row_lse, column_lse))
        torch.testing.assert_close(row_lse, start, rtol=1e-15, atol=0)
        torch.testing.assert_close(column_lse, start, rtol=1e-15, atol=0)
    for gradient in shard.grad_sweep(tiles):
        assert torch.equal(gradient, torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_and_columns_without_negatives_keep_their_values(dtype: torch.dtype) -> None:
    # With one column, row 3 has only its positive; likewise column 3 with one row.
    for b, m, diagonal in ((65, 1, -3), (1, 65, 3)):
        shard, tiles = make_shard(b, m, 72, dtype, diagonal=diagonal), TritonTiles()
        assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
        for lse, start in zip(shard.lse_sweep(tiles), shard.start, strict=True):
            if len(lse) > 1:
                torch.testing.assert_close(lse[3], start[3], rtol=1e-15, atol=0)
        assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[dtype]


# Tiles are 128 x 128: the diagonal passes through their corners, or touches one value of them.
@pytest.mark.parametrize("diagonal", [-128, -127, -1, 0, 1, 127, 128])
def test_scale_of_zero_gives_the_log_of_the_number_of_negatives(diagonal: int) -> None:
    features = [normalize(torch.randn(140, 8), dim=1).half() for _ in range(2)]
    shard, tiles = shard_of(*features, 0.0, diagonal), TritonTiles()
    assert shard.lse_error(shard.lse_sweep(tiles)) < 1e-12
    assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[FP16]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("scale_dtype", [torch.float64, FP32, BF16], ids=str)
def test_scale_may_have_any_shape_with_one_value(
    shape: tuple[int, ...], scale_dtype: torch.dtype
) -> None:
    shard, tiles = make_shard(40, 50, 16, FP32, scale=16.5), TritonTiles()
    shard.scale = torch.full(shape, 16.5, dtype=scale_dtype)
    assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
    assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[FP32]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sweeps_over_ring_shards_equal_one_sweep_and_float64(dtype: torch.dtype) -> None:
    sizes, width = (70, 33, 64), 72
    tiles = TritonTiles()
    images, texts = (
        [normalize(torch.randn(size, width), dim=1).to(dtype) for size in sizes] for _ in range(2)
    )
    whole = shard_of(torch.cat(images), torch.cat(texts), 100.0)
    scale, ranks = whole.scale, range(len(sizes))
    row_neg, column_neg = (
        [torch.full((size,), -torch.inf).double() for size in sizes] for _ in range(2)
    )
    for step in ranks:  # at each step, rank r holds the texts of rank r - step
        for rank in ranks:
            other = (rank - step) % len(sizes)
            part = torch.full((sizes[other],), -torch.inf).double()
            logits = Logits(images[rank], texts[other], scale, 0 if rank == other else None)
            tiles.lse_sweep(logits, Vectors(row_neg[rank], part))
            column_neg[other] = torch.logaddexp(column_neg[other], part)
    whole.start = tuple(torch.full((sum(sizes),), -torch.inf).double() for _ in range(2))
    for parts, at_once, dim in zip(
        (row_neg, column_neg), whole.lse_sweep(tiles), (1, 0), strict=True
    ):
        assert (torch.cat(parts) - at_once).abs().amax() < LSE_ERROR / 4
        assert (torch.cat(parts) - whole.negatives.logsumexp(dim)).abs().amax() < LSE_ERROR

    whole.lse = tuple(
        torch.logaddexp(torch.cat(parts), whole.logits.diagonal())
        for parts in (row_neg, column_neg)
    )
    row_lse, column_lse = (lse.split(sizes) for lse in whole.lse)
    d_images, d_texts = ([torch.zeros(size, width) for size in sizes] for _ in range(2))
    for rank in ranks:
        for other in ranks:
            logits = Logits(images[rank], texts[other], scale, 0 if rank == other else None)
            lses = Vectors(row_lse[rank], column_lse[other])
            tiles.grad_sweep(logits, lses, Derivatives(d_images[rank], d_texts[other]))
    limit = GRADIENT_ERROR[dtype]
    assert gradient_error(torch.cat(d_images), whole.softmax, whole.columns) < limit
    assert gradient_error(torch.cat(d_texts), whole.softmax.T, whole.rows) < limit
    assert whole.grad_error(whole.grad_sweep(tiles)) < limit
