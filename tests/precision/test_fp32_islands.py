"""Modules in `fp32_modules` compute in fp32, so their values do not overflow."""

import contextlib
import copy
import inspect
import pickle
import types
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.precision._weights.half_module import compute_in_fp32, outermost
from lightning_mp.precision._weights.working_copies import WorkingCopies
from tests.precision.models import (
    Regression,
    fit,
    loader,
    parameters_of,
    perceptron,
    relative,
)


class _Notes(Regression):
    """Records the dtypes of inputs and outputs of every leaf module."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        for name, module in self.network.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        def note(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            self.seen[name] = (args[0].dtype, output.dtype)

        return note


@pytest.mark.parametrize("weights", ["half", "full"])
def test_linear_layer_in_fp32_modules_computes_in_fp32(weights: Any) -> None:
    model = _Notes()
    fit(model, BalancedAMP(weights=weights, fp32_modules=["norm", "network.3"]), loader(2))
    assert model.seen["3"][1] == torch.float32
    assert model.seen["0"][1] == torch.float16
    assert model.seen["2"] == (torch.float16, torch.float16)  # the op policy handles the norm


def test_frozen_half_layer_in_fp32_modules_computes_in_fp32() -> None:
    model = _Notes()
    layer = model.network[3].half().requires_grad_(False)
    weight = layer.weight.clone()
    fit(model, BalancedAMP(fp32_modules=["norm", "network.3"]), loader(2))
    assert model.seen["3"][1] == torch.float32
    assert torch.equal(layer.weight, weight.float())


class _Thawed(Regression):
    """A model whose last layers are loaded in half, and may be frozen in the first epoch."""

    def __init__(self, *, half: bool, is_frozen: bool) -> None:
        super().__init__(
            lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        )
        self.network[1:].half()
        if not half:
            self.network.float()
        self.network[1:].requires_grad_(not is_frozen)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.network.requires_grad_(True)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("kind", [BalancedAMP, PureFP16])
def test_half_batch_norm_and_half_fp32_modules_train_as_in_fp32(kind: Any, is_frozen: bool) -> None:
    reference = _Thawed(half=False, is_frozen=is_frozen)
    model, start = _Thawed(half=True, is_frozen=is_frozen), parameters_of(reference)
    fit(reference, None, loader(4), max_epochs=2)
    fit(model, kind(fp32_modules=["network.2"]), loader(4), max_epochs=2)
    assert relative(model, reference, start) < 2**-7
    assert {t.dtype for t in model.network[1:].state_dict().values()} == {
        torch.float32,
        torch.int64,
    }


def big() -> nn.Module:
    """Return a network in which one layer returns values near 300,000."""
    network = perceptron()
    with torch.no_grad():
        network[0].bias.fill_(30_000.0)
        network[3].weight.mul_(1e-6)
    network.insert(1, nn.Linear(16, 16))
    with torch.no_grad():
        network[1].weight.fill_(0.6)
    return network


def test_values_that_overflow_fp16_are_finite_in_fp32_modules() -> None:
    for names, is_finite in ((["norm"], False), (["norm", "network.1"], True)):
        model = Regression(big)
        plugin = BalancedAMP(weights="full", fp32_modules=names, loss_scale=1.0)
        fit(model, plugin, loader(3))
        assert all(torch.tensor(model.losses).isfinite()) is is_finite
        assert (plugin.scaler.skipped_steps == 0) is is_finite


def test_autocast_is_off_only_in_fp32_modules_and_restored_after_an_exception() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
            self.was = torch.is_autocast_enabled("cpu"), x.dtype
            if fail:
                raise RuntimeError("on purpose")
            return x

    module, undo = Fails(), contextlib.ExitStack()
    compute_in_fp32([module], undo)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.ones(2).half()).dtype == torch.float32
        assert module.was == (False, torch.float32)
        with pytest.raises(RuntimeError, match="on purpose"):
            module(torch.ones(2), fail=True)
        assert torch.is_autocast_enabled("cpu")
        undo.close()
        assert module(torch.ones(2).half()).dtype == torch.float16


@pytest.mark.parametrize("replaces", ["fp32_modules", "half copies"])
@pytest.mark.parametrize("has_own", [False, True], ids=["class", "instance"])
def test_copy_of_a_module_computes_with_its_own_weights(has_own: bool, replaces: str) -> None:
    class Patched(nn.Linear):
        """No linear layer of torch, which autocast serves."""

    module = Patched(2, 2)
    if has_own:  # as patches of other libraries
        module.forward = types.MethodType(nn.Linear.forward, module)
    if replaces == "half copies":
        WorkingCopies(torch.bfloat16).attach(module)
    else:
        compute_in_fp32([module], contextlib.ExitStack())
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert copied(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
    assert module(torch.ones(1, 2)).tolist() != [[0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fp32_module_is_part_of_a_compiled_graph() -> None:
    network = perceptron()
    compute_in_fp32([network[3]], contextlib.ExitStack())
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = compiled(x)
        assert output.dtype == torch.float32
        assert torch.equal(output, network(x))


def test_outermost_returns_modules_that_are_called_outside_of_chosen_ones() -> None:
    shared, alone = nn.ReLU(), nn.ReLU()
    tower = nn.ModuleDict({"head": shared, "inner": nn.Sequential(nn.ReLU())})
    root = nn.ModuleDict({"tower": tower, "head": shared, "list": nn.ModuleList([alone])})
    chosen = {*tower.modules(), alone}
    assert outermost(root, chosen) == [tower, shared, alone]
    assert outermost(root, {*root.modules()}) == [root, tower, shared, root["list"]]


def test_forward_is_restored_after_training() -> None:
    model = Regression()
    fit(model, BalancedAMP(fp32_modules=["network"]), loader(1))
    assert not any("forward" in module.__dict__ for module in model.modules())


class _Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("weights", ["half", "full"])
def test_backward_of_fp32_modules_computes_in_fp32_in_manual_optimization(weights: Any) -> None:
    expected, model = _Manual(), _Manual()
    fit(expected, None, loader(3))
    fit(model, BalancedAMP(weights=weights, fp32_modules=["network"], loss_scale=1024), loader(3))
    assert torch.equal(model.weights[-1], expected.weights[-1])  # the scale is a power of 2


class _Penalized(Regression):
    """Adds a penalty on the gradients of its inputs; with `inside`, in the autocast of the step."""

    def __init__(self, inside: bool) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1)))
        self.inside = inside

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        total = self.network(inputs).sum()
        with torch.autocast("cpu", enabled=self.inside and torch.is_autocast_enabled("cpu")):
            (gradient,) = torch.autograd.grad(total, inputs, create_graph=True)
        return super().loss(batch) + gradient.square().mean()


@pytest.mark.parametrize("inside", [False, True])
def test_gradient_penalty_of_fp32_modules_is_exact_outside_autocast(inside: bool) -> None:
    expected, model = _Penalized(inside), _Penalized(inside)
    fit(expected, None, loader(3))
    fit(model, BalancedAMP(half="bf16", fp32_modules=["network"]), loader(3))
    assert torch.equal(model.weights[-1], expected.weights[-1]) is not inside  # see docs/limits.md


class _Assigned(nn.Module):
    """Computes in a method that is its `forward` on the instance alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.forward = nn.Linear(8, 16), self.compute

    def compute(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_forward_of_an_instance_computes_in_fp32() -> None:
    module, undo = _Assigned(), contextlib.ExitStack()
    before = module.forward
    for _ in range(2):
        compute_in_fp32([module], undo)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.ones(1, 8)).dtype == torch.float32
    undo.close()
    assert module.forward == before


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(32, 8), persistent=False)

    def forward(self, count: int) -> Tensor:
        return self.table[:count]


class _Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.network = _Positions(), perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x + self.positions(len(x)))


def test_fp32_module_without_input_tensors_does_not_end_training() -> None:
    """A `StopIteration` would end the epoch without an error."""
    trainer = fit(Regression(_Placed), BalancedAMP(fp32_modules=["_Positions"]), loader(3))
    assert trainer.global_step == 3


def test_pickled_model_with_fp32_modules_is_a_plain_model() -> None:
    module = perceptron()
    compute_in_fp32([module[0]], contextlib.ExitStack())
    assert str(inspect.signature(module[0].forward)) == "(input: torch.Tensor) -> torch.Tensor"
    x = torch.ones(2, 8)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


class Router(nn.Linear):
    """Adds an auxiliary loss to a list in a dictionary, and counts its calls in another one."""

    def forward(self, x: Tensor, losses: Any, calls: dict[str, int]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        losses["router"].append(y.float().square().mean())
        calls["router"] = calls.get("router", 0) + 1
        return y


class Routed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.routers = nn.Linear(8, 8), nn.ModuleList([Router(8, 8), Router(8, 8)])

    def loss(self, batch: list[Tensor]) -> Tensor:
        losses = defaultdict(list, router=[self.first(batch[0]).abs().mean()])  # in half
        calls: dict[str, int] = {}
        x = batch[0]
        for router in self.routers:
            x = router(x, losses, calls=calls)
        assert calls == {"router": 2}
        return super().loss([x, batch[1]]) + sum(loss.float() for loss in losses["router"])


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_fp32_modules_add_to_the_containers_that_they_are_given(make_plugin: Any) -> None:
    model, reference, start = Routed(), Routed(), Routed()
    fit(reference, None, loader(4))
    fit(model, make_plugin(fp32_modules=["Router"]), loader(4))
    assert relative(model, reference, parameters_of(start)) < 2**-7


class Clock(nn.Module):
    """Reads times in float64, and creates its first state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.eye(8) / 2)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8) @ self.weight
        assert state.dtype == torch.float32
        since = (times - 1.7e9)[:, None].to(x.dtype) / 16
        return torch.tanh(self.layer(x) + state + since)


class Timed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.register_buffer("shift", torch.zeros(8))
        self.pickled = b""

    def loss(self, batch: list[Tensor]) -> Tensor:
        times = 1.7e9 + torch.arange(len(batch[0]), dtype=torch.float64)
        return super().loss([self.clock(batch[0] + self.shift, times), batch[1]])

    def on_train_batch_end(self, *_: Any) -> None:
        self.pickled = pickle.dumps(self.clock)


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_fp32_modules_read_float64_create_fp32_and_can_be_pickled(make_plugin: Any) -> None:
    model, reference, start = Timed(), Timed(), Timed()
    fit(reference, None, loader(4))
    fit(model, make_plugin(fp32_modules=["Clock"]), loader(4))
    assert relative(model, reference, parameters_of(start)) < 2**-7
    x, times = torch.ones(1, 8), torch.full((1,), 1.7e9 + 1, dtype=torch.float64)
    copied = pickle.loads(model.pickled)(x, times).float()
    torch.testing.assert_close(copied, model.clock(x, times), rtol=0, atol=2**-9)


class Tied(Regression):
    """Embeds signs of the inputs; the head shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(nn.Embedding(2, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        )
        self.network[2].weight = self.network[0].weight

    def loss(self, batch: list[Tensor]) -> Tensor:
        outputs = self.network((batch[0][:, 0] > 0).long())
        return (outputs.float()[:, 0] / 8 - batch[1].float()).square().mean()


@pytest.mark.parametrize("make_plugin", [BalancedAMP, PureFP16])
def test_head_in_fp32_may_share_its_weight_with_an_embedding(make_plugin: Any) -> None:
    model, reference, start = Tied(), Tied(), Tied()
    fit(reference, None, loader(4))
    fit(model, make_plugin(fp32_modules=["network.2"]), loader(4))
    assert relative(model, reference, parameters_of(start)) < 2**-7
