"""Optimizers outside the trainer step, or raise if their gradients are scaled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.optim import optimizer as torch_optimizer

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16
from tests.precision.models import Regression, fit, loader, parameters_of

SCALES: dict[str, Any] = {"dynamic": LossScaleConfig(init_scale=256.0), "static": 256.0}
CLASSES = {"BalancedAMP": BalancedAMP, "PureFP16": PureFP16}
plugins = pytest.mark.parametrize(
    "make_plugin",
    [lambda c=c, s=s: c(loss_scale=s) for c in CLASSES.values() for s in SCALES.values()],
    ids=[f"{c}-{s}" for c in CLASSES for s in SCALES],
)
REFUSED = r"`SGD.step\(\)` was not called through `(BalancedAMP|PureFP16)`"


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Any:
    yield
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


class OfItsOwn(Regression):
    """Has an optimizer that `configure_optimizers` does not return."""

    def on_fit_start(self) -> None:
        self.own = SGD(self.network.parameters(), lr=0.1)


class AfterTheBackward(OfItsOwn):
    def on_after_backward(self) -> None:
        self.own.step()


class ByHand(OfItsOwn):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def on_train_start(self) -> None:
        for p in self.network.parameters():
            p.grad = torch.zeros_like(p)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self) -> list[Optimizer]:
        return []


class InTheBackward(OfItsOwn):
    """Steps each parameter as soon as its gradient is accumulated, and frees the gradient."""

    def on_fit_start(self) -> None:
        self.own = {p: SGD([p], lr=0.1) for p in self.network.parameters()}
        for p in self.own:
            p.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.own[parameter].step()
        parameter.grad = None


class AfterTheClosure(Regression):
    """Steps the optimizer of `configure_optimizers`, but not the one of Lightning around it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.optimizer.step()


@plugins
@pytest.mark.parametrize("model_class", [AfterTheBackward, AfterTheClosure, ByHand, InTheBackward])
def test_step_on_scaled_gradients_raises_before_weights_change(
    make_plugin: Callable[[], Any], model_class: type[Regression]
) -> None:
    model = model_class()
    before = parameters_of(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        fit(model, make_plugin(), loader(2))
    # `PureFP16` restores weights with 22 bits.
    torch.testing.assert_close(parameters_of(model), before, rtol=2**-21, atol=2**-24)


class OnWeightsBeside(OfItsOwn):
    """Has separate fp32 weights, as user code for half models does."""

    def on_fit_start(self) -> None:
        self.beside = [nn.Parameter(p.detach().float().clone()) for p in self.network.parameters()]
        self.own = SGD(self.beside, lr=0.1)

    def on_after_backward(self) -> None:
        for beside, p in zip(self.beside, self.network.parameters(), strict=True):
            beside.grad = p.grad
        self.own.step()


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_step_on_scaled_gradients_of_other_parameters_raises(scale: Any) -> None:
    """Not `PureFP16`: its gradients are half, which torch does not accept for fp32 weights."""
    model = OnWeightsBeside()
    before = parameters_of(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        fit(model, BalancedAMP(loss_scale=scale), loader(2))
    assert torch.equal(parameters_of(model), before)
    beside = torch.cat([p.detach().double().flatten() for p in model.beside])
    assert torch.equal(beside, before)


@plugins
def test_step_on_gradients_of_a_second_scaled_backward_raises(
    make_plugin: Callable[[], Any],
) -> None:
    """A second backward adds scaled gradients to those that the first step unscaled."""

    class Twice(ByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            given = self.optimizers()
            self.manual_backward(self.loss(batch))
            given.step()
            self.manual_backward(self.other.sum())
            self.own.step()

        def configure_optimizers(self) -> Optimizer:
            self.other = nn.Parameter(torch.zeros(3))
            return SGD(self.parameters(), lr=0.1)

    with pytest.raises(RuntimeError, match=REFUSED):
        fit(Twice(), make_plugin(), loader(2))


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_step_on_overflowed_gradients_raises_before_weights_change(scale: Any) -> None:
    """The plugin skips its step, but the step of another optimizer would make weights NaN."""

    class BeforeTheStep(OfItsOwn):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.own.step()

    model = BeforeTheStep(bad_batches=[0])
    before = parameters_of(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        fit(model, BalancedAMP(loss_scale=scale), loader(2))
    assert torch.equal(parameters_of(model), before)


def test_optimizer_in_the_backward_trains_as_in_fp32_at_a_loss_scale_of_one() -> None:
    plain, scaled = InTheBackward(), InTheBackward()
    start = parameters_of(plain)
    fit(plain, None, loader(8))
    fit(scaled, BalancedAMP(loss_scale=1), loader(8))
    assert_trained_alike(scaled, plain, start, torch.float16)


@pytest.mark.parametrize("model_class", [ByHand, InTheBackward])
def test_any_optimizer_trains_as_in_fp32_without_a_loss_scale(model_class: type[OfItsOwn]) -> None:
    plain, half = model_class(), model_class()
    start = parameters_of(plain)
    fit(plain, None, loader(8))
    fit(half, BalancedAMP(half="bf16"), loader(8))
    assert_trained_alike(half, plain, start, torch.bfloat16)


def assert_trained_alike(
    model: nn.Module, reference: nn.Module, start: Tensor, half: torch.dtype
) -> None:
    way = parameters_of(reference) - start
    assert way.norm() > 1e-2
    # Each gradient has a few roundings: of inputs, weights, outputs and cotangents.
    assert (parameters_of(model) - parameters_of(reference)).norm() <= (
        8 * torch.finfo(half).eps * way.norm()
    )


class Probed(Regression):
    """Trains a probe on features by its own backward and optimizer, as in self-supervision."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.probe = nn.Linear(16, 1)

    def on_fit_start(self) -> None:
        self.own = SGD(self.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.own.step()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        features = self.network[0].float()(batch[0]).detach()
        loss = (self.probe.float()(features).flatten() - batch[1]).square().mean()
        self.own.zero_grad()
        loss.backward()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.network.parameters(), lr=0.1)


def test_probe_with_unscaled_gradients_is_stepped() -> None:
    """Gradients of the probe persist during the scaled backward, which adds none."""
    plain, scaled = Probed(), Probed()
    start = parameters_of(plain.probe)
    fit(plain, None, loader(8))
    fit(scaled, BalancedAMP(loss_scale=SCALES["dynamic"]), loader(8))
    assert_trained_alike(scaled.probe, plain.probe, start, torch.float16)


@plugins
def test_optimizers_of_other_models_step_during_training(
    make_plugin: Callable[[], Any],
) -> None:
    class WithATeacher(Regression):
        def on_after_backward(self) -> None:
            other.weight.grad = torch.ones_like(other.weight)
            SGD(other.parameters(), lr=0.5).step()

    other = nn.Linear(3, 3, bias=False)
    before = other.weight.detach().clone()
    fit(WithATeacher(), make_plugin(), loader(2))
    torch.testing.assert_close(other.weight.detach(), before - 1)


@plugins
def test_nested_trainer_steps_its_own_optimizer(make_plugin: Callable[[], Any]) -> None:
    class Nested(Regression):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                self.inner = Regression(seed=1)
                fit(self.inner, make_plugin(), loader(2))

    model, alone = Nested(), Regression(seed=1)
    fit(model, make_plugin(), loader(3))
    fit(alone, make_plugin(), loader(2))
    assert torch.equal(model.inner.weights[-1], alone.weights[-1])
    assert len(model.weights) == 3


class SharpnessAware(Optimizer):
    """SAM as in most repositories: an inner optimizer that shares its parameter groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


class Delegating:
    """Wraps an optimizer but is not a subclass, like the wrapper of ScheduleFree."""

    def __init__(self, parameters: Any) -> None:
        self.base = SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)


class DelegatingOptimizer(Delegating, Optimizer):
    """A subclass without `Optimizer.__init__`; protocols of Python 3.12 see no `__getattr__`."""

    __hash__ = object.__hash__
    param_groups = property(lambda self: self.base.param_groups)
    defaults = property(lambda self: self.base.defaults)
    state = property(lambda self: self.base.state)


@pytest.mark.parametrize("wrapper", [SharpnessAware, DelegatingOptimizer])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_inner_optimizer_of_a_trainer_optimizer_is_stepped(wrapper: Any, scale: Any) -> None:
    plain, wrapped = Regression(), Regression(make_optimizer=wrapper)
    fit(plain, BalancedAMP(loss_scale=scale), loader(4))
    fit(wrapped, BalancedAMP(loss_scale=scale), loader(4))
    assert torch.equal(plain.weights[-1], wrapped.weights[-1])


class Together(Optimizer):
    """Steps an optimizer for sparse gradients and one for dense gradients."""

    def __init__(self, parameters: Any) -> None:
        table, *dense = parameters
        self.parts = [SparseAdam([table]), SGD(dense, lr=0.1)]
        super().__init__([group for each in self.parts for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for each in self.parts:
            each.step()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x[:, 0] > 0).long()))


def test_inner_optimizer_of_sparse_gradients_trains_as_in_fp32() -> None:
    plain, half = Regression(Embedded, Together), Regression(Embedded, Together)
    start = parameters_of(plain)
    fit(plain, None, loader(4))
    fit(half, BalancedAMP(loss_scale=SCALES["dynamic"]), loader(4))
    assert_trained_alike(half, plain, start, torch.float16)


def test_fused_optimizer_with_grad_scale_unscales_by_itself() -> None:
    class Unscaling(ByHand):
        def on_fit_start(self) -> None:
            self.own = AdamW(self.network.parameters(), lr=0.01, fused=True)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            scaler = self.trainer.precision_plugin.scaler
            if scaler is not None:
                self.own.grad_scale = torch.tensor(scaler.scale)
                self.own.found_inf = torch.tensor(0.0)
            super().training_step(batch, batch_idx)

    plain, scaled = Unscaling(), Unscaling()
    plain_plugin = BalancedAMP(loss_scale=1)
    fit(plain, plain_plugin, loader(4))
    fit(scaled, BalancedAMP(loss_scale=SCALES["static"]), loader(4))
    # A loss scale that is a power of two changes no bit of a gradient without overflow.
    torch.testing.assert_close(scaled.weights[-1], plain.weights[-1], rtol=1e-3, atol=1e-5)


def test_copies_follow_a_fused_optimizer_outside_the_trainer() -> None:
    """A GAN has two forwards in one training step, with an optimizer step in between."""

    class Twice(ByHand):
        def on_fit_start(self) -> None:
            self.own = SGD(self.network.parameters(), lr=0.1, fused=True)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.after = self.loss(batch).item()

    plain, half = Twice(), Twice()
    fit(plain, None, loader(2))
    fit(half, BalancedAMP(half="bf16"), loader(2))
    assert half.after == pytest.approx(plain.after, rel=2**-6)


class Direct(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.optimizers().zero_grad()
        super().training_step(batch, batch_idx).backward()  # not `self.manual_backward`
        self.optimizers().step()


@plugins
def test_gradients_of_an_unscaled_loss_raise_or_train_at_a_scale_of_one(
    make_plugin: Callable[[], Any],
) -> None:
    plugin, model, reference = make_plugin(), Direct(), Direct()
    if plugin.scaler is not None:
        with pytest.raises(RuntimeError, match="manual_backward"):
            fit(Direct(), plugin, loader(2))
        plugin = type(plugin)(loss_scale=1.0)
    start = parameters_of(model)
    fit(reference, None, loader(4))
    fit(model, plugin, loader(4))
    assert_trained_alike(model, reference, start, plugin.half_dtype)


@plugins
def test_step_without_gradients_needs_no_backward(make_plugin: Callable[[], Any]) -> None:
    class Steps(Regression):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.optimizers().step()

    model = Steps()
    start = parameters_of(model)
    fit(model, make_plugin(), loader(1))
    # `PureFP16` keeps 22 bits of a weight.
    torch.testing.assert_close(parameters_of(model), start, rtol=2**-21, atol=1e-9)
