"""Gathered loader batches equal the batches of a large loader, and the host holds one."""

import copy
import gc
import weakref
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_mp.strategies import InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.strategies.models import TinyCLIP, gather_batches, make_trainer, pairs


class SeesBatches(TinyCLIP):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dropout=0.0, **kwargs)
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.seen.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


def _fit(
    count: int,
    batch_size: int,
    n: int = 1,
    drop_last: bool = False,
    **trainer: Any,
) -> tuple[SeesBatches, pl.Trainer]:
    pl.seed_everything(3, verbose=False)
    model = SeesBatches(optimizer=torch.optim.Adam)
    data = DataLoader(pairs(count), batch_size=batch_size, shuffle=True, drop_last=drop_last)
    strategy = InfCLStrategy(micro_batch_size=3, loader_batches_per_step=n)
    fitted = make_trainer(strategy, **{"max_epochs": 2, **trainer})
    fitted.fit(model, data, DataLoader(pairs(4), batch_size=2))
    return model, fitted


CASES: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "divides": (24, {}, [12] * 4),
    "does not divide": (31, {}, [12, 12, 7] * 2),
    "drop_last": (31, {"drop_last": True}, [12, 12] * 2),
    "limited": (36, {"limit_train_batches": 2}, [12, 12] * 2),
    "limited to a share": (48, {"limit_train_batches": 0.5}, [12, 12] * 2),
    "accumulated": (36, {"accumulate_grad_batches": 2}, [12] * 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gathered_batches_equal_one_big_loader_batch(case: str) -> None:
    count, settings, sizes = CASES[case]
    expected, trainer = _fit(count, 12, **settings)
    model, gathered = _fit(count, 4, n=3, **settings)
    assert [len(batch) for batch in model.seen] == sizes
    assert all(torch.equal(*two) for two in zip(model.seen, expected.seen, strict=True))
    assert torch.equal(parameters_of(model), parameters_of(expected))
    assert gathered.global_step == trainer.global_step
    assert gathered.num_training_batches == trainer.num_training_batches
    assert gathered.num_val_batches == [2], "validation is not gathered"


@pytest.mark.slow
def test_progress_bar_counts_whole_batches() -> None:
    bar = TQDMProgressBar()
    _fit(31, 4, n=3, callbacks=[bar], enable_progress_bar=True)
    assert bar.total_train_batches == 3
    assert bar.train_progress_bar.total == 3


def _fit_on_ranks(rank: int, batch_size: int, n: int) -> tuple[list[Tensor], Tensor]:
    model, _ = _fit(50, batch_size, n, devices=2)
    return model.seen, parameters_of(model)


@pytest.mark.distributed
def test_gathered_batches_of_distributed_samplers_equal_large_batches() -> None:
    expected, gathered = run_ranks(_fit_on_ranks, 2, 12, 1), run_ranks(_fit_on_ranks, 2, 4, 3)
    for (batches, weights), (whole, whole_weights) in zip(gathered, expected, strict=True):
        assert all(torch.equal(*two) for two in zip(batches, whole, strict=True))
        assert torch.equal(weights, whole_weights)
    assert not torch.equal(gathered[0][0][0], gathered[1][0][0])


class Rows(Dataset):
    """Rows with fields of many types."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((2, 2), index, dtype=torch.uint8)
        return {"image": image, "text": str(index), "both": (index, float(index)), "ids": index}


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = default_collate(rows)
    return {**batch, "array": batch["ids"].numpy(), "vocabulary": 99, "scale": torch.tensor(2.0)}


def test_gathered_batches_of_every_type_equal_those_of_a_large_loader() -> None:
    small = DataLoader(Rows(), batch_size=2, collate_fn=_collate)
    for whole, big in zip(
        gather_batches(small, 2),
        DataLoader(Rows(), batch_size=4, collate_fn=_collate),
        strict=True,
    ):
        assert list(whole) == list(big)
        assert whole["image"].dtype == torch.uint8
        assert torch.equal(whole["image"], big["image"])
        assert whole["text"] == big["text"]
        assert all(torch.equal(*two) for two in zip(whole["both"], big["both"], strict=True))
        assert np.array_equal(whole["array"], big["array"])
        assert (whole["vocabulary"], whole["scale"]) == (99, 2.0)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "Pad to a fixed length"),
        ([torch.ones(2, 4), torch.ones(2, 3)], "Pad to a fixed length"),
        ([torch.ones(2), torch.arange(2)], "must have one dtype"),
        ([{"x": torch.ones(2), "n": 1}, {"x": torch.ones(2), "n": 2}], "`n`, which differs"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "the same fields"),
        ([(torch.ones(2), torch.ones(2)), (torch.ones(2), None)], r"`\[1\]` with 0 rows"),
    ],
)
def test_loader_batches_that_do_not_match_raise(batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(gather_batches(batches, 2))


def test_gathered_loader_drops_the_last_batch_and_has_the_attributes_of_its_loader() -> None:
    loader = DataLoader(torch.arange(11), batch_size=2, drop_last=True)
    gathered = gather_batches(loader, 2)
    assert [batch.tolist() for batch in gathered] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    gathered.timeout = 5
    assert (loader.timeout, copy.copy(gathered).timeout) == (5, 5)


def test_loader_batches_of_growing_size_are_gathered() -> None:
    parts = [torch.arange(n) + n for n in (1, 5, 2, 9)]
    (whole,) = gather_batches(parts, 4)
    assert torch.equal(whole, torch.cat(parts))


class NotesBatches(SeesBatches):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        Watches.batches.append(weakref.ref(batch[0]))
        return super().training_step(batch, batch_idx)


class Watches(Dataset):
    """Counts the gathered batches in memory when a row of the next batch is read."""

    batches: list[Any] = []
    counts: list[int] = []

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        gc.collect()
        Watches.counts.append(sum(batch() is not None for batch in Watches.batches))
        return pairs(1, seed=index)[0]


@pytest.mark.slow
def test_host_memory_holds_one_gathered_batch() -> None:
    strategy = InfCLStrategy(micro_batch_size=3, loader_batches_per_step=3, offload="host")
    gc.collect()
    gc.freeze()  # so that the collections of `Watches` visit the objects of this test only
    make_trainer(strategy, max_epochs=1).fit(NotesBatches(), DataLoader(Watches(), batch_size=4))
    assert len(Watches.batches) == 4
    assert Watches.counts == [0] * 48, "none of before stands beside the one that is gathered"
