"""`NonFiniteLocator` does not disturb training and works in all loops."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp import BalancedAMP, InstabilityError, PureFP16
from lightning_mp.callbacks.non_finite_locator import NonFiniteLocator
from tests.callbacks.non_finite_models import WIDTH, Model, Perceptron, data, fit, locate, mixed

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")

PLUGINS = {
    "32-true": lambda: None,
    "balanced": BalancedAMP,
    "pure": lambda: PureFP16(inf_clamp=[]),
    "16-mixed": mixed,
}


def body() -> nn.Module:
    return nn.Sequential(Perceptron(), nn.BatchNorm1d(WIDTH, momentum=None), nn.Dropout(0.5))


def infinite_at(*indices: int) -> Any:
    """Return a loss that is inf in some batches, for any weights."""

    class Spoiled(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loss_of = lambda out, y: (
                (out - y).square().mean() * (torch.inf if batch_idx in indices else 1.0)
            )
            return super().training_step(batch, batch_idx)

    return Spoiled


# --- training is not disturbed -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("plugin", ["balanced", "pure", "16-mixed"])
def test_locator_does_not_change_training_after_a_failure(plugin: str, automatic: bool) -> None:
    trained = []
    for callbacks in ([], [NonFiniteLocator()]):
        model = infinite_at(2, 4)(body, automatic=automatic)
        torch.manual_seed(7)
        fit(model, data(), PLUGINS[plugin](), callbacks=callbacks)
        trained.append((torch.stack(model.weights), dict(model.named_buffers())))
        if callbacks:
            assert callbacks[0].replays == 2
            assert [a.step for a in callbacks[0].alarms] == [2]  # not repeated so soon
    (weights, buffers), (again, buffers_again) = trained
    assert torch.equal(weights[1], weights[2])  # skipped
    assert not torch.equal(weights[2], weights[3])
    assert torch.equal(weights, again)
    assert all(torch.equal(buffers[name], buffers_again[name]) for name in buffers)


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_locator_does_not_change_healthy_training(plugin: Any) -> None:
    weights = []
    for callbacks in ([], [NonFiniteLocator()]):
        model = Model(body)
        torch.manual_seed(7)
        fit(model, data(4), plugin(), callbacks=callbacks)
        assert model.runs == [0, 1, 2, 3]
        weights.append(torch.stack(model.weights))
    assert torch.equal(*weights)


class _Syncs(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.parametrize("automatic", [True, False])
def test_locator_adds_no_host_sync_to_healthy_steps(plugin: Any, automatic: bool) -> None:
    counts = []
    for callbacks in ([], [NonFiniteLocator()]):
        model, made = Model(automatic=automatic), plugin()
        with _Syncs() as syncs:
            fit(model, data(4), made, callbacks=callbacks)
        counts.append(syncs.count)
    assert counts[0] == counts[1]


def test_locator_holds_no_batch_after_a_step() -> None:
    class Looks(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            held.append(locator._step)

    held: list[Any] = []
    locator = NonFiniteLocator()
    fit(Looks(), data(3), None, callbacks=[locator])
    assert held == [None] * 3


# --- loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_locator_names_the_failed_batch_among_accumulated_batches(plugin: Any) -> None:
    model = infinite_at(4)()
    locator = locate(model, plugin(), accumulate_grad_batches=3, max_replays=1)
    (alarm,) = locator.alarms
    assert alarm.step == 1
    assert "Step 1, epoch 0, batch 4, rank 0: The loss is not finite. " in alarm.message
    assert (alarm.epoch, alarm.batch_idx, alarm.rank) == (0, 4, 0)
    assert model.runs == [0, 1, 2, 3, 4, 5, 4]


@pytest.mark.slow
def test_locator_searches_every_accumulated_batch_for_an_overflow() -> None:
    class Roots(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.runs.append(batch_idx)
            loss = self(batch["x"]).square().mean()
            return loss + torch.sqrt(self.head.weight * 0).sum() if batch_idx == 4 else loss

    model = Roots()
    locator = locate(model, BalancedAMP(), accumulate_grad_batches=3, max_replays=1, repeated=1)
    (alarm,) = locator.alarms
    assert "batch 4, rank 0: Gradients overflowed in this step. " in alarm.message
    assert model.runs == [0, 1, 2, 3, 4, 5, 3, 4, 4]  # the last at a loss scale of 1


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_locator_works_in_manual_optimization(plugin: Any) -> None:
    def overflow(model: Any, index: int) -> None:
        if index == 3:
            with torch.no_grad():
                model.body.fc2.weight.zero_()
                model.body.fc2.bias.fill_(1.0)
                model.head.weight.fill_(torch.finfo(model.head.weight.dtype).max)

    model = Model(change=overflow, automatic=False)
    (alarm,) = locate(model, plugin(), max_replays=1).alarms
    assert alarm.step == 3
    assert alarm.tensor == "head"
    assert model.runs == [0, 1, 2, 3, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
def test_locator_names_compiled_modules_without_their_wrapper() -> None:
    class Compiled(Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.body.compile(backend="eager")
            self.head = torch.compile(self.head, backend="eager")

    def overflow(model: Any, index: int) -> None:
        if index == 1:
            model.body.overflow()

    torch.compiler.reset()
    locator = locate(Compiled(change=overflow), BalancedAMP(), data(2), max_replays=1)
    assert [a.tensor for a in locator.alarms] == ["body.drop"]

    def spoil(model: Any, index: int) -> None:
        if index == 1:
            model.head.weight.data.fill_(torch.nan)

    locator = locate(Compiled(change=spoil), None, data(2), max_replays=1)
    assert [a.tensor for a in locator.alarms] == ["head.weight"]

    def explode(model: Any, index: int) -> None:
        if index == 1:
            model.head.weight.data.fill_(3e38)

    locator = locate(Compiled(change=explode), None, data(2), max_replays=1)
    assert [a.tensor for a in locator.alarms] == ["head"]
    torch.compiler.reset()


def test_locator_reports_a_step_that_cannot_be_replayed() -> None:
    class Once(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx in self.runs:
                raise ValueError("a generator\nthat is used up")
            return super().training_step(batch, batch_idx) * torch.nan

    (alarm,) = locate(Once(), max_replays=1).alarms
    assert "The replay failed with ValueError: a generator." in alarm.message


def test_locator_reports_a_failure_that_does_not_recur() -> None:
    class Fleeting(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            is_first = batch_idx not in self.runs
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if is_first and batch_idx == 1 else loss

    (alarm,) = locate(Fleeting(), max_replays=1).alarms
    assert "The replay of the step was finite." in alarm.message


# --- actions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_locator_stop_ends_training_before_the_step(plugin: Any, automatic: bool) -> None:
    model = infinite_at(2)(automatic=automatic, make_optimizer=torch.optim.Adam)
    trainer = fit(model, data(), plugin(), callbacks=[NonFiniteLocator(action="stop")])
    assert len(model.weights) == 3
    assert torch.equal(model.weights[2], model.weights[1])
    assert all(state["step"] == 2 for state in trainer.optimizers[0].state.values())
    assert trainer.global_step == 2


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_locator_raise_ends_training_with_the_alarm(plugin: Any) -> None:
    class Watch(pl.Callback):
        def on_exception(self, trainer: Any, model: Any, _: Any) -> None:
            model.on_train_batch_end()  # records the weights

    model, locator = infinite_at(2)(), NonFiniteLocator(action="raise")
    with pytest.raises(InstabilityError, match="made a loss of inf") as caught:
        fit(model, data(), plugin(), callbacks=[locator, Watch()])
    assert [caught.value.alarm] == locator.alarms
    assert len(model.weights) == 3
    assert torch.equal(model.weights[2], model.weights[1])


@pytest.mark.slow
def test_locator_replays_no_more_steps_than_allowed() -> None:
    model = infinite_at(0, 1, 2, 3)()
    locator = locate(model, BalancedAMP(), max_replays=2)
    assert locator.replays == 2
    assert model.runs == [0, 0, 1, 1, 2, 3, 4, 5]


def test_locator_logs_under_its_documented_name(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)

    def overflow(model: Any, index: int) -> None:
        if index == 3:
            model.body.overflow()

    model = Model(change=overflow)
    locate(model, BalancedAMP(), logger=logger, log_every_n_steps=1, max_replays=1)
    header, *lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("instability/non_finite")
    steps = header.split(",").index("step")
    cells = [line.split(",") for line in lines]
    logged = {row[steps]: float(row[column]) for row in cells if row[column]}
    assert logged == {"3": pytest.approx(64576, rel=1e-2)}


def test_locator_state_is_restored_from_a_checkpoint() -> None:
    locator = locate(infinite_at(2)(), BalancedAMP())
    other = NonFiniteLocator()
    other.load_state_dict(copy.deepcopy(locator.state_dict()))
    assert other.replays == 1
    assert other.alarms == locator.alarms
    assert other.state_dict() == locator.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_locator_is_instantiated_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n"
        "  - class_path: lightning_mp.callbacks.non_finite_locator.NonFiniteLocator\n"
        "    init_args: {repeated: 5, near_limit: 0.25, check_gradients: true, action: stop,\n"
        "      max_replays: 7, repeat_after_steps: 10}\n"
    )
    monkeypatch.setattr("sys.argv", ["train", "--config", str(config)])
    cli = LightningCLI(Model, run=False, save_config_callback=None, seed_everything_default=False)
    (locator,) = (c for c in cli.trainer.callbacks if isinstance(c, NonFiniteLocator))
    assert (locator.repeated, locator.near_limit, locator.check_gradients) == (5, 0.25, True)
    assert (locator.action, locator.max_replays, locator.repeat_after_steps) == ("stop", 7, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeated": 0},
        {"repeated": True},
        {"max_replays": 1.5},
        {"near_limit": 0},
        {"near_limit": 1.0},
        {"check_gradients": "yes"},
        {"action": "halt"},
        {"repeat_after_steps": 0},
    ],
)
def test_locator_error_names_the_wrong_argument(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=rf"NonFiniteLocator\({name}={value!r}\)"):
        NonFiniteLocator(**wrong)
