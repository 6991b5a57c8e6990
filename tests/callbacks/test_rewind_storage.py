"""Checkpoints of rewinds: storage, size, loss, and learning rates after a rewind."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from lightning_mp.callbacks.spike_guard import SpikeGuard
from tests.callbacks.spike_models import PlantedModel, fit, kinds, make_batches
from tests.callbacks.test_rewind import BACK_TO, OPTIMIZERS, SPIKE, guard, warm_up
from tests.processes import exit_code_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning"),
]


class Loses(pl.Callback):
    """Deletes or damages the checkpoints that `which` selects, right before the spike."""

    def __init__(self, which: slice, how: str) -> None:
        self.which, self.how = which, how

    def on_train_batch_start(self, trainer: pl.Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if trainer.global_step != SPIKE or batch_idx != SPIKE:
            return
        paths = sorted(Path(trainer.default_root_dir).rglob("step=*.ckpt"))
        for path in paths[self.which]:
            if self.how == "removed":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:1000])


# There are checkpoints of steps 20, 30 and 40; the rewind should return to step 30.
LOST = {
    "chosen": (slice(1, 2), 1, 20),
    "far": (slice(0, 2), 2, 40),
    "all": (slice(0, 3), 3, None),
}


@pytest.mark.parametrize("how", [pytest.param("removed", marks=pytest.mark.sweep), "cut off"])
@pytest.mark.parametrize("lost", LOST)
def test_rewind_uses_another_checkpoint_if_one_is_lost(tmp_path: Path, lost: str, how: str) -> None:
    which, count, step = LOST[lost]
    watch, model = guard(tmp_path, rewind_steps=11), PlantedModel({SPIKE: "explosion"})
    fit(model, make_batches(90), watch, Loses(which, how), default_root_dir=tmp_path)
    said = [alarm.kind for alarm in watch.alarms]
    end = "rewind_failed" if step is None else "rewind_to_step"
    assert said == ["loss_spike", "rewind_lost", end]
    assert watch.alarms[1].value == count
    assert step is None or watch.alarms[-1].value == step
    assert model.seen[-1] == 89
    assert all(p.isfinite().all() for p in model.parameters())


def train(tmp_path: Path, **options: Any) -> tuple[PlantedModel, SpikeGuard, Path]:
    watch = guard(tmp_path, **options)
    model = PlantedModel({SPIKE: "explosion"}, OPTIMIZERS["adam"], warm_up, dropout=0.2)
    found: list[list[Path]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            found.append(list((tmp_path / "marks").rglob("*.ckpt")))

    torch.manual_seed(7)
    fit(model, make_batches(90), watch, Look(), default_root_dir=tmp_path)
    return model, watch, max(found, key=len)


def test_rewind_from_memory_equals_rewind_from_disk_and_writes_no_file(tmp_path: Path) -> None:
    on_disk, watch, files = train(tmp_path, rewind_storage="disk")
    assert len(files) == 2
    for storage in ("memory", "auto"):
        in_memory, again, files = train(tmp_path, rewind_storage=storage)
        assert files == []
        assert kinds(again) == kinds(watch)
        assert in_memory.seen == on_disk.seen
        for ours, theirs in zip(in_memory.parameters(), on_disk.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_checkpoint_in_memory_is_unchanged_by_a_rewind(tmp_path: Path) -> None:
    def run(storage: str) -> PlantedModel:
        model = PlantedModel(dict.fromkeys((SPIKE, SPIKE + 20), "nan"), OPTIMIZERS["adam"])
        watch = guard(tmp_path, rewind_storage=storage, skip_batches=15, rewind_steps=5)
        fit(model, make_batches(90), watch, default_root_dir=tmp_path)
        assert watch.rewinds == 2
        return model

    for ours, theirs in zip(run("memory").parameters(), run("disk").parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_checkpoints_are_written_at_once_under_a_plugin_that_writes_in_a_thread(
    tmp_path: Path, logged: list[str]
) -> None:
    watch, plugin = guard(tmp_path), AsyncCheckpointIO()
    model = PlantedModel({SPIKE: "explosion"})
    fit(model, make_batches(90), watch, default_root_dir=tmp_path, plugins=plugin)
    assert [alarm.kind for alarm in watch.alarms] == ["loss_spike", "rewind_to_step"]
    (said,) = (text for text in logged if "bytes each on disk" in text)
    assert " 0 bytes" not in said
    assert list((tmp_path / "marks").rglob("*.ckpt")) == []


def test_rewind_storage_auto_uses_the_disk_if_states_do_not_fit_in_memory(tmp_path: Path) -> None:
    weights = 4 * sum(p.numel() for p in PlantedModel().parameters())
    # Four checkpoints fit with weights alone, but not with two states of the same size.
    gb = 4 * 2 * weights / 1e9
    _, watch, files = train(tmp_path, rewind_storage="auto", rewind_memory_gb=gb)
    assert {path.stem for path in files} == {"step=10", "step=20"}  # not the mark of step 0
    assert watch.alarms[-1].value == BACK_TO


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_rewind_logs_its_storage_once(tmp_path: Path, storage: str, logged: list[str]) -> None:
    train(tmp_path, rewind_storage=storage)
    (said,) = (text for text in logged if "keeps up to" in text)
    words = said.replace(",", "").split()
    size, total = int(words[words.index("of") + 1]), int(words[-4])
    tensors = 3 * 4 * sum(p.numel() for p in PlantedModel().parameters())
    assert tensors < size
    assert total == 3 * size
    assert ("memory" in said) == (storage == "memory")


# --- learning rates ------------------------------------------------------------------------------

SCHEDULES: dict[str, Any] = {
    "lambda": warm_up,
    "cosine": lambda o: CosineAnnealingLR(o, 90, eta_min=1e-4),
    "one cycle": lambda o: OneCycleLR(o, 3e-3, total_steps=90),
    "sequence": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=20), ExponentialLR(o, 0.99)], milestones=[20]
    ),
}


# Rates computed from attributes of the schedule, from parameter groups, and by inner schedules.
GATE = ("lambda", "one cycle", "sequence")


@pytest.mark.parametrize(
    "schedule",
    [
        *GATE,
        *(pytest.param(s, marks=pytest.mark.sweep) for s in (None, *SCHEDULES) if s not in GATE),
    ],
)
@pytest.mark.parametrize("storage", ["memory", pytest.param("disk", marks=pytest.mark.sweep)])
def test_rewind_lowers_all_later_learning_rates(
    tmp_path: Path, schedule: str | None, storage: str
) -> None:
    class Rates(pl.Callback):
        def __init__(self) -> None:
            self.by_step: dict[int, float] = {}

        def on_before_optimizer_step(self, trainer: Any, _: Any, optimizer: Optimizer) -> None:
            self.by_step[trainer.global_step] = float(optimizer.param_groups[0]["lr"])

    def rates(factor: float) -> tuple[dict[int, float], SpikeGuard]:
        planted = dict.fromkeys((SPIKE, SPIKE + 20), "nan")
        model = PlantedModel(planted, OPTIMIZERS["adam"], SCHEDULES[schedule] if schedule else None)
        watch, seen = (
            guard(
                tmp_path,
                rewind_lr_factor=factor,
                rewind_storage=storage,
                rewind_steps=5,
                skip_batches=15,
            ),
            Rates(),
        )
        fit(model, make_batches(100), watch, seen, default_root_dir=tmp_path)
        return seen.by_step, watch

    (whole, watch), (lower, again) = rates(1.0), rates(0.5)
    # Repeated steps have replaced the first ones.
    backs = [int(alarm.value or 0) for alarm in watch.alarms if alarm.kind == "rewind_to_step"]
    assert len(backs) == len(again.alarms) - 2 == 2
    first, second = (mark_step(watch, back) for back in (0, 1))
    for step, rate in whole.items():
        factor = 0.25 if step >= second else 0.5 if step >= first else 1.0
        assert lower[step] == pytest.approx(factor * rate, rel=1e-6), step
    assert "The learning rate is" in again.alarms[-1].remedy


def mark_step(watch: SpikeGuard, index: int) -> int:
    """Return the optimizer step to which a rewind returned."""
    said = [alarm for alarm in watch.alarms if alarm.kind == "rewind_to_step"]
    before = sum(
        int(alarm.message.split("rewound by ")[1].split()[0]) for alarm in said[: index + 1]
    )
    return said[index].step + 1 - before - (index + 1)


class Sign(Optimizer):
    """Steps by the sign of the gradient, at a rate that no group holds."""

    def __init__(self, params: Any, **group: Any) -> None:
        super().__init__(params, group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(1e-3 * p.grad.sign())
        return loss


@pytest.mark.parametrize("group", [{"lr": None}, {}])
def test_rewind_lowers_no_rate_of_an_optimizer_without_one(
    tmp_path: Path, group: dict[str, Any]
) -> None:
    model = PlantedModel({SPIKE: "nan"}, lambda p: Sign(p, **group))
    watch = guard(tmp_path, rewind_lr_factor=0.5)
    fit(model, make_batches(50), watch, default_root_dir=tmp_path)
    (rewind,) = (alarm for alarm in watch.alarms if alarm.kind == "rewind_to_step")
    assert rewind.remedy == "This was rewind 1 of 3."


# --- killed runs ---------------------------------------------------------------------------------


class Killed(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 36:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(folder: str) -> None:
    fit(PlantedModel(), make_batches(90), guard(Path(folder)), Killed(), default_root_dir=folder)


def test_rewind_checkpoints_of_a_killed_run_are_removed_by_the_next(tmp_path: Path) -> None:
    assert exit_code_of(run_until_killed, str(tmp_path)) == -signal.SIGKILL
    left = list((tmp_path / "marks").rglob("*.ckpt"))
    assert len(left) == 2
    fit(PlantedModel(), make_batches(5), guard(tmp_path), default_root_dir=tmp_path)
    assert not list((tmp_path / "marks").rglob("*"))


def test_resumed_run_uses_and_removes_the_checkpoints_of_the_killed_run(
    tmp_path: Path,
) -> None:
    assert exit_code_of(run_until_killed, str(tmp_path)) == -signal.SIGKILL
    (stray,) = (tmp_path / "marks").glob("spike_guard-*")
    (stray / "step=99.ckpt").write_bytes(b"of a save that was cut off")
    watch, model = guard(tmp_path), PlantedModel({SPIKE: "explosion"})
    path = tmp_path / "last.ckpt"
    fit(model, make_batches(90), watch, default_root_dir=tmp_path, ckpt_path=path)
    assert watch.alarms[-1].value == BACK_TO
    assert not list((tmp_path / "marks").rglob("*"))


def test_rewind_keeps_the_checkpoints_of_a_running_process(tmp_path: Path) -> None:
    class Beside(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SPIKE - 1:
                other = guard(tmp_path)
                fit(PlantedModel(), make_batches(12), other, default_root_dir=tmp_path)

    watch, model = guard(tmp_path), PlantedModel({SPIKE: "explosion"})
    fit(model, make_batches(90), Beside(), watch, default_root_dir=tmp_path)
    assert [kind for _, kind in kinds(watch)] == ["loss_spike", "rewind_to_step"]
    assert not list((tmp_path / "marks").rglob("*"))
