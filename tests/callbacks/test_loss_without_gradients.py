"""The loss of every step is judged, even if the optimizer's parameters have no gradient."""

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mp import InstabilityError, SpikeGuard
from tests.callbacks.spike_models import PlantedModel, StepRecorder, fit, kinds, make_batches
from tests.callbacks.test_step_facts import Keeps
from tests.processes import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_mp.callbacks.monitor.InstabilityWarning",
    "ignore:.SpikeGuard.action='skip'.. reads one flag",
    "ignore:`training_step` returned `None`",
    "ignore:`LightningModule.configure_optimizers` returned `None`",
)

BAD = 40


class Elsewhere(PlantedModel):
    """Has an optimizer whose parameters get no gradient."""

    def __init__(self, planted: dict[int, str] | None = None, **options: Any) -> None:
        super().__init__(planted, **options)
        self.idle = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return SGD(self.idle.parameters(), lr=0.1)


def quick(**options: Any) -> SpikeGuard:
    return SpikeGuard(window_steps=32, judge_after_steps=16, **options)


@pytest.mark.parametrize("planted", ["nan", "explosion"])
@pytest.mark.parametrize("action", ["warn", "skip", "stop", "raise", "rewind"])
def test_loss_without_gradients_for_the_optimizer_is_judged(
    tmp_path: Path, action: Any, planted: str
) -> None:
    options = {"rewind_steps": 10, "checkpoint_every_n_steps": 10, "skip_batches": 15}
    guard = quick(action=action, **(options if action == "rewind" else {}))
    model = Elsewhere({BAD: planted})
    with pytest.raises(InstabilityError) if action == "raise" else nullcontext():
        fit(model, make_batches(60), guard, default_root_dir=tmp_path)
    kind = "non_finite_loss" if planted == "nan" else "loss_spike"
    follows = [(BAD, "rewind_to_step")] if action == "rewind" else []
    assert kinds(guard) == [(BAD, kind), *follows]
    is_over = action in ("stop", "raise")
    assert model.seen[-1] == (BAD if is_over else 59)
    assert (BAD + 1 in model.seen) == (action in ("warn", "skip"))


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_loss_that_is_nan_from_the_start_ends_training_at_once(action: Any) -> None:
    guard, model = quick(action=action), Elsewhere(dict.fromkeys(range(60), "nan"))
    with pytest.raises(InstabilityError) if action == "raise" else nullcontext():
        fit(model, make_batches(60), guard)
    assert model.seen == [0]
    assert guard.alarms[0].value is not None
    assert math.isnan(guard.alarms[0].value)


def test_stalled_loss_without_gradients_raises_an_alarm() -> None:
    class Rises(Elsewhere):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (9 if 4 <= batch_idx < 20 else 1)

    guard = quick(patience=200)
    fit(Rises(), make_batches(140), guard)
    assert "stalled_loss" in [kind for _, kind in kinds(guard)]


class Sometimes(PlantedModel):
    """Returns no loss for every third batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 2 else loss


def test_step_without_a_loss_has_no_loss_in_its_facts() -> None:
    guard, keeps = quick(action="stop"), Keeps()
    moved = StepRecorder()
    fit(Sometimes(), make_batches(30), guard, keeps, moved, log_every_n_steps=1)
    losses = [facts.loss for facts in keeps.facts]
    assert [loss is None for loss in losses] == [step % 3 == 2 for step in range(30)]
    assert [facts.gradient_norm is None for facts in keeps.facts] == [x is None for x in losses]
    assert kinds(guard) == []
    assert [step for step, _ in guard.history.curves["loss"]] == [s for s in range(30) if s % 3 < 2]


class SometimesByHand(PlantedModel):
    """Makes every third step without a backward, because no rank may return `None`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx % 3 < 2:
            self.manual_backward(super().training_step(batch, batch_idx))
        else:
            self.seen.append(batch_idx)
        self.optimizers().step()  # type: ignore[union-attr]
        self.zero_grad()


def train(rank: int, kind: str) -> Any:
    warnings.simplefilter("ignore")
    model: Any = {"nan": Elsewhere({BAD: "nan"}), "sometimes": SometimesByHand()}[kind]
    guard, keeps = quick(action="stop"), Keeps()
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}
    fit(model, make_batches(120)[rank::2], guard, keeps, use_distributed_sampler=False, **options)
    curve = guard.history.curves.get("loss", [])
    return kinds(guard), model.seen[-1], [f.loss for f in keeps.facts], curve


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_without_gradients_are_judged_on_all_ranks_and_missing_losses_are_not() -> None:
    for events, last, losses, _ in run_ranks(train, 2, "nan"):
        assert events == [(BAD, "non_finite_loss")]
        assert last == BAD
        assert all(loss is not None for loss in losses)
    for events, last, losses, curve in run_ranks(train, 2, "sometimes"):
        assert (events, last) == ([], 59)
        assert [loss is None for loss in losses] == [step % 3 == 2 for step in range(60)]
        assert [step for step, _ in curve] == [s for s in range(60) if s % 3 < 2]


def test_module_without_an_optimizer_has_its_loss_judged() -> None:
    class Frozen(PlantedModel):
        def configure_optimizers(self) -> None:
            return None

    guard = quick(action="stop")
    model = Frozen({BAD: "nan"})
    fit(model, make_batches(60), guard)
    assert kinds(guard) == [(BAD, "non_finite_loss")]
    assert model.seen[-1] == BAD
    assert torch.isfinite(model.net[0].weight).all()
