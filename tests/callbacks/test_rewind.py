"""`SpikeGuard(action="rewind")` returns to a checkpoint and skips the batches of the spike."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from lightning_mp import BalancedAMP
from lightning_mp.callbacks.spike_guard import SpikeGuard
from tests.averages import weight_averaging
from tests.callbacks.spike_models import (
    PlantedModel,
    fit,
    kinds,
    make_batches,
)

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")

SPIKE, SKIP = 43, 30
BACK_TO = 30  # checkpoints are taken after 10, 20, 30 and 40 steps; at least 10 steps back
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: Adam(p, lr=3e-3),
}


def warm_up(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.99**step
    )


def guard(tmp_path: Path, **options: Any) -> SpikeGuard:
    defaults: dict[str, Any] = {
        "action": "rewind",
        "rewind_steps": 10,
        "skip_batches": SKIP,
        "checkpoint_every_n_steps": 10,
        "window_steps": 32,
        "judge_after_steps": 16,
        "dirpath": str(tmp_path / "marks"),
        "rewind_storage": "disk",
    }
    return SpikeGuard(**(defaults | options))


class Reseed(pl.Callback):
    """Seeds the generators when training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(7)


def train_by_hand(
    batches: list[list[Tensor]], trained: list[int], make_optimizer: Callable[[Any], Optimizer]
) -> tuple[PlantedModel, float]:
    """Train on some batches, in order; return the model and the last learning rate."""
    model = PlantedModel(dropout=0.2)
    optimizer = make_optimizer(model.parameters())
    schedule = warm_up(optimizer)
    torch.manual_seed(7)
    for index in trained:
        optimizer.zero_grad()
        model.compute_loss(batches[index % len(batches)]).backward()
        optimizer.step()
        schedule.step()
    return model, optimizer.param_groups[0]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("batches_an_epoch", "epochs"), [(90, 1), (50, 2), (8, 12)], ids=["inside", "across", "over"]
)
def test_rewind_after_a_spike_equals_training_without_the_skipped_batches(
    tmp_path: Path, optimizer: str, batches_an_epoch: int, epochs: int
) -> None:
    batches = make_batches(batches_an_epoch)
    make_optimizer = OPTIMIZERS[optimizer]
    model = PlantedModel({SPIKE: "explosion"}, make_optimizer, warm_up, dropout=0.2)
    watch = guard(tmp_path)
    trainer = fit(model, batches, Reseed(), watch, max_epochs=epochs, default_root_dir=tmp_path)
    total = batches_an_epoch * epochs
    assert model.seen == [*range(SPIKE + 1), *range(BACK_TO + SKIP, total)]
    trained = [*range(BACK_TO), *range(BACK_TO + SKIP, total)]
    expected, lr = train_by_hand(batches, trained, make_optimizer)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert trainer.optimizers[0].param_groups[0]["lr"] == lr
    assert trainer.global_step == len(trained)
    assert trainer.current_epoch == epochs
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == total
    assert not (tmp_path / "marks").exists() or not list((tmp_path / "marks").rglob("*"))


@pytest.mark.slow
def test_rewind_with_half_weights_equals_training_without_the_skipped_batches(
    tmp_path: Path,
) -> None:
    def train(planted: dict[int, str], *callbacks: pl.Callback) -> PlantedModel:
        model = PlantedModel(planted, OPTIMIZERS["adam"])
        plugin = BalancedAMP(half="bf16", device="cpu")
        batches = make_batches(70)
        if not planted:
            batches = batches[:BACK_TO] + batches[BACK_TO + SKIP :]
        fit(model, batches, *callbacks, plugins=[plugin], default_root_dir=tmp_path)
        return model

    ours, theirs = train({SPIKE: "explosion"}, guard(tmp_path)), train({})
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@pytest.mark.slow
def test_rewind_with_accumulation_starts_with_a_whole_step(tmp_path: Path) -> None:
    model = PlantedModel({82: "explosion"}, OPTIMIZERS["sgd"])
    watch = guard(tmp_path, skip_batches=41, rewind_steps=5)
    fit(model, make_batches(130), watch, accumulate_grad_batches=3, default_root_dir=tmp_path)
    # Step 27 has batches 81 to 83; back to step 20, batch 60; 41 batches rounded up to 42.
    assert model.seen == [*range(84), *range(102, 130)]
    reference = PlantedModel(make_optimizer=OPTIMIZERS["sgd"])
    rest = make_batches(130)
    fit(
        reference,
        rest[:60] + rest[102:],
        accumulate_grad_batches=3,
        default_root_dir=tmp_path,
    )
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_rewind_logs_increasing_steps_and_reports_the_mark(tmp_path: Path) -> None:
    class Logged(PlantedModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    logger = CSVLogger(tmp_path, name="", version="")
    fit(
        Logged({SPIKE: "explosion"}),
        make_batches(90),
        guard(tmp_path),
        logger=logger,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    trained = SPIKE + 1 + 90 - BACK_TO - SKIP
    for name in ("loss", "instability/loss", "instability/gradient_norm"):
        assert [int(row["step"]) for row in rows if row[name]] == list(range(trained))
    told = [row for row in rows if row["instability/rewind_to_step"]]
    assert [float(row["instability/rewind_to_step"]) for row in told] == [BACK_TO]
    assert [int(row["step"]) for row in told] == [SPIKE]


@pytest.mark.slow
def test_training_continues_after_max_rewinds(tmp_path: Path) -> None:
    planted = dict.fromkeys((43, 70, 95), "explosion")
    model = PlantedModel(planted)
    watch = guard(tmp_path, max_rewinds=2, skip_batches=14)
    fit(model, make_batches(120), watch, default_root_dir=tmp_path)
    assert [kind for _, kind in kinds(watch)] == [
        *["loss_spike", "rewind_to_step"] * 2,
        "loss_spike",
    ]
    assert "used up" in watch.alarms[-1].message
    assert model.seen[-1] == 119
    assert watch.rewinds == 2


@pytest.mark.slow
def test_rewind_restores_averaged_weights(tmp_path: Path) -> None:
    averages = weight_averaging()

    def train(batches: list[list[Tensor]], *callbacks: pl.Callback, **planted: Any) -> Any:
        model = PlantedModel(planted.get("planted"), OPTIMIZERS["sgd"])
        average = averages.EMAWeightAveraging(decay=0.9)
        fit(model, batches, average, *callbacks, default_root_dir=tmp_path)
        return model  # holds the averaged weights after training

    batches = make_batches(70)
    ours = train(batches, guard(tmp_path), planted={SPIKE: "explosion"})
    theirs = train(batches[:BACK_TO] + batches[BACK_TO + SKIP :])
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.slow
def test_rewind_from_nan_weights_recovers(tmp_path: Path) -> None:
    model = PlantedModel({SPIKE: "nan"})
    watch = guard(tmp_path)
    fit(model, make_batches(90), watch, default_root_dir=tmp_path)
    assert kinds(watch) == [(SPIKE, "non_finite_loss"), (SPIKE, "rewind_to_step")]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_resumed_run_rewinds_to_checkpoints_of_the_first_run(
    tmp_path: Path,
) -> None:
    class Interrupt(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 36:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
                raise ValueError("power cut")

    batches = make_batches(90)
    with pytest.raises(ValueError, match="power cut"):
        fit(PlantedModel(), batches, guard(tmp_path), Interrupt(), default_root_dir=tmp_path)
    model = PlantedModel({SPIKE: "explosion"})
    watch = guard(tmp_path)
    fit(model, batches, watch, default_root_dir=tmp_path, ckpt_path=tmp_path / "last.ckpt")
    events = kinds(watch)
    assert [kind for _, kind in events] == ["loss_spike", "rewind_to_step"]
    assert watch.alarms[-1].value == BACK_TO


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_rewind_with_a_dataloader_iter_raises_an_error(tmp_path: Path) -> None:
    class Fetches(PlantedModel):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            return self.compute_loss(next(dataloader_iter)[0])

    with pytest.raises(MisconfigurationException, match="fetches them"):
        fit(Fetches(), make_batches(5), guard(tmp_path), default_root_dir=tmp_path)


def test_rewind_of_a_pruned_model_raises_an_error(tmp_path: Path) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(MisconfigurationException, match="with `ModelPruning`"):
        fit(PlantedModel(), make_batches(2), guard(tmp_path), pruning, default_root_dir=tmp_path)


class _Grows(PlantedModel):
    """Unfreezes a layer before the batch 35, and gives it to the optimizer."""

    def on_fit_start(self) -> None:
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.net[3].parameters(), lr=3e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 35:
            self.net[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.net[0].parameters())})


@pytest.mark.parametrize(
    ("spike", "kind", "words"),
    [(SPIKE, "rewind_to_step", "the checkpoint before step 36"), (35, "rewind_failed", "changed")],
)
def test_rewind_after_a_layer_has_joined_the_optimizer(
    tmp_path: Path, spike: int, kind: str, words: str
) -> None:
    model, rewinding = _Grows({spike: "nan gradient"}), guard(tmp_path)
    fit(model, make_batches(80), rewinding, default_root_dir=tmp_path)
    alarm = next(each for each in rewinding.alarms if each.kind.startswith("rewind"))
    assert alarm.kind == kind
    assert words in alarm.message
    is_finite = all(p.isfinite().all() for p in model.parameters())
    assert is_finite == (kind == "rewind_to_step")
