"""Blocks, operands, products and the table of tile shapes of the Triton backend.

Shapes:
    b: rows. m: columns. D: width. n, c: rows and columns of one block.
"""

import collections
import random

import pytest
import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.literals import TileDtype
from lightning_mp.contrastive._tiles.masks import Thresholds
from lightning_mp.contrastive._tiles.tile_backend import Logits, StoredTiles
from lightning_mp.contrastive._tiles.triton_tiles.block import add_product
from lightning_mp.contrastive._tiles.triton_tiles.configs import (
    TileConfig,
    all_configs,
    arch_of,
    find_configs,
)
from lightning_mp.contrastive._tiles.triton_tiles.kernel_logits import (
    KernelLogits,
    block_shape,
    whole_waves,
)
from lightning_mp.contrastive._tiles.triton_tiles.operands import (
    WIDTH_MULTIPLE,
    Operand,
    Precision,
)
from lightning_mp.contrastive._tiles.triton_tiles.tiles import DEFAULT_WORKSPACE_BYTES
from tests.reference.contrastive import relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLIT = Precision.of(FP32, "auto")
ONE_TILE = 128 * 128


def _any_size(largest: int) -> int:
    """Return a size whose number of digits is as likely as any other."""
    return int(2 ** random.uniform(0, largest))


@pytest.mark.parametrize("diagonal", [None, 0, 5, -7, 100])
@pytest.mark.parametrize("_round", range(5))
def test_blocks_cover_every_value_once_with_their_positives(
    diagonal: int | None, _round: int
) -> None:
    b, m = random.choice((random.randint(1, 80), random.randint(129, 180))), random.randint(1, 80)
    memory = torch.zeros(random.choice((0, 140 * 80, 180 * 80)))
    shape = random.randint(1, 90), random.randint(1, 90)
    rows, columns = torch.randn(b, 64).bfloat16(), torch.randn(m, 64).bfloat16()
    covered, positives = torch.zeros(b, m), torch.zeros(b, m, dtype=torch.bool)
    logits = Logits(rows, columns, torch.ones(()), diagonal, stored=StoredTiles(memory))
    stored = StoredTiles(memory).take_rows(b, m)
    assert len(stored) == (b if b * -(-m // 16) * 16 <= len(memory) else 128 * (len(memory) > 0))
    for block in KernelLogits.of(logits, "auto").blocks(shape):
        if block.stored_nc is not None:
            block.stored_nc.add_(1)
            assert block.stored_nc.shape == (len(rows[block.rows]), len(columns[block.columns]))
        part = covered[block.rows, block.columns]
        part += 1
        assert part.shape[0] <= shape[0]
        assert part.shape[1] <= shape[1]
        assert torch.equal(block.row_operand.tiles_nk, rows[block.rows])
        assert torch.equal(block.column_operand.tiles_nk, columns[block.columns])
        assert (block.diagonal is None) == (diagonal is None)
        if block.diagonal is not None:
            positives[block.rows, block.columns] = _band(*part.shape, block.diagonal)
    assert (covered == 1).all()
    assert (stored == 1).all()
    assert memory.sum() == stored.numel()
    if diagonal is not None:
        assert torch.equal(positives, _band(b, m, diagonal))


def _band(rows: int, columns: int, offset: int) -> Tensor:
    return torch.arange(columns) - torch.arange(rows)[:, None] == offset


def test_blocks_stay_within_the_budget_and_the_shard() -> None:
    for _ in range(20_000):
        b, m, values = _any_size(18), _any_size(18), _any_size(29)
        n, c = block_shape(b, m, values)
        assert n * c <= max(values, ONE_TILE), (b, m, values)
        assert n <= b
        assert c <= m
        assert n >= min(b, 128)
        assert c >= min(m, 64)


def test_block_sizes_fit_the_index_type_of_kernels() -> None:
    assert block_shape(2**31, 1, 2**40) == (2**30, 1)
    assert max(block_shape(1, 2**31, 2**40)) == 2**30


def test_blocks_of_a_large_shard_are_nearly_square() -> None:
    for _ in range(20_000):
        values = random.randint(2**20, 2**29)
        side = values**0.5
        b, m = random.randint(round(2 * side), 2**18), random.randint(round(side), 2**18)
        n, c = block_shape(b, m, values)
        # Equal blocks of columns may be half as wide and twice as tall as a square.
        assert 1 / n + 1 / c < 1.3 * 2 / side, (b, m, values)


def test_shard_that_fits_is_one_block() -> None:
    for _ in range(2_000):
        b, m = _any_size(14), _any_size(14)
        assert block_shape(b, m, random.randint(b * m, 2 * b * m)) == (b, m)


def test_blocks_of_columns_are_even_and_aligned() -> None:
    for _ in range(20_000):
        b, m, values = _any_size(18), _any_size(18), random.randint(2**14, 2**29)
        _, c = block_shape(b, m, values)
        count = -(-m // c)
        if count > 1:
            assert c % 64 == 0, (b, m, values)
            last = m - (count - 1) * c
            assert last > c - 64 * count, (b, m, values)


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        # A wave is 132 tiles of 128 x 256, so 132 rows of tiles make 2, 3 and 4 waves.
        (17_408, 512, 16_896),
        (17_408, 768, 16_896),
        (17_408, 1024, 16_896),
        # Rows of 66 x 2, 44 x 3 and 66 x 4 tiles.
        (8_704, 512, 8_448),
        (8_704, 768, 5_632),
        (8_704, 1024, 8_448),
        (100, 512, 100),
        (128, 512, 128),
    ],
)
def test_whole_waves_of_132_multiprocessors(rows: int, width: int, expected: int) -> None:
    assert whole_waves(rows, width, 132) == expected


def test_whole_waves_finds_the_fullest_last_wave() -> None:
    for _ in range(300):
        rows, width = random.randint(128, 40_000), random.randint(1, 4096)
        multiprocessors = random.choice([16, 84, 108, 132, 148])

        def fullness(tiles: int, width: int = width, at_once: int = multiprocessors) -> float:
            tiles *= -(-width // 256)
            return tiles / (-(-tiles // at_once) * at_once)

        found = whole_waves(rows, width, multiprocessors)
        assert found % 128 == 0
        assert rows // 2 - 128 < found <= rows
        candidates = range(rows // 128 // 2 + 1, rows // 128 + 1)
        assert fullness(found // 128) == max(map(fullness, candidates))


@pytest.mark.parametrize(
    ("dtype", "values"),
    # The guide itself; a copy that is padded to a multiple of 64; three halves and two halves.
    [(BF16, 0), (FP16, 2 * 128), (FP32, 5 * 128 + 128)],
    ids=str,
)
def test_guide_operands_count_toward_the_budget(dtype: torch.dtype, values: int) -> None:
    features = torch.zeros(9, 64, dtype=BF16)
    guide = torch.zeros(9, 128 if dtype == BF16 else 100, dtype=dtype)
    logits = Logits(features, features, torch.ones(()), 0)
    assert KernelLogits.of(logits, "auto").edge_bytes == 0
    thresholds = Thresholds(torch.zeros(9), torch.zeros(9), (guide, guide))
    assert KernelLogits.of(logits._replace(thresholds=thresholds), "auto").edge_bytes == 2 * values


def test_default_workspace_is_16896_by_16384_values_of_two_bytes() -> None:
    assert DEFAULT_WORKSPACE_BYTES == 16_896 * 16_384 * 2 + 16 * 2**20
    n, c = block_shape(2**17, 2**17, DEFAULT_WORKSPACE_BYTES // 2)
    assert (whole_waves(n, 512, 132), c) == (16_896, 16_384)


@pytest.mark.parametrize(
    ("features", "tile_dtype", "expected"),
    [
        # Dtypes of the logits' operands and of the softmax; whether the low half is kept; whether
        # features are split.
        (BF16, "auto", (BF16, BF16, False, False)),
        (FP16, "auto", (FP16, FP16, False, False)),
        (FP32, "auto", (FP16, BF16, True, True)),
        (FP32, "fp32", (FP16, BF16, True, True)),
        (BF16, "fp32", (BF16, BF16, True, False)),
        (FP16, "fp32", (FP16, FP16, True, False)),
        (FP32, "tf32", (FP32, FP32, False, False)),
        (BF16, "tf32", (BF16, BF16, False, False)),
        (FP32, "bf16", (BF16, BF16, False, False)),
        (FP16, "bf16", (BF16, BF16, False, False)),
        (FP32, "fp16", (FP16, FP16, False, False)),
        (BF16, "fp16", (FP16, FP16, False, False)),
    ],
)
def test_precision_of_features_and_tile_dtype(
    features: torch.dtype, tile_dtype: TileDtype, expected: tuple[object, ...]
) -> None:
    precision = Precision.of(features, tile_dtype)
    found = precision.operand, precision.softmax, precision.keeps_low, precision.is_split
    assert found == expected
    assert precision.softmax_bytes == (1 + precision.keeps_low) * precision.softmax.itemsize
    # In fp16, a softmax sum of 2 is finite and 2^-28 is a normal number.
    assert precision.softmax_exponent == (14 if precision.softmax == FP16 else 0)


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize(
    ("features", "tile_dtype"), [(BF16, "auto"), (FP16, "auto"), (FP32, "tf32"), (BF16, "fp32")]
)
def test_aligned_features_are_not_copied(
    features: torch.dtype, tile_dtype: TileDtype, width: int
) -> None:
    precision = Precision.of(features, tile_dtype)
    wider = torch.randn(9, 2 * width).to(features)
    for aligned in (wider, wider[:, width:], wider[2::3, :width], wider[:1]):
        operand = Operand(aligned, precision, None, is_columns=False)
        (part,) = operand.parts_nD
        for tensor in (operand.tiles_nk, part):
            assert tensor.data_ptr() == aligned.data_ptr()
            assert tensor.stride() == aligned.stride()
            assert tensor.shape == aligned.shape


@pytest.mark.parametrize(
    ("width", "stored", "offset"),
    [(1, 1, 0), (40, 40, 0), (64, 72, 0), (64, 80, 3), (64, 65, 0), (130, 192, 0)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_other_features_are_copied_and_padded_with_zeros(
    dtype: torch.dtype, width: int, stored: int, offset: int
) -> None:
    precision = Precision.of(dtype, "tf32")
    features = torch.randn(9, stored).to(dtype)[:, offset : offset + width]
    operand = Operand(features, precision, None, is_columns=True)
    tiles, (part,) = operand.tiles_nk, operand.parts_nD
    assert tiles.shape[1] % WIDTH_MULTIPLE == 0
    assert tiles.shape[1] < width + WIDTH_MULTIPLE
    assert tiles.data_ptr() % 16 == 0
    assert tiles.is_contiguous()
    assert torch.equal(tiles[:, :width], features)
    assert not tiles[:, width:].any()
    assert torch.equal(part, features)


def test_rows_that_share_memory_are_copied() -> None:
    # The copy engine of Hopper requires rows that do not share memory.
    one = torch.randn(512).bfloat16()
    for features in (one[:128].expand(9, 128), one.as_strided((9, 128), (32, 1))):
        operand = Operand(features, Precision.of(BF16, "auto"), None, is_columns=False)
        assert operand.tiles_nk.is_contiguous()
        assert torch.equal(operand.tiles_nk, features)


def test_guides_are_contiguous_in_kernels() -> None:
    features, wider = torch.randn(9, 64).bfloat16(), torch.randn(9, 128).bfloat16()
    thresholds = Thresholds(torch.zeros(9), torch.zeros(9), (wider[:, :64], wider[:, 64:]))
    logits = Logits(features, features, torch.ones(()), 0, thresholds=thresholds)
    (block,) = KernelLogits.of(logits, "auto").blocks((9, 9))
    assert block.thresholds is not None
    for guides, given in zip(
        block.thresholds.guides or (), (wider[:, :64], wider[:, 64:]), strict=True
    ):
        assert guides.is_contiguous()
        assert torch.equal(guides, given)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e-4, 1.0, 3.0, 1e4, 1e20, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_unit_is_a_power_of_two_that_scales_the_largest_value_to_256(
    size: float, sign: int
) -> None:
    features = size * (torch.rand(5, 4) - 0.5)
    features[2, 1] = sign * size
    unit = SPLIT.unit(features)
    assert unit is not None
    assert unit.isfinite()
    assert torch.frexp(unit).mantissa == 0.5
    largest = (torch.tensor(size) * unit).item()
    assert largest < 2**8
    # The largest power of two in fp32 is 2^127.
    assert largest >= 2**7 or unit >= 2.0**126


def test_unit_of_zeros_is_finite_and_none_without_split() -> None:
    zeros = torch.zeros(3, 4)
    unit = SPLIT.unit(zeros)
    assert unit is not None
    assert 0 < unit < torch.inf
    assert Precision.of(BF16, "fp32").unit(zeros) is None
    assert Precision.of(FP32, "tf32").unit(zeros) is None


@pytest.mark.parametrize("width", [8, 64, 130])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-4, 1e4), (1e15, 1e-20)])
def test_split_halves_reproduce_fp32_and_its_products(
    sizes: tuple[float, float], width: int
) -> None:
    features = sizes[0] * torch.randn(9, width), sizes[1] * torch.randn(7, width)
    operands, total_unit = [], torch.ones(()).double()
    for features_nD, layout in zip(features, ((1, 0, 0), (0, 1, 0)), strict=True):
        unit = SPLIT.unit(features_nD)
        assert unit is not None
        total_unit *= unit
        operand = Operand(features_nD, SPLIT, unit, is_columns=layout == (0, 1, 0))
        operands.append(operand.tiles_nk.double())
        padded = operand.tiles_nk.shape[1] // 3
        assert padded % WIDTH_MULTIPLE == 0
        pieces = operands[-1].unflatten(1, (3, padded))
        assert not pieces[:, :, width:].any()
        high, low = pieces[:, layout.index(0)], pieces[:, layout.index(1)]
        for index, piece in enumerate(layout):
            assert torch.equal(pieces[:, index], (high, low)[piece])
        error = ((high + low)[:, :width] / unit.double() - features_nD).abs()
        # The error of values far below the largest is bounded by the smallest number of fp16.
        assert (error <= 2**-21 * features_nD.abs() + 2**-24 / unit.double()).all()
        high, low = (part.double() for part in operand.parts_nD)
        assert ((high + low - features_nD).abs() <= 2**-16 * features_nD.abs()).all()
    product = operands[0] @ operands[1].T / total_unit
    assert relative_error(product, features[0].double() @ features[1].double().T) < 2**-20


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_products_are_added_in_fp32(dtype: torch.dtype, transposed: bool) -> None:
    left, right = torch.randn(30, 40).to(dtype), torch.randn(40, 50).to(dtype)
    if transposed:
        left = left.T.contiguous().T
    start = torch.randn(30, 50)
    total = start.clone()
    add_product(total, left, right, 2.0**-14)
    add_product(total, left, right)
    expected = start.double() + (1 + 2.0**-14) * (left.double() @ right.double())
    assert relative_error(total, expected) < 1e-6


def _shape(row: TileConfig) -> tuple[object, ...]:
    return row.kernel, row.arch, row.dtypes, row.max_width, row.tile, row.warps, row.stages


def test_table_rows_are_unique_and_have_a_reason() -> None:
    assert max(collections.Counter(map(_shape, all_configs())).values()) == 1
    for row in all_configs():
        assert len(row.reason) > 20, row
        assert row.reason.endswith("."), row
        assert all(size & (size - 1) == 0 and size >= 32 for size in row.tile), row
        assert WIDTH_MULTIPLE % row.tile[2] == 0, row
        assert row.tma == (row.arch >= 90), row
        assert row.warps in (4, 8), row
        assert row.launch_options["enable_fp_fusion"], row


@pytest.mark.parametrize("kernel", ["lse", "softmax", "softmax_wide"])
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_table_has_rows_for_every_width(kernel: str, arch: int, dtype: torch.dtype) -> None:
    for width in (1, 256, 257, 2**20):
        found = find_configs(kernel, arch, dtype, width)
        assert found
        assert all(row.max_width is None or width <= row.max_width for row in found)
    assert any(row.max_width is None for row in found)
    # The wide variant has one row for all widths, and at most a second, smaller row for guides.
    areas = [row.tile[0] * row.tile[1] for row in found]
    assert kernel != "softmax_wide" or areas in ([areas[0]], [areas[0], areas[0] // 2])


def test_interpreter_uses_the_rows_of_the_first_architecture() -> None:
    assert arch_of(torch.device("cpu")) == 80


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), 80), ((8, 6), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100),
     ((11, 0), 80), ((12, 0), 120)],
)  # fmt: skip
def test_device_uses_the_rows_of_its_family(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arch_of(torch.device("cuda", 0)) == arch
