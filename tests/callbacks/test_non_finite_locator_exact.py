"""`NonFiniteLocator`: exactness of replays, and masks of -inf."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import BalancedAMP
from lightning_mp.callbacks._step.batches import copy_containers
from tests.callbacks.non_finite_models import WIDTH, Model, data, locate

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nan


class Body(nn.Sequential):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__(nn.Linear(8, WIDTH), *more)


# --- the batch -----------------------------------------------------------------------------------


class Pops(Model):
    """Removes its targets from the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch.pop("nested").pop())


def test_locator_replays_the_original_batch_that_the_step_empties() -> None:
    (alarm,) = locate(Pops(lambda: Body(Bad())), max_replays=1).alarms
    assert alarm.tensor == "body.1"
    assert "not exact" not in alarm.message


def test_locator_says_that_a_batch_changed_in_place_is_not_exact() -> None:
    class Scales(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["x"].mul_(0.5)
            loss = F.mse_loss(self(batch["x"]), batch["nested"][0])
            loss.register_hook(lambda gradient: gradient * torch.nan)
            return loss

    (alarm,) = locate(Scales(Body), loader=data(1)).alarms
    assert "The replay is not exact: its loss is " in alarm.message


@dataclass
class Fields:
    x: list[Tensor]


def test_copy_containers_copies_everything_except_tensors() -> None:
    x = torch.ones(2)
    batch = {"a": [x], "b": (x, {"c": x}), "d": Fields([x]), "e": UserDict(f=[x]), "g": "text"}
    copied = copy_containers(batch)
    batch["a"].clear()
    batch["b"][1].clear()
    batch["d"].x.clear()
    batch["e"]["f"].clear()
    batch.clear()
    assert copied.keys() == {"a", "b", "d", "e", "g"}
    kept = [copied["a"][0], *copied["b"][:1], copied["b"][1]["c"], copied["d"].x[0]]
    assert all(each is x for each in [*kept, copied["e"]["f"][0]])


# --- generators ----------------------------------------------------------------------------------


class Draws(nn.Module):
    """Returns NaN in some calls, which its own generator selects."""

    def __init__(self, generator: Any, draw: Any) -> None:
        super().__init__()
        self.generator, self.draw = generator, draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.nan if self.draw(self.generator) < 0.3 else 1.0)


def own_draw(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def test_locator_restores_the_generator_of_a_module() -> None:
    def body() -> Body:
        return Body(Draws(torch.Generator().manual_seed(0), own_draw))

    model = Model(body)
    locator = locate(model, max_replays=1)
    (alarm,) = locator.alarms
    assert alarm.tensor == "body.1"
    generator = torch.Generator().manual_seed(0)
    drawn = [own_draw(generator) for _ in range(6)]
    assert alarm.step == next(i for i, each in enumerate(drawn) if each < 0.3)
    after = model.body[1].generator.get_state()
    assert torch.equal(after, generator.get_state())  # training continues as without a replay


def test_locator_says_that_hidden_state_makes_the_replay_inexact() -> None:
    def body() -> Body:
        return Body(Draws([1.0, 1.0, 0.0, 1.0, 1.0], lambda hidden: hidden.pop(0)))

    (alarm,) = locate(Model(body), loader=data(3), max_replays=1).alarms
    assert "The replay of the step was finite. The replay is not exact" in alarm.message


# --- masks ---------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Masked logits: finite values, and -inf above the diagonal."""

    def __init__(self, fully: bool = False) -> None:
        super().__init__()
        self.fully = fully

    def forward(self, h: Tensor) -> Tensor:
        mask = torch.ones(len(h), len(h)).triu(0 if self.fully else 1).bool()
        return (h @ h.T).masked_fill(mask, -torch.inf)


class Attention(nn.Module):
    """Attends by a softmax that is a module or a function."""

    def __init__(self, softmax: nn.Module | None, fully: bool = False) -> None:
        super().__init__()
        self.scores, self.softmax = Scores(fully), softmax

    def forward(self, h: Tensor) -> Tensor:
        scores = self.scores(h)
        return (scores.softmax(-1) if self.softmax is None else self.softmax(scores)) @ h


@pytest.mark.parametrize("softmax", [None, nn.Softmax(-1)], ids=["function", "module"])
@pytest.mark.parametrize("last", [Bad(), None], ids=["module", "root"])
def test_locator_does_not_name_masked_logits(softmax: Any, last: Any) -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).mean() * (1.0 if last else torch.nan)

    model = Model(lambda: Body(Attention(softmax), *([last] if last else [])), loss_of=loss_of)
    (alarm,) = locate(model, max_replays=1).alarms
    assert alarm.tensor == ("body.2" if last else "Model")


@pytest.mark.parametrize("softmax", [None, nn.Softmax(-1)], ids=["function", "module"])
def test_locator_does_not_name_masked_logits_for_a_non_finite_backward(softmax: Any) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x * 0)

    model = Model(lambda: Body(Attention(softmax), Root()))
    (alarm,) = locate(model, max_replays=1).alarms
    assert alarm.tensor == "body.2"


def test_locator_names_the_softmax_of_a_fully_masked_row() -> None:
    model = Model(lambda: Body(Attention(nn.Softmax(-1), fully=True)))
    (alarm,) = locate(model, max_replays=1).alarms
    assert alarm.tensor == "body.1.softmax"
    assert "The -inf in its input `[0]` is a mask." in alarm.message


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("after", ["layer", "loss"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_locator_names_a_logarithm_of_zero(after: str, is_inside: bool) -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x.clamp(min=0))

    log = Residual(Log()) if is_inside else Log()
    model = Model(lambda: Body(log, *([nn.Linear(WIDTH, WIDTH)] if after == "layer" else [])))
    model.head = nn.Identity() if after == "loss" else model.head
    model.forward = lambda x: model.head(model.body(x)).sum(-1)  # type: ignore[method-assign]
    (alarm,) = locate(model, max_replays=1).alarms
    assert alarm.tensor == ("body.1.0" if is_inside else "body.1")


def test_locator_names_minus_inf_from_an_overflow() -> None:
    class Falls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0 - 300) * torch.linspace(1, 300, WIDTH).to(x.dtype)

    model = Model(lambda: Body(Falls(), nn.LayerNorm(WIDTH)))
    (alarm,) = locate(model, BalancedAMP(), max_replays=1).alarms
    assert alarm.tensor == "body.1"
    assert "float16" in alarm.message
