"""Alarms save the batches of their step."""

import pickle
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    InstabilityMonitor,
    NonFiniteLocator,
    SpikeGuard,
)
from lightning_mp.callbacks._step import batches as keeping
from tests.callbacks.disks import full_disk
from tests.callbacks.spike_models import PlantedModel, fit, make_batches
from tests.processes import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning"),
]

BAD = 40
MONITORS: dict[str, Any] = {
    "guard": lambda **options: SpikeGuard(window_steps=32, judge_after_steps=16, **options),
    "locator": lambda **options: NonFiniteLocator(**options),
}


class Empties(PlantedModel):
    """Removes items from its batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        batch.clear()
        return loss


def saved(monitor: InstabilityMonitor) -> dict[str, Any]:
    alarm = monitor.alarms[0]
    assert alarm.batch_path is not None
    assert f"Its batch is in `{alarm.batch_path}`." in alarm.message
    content: dict[str, Any] = torch.load(alarm.batch_path, weights_only=False)
    assert (content["step"], content["epoch"], content["rank"]) == (alarm.step, 0, alarm.rank)
    return content


@pytest.mark.parametrize("make", MONITORS.values(), ids=MONITORS)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_alarm_saves_the_batches_of_its_step_in_the_folder_of_the_run(
    tmp_path: Path, make: Any, accumulated: int, action: str
) -> None:
    monitor, batches = make(save_batch=True, action=action), make_batches(44)
    logger = CSVLogger(tmp_path, name="", version="run")
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "logger": logger}
    fit(Empties({BAD: "nan"}), batches, monitor, default_root_dir=tmp_path, **options)
    content = saved(monitor)
    expected = batches[BAD : BAD + accumulated]
    assert len(content["batches"]) == accumulated
    for ours, theirs in zip(content["batches"], expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert Path(monitor.alarms[0].batch_path or "").parent == tmp_path / "run" / "bad_batches"


def test_save_batch_applies_to_alarms_of_all_monitors(
    tmp_path: Path,
) -> None:
    monitor, batches = ActivationRangeMonitor(every_n_steps=1), make_batches(44)
    asked = MONITORS["guard"](save_batch=True)
    model = PlantedModel({BAD: "nan"})
    fit(model, batches, monitor, asked, default_root_dir=tmp_path)
    assert monitor.alarms[0].step == BAD + 1  # whose weights are NaN
    (batch,) = saved(monitor)["batches"]
    assert all(map(torch.equal, batch, batches[BAD + 1]))


@pytest.mark.parametrize("make", MONITORS.values(), ids=MONITORS)
def test_alarm_saves_no_batch_by_default(tmp_path: Path, make: Any) -> None:
    monitor = make()
    fit(PlantedModel({BAD: "nan"}), make_batches(44), monitor, default_root_dir=tmp_path)
    assert monitor.alarms[0].batch_path is None
    assert not list(tmp_path.rglob("*.pt"))


def test_batch_that_cannot_be_saved_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "bad_batches").write_text("in the way")
    monitor, model = MONITORS["guard"](save_batch=True), PlantedModel({BAD: "nan"})
    with pytest.warns(UserWarning, match="could not be saved in .*: FileExistsError: File exists"):
        fit(model, make_batches(44), monitor, default_root_dir=tmp_path)
    assert model.seen[-1] == 43
    assert not any(
        alarm.batch_path or "Its batch is in" in alarm.message for alarm in monitor.alarms
    )
    assert monitor.alarms


def test_full_disk_warns_once_and_alarms_name_no_batch(tmp_path: Path) -> None:
    class Full(PlantedModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == BAD:
                self.limit = full_disk()
                self.limit.__enter__()
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            self.limit.__exit__(None, None, None)

    planted = {BAD: "explosion", BAD + 2: "nan"}
    monitors = [make(save_batch=True) for make in MONITORS.values()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Full(planted), make_batches(46), *monitors, default_root_dir=tmp_path)
    told = [str(each.message) for each in caught if "could not" in str(each.message)]
    assert len(told) == 1
    assert "File too large. Training continues." in told[0]
    alarms = [alarm for monitor in monitors for alarm in monitor.alarms]
    assert len({alarm.step for alarm in alarms}) > 1
    assert not any(alarm.batch_path or "Its batch is in" in alarm.message for alarm in alarms)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_batch_of_another_run_is_kept(tmp_path: Path) -> None:
    paths = []
    for seed in (0, 1):
        monitor = MONITORS["guard"](save_batch=True)
        batches = make_batches(44, seed=seed)
        fit(PlantedModel({BAD: "nan"}), batches, monitor, default_root_dir=tmp_path)
        (batch,) = saved(monitor)["batches"]
        assert all(map(torch.equal, batch, batches[BAD]))
        paths.append(monitor.alarms[0].batch_path)
    assert len(set(paths)) == 2
    first = torch.load(paths[0], weights_only=True)["batches"][0]
    assert all(map(torch.equal, first, make_batches(44)[BAD]))


class OneRank(PlantedModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx == BAD and self.global_rank == 1 else loss


def train(rank: int, name: str, folder: str) -> Any:
    warnings.simplefilter("ignore")
    monitor = MONITORS[name](save_batch=True)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "default_root_dir": folder}
    batches = make_batches(90)[rank::2]
    fit(OneRank(), batches, monitor, **options, use_distributed_sampler=False)
    return pickle.dumps((saved(monitor)["batches"], batches[BAD])), monitor.alarms[0].rank


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.sweep] * (n != "locator")) for n in MONITORS]
)
def test_batch_of_the_rank_that_failed_is_saved(tmp_path: Path, name: str) -> None:
    (_, rank), (second, other) = run_ranks(train, 2, name, str(tmp_path))
    assert rank == other == 1
    (batch,), expected = pickle.loads(second)
    assert all(map(torch.equal, batch, expected))
    assert len(list(tmp_path.rglob(f"step={BAD}-*.pt"))) == 1


def train_on_a_bad_disk(rank: int, folder: str) -> Any:
    warnings.simplefilter("ignore")
    if rank == 0:
        (Path(folder) / "bad_batches").write_text("in the way")
    torch.distributed.barrier()
    monitor = MONITORS["guard"](save_batch=True)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "default_root_dir": folder}
    fit(OneRank(), make_batches(90)[rank::2], monitor, **options, use_distributed_sampler=False)
    return [(alarm.kind, alarm.rank, alarm.batch_path) for alarm in monitor.alarms]


@pytest.mark.distributed
def test_no_rank_names_a_batch_that_could_not_be_saved(tmp_path: Path) -> None:
    first, second = run_ranks(train_on_a_bad_disk, 2, str(tmp_path))
    assert first == second
    assert first[0] == ("non_finite_loss", 1, None)
    assert not any(path for _, _, path in first)


class Alone(InstabilityMonitor):
    """Raises alarms only on rank zero, about batches of the other rank."""

    save_batch = True

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        facts = self.recorder.now
        if trainer.is_global_zero and facts is not None and facts.step in (2, 4, 6):
            self.alarm(trainer, "odd", "Odd.", "Look.", facts=replace(facts, rank=1))


def train_alone(rank: int, folder: str) -> Any:
    warnings.simplefilter("ignore")
    keeping._PATIENCE = timedelta(seconds=0.5)  # in this process alone
    monitor, model = Alone(repeat_after_steps=1), PlantedModel()
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "default_root_dir": folder}
    fit(model, make_batches(20)[rank::2], monitor, **options, use_distributed_sampler=False)
    return [alarm.batch_path for alarm in monitor.alarms], len(model.seen)


@pytest.mark.distributed
def test_alarm_of_a_single_rank_does_not_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, steps), (second, others) = run_ranks(train_alone, 2, str(tmp_path))
    assert (first, second) == ([None] * 3, [])
    assert steps == others == 10
