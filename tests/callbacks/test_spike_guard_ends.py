"""`SpikeGuard` ends a run before the bad step."""

import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mp import BalancedAMP, InstabilityError, NonFiniteLocator
from lightning_mp.callbacks.monitor import InstabilityWarning
from lightning_mp.callbacks.spike_guard import SpikeGuard
from tests.callbacks.spike_models import PlantedModel, fit, kinds, make_batches
from tests.callbacks.test_spike_guard import OPTIMIZERS, SETUPS, TwoPlayers, quick, warm_up
from tests.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")

BAD = 40
KIND_OF = {
    "nan": "non_finite_loss",
    "nan gradient": "non_finite_gradient",
    "explosion": "loss_spike",
    "gradient only": "gradient_spike",
}


class Before(pl.Callback):
    """Stores the state before the bad step."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop._batches_that_stepped == BAD:
            self.trainer, self.kept = trainer, self.now(trainer)

    @staticmethod
    def now(trainer: pl.Trainer) -> list[Any]:
        (optimizer,) = trainer.optimizers
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*trainer.lightning_module.parameters(), *states]
        copies = [t.detach().clone() for t in tensors if isinstance(t, torch.Tensor)]
        return [*copies, optimizer.param_groups[0]["lr"], trainer.global_step]

    def check(self) -> None:
        for before, after in zip(self.kept, self.now(self.trainer), strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=0)


def end(
    tmp_path: Path, action: Any, planted: str, setup: str = "plain", **options: Any
) -> tuple[SpikeGuard, PlantedModel, Before]:
    """Train until the guard ends it."""
    make_plugin, optimizer, _ = SETUPS[setup]
    guard, before = quick(action=action), Before()
    model = PlantedModel({BAD: planted}, OPTIMIZERS[optimizer], warm_up)
    options |= {"plugins": [make_plugin()] if make_plugin else []}
    callbacks = (guard, before, *options.pop("callbacks", ()))
    with pytest.raises(InstabilityError) if action == "raise" else nullcontext() as caught:
        fit(model, make_batches(60), *callbacks, default_root_dir=tmp_path, **options)
    if caught is not None:
        assert caught.value.alarm == guard.alarms[-1]
        assert str(caught.value) == guard.alarms[-1].message
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return guard, model, before


OTHER_SETUPS = [
    *((setup, "nan") for setup in SETUPS if setup != "plain"),
    *((setup, "explosion") for setup in ("fused", "balanced", "16-mixed")),
]


# Both actions share the decision, so other set-ups test only `stop`; `make sweep` tests both.
@pytest.mark.parametrize(
    ("action", "setup", "planted"),
    [
        *((action, "plain", planted) for action in ("stop", "raise") for planted in KIND_OF),
        *(pytest.param("stop", *case, marks=pytest.mark.slow) for case in OTHER_SETUPS),
        *(pytest.param("raise", *case, marks=pytest.mark.sweep) for case in OTHER_SETUPS),
    ],
)
def test_training_ends_before_the_bad_step_changes_anything(
    tmp_path: Path, action: str, setup: str, planted: str
) -> None:
    guard, model, before = end(tmp_path, action, planted, setup)
    before.check()
    assert kinds(guard) == [(BAD, KIND_OF[planted])]
    assert model.seen[-1] == BAD


@pytest.mark.parametrize("planted", ["nan", "nan gradient"])
def test_error_before_the_bad_step_refers_to_the_module_that_a_later_locator_names(
    tmp_path: Path, planted: str
) -> None:
    locator = NonFiniteLocator()
    guard, *_ = end(tmp_path, "raise", planted, callbacks=[locator])
    (located,) = locator.alarms
    assert f"at step {BAD} about `{located.tensor}`" in guard.alarms[-1].message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("action", ["stop", "raise"])
def test_default_checkpoint_holds_no_nan_and_a_resumed_run_ends_again(
    tmp_path: Path, action: Any
) -> None:
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    end(tmp_path, action, "nan", callbacks=[keep], enable_checkpointing=True)
    path = tmp_path / "last.ckpt"
    saved = torch.load(path, weights_only=False)
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert saved["global_step"] == BAD
    guard = quick(action=action)
    again = PlantedModel(dict.fromkeys((BAD, BAD + 1), "nan"), OPTIMIZERS["adamw"], warm_up)
    with pytest.raises(InstabilityError) if action == "raise" else nullcontext():
        fit(again, make_batches(60), guard, default_root_dir=tmp_path, ckpt_path=path)
    assert len(again.seen) == 1
    assert kinds(guard)[-1] == (again.seen[0], "non_finite_loss")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "raise"])
def test_overflow_under_a_loss_scale_does_not_end_training(tmp_path: Path, action: Any) -> None:
    guard = quick(action=action)
    plugin = BalancedAMP(half="fp16", loss_scale="dynamic", device="cpu")
    model = PlantedModel({BAD: "nan gradient"})
    fit(model, make_batches(45), guard, plugins=[plugin], default_root_dir=tmp_path)
    assert (BAD, "non_finite_gradient") in kinds(guard)
    assert model.seen[-1] == 44


def test_stop_in_manual_optimization_skips_later_optimizers(tmp_path: Path) -> None:

    after: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, model: Any, *_: Any) -> None:
            self.before = [p.detach().clone() for p in model.parameters()]

        def on_train_end(self, trainer: pl.Trainer, model: Any) -> None:
            pairs = zip(self.before, model.parameters(), strict=True)
            after["moved"] = [not torch.equal(one, other) for one, other in pairs]

    fit(TwoPlayers(), make_batches(45), quick(action="stop"), Watch(), default_root_dir=tmp_path)
    assert after["moved"] == [True, True, False, False]  # the loss of the second one exploded


def test_alarm_says_that_training_stops_before_the_step(tmp_path: Path) -> None:
    with pytest.warns(InstabilityWarning, match="Training stops before this step"):
        end(tmp_path, "stop", "explosion")


class Loses(pl.Callback):
    """Makes a weight NaN before the bad step."""

    def on_train_batch_start(self, _: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD and pl_module.global_rank == pl_module.trainer.world_size - 1:
            next(pl_module.parameters()).data.fill_(torch.nan)


@pytest.mark.filterwarnings("ignore:`SpikeGuard.action='skip'.` reads one flag")
def test_skip_ends_a_run_whose_weights_are_lost(tmp_path: Path) -> None:
    guard = quick(action="skip", patience=5)
    limits = {"max_epochs": -1, "max_steps": 100}  # skipped steps do not count
    fit(PlantedModel({}), make_batches(60), guard, Loses(), default_root_dir=tmp_path, **limits)
    assert kinds(guard) == [(BAD, "non_finite_loss"), (BAD + 4, "non_finite_run")]
    assert "Training stops" in guard.alarms[-1].message


def lose(rank: int) -> Any:
    warnings.simplefilter("ignore")
    guard, model = quick(action="skip", patience=5), PlantedModel()
    fit(model, make_batches(120), guard, Loses(), devices=2, strategy="ddp")
    return kinds(guard), model.seen[-1]


@pytest.mark.distributed
def test_skip_ends_all_ranks_if_the_weights_of_one_are_lost() -> None:
    # A shard may be the only one with NaN. A rank that trains on would wait for the others.
    first, second = run_ranks(lose, 2)
    assert first == second
    assert first[0][-1][1] == "non_finite_run"


def raise_error(rank: int) -> str:
    warnings.simplefilter("ignore")
    guard, plugin = quick(action="raise"), BalancedAMP(loss_scale=64.0, device="cpu")
    model = PlantedModel({BAD: "nan"} if rank == 1 else {})
    options = {"devices": 2, "strategy": "ddp", "plugins": [plugin]}
    with pytest.raises(InstabilityError) as caught:
        fit(model, make_batches(120), guard, NonFiniteLocator(), **options)
    return str(caught.value)


@pytest.mark.distributed
def test_error_refers_to_the_locator_although_ranks_with_a_loss_scale_agree_after_the_step() -> (
    None
):
    first, second = run_ranks(raise_error, 2)
    assert first == second
    assert "rank 1: The loss is NaN." in first
    assert f"alarm of `NonFiniteLocator` at step {BAD} about `PlantedModel`" in first
