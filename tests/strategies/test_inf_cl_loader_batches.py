"""Loader batches gathered into one equal those of a big loader, and the host holds one."""

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_mp.strategies import InfCLStrategy
from lightning_mp.strategies._inf_cl.loader_batches import gather_batches
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.strategies.models import TinyCLIP, make_trainer, pairs


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
    ckpt_path: Path | None = None,
    **trainer: Any,
) -> tuple[SeesBatches, pl.Trainer]:
    pl.seed_everything(3, verbose=False)
    model = SeesBatches(optimizer=torch.optim.Adam)
    data = DataLoader(pairs(count), batch_size=batch_size, shuffle=True, drop_last=drop_last)
    strategy = InfCLStrategy(micro_batch_size=3, loader_batches_per_step=n)
    fitted = make_trainer(strategy, **{"max_epochs": 2, **trainer})
    fitted.fit(model, data, DataLoader(pairs(4), batch_size=2), ckpt_path=ckpt_path)
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
def test_gathered_batches_of_distributed_samplers_equal_big_ones() -> None:
    expected, gathered = run_ranks(_fit_on_ranks, 2, 12, 1), run_ranks(_fit_on_ranks, 2, 4, 3)
    for (batches, weights), (whole, whole_weights) in zip(gathered, expected, strict=True):
        assert all(torch.equal(*two) for two in zip(batches, whole, strict=True))
        assert torch.equal(weights, whole_weights)
    assert not torch.equal(gathered[0][0][0], gathered[1][0][0])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 8], ids=["at an epoch", "in an epoch"])
def test_resumed_training_sees_what_it_sees_with_a_big_loader(tmp_path: Path, steps: int) -> None:
    results = []
    for batch_size, n in ((12, 1), (4, 3)):
        path = tmp_path / f"{n}.ckpt"
        _, half = _fit(60, batch_size, n=n, max_epochs=-1, max_steps=steps)
        half.save_checkpoint(path)
        model, trainer = _fit(60, batch_size, n=n, max_epochs=3, ckpt_path=path)
        results.append((model, trainer.global_step))
    (expected, step), (resumed, gathered_step) = results
    assert [len(batch) for batch in resumed.seen] == [len(batch) for batch in expected.seen]
    assert all(torch.equal(*two) for two in zip(resumed.seen, expected.seen, strict=True))
    assert torch.equal(parameters_of(resumed), parameters_of(expected))
    assert gathered_step == step


class Stateful(DataLoader):
    """A loader that counts its batches and can go on from any of them."""

    start = at = 0

    def __iter__(self) -> Any:
        self.at = 0
        for batch in super().__iter__():
            self.at += 1
            if self.at > self.start:
                yield batch
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def test_stateful_loader_goes_on_in_the_middle_of_an_epoch() -> None:
    gathered = gather_batches(Stateful(pairs(31), batch_size=4), 3, pin=False)
    batches = iter(gathered)
    next(batches)
    state, rest = gathered.state_dict(), [batch[0] for batch in batches]
    again = gather_batches(Stateful(pairs(31), batch_size=4), 3, pin=False)
    again.load_state_dict(state)
    assert state == {"at": 3}
    assert all(torch.equal(*two) for two in zip((b[0] for b in again), rest, strict=True))
    plain = gather_batches(DataLoader(pairs(4)), 2, pin=False)
    assert not hasattr(plain, "state_dict")


class Rows(Dataset):
    """Rows of many kinds."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((2, 2), index, dtype=torch.uint8)
        return {"image": image, "text": str(index), "both": (index, float(index)), "ids": index}


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = default_collate(rows)
    return {**batch, "array": batch["ids"].numpy(), "vocabulary": 99, "scale": torch.tensor(2.0)}


def test_batches_of_every_kind_are_those_of_a_big_loader() -> None:
    small = DataLoader(Rows(), batch_size=2, collate_fn=_collate)
    for whole, big in zip(
        gather_batches(small, 2, pin=False),
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
        ([{"x": torch.ones(2), "n": 1}, {"x": torch.ones(2), "n": 2}], "`n`, which differs"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "the same parts"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(gather_batches(batches, 2, pin=False))


def test_batches_of_growing_size_are_gathered() -> None:
    parts = [torch.arange(n) + n for n in (1, 5, 2, 9)]
    (whole,) = gather_batches(parts, 4, pin=False)
    assert torch.equal(whole, torch.cat(parts))


class NotesBatches(SeesBatches):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        Watches.batches.append(weakref.ref(batch[0]))
        return super().training_step(batch, batch_idx)


class Watches(Dataset):
    """Counts the whole batches that are in memory when a row is read for the next one."""

    batches: list[Any] = []
    counts: list[int] = []

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        gc.collect()
        Watches.counts.append(sum(batch() is not None for batch in Watches.batches))
        return pairs(1, seed=index)[0]


@pytest.mark.slow
def test_one_whole_batch_stands_in_host_memory() -> None:
    strategy = InfCLStrategy(micro_batch_size=3, loader_batches_per_step=3, offload="host")
    make_trainer(strategy, max_epochs=1).fit(NotesBatches(), DataLoader(Watches(), batch_size=4))
    assert len(Watches.batches) == 4
    assert Watches.counts == [0] * 48, "none of before stands beside the one that is gathered"


def _batches(positives: Any, count: int = 2) -> list[dict[str, Any]]:
    return [{"image": torch.ones(8, 2), "extra": {"positives": positives}} for _ in range(count)]


@pytest.mark.parametrize(
    "positives",
    [
        torch.arange(8).flip(0),
        torch.tensor([[row, -1] for row in range(8)], dtype=torch.int32),
        np.arange(8),
        list(range(8)),
        torch.tensor([[0, 1], *([row, -1] for row in range(2, 9))]),  # nine texts
    ],
    ids=["permuted", "padded", "array", "list", "several texts"],
)
def test_positives_numbered_within_a_loader_batch_are_refused(positives: Any) -> None:
    gathered = gather_batches(_batches(positives), 2, pin=False)
    with pytest.raises(ValueError, match=r"`extra.positives` .* numbers the rows of each loader"):
        list(gathered)
    (alone,) = gather_batches(_batches(positives, 1), 2, pin=False)  # nothing is joined
    assert len(alone["image"]) == 8


@pytest.mark.parametrize(
    "positives",
    [
        torch.arange(8) % 3,
        torch.randint(50, 1000, (8, 5)),  # tokens of positive texts
        torch.rand(8),
        torch.ones(8, 4, dtype=torch.bool),
    ],
)
def test_other_things_named_positives_are_joined(positives: Tensor) -> None:
    (whole,) = gather_batches(_batches(positives), 2, pin=False)
    assert torch.equal(whole["extra"]["positives"], torch.cat([positives] * 2))


def test_row_numbers_under_another_name_are_warned_of_and_joined() -> None:
    rows = torch.arange(8)
    with pytest.warns(UserWarning, match=r"`\[1\]` .*If these are labels"):
        list(gather_batches([(torch.ones(8, 2), rows)] * 2, 2, pin=False))
    later = [(torch.ones(8, 2), rows), (torch.ones(8, 2), rows + 8)]  # numbers of the data set
    (whole,) = gather_batches(later, 2, pin=False)
    assert torch.equal(whole[1], torch.arange(16))
    few = [(torch.ones(2, 2), torch.arange(2))] * 2  # as labels are by chance
    (whole,) = gather_batches(few, 2, pin=False)
    assert whole[1].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("texts", [(9, 8), (8, 8)])
def test_several_texts_an_image_are_refused_in_a_sentence_without_their_values(texts: Any) -> None:
    batches = [{"image": torch.ones(4, 2), "text": torch.rand(n, 3)} for n in texts]
    shapes = rf"float32 of shape \[{texts[0]}, 3\] and torch.float32 of shape \[{texts[1]}, 3\]"
    with pytest.raises(
        ValueError, match=rf"`text`, .*{shapes}, for 4 rows.*several texts"
    ) as error:
        list(gather_batches(batches, 2, pin=False))
    assert "tensor(" not in str(error.value)
