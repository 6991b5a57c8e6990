"""Products that the first sweep stores for the second: number, use and exactness.

Shapes:
    b: rows. m: columns. D: width.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._operator import loss_of
from lightning_mp.contrastive._tiles.masks import Ids
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Logits, StoredTiles, Vectors
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    make_shard,
    shard_of,
)
from tests.reference.contrastive import HARD, hard_features, reference, relative_error

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
FOR_BLOCKS = 2**27  # bytes of the workspace for blocks, which store no products


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.sweep if i in (0, 3) else ())
        for i, case in enumerate(HARD)
    ],
)
def test_loss_and_gradients_with_partly_stored_products_equal_float64(case: str) -> None:
    """Other tests of losses store all products; here only a part fits the workspace."""
    b, workspace_bytes = 141, FOR_BLOCKS + 4 * 130 * 144
    tiles = TritonTiles(workspace_bytes)
    values = tiles.stored_values(b, b, FP32, CPU)
    assert tiles.multiplied_twice(b, b, 24, FP32, CPU, values) == (b - 128) * b
    image, text, scale = hard_features(b, 24, case)
    expected = dataclasses.astuple(reference(image, text, scale))
    # The error of a logit enters each power and each sum of powers. In the products of the
    # gradients, softmax and features are split into two bf16 halves.
    off_by, _ = tiles.rounding(image.shape[1], FP32)
    largest = abs(scale) * (image.norm(dim=1).max() * text.norm(dim=1).max()).item()
    bound = 2 * largest * off_by + GRADIENT_ERROR[FP32]
    leaves = [image.requires_grad_(), text.requires_grad_()]
    leaves.append(torch.tensor(scale, requires_grad=True))
    loss = ContrastiveLoss(backend="triton", workspace_bytes=workspace_bytes)(*leaves)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    for value, right in zip((loss.detach(), *once), expected, strict=True):
        assert relative_error(value, right) < bound
    # A second backward gives the same bits.
    again = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@pytest.mark.parametrize(
    ("seen", "arch"),
    [
        ("ids", 80),
        ("maxima", 90),
        pytest.param("ids", 100, marks=pytest.mark.sweep),
        pytest.param("positive rows", 120, marks=pytest.mark.sweep),
    ],
)
def test_shards_share_the_memory_and_stored_rows_are_read(seen: str, arch: int) -> None:
    b, sizes = 150, (70, 129)
    image, text = (torch.nn.functional.normalize(torch.randn(n, 40), dim=1) for n in (b, 199))
    rows = slice(20, 70) if seen == "positive rows" else None
    memory = torch.full((b * 80 + 130 * 144,), torch.nan)  # 128 rows of the second shard fit
    # Blocks of 128 x 64, or one block.
    tiles = TritonTiles(memory.nbytes + 1 if seen == "maxima" else None, arch=arch)
    shards = [
        shard_of(image, part, 100.0, diagonal)
        for part, diagonal in zip(text.split(sizes), (0, None), strict=True)
    ]
    swept = [_with(shard.swept, seen, rows) for shard in shards]
    stored = StoredTiles(memory)
    for shard, logits in zip(shards, swept, strict=True):
        lses = Vectors(*(lse.clone() for lse in shard.start))
        lows = (torch.full_like(lse, -torch.inf) for lse in shard.start)
        maxima = Vectors(*lows) if seen == "maxima" else None
        tiles.lse_sweep(logits._replace(stored=stored, maxima=maxima), lses)
        shard.positives = _masked(logits)
        assert shard.lse_error(lses) < LSE_ERROR
    used = b * 80 + 128 * 144
    assert memory[:used].isfinite().all()
    assert memory[used:].isnan().all()
    for spoilt in (False, True):
        if spoilt:
            memory[:] = torch.nan
        stored = StoredTiles(memory)
        for shard, logits, read in zip(shards, swept, (b, 128), strict=True):
            gradients = Derivatives(torch.zeros(b, 40), torch.zeros(shard.columns.shape))
            tiles.grad_sweep(logits._replace(stored=stored), Vectors(*shard.lse), gradients)
            if spoilt:
                assert gradients[0].isnan().any(1).tolist() == [True] * read + [False] * (b - read)
            else:
                assert shard.grad_error(gradients) < GRADIENT_ERROR[FP32]


def _with(logits: Logits, seen: str, rows: slice | None) -> Logits:
    b, m = len(logits.rows_bD), len(logits.columns_mD)
    ids = Ids(torch.arange(b) % 17, torch.arange(m) % 19) if seen == "ids" else None
    return logits._replace(positive_rows=rows, ids=ids)


def _masked(logits: Logits) -> Tensor:
    b, m = len(logits.rows_bD), len(logits.columns_mD)
    out = torch.zeros(b, m, dtype=torch.bool)
    if logits.diagonal is not None:
        own = slice(0, b) if logits.positive_rows is None else logits.positive_rows
        out[own] = torch.eye(b, m, dtype=torch.bool)[own]
    if logits.ids is not None:
        out |= logits.ids.rows_b[:, None] == logits.ids.columns_m
    return out


def test_stored_products_with_distant_log_sum_exps_equal_recomputed_ones() -> None:
    """Log-sum-exps of rows and columns are too distant for the narrow variant."""
    shard, tiles = make_shard(65, 63, 24, FP32), TritonTiles()
    shard.lse = shard.lse[0] + 40.0, shard.lse[1] - torch.linspace(0, 60, 63).double()
    stored = torch.empty(65 * 64)
    lses = Vectors(*(lse.clone() for lse in shard.start))
    tiles.lse_sweep(shard.swept._replace(stored=StoredTiles(stored)), lses)
    gradients = Derivatives(torch.zeros(65, 24), torch.zeros(63, 24))
    swept = shard.swept._replace(stored=StoredTiles(stored))
    tiles.grad_sweep(swept, Vectors(*shard.lse), gradients)
    assert shard.grad_error(gradients) < GRADIENT_ERROR[FP32]


@pytest.mark.parametrize(
    ("trained", "units"), [("image text scale", 4), ("image", 3), ("text scale", 3), ("", 1)]
)
@pytest.mark.parametrize(("b", "stored_rows"), [(8192, 8192), (12_000, 5888), (20_000, 0)])
def test_loss_takes_four_units_of_work_and_fewer_with_stored_products_or_a_locked_tower(
    trained: str, units: int, b: int, stored_rows: int
) -> None:
    width, names = 16, ("image", "text", "scale")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        inputs = [torch.empty(b, width), torch.empty(b, width), torch.ones(())]
        for name, x in zip(names, inputs, strict=True):
            x.requires_grad_(name in trained.split())
        loss, _ = loss_of(Request(*inputs, backend="triton").checked())
        if trained:
            loss.backward()
    expected = units * b - stored_rows * bool(trained)
    assert counter.get_total_flops() == expected * 2 * b * width


def test_workspace_determines_the_stored_products() -> None:
    def share(b: int, workspace_bytes: int | None, **options: Any) -> float:
        tiles = TritonTiles(workspace_bytes, **options)
        return tiles.stored_values(b, b, FP32, CPU) / b**2

    # Half of 544 MiB holds 8,444 x 8,444 values, or a quarter of 16,888 x 16,888; row strides are
    # multiples of 16.
    assert share(8432, None) == 1
    assert share(8464, None) == 2**20 * 272 / 4 / 8464**2
    assert 0.25 <= share(16_880, None) < 0.2503
    assert share(16_896, None) == 0
    # Blocks get at least 128 MiB.
    assert share(512, FOR_BLOCKS) == 0
    assert share(512, FOR_BLOCKS + 2**20) == 1
    assert share(2048, FOR_BLOCKS + 2**22) == 0.25
    # One product of 16-bit values takes no longer than storing and loading its logits.
    for dtype, tile_dtype in ((BF16, "auto"), (FP16, "fp32"), (FP32, "bf16"), (FP32, "tf32")):
        assert TritonTiles(tile_dtype=tile_dtype).stored_values(64, 64, dtype, CPU) == 0
    assert share(64, None, tile_dtype="fp32") == 1


@pytest.mark.sweep
def test_compiled_loss_stores_as_many_products_as_eager() -> None:
    loss_fn = ContrastiveLoss(backend="triton")
    compiled = torch.compile(loss_fn, backend="aot_eager", fullgraph=True, dynamic=True)
    for b in (33, 40):
        image, text = (torch.randn(b, 8, requires_grad=True) for _ in range(2))
        results = [
            torch.autograd.grad(function(image, text, 0.5), (image, text))
            for function in (loss_fn, compiled)
        ]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
