"""The planned matrix products of our loss equal those of its sweeps."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._sums.agreement import exchange_for
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.plan import formulas
from lightning_mp.plan.estimate import METHODS, Machine, exchanged, memory, products
from lightning_mp.plan.subject import Subject, TowerBytes

WIDTH = 16
DENSE, OURS = METHODS[1], METHODS[-1]


def _subject(precision: str) -> Subject:
    towers = {"visual": TowerBytes(1.0, 1.0, 0.0, 1.0, 1, WIDTH, 1.0)}
    return Subject("small", 1, "SGD", {"float32": 0}, towers, 1.0, precision)


def _machine(gpus: int, device: str) -> Machine:
    return Machine(gpus, 2.0**40, 2.0**40, gpus, device)


def _counted(batch: int) -> int:
    sides = [torch.randn(batch, WIDTH, requires_grad=True) for _ in range(2)]
    with FlopCounterMode(display=False) as flops:
        ContrastiveLoss()(*sides, torch.tensor(1.0)).backward()
    return int(flops.get_total_flops())


@pytest.mark.parametrize("batch", [1024, 2560])
def test_products_of_one_process_equal_the_plan(batch: int) -> None:
    subject, machine = _subject("32-true"), _machine(1, "cpu")
    # Half of 32 MiB holds at most this number of logits.
    fits = batch**2 <= 2**24 // 4
    least, most = (3.0, 3.0) if fits else (4 - 2**22 / batch**2, 4.0)
    assert least <= products(OURS, batch, subject, machine) <= most
    assert exchanged(OURS, batch, subject, machine)[1] == pytest.approx(_counted(batch), rel=1e-12)


def test_exchange_counts_texts_twice_and_their_gradients() -> None:
    # 7 of 8 shards of 1,000 pairs: fp16 texts in both passes, fp32 gradients, two float64 vectors.
    subject = _subject("BalancedAMP")
    sent, _ = exchanged(OURS, 8000, subject, _machine(8, "cpu"))
    assert sent == 7 * 1000 * (4 * WIDTH + 4 * WIDTH + 16)
    assert exchanged(OURS, 1000, subject, _machine(1, "cpu"))[0] == 0


def test_host_holds_the_batch_and_prefetched_batches() -> None:
    subject, machine = _subject("32-true"), _machine(2, "cpu")
    loading = dataclasses.replace(subject, pair_bytes=1000.0, workers=8)
    assert memory(OURS, 2048, loading, machine).host == 2 * 1000 * 1024 * (1 + 16)
    loading = dataclasses.replace(loading, loader_batches=8)
    assert memory(OURS, 2048, loading, machine).host == 2 * 1000 * 1024 * (1 + 2)


def _multiplied(rows: int, ranks: int) -> int:
    """Count the logits that one of many ranks computes in both sweeps, without the other ranks.

    Only they come from `mm`: gradients are added by `addmm_`, which is not counted.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        features = [torch.zeros(rows, WIDTH) for _ in range(2)]
        found = exchange_for([rows] * ranks, features[0], "slices", TorchTiles, None)
        request, pairs = Request(*features, torch.tensor(1.0)), rows * ranks
        plan = Plan(request, *found, NeedsGrad(True, True, True), pairs=pairs)
        with FlopCounterMode(display=False) as flops:
            softmax_loss(plan)
    finally:
        dist.destroy_process_group()
    return int(flops.get_total_flops()) // (2 * WIDTH)


@pytest.mark.parametrize("rows", [256, 1408])
def test_products_of_a_rank_equal_the_plan(rows: int) -> None:
    ranks = 4
    logits = ranks * rows**2
    planned = products(OURS, ranks * rows, _subject("32-true"), _machine(ranks, "cpu"))
    assert _multiplied(rows, ranks) / logits == pytest.approx(planned - 2, rel=1e-12)


def test_gpu_stores_products_of_fp32_features_that_fit() -> None:
    pytest.importorskip("triton")
    machine = _machine(1, "cuda")
    found = {
        (precision, batch): products(OURS, batch, _subject(precision), machine)
        for precision in ("32-true", "BalancedAMP")
        for batch in (8192, 16_384, 65_536)
    }
    assert found["32-true", 8192] == 3
    assert 3 < found["32-true", 16_384] < 4
    assert {found["BalancedAMP", batch] for batch in (8192, 65_536)} == {4}
    assert found["32-true", 65_536] == formulas.OUR_PRODUCTS


def test_products_of_other_losses_do_not_depend_on_the_size() -> None:
    for batch in (64, 65_536):
        found = products(DENSE, batch, _subject("32-true"), _machine(8, "cuda"))
        assert found == formulas.CLIP_PRODUCTS


@pytest.mark.parametrize(
    ("precision", "held"),
    # Frozen weights have half copies under BalancedAMP, but autocast caches none of them.
    [("32-true", 4), ("bf16-mixed", 4), ("BalancedAMP", 6), ("PureFP16", 2), ("bf16-true", 2)],
)
def test_frozen_parameters_take_the_bytes_of_their_dtype(precision: str, held: int) -> None:
    plain, machine = _subject(precision), _machine(1, "cpu")
    plain = dataclasses.replace(plain, states={"float32": 0, "bfloat16": 0})
    locked = dataclasses.replace(plain, frozen_parameters=1000)
    static = [memory(OURS, 64, subject, machine).static for subject in (plain, locked)]
    assert static[1] - static[0] == 1000 * held


def test_sharded_weights_are_divided_by_the_ranks() -> None:
    states = {"float32": 8_000}
    plain = dataclasses.replace(_subject("32-true"), parameters=1000, states=states)
    sharded = dataclasses.replace(plain, is_sharded=True)
    machine = _machine(8, "cpu")
    # Weights and states; DDP has a bucket for each gradient, too.
    assert memory(OURS, 64, plain, machine).static == 8_000 + 1000 * (4 + 4)
    assert memory(OURS, 64, sharded, machine).static == (8_000 + 1000 * 4) / 8
    backbone = [memory(OURS, 64, subject, machine).backbone for subject in (plain, sharded)]
    assert backbone[0] - backbone[1] == 1000 * 4 * 7 / 8
