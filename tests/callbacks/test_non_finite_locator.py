"""`NonFiniteLocator` finds failures that are planted in a known place."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks.monitor import InstabilityWarning
from tests.callbacks.non_finite_models import WIDTH, Model, Perceptron, data, locate, mixed

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")


def overflow_at_three(model: Any, index: int) -> None:
    if index == 3:
        model.body.overflow()


FP16 = {
    "balanced": BalancedAMP,
    "full": lambda: BalancedAMP(weights="full"),
    "pure": lambda: PureFP16(inf_clamp=[]),
    "16-mixed": mixed,
}


# --- the forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", FP16.values(), ids=FP16)
def test_locator_names_an_overflowing_dropout_and_the_layer_before_it(plugin: Any) -> None:
    locator = locate(Model(change=overflow_at_three), plugin(), max_replays=1)
    (alarm,) = locator.alarms
    assert alarm.step == 3
    assert alarm.tensor == "body.drop"
    assert alarm.kind == "non_finite"
    assert alarm.threshold == 65504
    assert alarm.value == pytest.approx(64576, rel=1e-2)  # the finite input
    for words in ("Step 3, ", "batch 3", "`body.drop` (Dropout) made inf in the forward"):
        assert words in alarm.message
    assert "values near the limit: `body.fc2` (weight 60000, output 64" in alarm.message
    assert "body.fc1" not in alarm.message
    assert "inf_clamp=['body.drop']" in alarm.remedy


@pytest.mark.parametrize("plugin", [BalancedAMP, PureFP16])
def test_remedy_extends_the_modules_that_the_user_has_chosen(plugin: Any) -> None:
    chosen = plugin(fp32_modules=["norm", "head"], inf_clamp=["body.fc1"])
    (alarm,) = locate(Model(change=overflow_at_three), chosen, max_replays=1).alarms
    assert f"`{plugin.__name__}(fp32_modules=['norm', 'head', 'body.drop'])`" in alarm.remedy
    assert f"`{plugin.__name__}(inf_clamp=['body.fc1', 'body.drop'])`" in alarm.remedy
    (alarm,) = locate(Model(change=overflow_at_three), PureFP16(inf_clamp=[])).alarms
    assert "`PureFP16(fp32_modules=['body.drop'])`" in alarm.remedy


def test_remedy_names_no_clamp_that_the_plugin_does_not_take() -> None:
    class Sharded(BalancedAMP):  # as `FSDPBalancedAMP`
        def __init__(self) -> None:
            super().__init__(half="fp16")

    (alarm,) = locate(Model(change=overflow_at_three), Sharded(), max_replays=1).alarms
    assert "fp32_modules=" in alarm.remedy
    assert "inf_clamp" not in alarm.remedy


@pytest.mark.parametrize("name", ["balanced", "pure"])
def test_locator_remedies_for_an_overflowing_dropout_keep_the_loss_finite(name: str) -> None:
    class Clamped(Model):
        def on_before_backward(self, loss: Tensor) -> None:
            losses.append(loss.item())

    plugin = BalancedAMP if name == "balanced" else PureFP16
    for remedy in ({"inf_clamp": ["body.drop"]}, {"half": "bf16", "inf_clamp": []}):
        losses: list[float] = []
        locate(Clamped(change=overflow_at_three), plugin(**remedy), data(4))
        assert len(losses) == 4
        assert all(torch.isfinite(torch.tensor(losses)))


class Makes(nn.Module):
    """Returns an overflowing product in a given container."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x, torch.exp(x.float() * 0 + 200))  # e^200 > 3.4e38


class Uses(nn.Module):
    """Unwraps the output of `Makes`."""

    def __init__(self, wrap: Any, unwrap: Any) -> None:
        super().__init__()
        self.fc, self.makes = nn.Linear(8, WIDTH), Makes(wrap)
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h + self.unwrap(self.makes(h))


class Pair(NamedTuple):
    good: Tensor
    bad: Tensor


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None
    extra: Tensor | None = None


@dataclass
class Plain:
    good: Tensor
    bad: Tensor


WRAPPINGS = {
    "dict": (lambda g, b: {"good": g, "bad": b}, lambda o: o["bad"], "['bad']"),
    "ordered": (lambda g, b: OrderedDict(good=g, bad=b), lambda o: o["bad"], "['bad']"),
    "tuple": (lambda g, b: (g, b), lambda o: o[1], "[1]"),
    "namedtuple": (Pair, lambda o: o.bad, ".bad"),
    "nested": (lambda g, b: [g, {"deep": (g, [b])}], lambda o: o[1]["deep"][1][0], "[1]['deep']"),
    "dataclass": (Plain, lambda o: o.bad, ".bad"),
    "model output": (lambda g, b: Output(hidden=g, extra=b), lambda o: o.extra, "['extra']"),
}


@pytest.mark.parametrize(("wrap", "unwrap", "path"), WRAPPINGS.values(), ids=WRAPPINGS)
def test_locator_finds_inf_inside_an_output(wrap: Any, unwrap: Any, path: str) -> None:
    locator = locate(Model(lambda: Uses(wrap, unwrap)), max_replays=1)
    (alarm,) = locator.alarms
    assert (alarm.step, alarm.tensor) == (0, "body.makes")
    assert f" in `{path}" in alarm.message
    assert "3.40282e+38" in alarm.message


def test_locator_finds_inf_in_complex_numbers() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.makes, self.back = nn.Linear(8, WIDTH), Transform(), Back()

        def forward(self, x: Tensor) -> Tensor:
            return self.back(self.makes(self.fc(x)))

    class Transform(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x) * 1e38 * 1e5

    class Back(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return torch.fft.irfft(z)

    (alarm,) = locate(Model(Spectral), max_replays=1).alarms
    assert (alarm.step, alarm.tensor) == (0, "body.makes")


def test_locator_finds_inf_in_a_dict_that_only_the_loss_reads() -> None:
    class Reads(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h = self.body.fc(batch["x"])
            return (self.head(h) * self.body.makes(h)["bad"].mean()).mean()

    body = Uses(lambda g, b: {"good": g, "bad": b}, None)
    (alarm,) = locate(Reads(lambda: body), max_replays=1).alarms
    assert alarm.tensor == "body.makes"
    assert "['bad']" in alarm.message


def test_locator_names_the_root_for_a_non_finite_loss_of_finite_outputs() -> None:
    model = Model(loss_of=lambda out, y: (out - y).mean() / torch.zeros(()))
    (alarm,) = locate(model, max_replays=1).alarms
    assert alarm.tensor == "Model"
    assert "a loss of inf in the forward, outside its submodules." in alarm.message


@pytest.mark.slow
def test_locator_names_the_root_for_inf_in_its_own_forward() -> None:
    class Root(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.exp(self.body(x).abs() + 100)).float().flatten()

    for plugin, step in ((None, 0), (BalancedAMP(), 0)):
        (alarm,) = locate(Root(), plugin, max_replays=1).alarms
        assert (alarm.step, alarm.tensor) == (step, "Root")
        assert (
            "The root `Root` itself made inf in the forward and passed it to `head`."
            in alarm.message
        )


def test_locator_names_the_root_for_inf_between_submodules() -> None:
    class Between(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.head(torch.exp(self.body(batch["x"]).abs() + 100)).sum()

    (alarm,) = locate(Between(), max_replays=1).alarms
    assert alarm.tensor == "Between"
    assert "made inf in the forward, outside its submodules, and passed it to `head`." in (
        alarm.message
    )


def test_locator_does_not_name_a_module_that_receives_inf() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                nn.Linear(8, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), Perceptron()),
            )
            self.log = Log()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.log(self.first(x)))  # the norm returns NaN as well

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x.abs() * 0)

    (alarm,) = locate(Model(Late), max_replays=1).alarms
    assert alarm.tensor == "body.log"


# --- batch and parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("plugin", [None, BalancedAMP])
def test_locator_names_the_path_of_a_bad_value_in_the_batch(value: float, plugin: Any) -> None:
    def spoil(x: Tensor) -> None:
        x[4 * 8 + 2, 3] = value

    model = Model(lambda: nn.Linear(8, WIDTH))
    locator = locate(model, plugin and plugin(), data(bad=spoil), max_replays=1)
    (alarm,) = locator.alarms
    assert (alarm.step, alarm.tensor) == (4, "batch['x']")
    assert f"held {'NaN' if value != value else 'inf'} when it came" in alarm.message
    assert "nan_to_num" in alarm.remedy


@pytest.mark.parametrize(
    "part",
    [
        torch.eye(8).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3, 2)] * 8, layout=torch.jagged),
    ],
    ids=["sparse", "nested"],
)
def test_locator_accepts_sparse_and_nested_tensors_in_the_batch(part: Tensor) -> None:
    class WithPart(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    loader = DataLoader([(batch, part) for batch in data(2)], batch_size=None)
    model = WithPart(loss_of=lambda out, y: (out - y).square().mean() * torch.inf)
    (alarm,) = locate(model, loader=loader).alarms
    assert alarm.tensor == "WithPart"


def test_locator_ignores_nan_in_an_unused_part_of_the_batch() -> None:
    class Ignores(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch["nested"][0].isnan().any()
            return self.body(batch["x"]).sum()

    def spoil(x: Tensor) -> None:
        torch.nn.init.zeros_(x)

    body = Uses(lambda g, b: {"bad": b}, lambda o: o["bad"])
    loader = data(2, bad=spoil)
    loader.dataset.tensors[1].fill_(torch.nan)
    (alarm,) = locate(Ignores(lambda: body), None, loader, max_replays=1).alarms
    assert alarm.tensor == "body.makes"


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [None, BalancedAMP, mixed])
def test_locator_names_a_parameter_that_was_non_finite_before_the_step(plugin: Any) -> None:
    def spoil(model: Any, index: int) -> None:
        if index == 2:
            with torch.no_grad():
                model.body.fc1.weight[1, 2] = torch.nan

    (alarm,) = locate(Model(change=spoil), plugin and plugin(), max_replays=1).alarms
    assert (alarm.step, alarm.tensor) == (2, "body.fc1.weight")
    assert "held NaN before the step" in alarm.message


def test_locator_names_a_non_finite_buffer_and_its_module() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, WIDTH)
            self.register_buffer("table", torch.full((WIDTH,), torch.nan))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + self.table

    (alarm,) = locate(Model(Table), max_replays=1).alarms
    assert alarm.tensor == "body"
    assert "Its buffer `body.table` held NaN." in alarm.message


@pytest.mark.slow
def test_locator_warns_once() -> None:
    with pytest.warns(InstabilityWarning, match="rank 0: The loss is not finite. ") as caught:
        locate(Model(change=overflow_at_three), BalancedAMP(), max_replays=2)
    assert len([each for each in caught if each.category is InstabilityWarning]) == 1


class Attention(nn.Module):
    """Attends under a mask of 0 and -inf; with `fully`, a masked row makes softmax return NaN."""

    def __init__(self, fully: bool) -> None:
        super().__init__()
        self.fc, self.fully = nn.Linear(8, WIDTH), fully
        self.attend, self.out = Attend(), Overflows(not fully)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        mask = torch.zeros(len(h), len(h)).masked_fill_(torch.eye(len(h)).bool(), -torch.inf)
        if self.fully:
            mask[0] = -torch.inf
        return self.out(self.attend(h, mask=mask))


class Attend(nn.Module):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return (h @ h.T + mask).softmax(dim=-1) @ h


class Overflows(nn.Module):
    def __init__(self, really: bool) -> None:
        super().__init__()
        self.really = really

    def forward(self, h: Tensor) -> Tensor:
        return h * 1e38 * 1e38 if self.really else h


def test_locator_does_not_name_a_mask_of_minus_inf() -> None:
    (alarm,) = locate(Model(lambda: Attention(False)), max_replays=1).alarms
    assert alarm.tensor == "body.out"


def test_locator_names_attention_with_a_fully_masked_row_and_its_mask() -> None:
    (alarm,) = locate(Model(lambda: Attention(True)), max_replays=1).alarms
    assert alarm.tensor == "body.attend"
    assert "made NaN in the forward" in alarm.message
    assert "The -inf in its input `['mask']` is a mask." in alarm.message


def test_locator_reports_an_infinite_loss_with_finite_gradients() -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean() + torch.inf

    model, plugin = Model(loss_of=loss_of), BalancedAMP()
    (alarm,) = locate(model, plugin, data(2), max_replays=1).alarms
    assert plugin.scaler.skipped_steps == 0
    assert (alarm.step, alarm.tensor) == (0, "Model")
    assert model.runs == [0, 0, 1]
