"""A run that was interrupted within an epoch resumes at exactly the next batch."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_mp.strategies import InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.strategies.models import gather_batches, make_trainer, pairs
from tests.strategies.test_inf_cl_loader_batches import SeesBatches

OWN_SAMPLER = ("own generator", "generator", "drawn")
COUNT, EPOCHS = 60, 2  # 5 gathered batches of 3 loader batches of 4 rows


class Stateful(DataLoader):
    """A loader that counts its batches and can resume at any batch."""

    start = at = 0

    def __iter__(self) -> Any:
        self.at, start, self.start = 0, self.start, 0
        for batch in super().__iter__():
            self.at += 1
            if self.at > start:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class Stream(IterableDataset):
    """A data set without a length, for which Lightning fetches a batch ahead."""

    def __iter__(self) -> Any:
        return iter(pairs(COUNT))


class Reversed(Sampler):
    """A sampler of unknown order."""

    def __iter__(self) -> Any:
        return iter(range(COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return COUNT


class Saves(pl.Callback):
    """Saves within both epochs and around the end of the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (3, 4, 5, 8):
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch={trainer.current_epoch}.ckpt")


def _loader(kind: str) -> DataLoader:
    data = pairs(COUNT)
    samplers = {
        "own generator": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(1)),
        "subset": lambda: SubsetRandomSampler(range(COUNT)),
        "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, COUNT + 1), COUNT),
        "unknown": Reversed,
    }
    if kind == "stateful":
        return Stateful(data, batch_size=4)
    if kind == "stream":
        return Stateful(Stream(), batch_size=4)
    if kind in samplers:
        return DataLoader(data, batch_size=4, sampler=samplers[kind]())
    if kind == "generator":  # the sampler and the loader draw from it
        generator = torch.Generator().manual_seed(1)
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "workers" else {}
    return DataLoader(data, batch_size=4, shuffle=kind != "in order", **workers)


def _fit(kind: str, folder: Path | None, joined: int = 3, **trainer: Any) -> SeesBatches:
    """Train and save in some steps and at the end, or resume from `ckpt_path`."""
    pl.seed_everything(3, verbose=False)
    model = SeesBatches(optimizer=torch.optim.Adam)
    path = trainer.pop("ckpt_path", None)
    if folder is not None:
        trainer["callbacks"] = [Saves(folder)]
    strategy = InfCLStrategy(micro_batch_size=8, loader_batches_per_step=joined)
    # With several ranks, Lightning wraps torch's samplers.
    trainer |= {"max_epochs": EPOCHS, "use_distributed_sampler": kind not in OWN_SAMPLER}
    fitted = make_trainer(strategy, **trainer)
    fitted.fit(model, _loader(kind), ckpt_path=path)
    if folder is not None:
        fitted.save_checkpoint(folder / "end.ckpt")
    return model


def _check(whole: SeesBatches, resumed: SeesBatches, step: int, is_drawn: bool = False) -> None:
    rest = whole.seen[step:]
    assert len(resumed.seen) == len(rest)
    if is_drawn:  # Lightning does not restore torch's generator for later epochs
        left = 5 - step % 5
        assert all(torch.equal(*two) for two in zip(resumed.seen[:left], rest, strict=False))
        return
    assert all(torch.equal(*two) for two in zip(resumed.seen, rest, strict=True))
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "shuffled",
        "in order",
        "own generator",
        "generator",
        "drawn",
        "subset",
        "weighted",
        "workers",
    ],
)
def test_plain_loader_resumes_by_skipping_indices(
    kind: str, tmp_path: Path, logged: list[str]
) -> None:
    whole = _fit(kind, tmp_path)
    for step in (3, 8):
        logged.clear()
        resumed = _fit(kind, None, ckpt_path=tmp_path / f"step={step}.ckpt")
        (said,) = [line for line in logged if "within an epoch" in line]
        assert f"{3 * (step % 5)} loader batches are skipped in the order of the sampler" in said
        _check(whole, resumed, step, is_drawn=kind in ("drawn", "subset", "weighted"))


def test_run_that_resumed_within_an_epoch_resumes_again(tmp_path: Path) -> None:
    whole = _fit("shuffled", tmp_path)
    _fit("shuffled", tmp_path / "resumed", ckpt_path=tmp_path / "step=3.ckpt")
    resumed = _fit("shuffled", None, ckpt_path=tmp_path / "resumed" / "step=4.ckpt")
    _check(whole, resumed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stateful", "stream"])
def test_stateful_loader_resumes_at_the_next_batch(
    kind: str, tmp_path: Path, logged: list[str]
) -> None:
    whole = _fit(kind, tmp_path)
    for step in (3, 8):
        logged.clear()
        resumed = _fit(kind, None, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert any("from the loader's own state" in line for line in logged)
        _check(whole, resumed, step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_loader_of_unknown_order_starts_again(tmp_path: Path, logged: list[str]) -> None:
    whole = _fit("unknown", tmp_path)
    resumed = _fit("unknown", None, ckpt_path=tmp_path / "step=3.ckpt")
    assert any("starts again from the first batch, because the order" in line for line in logged)
    assert torch.equal(resumed.seen[0], whole.seen[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (("shuffled", 3), ("unknown", 3), "written with another kind of loader"),
        (("unknown", 3), ("shuffled", 3), "written with another kind of loader"),
        (("stateful", 3), ("shuffled", 3), "written with another kind of loader"),
        (("shuffled", 3), ("stateful", 3), "written with another kind of loader"),
        (("shuffled", 3), ("own generator", 3), "written with another kind of loader or sampler"),
        (("shuffled", 3), ("shuffled", 1), "written with another `loader_batches_per_step`"),
        (("shuffled", 1), ("shuffled", 3), "does not contain the position of the loader"),
    ],
)
def test_checkpoint_of_another_loader_starts_again_with_a_log_line(
    before: tuple[str, int],
    after: tuple[str, int],
    reason: str,
    tmp_path: Path,
    logged: list[str],
) -> None:
    _fit(before[0], tmp_path, before[1], max_steps=4)
    resumed = _fit(after[0], None, after[1], max_steps=5, ckpt_path=tmp_path / "step=3.ckpt")
    (said,) = [line for line in logged if "within an epoch" in line]
    assert reason in said
    assert resumed.seen


def test_validation_of_a_checkpoint_logs_nothing_about_the_loader(
    tmp_path: Path, logged: list[str]
) -> None:
    model = _fit("shuffled", tmp_path, max_steps=4)
    trainer = make_trainer(InfCLStrategy(micro_batch_size=3))
    trainer.validate(model, _loader("in order"), tmp_path / "step=3.ckpt", verbose=False)
    assert not any("within an epoch" in line for line in logged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "workers"])
def test_epoch_ended_by_max_steps_resumes(kind: str, tmp_path: Path) -> None:
    whole = _fit(kind, None)
    _fit(kind, tmp_path, max_steps=3)
    # Lightning counts the epoch as complete and resumes with the next epoch number.
    resumed = _fit(kind, None, max_steps=5, ckpt_path=tmp_path / "end.ckpt")
    assert all(torch.equal(*two) for two in zip(resumed.seen, whole.seen[3:5], strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_checkpoint_without_a_loader_state_is_logged(tmp_path: Path, logged: list[str]) -> None:
    whole, path = _fit("in order", tmp_path), tmp_path / "step=3.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, path)
    resumed = _fit("in order", None, ckpt_path=path)
    assert any("does not contain the position of the loader" in line for line in logged)
    assert torch.equal(resumed.seen[0], whole.seen[0])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit", "step"), [("in order", 9, 5), ("stateful", 2, 4)])
def test_resumed_at_the_end_of_an_epoch_skips_nothing(
    kind: str, limit: int, step: int, tmp_path: Path, logged: list[str]
) -> None:
    whole = _fit(kind, tmp_path, limit_train_batches=limit)
    path = tmp_path / f"step={step}.ckpt"
    resumed = _fit(kind, None, limit_train_batches=limit, ckpt_path=path)
    _check(whole, resumed, step)
    assert not any("within an epoch" in line for line in logged)


@pytest.mark.slow
@pytest.mark.parametrize("joined", [1, 3])
def test_workers_of_a_run_resumed_after_an_epoch_read_the_next_epoch(
    joined: int, tmp_path: Path
) -> None:
    """Lightning sets the epoch of the sampler after workers have begun to read."""
    whole = _fit("workers", tmp_path, joined)
    resumed = _fit("workers", None, joined, ckpt_path=tmp_path / "epoch=0.ckpt")
    _check(whole, resumed, 15 // joined)


def _fit_on_ranks(
    rank: int, folder: Path, step: int | None, ranks: int = 2
) -> tuple[list[Tensor], Tensor]:
    if step is None:
        model = _fit("shuffled", folder, devices=2)
    else:
        path, joined = folder / f"step={step}.ckpt", 6 // ranks
        model = _fit("shuffled", None, joined, devices=ranks, ckpt_path=path)
    return model.seen, parameters_of(model)


@pytest.mark.distributed
def test_each_rank_resumes_at_its_own_next_batch(tmp_path: Path) -> None:
    # 30 rows per rank: 3 gathered batches per epoch.
    whole = run_ranks(_fit_on_ranks, 2, tmp_path, None)
    resumed = run_ranks(_fit_on_ranks, 2, tmp_path, 5)
    for (batches, weights), (rest, rest_weights) in zip(whole, resumed, strict=True):
        assert all(torch.equal(*two) for two in zip(batches[5:], rest, strict=True))
        assert torch.equal(weights, rest_weights)
    assert not torch.equal(whole[0][0][0], whole[1][0][0])
    # One rank with twice the loader batches per step sees the rows of both.
    ((batches, weights),) = run_ranks(_fit_on_ranks, 1, tmp_path, 5, 1)
    (seen,), both = batches, torch.cat([rows[5] for rows, _ in whole])
    assert torch.equal(seen.unique(dim=0), both.unique(dim=0))
    assert torch.allclose(weights, whole[0][1], rtol=1e-4)


def test_loader_states_depend_on_the_sampler() -> None:
    gathered = gather_batches(_loader("stateful"), 3)
    batches = iter(gathered)
    next(batches)
    assert gathered.state_dict()["loader"] == {"at": 3}
    unknown = gather_batches(_loader("unknown"), 3)
    next(iter(unknown))
    assert unknown.state_dict()["loader"] == {}
    known = gather_batches(_loader("shuffled"), 3)
    sampler = known.batch_sampler
    next(iter(known))
    assert known.state_dict()["loader"]["rows"] == 12
    assert known.batch_sampler is sampler, "the loader keeps its own"
