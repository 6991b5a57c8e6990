"""`NonFiniteLocator` says what is finite around the source, in the forward and in the backward."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import BalancedAMP
from tests.callbacks.non_finite_models import WIDTH, Model, data, locate

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")


class Leaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nan


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.nan


class Passes(Container):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * torch.nan)


class Named(Container):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"mean": self.inner(x), "spread": x.log() * 0 + torch.nan}


class Mean(nn.Module):
    def forward(self, named: dict[str, Tensor]) -> Tensor:
        return named["mean"] + named["spread"]


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0)


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e25


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 0 + torch.sqrt(self.weight)


INPUTS = "Its inputs are finite: at most N in float32 (limit N)."
OUTPUT = "The gradient of its output is finite: at most N in float32 (limit N)."
INSIDE = "None of its submodules made this value."


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Leaf, f"`body.1` (Leaf) made NaN in the forward. {INPUTS} Look"),
        (Container, f"`body.1` (Container) made NaN in the forward. {INPUTS} {INSIDE} Look"),
        (
            Passes,
            "`body.1` (Passes) made NaN in the forward and passed it to `body.1.inner`. "
            f"{INPUTS} {INSIDE} Look",
        ),
        (
            lambda: nn.Sequential(Named(), Mean()),
            "`body.1.0` (Named) made NaN in the forward, in `['spread']` of its output. "
            f"{INPUTS} {INSIDE} Look",
        ),
        (
            Root,
            f"`body.1` (Root) made NaN in the backward. {OUTPUT} "
            "The gradient of its input is not finite. Look",
        ),
        (
            Scale,
            f"`body.1` (Scale) made inf in the backward. {OUTPUT} "
            "The gradient of `body.1.weight` is not finite. Look",
        ),
    ],
)
def test_alarm_states_what_is_finite_around_the_source(
    layer: Callable[[], nn.Module], said: str
) -> None:
    def body() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, WIDTH), layer(), nn.Linear(WIDTH, WIDTH))

    (alarm,) = locate(Model(body), max_replays=1).alarms
    assert said in re.sub(r"(?<=most |imit )[\d.e+-]+", "N", alarm.message)


def test_large_values_whose_squares_overflow_are_blamed_on_weights_or_data() -> None:
    def body() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, WIDTH), Large(), nn.LayerNorm(WIDTH))

    (alarm,) = locate(Model(body), max_replays=1).alarms
    assert alarm.tensor == "body.2"
    assert "such values overflow. Smaller initial weights, a lower learning rate" in alarm.message


@pytest.mark.parametrize("plugin", [None, BalancedAMP(half="fp16", loss_scale=1.0, device="cpu")])
def test_code_of_the_loss_may_overflow_on_half_precision_outputs(
    plugin: BalancedAMP | None,
) -> None:
    model = Model(
        lambda: nn.Linear(8, WIDTH), loss_of=lambda out, _: (out - out.detach()).log().sum()
    )
    alarm = locate(model, plugin, max_replays=1).alarms[0]
    assert "a division by 0 (as of a cross-entropy without labels)" in alarm.remedy
    assert ("Sums and products of fp16 outputs" in alarm.remedy) == (plugin is not None)


def test_first_row_with_nan_in_the_batch_is_named() -> None:
    loader = data(bad=lambda x: x[3 * 8 + 5 :, 2].fill_(torch.nan))
    (alarm,) = locate(Model(), loader=loader, max_replays=1).alarms
    assert (alarm.batch_idx, alarm.tensor) == (3, "batch['x']")
    assert "The first such value is in row 5 of the batch" in alarm.message


def test_alarm_names_the_loss_if_only_its_derivative_is_not_finite() -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return torch.sqrt((out - y).square().mean() * 0)

    (alarm,) = locate(Model(lambda: nn.Linear(8, WIDTH), loss_of=loss_of), max_replays=1).alarms
    assert "The loss computation in `training_step` of the root `Model` made NaN" in alarm.message
    assert "The loss is finite, and no submodule made this gradient." in alarm.message
