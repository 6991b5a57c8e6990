"""Launches, collectives, waits and memory of one rank's loss, counted without a device or peers."""

import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._pytree import tree_leaves

from benchmarks.exchange import (
    CASES,
    FLOP_A_SECOND,
    SHORTEST,
    Counts,
    count,
    largest_stored,
    main,
    saved_by_storing,
)
from benchmarks.tables import read
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles

WIDTH = 768


class CountsAndPeakBytes(Counts):
    """Counts, and the peak of the bytes of tensors that were created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}  # bytes of storages

    def __torch_dispatch__(self, *call):  # noqa: ANN002, ANN204
        result = super().__torch_dispatch__(*call)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return result


DEFAULT_BYTES = 544 * 2**20


@pytest.fixture(scope="module", autouse=True)
def _collectives_can_be_pretended() -> None:
    try:
        count([4, 4], 64, "slices")
    except UnsupportedOperatorException:
        pytest.skip(f"torch {torch.__version__} knows no collectives of tensors without values")


@pytest.mark.parametrize(("world_size", "batch"), CASES)
def test_slices_cost_little_more_than_one_process(world_size: int, batch: int) -> None:
    counts = count([batch] * world_size, WIDTH, "slices")
    # With one slice: texts; column sums to their ranks; log-sum-exps with the loss; gradients of
    # texts to their ranks; the gradient of the scale.
    assert counts.collectives == {
        "_allgather_base_": 2, "alltoall_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 1,
    }  # fmt: skip
    assert counts.of["wait"] == 0
    # A block takes 2 launches forward, and 2 launches and 2 products backward (1 launch if small).
    # 65,536 columns by 1,024 or 256 rows in bf16 are one block; by 8,192 rows they take 2^30 bytes,
    # at most 4 blocks. Positives and factors of the softmax take 4 further launches.
    blocks, is_small = 4 if batch == 8192 else 1, batch == 256
    assert counts.of["kernel"] <= 4 * blocks + 4 - is_small
    assert counts.of["product"] <= 2 * blocks
    # Initial values of two sets of peaks (one for a small block), sums of the parts of the loss and
    # of the scale's gradient, the rounding of the loss, and three gradients times the cotangent.
    assert counts.of["op"] <= 8 - is_small
    # By the cost model, the host takes less than twice the time of the products.
    assert counts.host_seconds < 2 * 4 * 2 * world_size * batch**2 * WIDTH / FLOP_A_SECOND


@pytest.mark.parametrize(("world_size", "batch"), CASES)
@pytest.mark.parametrize("short_rank", [0, 1, -1])
def test_short_rank_takes_no_more_collectives_and_at_most_half_more_host_time(
    world_size: int, batch: int, short_rank: int
) -> None:
    even, sizes = count([batch] * world_size, WIDTH, "slices"), [batch] * world_size
    sizes[short_rank] = SHORTEST
    uneven = count(sizes, WIDTH, "slices")
    assert uneven.collectives == even.collectives
    assert uneven.of["wait"] == 0
    assert uneven.host_seconds <= 1.5 * even.host_seconds


@pytest.mark.parametrize("batch", [256, 4096])
def test_loss_of_one_process_is_a_few_launches(batch: int) -> None:
    counts = count([batch], WIDTH, "ring")
    # Positives, sums of a tile, merge, terms; factors, the wide variant, positives' gradients.
    assert (counts.of["kernel"], counts.of["product"]) == (7, 2)
    # The same as with several ranks, without the sums over ranks.
    assert counts.of["op"] <= 7
    assert counts.of["wait"] == counts.collectives.total() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "batch"), [(8, 1024), (16, 256)])
def test_ring_costs_a_sweep_for_every_turn(world_size: int, batch: int) -> None:
    counts = count([batch] * world_size, WIDTH, "ring")
    assert counts.of["kernel"] == 4 * world_size + 3  # small blocks
    # Texts and column sums, then texts, log-sum-exps and gradients, are each sent and received.
    sent = 2 * (3 * (world_size - 1) + 2 * world_size)
    assert counts.collectives == {"send": sent / 2, "recv_": sent / 2, "allreduce_": 1}
    assert counts.of["wait"] == 0


BF16, FP32 = torch.bfloat16, torch.float32
SLOW = {"marks": pytest.mark.slow}
SWEEP = {"marks": pytest.mark.sweep}


@pytest.mark.parametrize(
    ("sizes", "workspace_bytes", "dtype"),
    [
        ([1024] * 64, DEFAULT_BYTES, BF16),
        ([1024] * 64, DEFAULT_BYTES, FP32),
        pytest.param([8192] * 8, DEFAULT_BYTES, BF16, **SLOW),
        pytest.param([1024] * 16, 2**26, FP32, **SLOW),
        pytest.param([2048] * 4 + [100] * 4, 2**26, BF16, **SLOW),
        pytest.param([8192] * 8, DEFAULT_BYTES, FP32, **SWEEP),
        pytest.param([1024] * 16, 2**26, BF16, **SWEEP),
        pytest.param([2048] * 4 + [100] * 4, 2**26, FP32, **SWEEP),
    ],
)
def test_slices_take_the_workspace_and_eight_batches(
    sizes: list[int], workspace_bytes: int, dtype: torch.dtype
) -> None:
    counts = count(sizes, WIDTH, "slices", workspace_bytes, dtype, CountsAndPeakBytes)
    assert counts.peak_bytes <= workspace_bytes + 8 * sizes[0] * WIDTH * 4
    # Several slices of texts are gathered in both sweeps, one slice only in the first.
    slices = counts.collectives["alltoall_base_"]
    texts = 2 * slices if slices > 1 else 1
    assert counts.collectives["_allgather_base_"] == texts + 1
    if (
        sizes == [1024] * 64 and workspace_bytes == DEFAULT_BYTES
    ):  # the exchange determines the peak
        assert counts.peak_bytes > sum(sizes) * WIDTH * dtype.itemsize


@pytest.mark.parametrize(("batch", "is_all"), [(8192, True), (16_384, False)])
def test_loss_that_keeps_products_takes_the_workspace_and_eight_batches(
    batch: int, is_all: bool
) -> None:
    counts = count([batch], WIDTH, "ring", DEFAULT_BYTES, torch.float32, CountsAndPeakBytes)
    assert counts.peak_bytes <= DEFAULT_BYTES + 8 * batch * WIDTH * 4
    # A block takes three products for each tower. If all products are stored, it is one kernel in
    # the second sweep; the first sweep has two kernels, and every loss four others.
    blocks = counts.of["product"] // 6
    assert blocks >= 2
    assert (counts.of["kernel"] == 2 + blocks + 4) == is_all


def test_kept_tiles_pay_where_products_take_longer_than_memory() -> None:
    # 8 bytes at 3 TB/s take as long as 2 x 800 FLOP at 600 TFLOP/s, so nothing is saved.
    assert saved_by_storing(4, 1, 800) == pytest.approx(0.0, abs=1e-12)
    # Without any bytes, storing saves one of four units.
    assert saved_by_storing(0, 1, 800) == 0.25
    assert saved_by_storing(4, 3, 800) == pytest.approx(0.25 * 2 / 3)


def test_largest_stored_batch_equals_the_stored_values_of_the_tiles() -> None:
    tiles = TritonTiles()
    for budget, least in ((DEFAULT_BYTES // 2, 1.0), (2 * DEFAULT_BYTES, 0.25)):
        b = largest_stored(4, budget)
        shares = [
            tiles.stored_values(n, n, torch.float32, torch.device("cpu")) / (n * -(-n // 16) * 16)
            for n in (b, b + 1)
        ]
        assert shares[0] >= least > shares[1]


def test_benchmark_prints_and_writes_a_row_for_every_exchange(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.exchange.CASES", ((2, 64), (3, 64)))
    path = tmp_path / "exchange.csv"
    assert main(["--width", "48", "--csv", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " x 64" in line]
    # Two launches forward and two backward in each of the visits; three more for the positives.
    turns = [("ring", 64, 2), ("slices", 64, 1), ("slices", SHORTEST, 1)]
    turns += [("ring", 64, 3), *turns[1:]]
    assert [row[3:5] + row[6:7] for row in rows] == [
        [str(shortest), name, str(4 * count + 3)] for name, shortest, count in turns
    ]
    names = ("shortest", "exchange", "torch_operations", "triton_launches")
    written = [[str(row[name]) for name in names] for row in read(path)]
    assert written == [row[3:7] for row in rows]
