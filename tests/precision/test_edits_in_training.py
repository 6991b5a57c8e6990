"""Optimizers, schedules, layers and weights that are replaced during training."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import SGD, AdamW

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16, SafeAdamW
from tests.precision.models import Regression, fit, loader, make_trainer, parameters_of, relative

SCALE = LossScaleConfig(init_scale=2.0**10)
# A step of a half weight is rounded by 2^-11 or 2^-8; the runs take 8 steps.
BOUND = {torch.float16: 2**-7, torch.bfloat16: 2**-4}
plugins = pytest.mark.parametrize(
    "make_plugin",
    [
        lambda: BalancedAMP(loss_scale=SCALE),
        lambda: BalancedAMP(half="bf16"),
        lambda: PureFP16(loss_scale=SCALE),
        lambda: PureFP16(half="bf16"),
    ],
    ids=["BalancedAMP-fp16", "BalancedAMP-bf16", "PureFP16-fp16", "PureFP16-bf16"],
)


def trained_as_in_fp32(make_model: Callable[[], Regression], plugin: Any) -> Regression:
    """Return a model that has trained under a plugin, after a comparison with fp32."""
    plain, model = make_model(), make_model()
    start = parameters_of(plain)
    fit(plain, None, loader(8))
    fit(model, plugin, loader(8))
    if len(start) != len(parameters_of(plain)):  # a layer has grown
        start = plain.start
    assert relative(model, plain, start) < BOUND[plugin.half_dtype]
    return model


class _Edited(Regression):
    """Calls `edit` after the third batch."""

    start: Tensor

    def edit(self) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.losses) == 3:
            torch.manual_seed(1)
            self.edit()
            self.start = parameters_of(self)


# --- optimizers and schedules --------------------------------------------------------------------


class _NewHead(_Edited):
    def edit(self) -> None:
        self.network[3] = nn.Linear(16, 1)
        self.trainer.strategy.setup_optimizers(self.trainer)


class _NewOptimizers(_Edited):
    def edit(self) -> None:
        self.network[3] = nn.Linear(16, 1)
        self.trainer.optimizers = [self.configure_optimizers()]


@plugins
@pytest.mark.parametrize("kind", [_NewHead, _NewOptimizers])
@pytest.mark.parametrize(
    "optimizer",
    [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: SafeAdamW(p, lr=1e-2, eps=1e-3)],
    ids=["SGD", "SafeAdamW"],
)
def test_layer_replaced_with_new_optimizers_trains_as_in_fp32(
    make_plugin: Any, kind: type[_Edited], optimizer: Any
) -> None:
    trained_as_in_fp32(lambda: kind(make_optimizer=optimizer), make_plugin())


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_new_schedules_wait_for_skipped_steps(make_plugin: Any) -> None:
    class NewSchedules(_Edited):
        def edit(self) -> None:
            self.trainer.strategy.setup_optimizers(self.trainer)

    model = NewSchedules(interval="step", bad_batches=[4, 5])
    trainer = fit(model, make_plugin(loss_scale=SCALE), loader(8))
    # Of the steps 3 to 7 of the new schedule, two are skipped.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**3)


def test_epsilon_of_new_optimizers_is_checked() -> None:
    class Replaces(_Edited):
        def edit(self) -> None:
            self.trainer.optimizers = [AdamW(self.parameters(), lr=1e-3, eps=1e-8)]

    model = Replaces()
    trainer = fit(model, BalancedAMP(adam_epsilon=1e-5), loader(8))
    assert trainer.optimizers[0].param_groups[0]["eps"] == 1e-5


# --- layers and weights --------------------------------------------------------------------------


@plugins
def test_batch_norm_added_in_training_trains_as_in_fp32(make_plugin: Any) -> None:
    class Grows(_Edited):
        def edit(self) -> None:
            added = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 1))
            self.network[3] = added
            self.optimizers().param_groups[0]["params"] = list(self.parameters())

    trained_as_in_fp32(Grows, make_plugin())


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
@pytest.mark.parametrize("name", ["network.3", "Linear"])
def test_layer_that_replaces_a_module_of_fp32_modules_computes_in_fp32(
    make_plugin: Any, name: str
) -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    class Replaces(_Edited):
        def edit(self) -> None:
            self.network[3] = nn.Linear(16, 1)
            self.network[3].register_forward_hook(self.note)
            self.optimizers().param_groups[0]["params"] = list(self.parameters())

        def note(self, head: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
            # 1 + 2^-14 is a number of fp32, but not of fp16.
            with torch.no_grad():
                fine = torch.full((1, 16), 1 + 2.0**-14, dtype=torch.float32)
                product = head.forward(fine).double()
            exact = head.weight.double().sum() * (1 + 2.0**-14) + head.bias.double()
            seen.append(((product - exact).abs().item() < 1e-6, head.weight.dtype))

    fit(Replaces(), make_plugin(loss_scale=SCALE, fp32_modules=["norm", name]), loader(8))
    assert set(seen) == {(True, torch.float32)}


class _Recurrent(nn.Module):
    """A recurrent layer that starts from an fp32 state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 16, dtype=torch.float32)
        return self.layer(x[:, None], state)[0][:, 0]


@plugins
def test_recurrent_layer_added_in_training_trains_as_in_fp32(make_plugin: Any) -> None:
    class Grows(_Edited):
        def edit(self) -> None:
            self.network[3] = nn.Sequential(_Recurrent(), nn.Linear(16, 1))
            self.optimizers().param_groups[0]["params"] = list(self.parameters())

    trained_as_in_fp32(Grows, make_plugin())


class _Parametrized(Regression):
    """Parametrizes a weight between two batches."""

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.before = self.network.state_dict()["3.weight"].clone()
            register_parametrization(self.network[3], "weight", nn.Identity())

    def on_before_zero_grad(self, *_: Any) -> None:
        state = self.network.state_dict()
        if not hasattr(self, "after") and "3.parametrizations.weight.original" in state:
            self.after = state["3.parametrizations.weight.original"]


def test_weight_that_is_parametrized_in_training_keeps_its_residual() -> None:
    model = _Parametrized()
    fit(model, PureFP16(), loader(4))
    assert torch.equal(model.after, model.before)
    assert not torch.equal(model.before, model.before.half().float())


def test_removed_module_of_fp32_modules_does_not_end_training() -> None:
    class Removes(_Edited):
        def edit(self) -> None:
            self.network[1] = nn.Tanh()

    for plugin in (BalancedAMP, PureFP16):
        trained_as_in_fp32(Removes, plugin(loss_scale=SCALE, fp32_modules=["norm", "GELU"]))


@plugins
@pytest.mark.parametrize(
    "optimizer",
    [lambda p: SGD(p, lr=0.1), lambda p: SafeAdamW(p, lr=1e-2, eps=1e-3)],
    ids=["SGD", "SafeAdamW"],
)
def test_weight_resized_through_data_trains_as_in_fp32(make_plugin: Any, optimizer: Any) -> None:
    class Grows(_Edited):
        def edit(self) -> None:
            for name, dim in (("0.weight", 0), ("0.bias", 0), ("3.weight", 1)):
                p = self.network.get_parameter(name)
                p.data = torch.cat([p.data, 0.1 * torch.ones_like(p.data)], dim)
                p.grad = None
                self.optimizers().state.pop(p, None)
            self.network[2] = nn.Identity()

    trained_as_in_fp32(lambda: Grows(make_optimizer=optimizer), make_plugin())


# --- several Trainers ----------------------------------------------------------------------------


class _Evaluates(Regression):
    """Evaluates another model after every epoch, with a Trainer of its own."""

    def __init__(self, plugin: Any) -> None:
        super().__init__()
        self.plugin, self.dtypes = plugin, set[torch.dtype]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.dtypes.add(self.network[0].weight.dtype)

    def on_train_epoch_end(self) -> None:
        make_trainer(self.plugin).validate(Regression(seed=1), loader(1), verbose=False)


@pytest.mark.parametrize("kind", [BalancedAMP, PureFP16])
def test_plugin_serves_runs_in_turn_but_not_at_once(kind: Any) -> None:
    plugin = kind(loss_scale=SCALE)
    with pytest.raises(MisconfigurationException, match="the run of the first has not ended"):
        fit(_Evaluates(plugin), plugin, loader(2))
    model = _Evaluates(kind(loss_scale=SCALE))
    fit(model, plugin, loader(2), max_epochs=2)
    assert model.dtypes == {torch.float32 if kind is BalancedAMP else torch.float16}


class _Tries(_Evaluates):
    """Goes on after the refusal of the second Trainer."""

    def on_train_batch_end(self, *_: Any) -> None:
        with pytest.raises(MisconfigurationException, match="the run of the first has not ended"):
            super().on_train_epoch_end()

    def on_train_epoch_end(self) -> None:
        pass


@pytest.mark.parametrize("kind", [BalancedAMP, PureFP16])
def test_refused_trainer_leaves_the_run_as_it_was(kind: Any) -> None:
    plugins = kind(loss_scale=SCALE), kind(loss_scale=SCALE)
    alone, beside = Regression(), _Tries(plugins[1])
    for model, plugin in zip((alone, beside), plugins, strict=True):
        fit(model, plugin, loader(4))
    pairs = zip(parameters_of(alone), parameters_of(beside), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # The plugin is free again.
    fit(Regression(), plugins[1], loader(1))


class _Nests(Regression):
    """Trains another model in a hook."""

    plugin: Any = None

    def on_after_backward(self) -> None:
        if self.plugin is not None:
            fit(Regression(seed=1), self.plugin, loader(2))


@pytest.mark.parametrize("kind", [BalancedAMP, PureFP16])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_of_a_plugin_serves_runs_of_its_own(copied: Any, kind: Any) -> None:
    alone, beside = _Nests(), _Nests()
    plugin = kind(loss_scale=SCALE)
    beside.plugin = copied(plugin)
    fit(alone, kind(loss_scale=SCALE), loader(4))
    fit(beside, plugin, loader(4))
    assert alone.losses == beside.losses


@pytest.mark.parametrize("kind", [BalancedAMP, PureFP16])
def test_modules_outside_of_the_model_are_not_taken_for_changes(kind: Any) -> None:
    """A slice of `nn.Sequential` is a new module; the preparation would take time and memory."""
    looks: list[nn.Module] = []

    class Counts(kind):
        def _take_new(self, root: nn.Module) -> None:
            looks.append(root)
            super()._take_new(root)

    class Slices(Regression):
        def loss(self, batch: list[Tensor]) -> Tensor:
            hidden = self.network[:2](batch[0])
            return self.network[2:](hidden).float().square().mean()

    fit(Slices(), Counts(loss_scale=SCALE), loader(4))
    assert len(looks) == 1
