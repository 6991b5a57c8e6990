"""`ParameterMonitor` names parameters that do not train, and no others."""

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks import InstabilityWarning, ParameterMonitor
from lightning_mp.callbacks._rules.parameters import ParameterNumbers, ParameterRule
from tests.precision.models import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


class Model(pl.LightningModule):
    """A stem and a head that are trained for 80 steps.

    Args:
        frozen: Whether the stem is frozen, as a tower on purpose.
        apart: Whether stem and head have an optimizer each, and manual optimization.
        every: Number of steps between two gradients of the stem, as with alternating tasks.
    """

    def __init__(self, frozen: bool = False, apart: bool = False, every: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
        self.stem.requires_grad_(not frozen)
        self.automatic_optimization = not apart
        self.apart, self.every = apart, every

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(batch)
        x = x if batch_idx % self.every == self.every - 1 else x.detach()
        loss = (self.head(x.tanh()) - batch[:, :1]).square().mean()
        if self.apart:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        if self.apart:
            parts = self.stem, self.head
            return [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in parts]
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(640, 8), batch_size=8)


def kinds(monitor: ParameterMonitor) -> list[tuple[int, str, str | None]]:
    return [(alarm.step, alarm.kind, alarm.tensor) for alarm in monitor.alarms]


def watch(model: Model, patience: int = 50) -> ParameterMonitor:
    monitor = ParameterMonitor(every_n_steps=10, patience=patience)
    make_trainer(callbacks=monitor).fit(model)
    return monitor


@pytest.mark.parametrize(
    "options",
    [{}, {"apart": True}, {"every": 7}],
    ids=["plain", "two optimizers", "tasks in turn"],
)
def test_healthy_parameters_raise_no_alarm(options: dict[str, Any]) -> None:
    monitor = ParameterMonitor(every_n_steps=10)
    make_trainer(callbacks=monitor).fit(Model(**options))
    assert kinds(monitor) == []
    assert monitor.samples >= 8


def test_frozen_tower_in_an_optimizer_is_noted_once_without_a_warning() -> None:
    monitor = ParameterMonitor(every_n_steps=10, repeat_after_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstabilityWarning)
        make_trainer(callbacks=monitor).fit(Model(frozen=True))
    (note,) = monitor.alarms
    assert (note.step, note.kind, note.severity) == (0, "frozen_weights", "info")
    assert note.tensor == "stem.weight"
    assert monitor.samples >= 8


@pytest.mark.parametrize("plugin", [BalancedAMP, PureFP16, lambda: BalancedAMP(half="bf16")])
def test_healthy_parameters_in_half_precision_raise_no_alarm(plugin: Any) -> None:
    monitor = ParameterMonitor(every_n_steps=10)
    make_trainer(plugin(), callbacks=monitor).fit(Model())
    assert kinds(monitor) == []


def test_embedding_whose_first_rows_are_not_used_raises_no_alarm() -> None:
    class Tokens(Model):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Embedding(200, 16), nn.Linear(16, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            tokens = (100 + 30 * batch[:, 0].abs()).long().clamp(max=199)
            return (self.head(self.stem(tokens)) - batch[:, :1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    assert kinds(watch(Tokens(), patience=20)) == []


def test_imaginary_parts_of_complex_weights_are_compared() -> None:
    class Phase(Model):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Identity(), nn.Linear(8, 1)
            self.turn = nn.Parameter(torch.ones(400, dtype=torch.complex64))
            self.turn.register_hook(lambda gradient: 1j * torch.ones_like(gradient))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.head(batch).square().mean() + self.turn.real.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.head.parameters(), self.turn], lr=1e-2)

    assert kinds(watch(Phase(), patience=20)) == []


def test_branch_without_gradient_is_named_with_its_share() -> None:
    monitor = ParameterMonitor(patience=20, every_n_steps=10)
    make_trainer(callbacks=monitor).fit(Model(every=1000))
    (alarm,) = monitor.alarms
    assert (alarm.step, alarm.kind, alarm.tensor) == (20, "no_gradient", "stem.weight")
    assert alarm.value == pytest.approx(288 / 321)
    assert "2 of 4 parameters, 90% of the values" in alarm.message


class _Edited(Model):
    """Calls `edit` before the batch 30; the optimizer holds what trains at the start."""

    def edit(self) -> None: ...

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 30:
            self.edit()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_layer_unfrozen_in_training_that_no_optimizer_holds_is_named() -> None:
    class Unfreezes(_Edited):
        def edit(self) -> None:
            self.stem.requires_grad_(True)

    assert kinds(watch(Unfreezes(frozen=True))) == [(50, "not_optimized", "stem.weight")]


def test_layer_replaced_in_training_that_no_optimizer_holds_is_named() -> None:
    class Replaces(_Edited):
        def edit(self) -> None:
            self.head = nn.Sequential(nn.Linear(32, 1))

    assert (50, "not_optimized", "head.0.weight") in kinds(watch(Replaces()))


def test_layer_that_joins_an_optimizer_in_training_raises_no_alarm() -> None:
    class Joins(_Edited):
        def edit(self) -> None:
            self.optimizers().add_param_group({"params": list(self.stem.parameters())})

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.head.parameters(), lr=1e-2)

    assert kinds(watch(Joins())) == []


def test_parameters_of_a_replaced_layer_in_the_optimizer_raise_no_alarm() -> None:
    class Replaces(_Edited):
        def edit(self) -> None:
            self.stem = nn.Linear(8, 32)
            self.optimizers().add_param_group({"params": list(self.stem.parameters())})

    assert kinds(watch(Replaces(), patience=20)) == []


def test_layer_added_in_training_without_a_gradient_is_named() -> None:
    class Grows(_Edited):
        def edit(self) -> None:
            self.unused = nn.Linear(32, 32)
            self.optimizers().add_param_group({"params": list(self.unused.parameters())})

    found = kinds(watch(Grows(), patience=30))
    assert [(kind, name) for _, kind, name in found] == [("no_gradient", "unused.weight")]


def test_share_at_the_limit_raises_no_alarm() -> None:
    monitor = ParameterMonitor(patience=20, every_n_steps=10, max_untrained=0.9)
    make_trainer(callbacks=monitor).fit(Model(every=1000))
    assert kinds(monitor) == []


def test_state_is_restored_from_a_checkpoint() -> None:
    monitor, other = ParameterMonitor(every_n_steps=10), ParameterMonitor(every_n_steps=10)
    make_trainer(callbacks=monitor).fit(Model())
    other.load_state_dict(monitor.state_dict())
    assert other.state_dict() == monitor.state_dict()
    assert other._rule._first.keys() == {"stem.weight", "head.weight"}


def sample(name: str = "w", **values: Any) -> ParameterNumbers:
    usual: dict[str, Any] = {
        **{"numel": 100, "weight_norm": 1.0, "gradient_norm": 1e-3, "has_gradient": True},
        **{"had_gradient": True, "is_changed": True, "is_matrix": True, "rate": 1e-3},
    }
    return ParameterNumbers(name, **{**usual, **values})


def rule() -> ParameterRule:
    return ParameterRule(
        patience=50, max_untrained=0.1, min_gradient=1e-8, min_weight=0.01, max_weight=30.0
    )


def test_vanishing_gradient_is_relative_to_the_largest_gradient() -> None:
    judge, said = rule(), []
    for step in range(6):
        said += judge.judge(step, [sample("first", gradient_norm=1e-12), sample("last")])
    assert [(v.kind, v.tensor, v.numbers["largest"]) for v in said] == 2 * [
        ("vanishing_gradients", "first", "last")
    ]


def test_lora_that_starts_at_zero_raises_no_alarm() -> None:
    judge = rule()
    for step in range(200):
        up = sample("lora_B", weight_norm=1e-3 * step)
        down = sample("lora_A", gradient_norm=1e-6 * step)
        assert judge.judge(step, [up, down]) == []


@pytest.mark.parametrize(
    ("norm", "kind", "limit"),
    [(0.05, "weight_collapse", 0.01), (500.0, "weight_growth", 30.0), (20.0, None, None)],
)
def test_size_of_weights_is_compared_with_their_earlier_size(
    norm: float, kind: str | None, limit: float | None
) -> None:
    judge = rule()
    for size in (10.0, math.inf, math.nan):
        judge.judge(0, [sample(weight_norm=size)])
    vector = sample("bias", is_matrix=False, weight_norm=norm)
    assert judge.judge(1, [sample(weight_norm=norm), vector]) == []
    found = judge.judge(2, [sample(weight_norm=norm), vector])
    assert [(v.kind, v.threshold) for v in found] == ([(kind, limit)] if kind else [])


def test_gradients_are_relative_to_weights() -> None:
    judge, said = rule(), []
    for step in range(4):
        small = sample("small", weight_norm=1e-6, gradient_norm=1e-12)
        vector = sample("bias", gradient_norm=1e-12, is_matrix=False)
        said += judge.judge(step, [small, vector, sample("last")])
    assert said == []
    for step in range(4, 9):
        said += judge.judge(step, [sample("faint", gradient_norm=1e-12), sample("last")])
    assert {v.tensor for v in said} == {"faint"}
    assert said[0].value == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("rate", "tags", "stated"),
    [
        (0.0, ("no rate",), 0.0),
        (1e-9, (), 1e-9),
        (torch.tensor(1e-9), (), pytest.approx(1e-9)),
        (torch.tensor(0.0), ("no rate",), 0.0),
        (None, ("unknown rate",), 0.0),  # an optimizer without learning rate
    ],
)
def test_weights_that_do_not_change_state_their_learning_rate(
    rate: Any, tags: tuple[str, ...], stated: float
) -> None:
    judge = rule()
    for step in (10, 59):
        assert judge.judge(step, [sample(is_changed=False, rate=rate)]) == []
    (found,) = judge.judge(60, [sample(is_changed=False, rate=rate)])
    assert (found.kind, found.value, found.tags) == ("unchanged_weights", 1.0, tags)
    assert found.numbers["rate"] == stated
    assert judge.judge(70, [sample(rate=rate)]) == []
    assert judge.judge(120, [sample(is_changed=None, rate=rate)]) == []  # unknown
    assert judge.judge(169, [sample(is_changed=False, rate=rate)]) == []


@pytest.mark.parametrize(
    ("had", "has", "is_dead"),
    [(True, True, True), (True, False, False), (False, False, True)],
    ids=["a gradient of zero", "a gradient in other steps", "no gradient"],
)
def test_gradient_counts_if_any_step_has_one_that_is_not_zero(
    had: bool, has: bool, is_dead: bool
) -> None:
    judge = rule()
    none = sample(gradient_norm=0.0, had_gradient=had, has_gradient=has)
    found = [v.kind for step in (0, 50) for v in judge.judge(step, [none])]
    assert found == ["no_gradient"] * is_dead
    judge = rule()
    assert [judge.judge(step, [each]) for step, each in ((0, sample()), (50, none))] == [[], []]
