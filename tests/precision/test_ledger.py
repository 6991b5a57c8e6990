"""User code that writes or steps weights works as in fp32, or raises or warns."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_mp import BalancedAMP, PureFP16, SafeAdamW
from tests.precision.models import Regression, fit, loader, parameters_of, perceptron, relative
from tests.precision.support_cases import ScheduleFree

PLUGINS: dict[str, Callable[[], Any]] = {
    "BalancedAMP fp16": BalancedAMP,
    "BalancedAMP bf16": lambda: BalancedAMP(half="bf16"),
    "PureFP16 fp16": PureFP16,
    "PureFP16 bf16": lambda: PureFP16(half="bf16"),
}
plugins = pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)
BOUND = {
    torch.float16: 2**-6,
    torch.bfloat16: 2**-4,
}  # relative to the change of weights, after a few steps


@pytest.fixture(autouse=True)
def _no_global_hooks_are_left() -> Iterator[None]:
    yield
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert not torch_module._global_parameter_registration_hooks
    assert not torch_module._global_module_registration_hooks


# --- writes --------------------------------------------------------------------------------------


class Taught(Regression):
    """Has a frozen EMA teacher with a rate of 2^-13 per step that user code updates."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.teacher = perceptron().requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "state_dict":
            fast = self.network.state_dict()
            for name, slow in self.teacher.state_dict().items():
                slow.lerp_(fast[name], 2.0**-13)
        elif self.how == "state_dict of each weight":
            for name in self.network.state_dict():
                self.teacher.state_dict()[name].lerp_(self.network.state_dict()[name], 2.0**-13)
        else:
            pairs = zip(self.teacher.parameters(), self.network.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 2.0**-13)


@pytest.mark.parametrize("how", ["state_dict", "state_dict of each weight"])
@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_teacher_updated_through_state_dict_follows_as_in_fp32(half: Any, how: str) -> None:
    plain, model = Taught(how), Taught(how)
    start = parameters_of(plain.teacher)
    fit(plain, None, loader(30, batch_size=4))
    fit(model, PureFP16(half=half), loader(30, batch_size=4))
    way = parameters_of(plain.teacher) - start
    # Each write rounds to 2^-22 (2^-16 in bf16) of a weight, and frozen weights start from their
    # half values.
    bits, bits_of_half = {"fp16": (22, 11), "bf16": (16, 8)}[half]
    rounding = (30**0.5 * 2.0**-bits + 2.0 ** -(bits_of_half + 1)) * start.norm()
    missed = (parameters_of(model.teacher) - parameters_of(plain.teacher)).norm()
    assert missed < BOUND[PureFP16(half=half).half_dtype] * way.norm() + rounding
    assert missed < 0.5 * way.norm()


def test_writes_to_state_dict_after_the_last_step_reach_exposed_weights_and_checkpoints() -> None:
    value = 1 + 2.0**-20

    class Ends(Regression):
        def on_train_end(self) -> None:
            self.state_dict()["network.3.bias"].fill_(value)
            with self.trainer.precision_plugin.exposed(self.network[3]):
                self.seen = self.network[3].bias.item()
            self.state_dict()["network.3.bias"].mul_(2)
            self.saved = self.state_dict()["network.3.bias"].item()

    model = Ends()
    fit(model, PureFP16(), loader(2))
    assert (model.seen, model.saved, model.network[3].bias.item()) == (value, 2 * value, 2 * value)


def test_write_to_half_weights_warns_once_with_their_name() -> None:
    with pytest.warns(UserWarning, match=r"wrote to 'teacher\.0\.weight'.*exposed") as found:
        fit(Taught("parameters"), PureFP16(), loader(4))
    assert sum("exposed" in str(each.message) for each in found) == 1


@plugins
def test_run_without_such_writes_does_not_warn(
    make_plugin: Any, recwarn: pytest.WarningsRecorder
) -> None:
    class Saves(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            state = copy.deepcopy(self.state_dict())
            if len(self.losses) == 2:
                self.load_state_dict(state)

    for make in (lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: SafeAdamW(p, lr=0.01)):
        fit(Saves(make_optimizer=make), make_plugin(), loader(4), max_epochs=2)
    assert not [w for w in recwarn if "wrote to" in str(w.message)]


def test_fp32_data_assigned_to_a_half_weight_keeps_all_bits() -> None:
    value = torch.full((16, 8), 1 + 2.0**-20)

    class Replaces(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            self.network[0].weight.data = value.clone()

    model = Replaces(make_optimizer=lambda p: SGD(p, lr=0.0))
    fit(model, PureFP16(), loader(2))
    assert torch.equal(model.network[0].weight, value)


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_optimizer_in_the_backward_raises_on_half_weights(half: Any) -> None:
    class Fused(Regression):
        def on_fit_start(self) -> None:
            for p in self.network.parameters():
                own = SGD([p], lr=0.1)
                p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())

        def configure_optimizers(self) -> Optimizer:
            self.other = nn.Parameter(torch.zeros(3))
            return SGD([self.other], lr=0.1)

    model = Fused()
    before = parameters_of(model.network)
    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was not called through `PureFP16`"):
        fit(model, PureFP16(half=half), loader(1))
    torch.testing.assert_close(parameters_of(model.network), before, rtol=2.0**-15, atol=2.0**-24)


class NeedsAClosure(SGD):
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class SharpnessAware(SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


@plugins
@pytest.mark.parametrize("kind", [NeedsAClosure, SharpnessAware, torch.optim.LBFGS])
def test_optimizers_with_a_closure_run_in_bf16_or_raise_at_the_start(
    kind: Any, make_plugin: Any
) -> None:
    model, plugin = Regression(make_optimizer=lambda p: kind(p, lr=0.1)), make_plugin()
    if isinstance(plugin, BalancedAMP) and plugin.half == "bf16":
        fit(model, plugin, loader(2))
        assert len(model.losses) >= 2
        return
    with pytest.raises(MisconfigurationException, match=f"`{kind.__name__}`.*first-order"):
        fit(model, plugin, loader(2))
    assert model.losses == []


@plugins
def test_schedule_free_optimizers_run_on_fp32_weights_and_raise_on_half_weights(
    make_plugin: Any,
) -> None:
    class Switches(Regression):
        def on_train_batch_start(self, *_: Any) -> None:
            self.optimizers().train()

        def on_train_batch_end(self, *_: Any) -> None:
            self.optimizers().eval()

    plain, model = Switches(make_optimizer=ScheduleFree), Switches(make_optimizer=ScheduleFree)
    start, plugin = parameters_of(plain), make_plugin()
    if isinstance(plugin, PureFP16):
        with pytest.raises(MisconfigurationException, match=r"`train\(\)` and `eval\(\)` write"):
            fit(model, plugin, loader(10))
        return
    fit(plain, None, loader(10))
    fit(model, plugin, loader(10))
    assert relative(model, plain, start) < BOUND[plugin.half_dtype]


# --- modules -------------------------------------------------------------------------------------


@plugins
def test_replaced_parameter_that_no_optimizer_holds_raises(make_plugin: Any) -> None:
    class Assigns(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            state = {name: value.clone() for name, value in self.network.state_dict().items()}
            self.network.load_state_dict(state, assign=True)

    with pytest.raises(RuntimeError, match=r"'network\.0\.weight' was replaced.*`SGD`"):
        fit(Assigns(), make_plugin(), loader(2))


@plugins
def test_layer_replaced_in_model_and_optimizer_trains_as_in_fp32(make_plugin: Any) -> None:
    class Replaces(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.losses) == 3:
                torch.manual_seed(1)
                self.network[3] = nn.Linear(16, 1)
                groups = self.optimizers().param_groups
                groups[0]["params"] = list(self.network.parameters())

    plain, model = Replaces(), Replaces()
    start, plugin = parameters_of(plain), make_plugin()
    fit(plain, None, loader(8))
    fit(model, plugin, loader(8))
    assert relative(model, plain, start) < BOUND[plugin.half_dtype]


@plugins
def test_parametrized_weights_stay_in_fp32_and_train_as_in_fp32(make_plugin: Any) -> None:
    def network() -> nn.Module:
        layers = perceptron()
        layers[0] = parametrizations.orthogonal(nn.Linear(8, 16))
        layers[3] = parametrizations.weight_norm(nn.Linear(16, 1))
        return layers

    plain, model = Regression(network), Regression(network)
    start, plugin = parameters_of(plain), make_plugin()
    fit(plain, None, loader(8))
    fit(model, plugin, loader(8))
    assert relative(model, plain, start) < BOUND[plugin.half_dtype]
    weight = model.network[0].weight.double()
    torch.testing.assert_close(weight.T @ weight, torch.eye(8).double(), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
# BalancedAMP in bf16 is left out: TorchScript would see both half dtypes in one process.
@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16, PLUGINS["PureFP16 bf16"]])
def test_torchscript_module_computes_or_raises_with_its_name(make_plugin: Any) -> None:
    model, plugin = Regression(lambda: torch.jit.script(perceptron())), make_plugin()
    if isinstance(plugin, BalancedAMP):
        fit(model, plugin, loader(2))
        assert len(model.losses) == 2
    else:
        with pytest.raises(MisconfigurationException, match=r"`network` is TorchScript.*Balanced"):
            fit(model, plugin, loader(2))


class Calling(nn.Module):
    """Calls a TorchScript module, whose inputs it records."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(perceptron())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, torch.is_autocast_enabled("cpu")
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("plugin", [BalancedAMP, PureFP16])
def test_torchscript_computes_in_fp32_inside_a_selected_module(plugin: Any) -> None:
    plain, model = Regression(Calling), Regression(Calling)
    fit(plain, None, loader(2))
    fit(model, plugin(fp32_modules=["network"]), loader(2))
    assert model.network.seen == (torch.float32, False)
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-3, atol=0)
    with pytest.raises(MisconfigurationException, match=r"Selected `Sequential` .*TorchScript"):
        fit(Regression(Calling), plugin(fp32_modules=["network.inner"]), loader(2))


# --- frozen weights ------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer plus a trainable low-rank layer (LoRA)."""

    def __init__(self, base: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(8, 1).to(base).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("base", [torch.float32, torch.float16, torch.bfloat16])
def test_frozen_weight_takes_two_bytes_and_is_restored_exactly(base: torch.dtype) -> None:
    class Looks(Regression):
        def on_train_end(self) -> None:
            ledger = self.trainer.precision_plugin._ledger
            self.beside = {
                n: e.beside for n, p in self.named_parameters() for e in [ledger.open(p)]
            }
            self.saved = self.state_dict()["network.base.weight"].dtype

    model = Looks(lambda: Adapted(base))
    before = model.network.base.weight.detach().clone()
    fit(model, PureFP16(), loader(3))
    has_residual = {name: each is not None for name, each in model.beside.items()}
    assert has_residual == {
        "network.base.weight": False,
        "network.base.bias": False,
        "network.down.weight": True,
        "network.up.weight": True,
    }
    assert model.network.base.weight.dtype == base == model.saved
    assert torch.equal(model.network.base.weight, before.half().to(base))


def test_unfrozen_weight_gets_a_residual_and_keeps_small_updates() -> None:
    step = 2.0**-16

    class Unfreezes(Regression):
        def loss(self, batch: list[Tensor]) -> Tensor:
            self.network.base.requires_grad_(True)
            return self.network.base.weight.float().sum()

        def configure_optimizers(self) -> Optimizer:
            return SGD(self.network.base.parameters(), lr=step)

    model = Unfreezes(Adapted)
    start = model.network.base.weight.detach().half().double()
    fit(model, PureFP16(), loader(8))
    moved = start - model.network.base.weight.detach().double()
    assert (moved - 8 * step).abs().max() < 8 * 2.0**-22
