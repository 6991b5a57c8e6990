"""Hooks, clipping and optimizers receive unscaled fp32 gradients."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import (
    Regression,
    fit,
    gradients_of,
    loader,
    norm_of,
    parameters_of,
)

Plugin = BalancedAMP | PureFP16
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "fp16 O2": lambda: BalancedAMP(loss_scale=2.0**10),
    "fp16 O1": lambda: BalancedAMP(loss_scale=2.0**10, weights="full"),
    "bf16 O2": lambda: BalancedAMP(half="bf16"),
    "pure fp16": lambda: PureFP16(loss_scale=2.0**10),
    "pure bf16": lambda: PureFP16(half="bf16"),
}
plugins = pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)
CLIPPING: dict[str, tuple[float, str]] = {"norm": (0.1, "norm"), "value": (0.01, "value")}
clipping = pytest.mark.parametrize("clipping", CLIPPING.values(), ids=CLIPPING)


def growing(plugin_type: Any) -> Plugin:
    """Return a plugin whose loss scale doubles at every step."""
    return plugin_type(loss_scale=LossScaleConfig(init_scale=2.0**4, growth_interval=1))


def growing_stock() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
    return MixedPrecision("16-mixed", "cpu", scaler)


def tolerance(plugin: Plugin) -> float:
    return 2**-7 if plugin.half == "fp16" else 2**-4


def moved_alike(model: nn.Module, reference: nn.Module, start: Tensor) -> float:
    """Return the distance of two models relative to how far the reference moved."""
    target = parameters_of(reference)
    assert (target - start).norm() > 1e-2
    return ((parameters_of(model) - target).norm() / (target - start).norm()).item()


# --- clipping ------------------------------------------------------------------------------------


class Stepping(Regression):
    """Records the gradients that the optimizer steps with, after clipping."""

    stepped: list[tuple[float, float]]

    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        self.stepped = []
        if not self.automatic_optimization:
            optimizer.register_step_pre_hook(lambda *_: self.record(optimizer))
        return optimizer

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.record(optimizer)

    def record(self, optimizer: Optimizer) -> None:
        gradients = gradients_of(optimizer)
        largest = max(g.abs().max().item() for g in gradients)
        self.stepped.append((norm_of(gradients), largest))


class ClippedByHand(Stepping):
    """Clips gradients in manual optimization."""

    def __init__(self, clipping: tuple[float, str], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.clipping = clipping

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        value, algorithm = self.clipping
        self.clip_gradients(optimizer, value, gradient_clip_algorithm=algorithm)
        optimizer.step()


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.5),
    "fused sgd": lambda p: SGD(p, lr=0.5, fused=True),
    "fused adamw": lambda p: AdamW(p, lr=0.01, fused=True, eps=1e-3),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@plugins
@clipping
def test_automatic_clipping_equals_fp32(
    clipping: tuple[float, str],
    make_plugin: Callable[[], Plugin],
    make_optimizer: Callable[..., Optimizer],
) -> None:
    """Lightning's 16-mixed does not clip with fused optimizers (Lightning#21435)."""
    value, algorithm = clipping
    options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    reference, model = (Stepping(make_optimizer=make_optimizer) for _ in range(2))
    start, plugin = parameters_of(model), make_plugin()
    fit(reference, None, loader(6), **options)
    fit(model, plugin, loader(6), **options)
    _assert_clipped_alike(model, reference, clipping, tolerance(plugin))
    assert moved_alike(model, reference, start) < 4 * tolerance(plugin)
    # Hooks see gradients that are neither clipped nor scaled.
    assert model.gradient_dtypes == {torch.float32}
    expected = pytest.approx(reference.gradient_norms, rel=4 * tolerance(plugin))
    assert model.gradient_norms == expected


@plugins
@clipping
def test_manual_clipping_equals_fp32(
    clipping: tuple[float, str], make_plugin: Callable[[], Plugin]
) -> None:
    """Lightning clipped scaled gradients, which removed most of each gradient (Lightning#18089)."""
    reference, model = (ClippedByHand(clipping, make_optimizer=OPTIMIZERS["sgd"]) for _ in "12")
    start, plugin = parameters_of(model), make_plugin()
    fit(reference, None, loader(6))
    fit(model, plugin, loader(6))
    _assert_clipped_alike(model, reference, clipping, tolerance(plugin))
    assert moved_alike(model, reference, start) < 4 * tolerance(plugin)


def _assert_clipped_alike(
    model: Stepping, reference: Stepping, clipping: tuple[float, str], relative: float
) -> None:
    value, algorithm = clipping
    assert len(model.stepped) == len(reference.stepped) == 6
    of_algorithm = [[step[algorithm == "value"] for step in m.stepped] for m in (model, reference)]
    assert max(max(numbers) for numbers in of_algorithm) < value * 1.001
    assert sum(number > value * 0.999 for number in of_algorithm[0]) >= 3  # clipping is active
    norms = [[norm for norm, _ in m.stepped] for m in (model, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=4 * relative)


class ByHand(Regression):
    """Steps in manual optimization, with or without a closure."""

    has_closure = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = super(ByHand, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if self.has_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()
        return None


@plugins
def test_manual_steps_equal_automatic_steps_bit_for_bit(make_plugin: Callable[[], Plugin]) -> None:
    """Autocast would round the product of Adafactor's factors, which underflow in fp16."""
    ends = []
    for is_manual, has_closure in ((False, False), (True, False), (True, True)):
        model = ByHand(make_optimizer=lambda p: Adafactor(p, lr=0.01))
        model.automatic_optimization, model.has_closure = not is_manual, has_closure
        fit(model, make_plugin(), loader(4))
        ends.append(parameters_of(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("change", ["backward", "zero_grad", "zeros", "clip", "edit"])
@plugins
def test_gradient_changes_after_clipping_equal_fp32(
    make_plugin: Callable[[], Plugin], change: str
) -> None:
    class Changing(ClippedByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="norm")
            if change in ("zero_grad", "zeros"):
                optimizer.zero_grad(set_to_none=change == "zero_grad")
            if change == "clip":
                self.clip_gradients(optimizer, 0.05, gradient_clip_algorithm="norm")
            elif change == "edit":
                for p in self.parameters():
                    p.grad *= 2
            else:
                self.manual_backward(self.loss(batch))
            optimizer.step()

    make = functools.partial(Changing, (0.1, "norm"))
    reference, model = make(), make()
    start, plugin = parameters_of(model), make_plugin()
    fit(reference, None, loader(6))
    fit(model, plugin, loader(6))
    assert moved_alike(model, reference, start) < 4 * tolerance(plugin)


@plugins
def test_clipping_without_a_step_equals_fp32(make_plugin: Callable[[], Plugin]) -> None:
    class Clips(ClippedByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="norm")
            if batch_idx % 2:
                optimizer.step()

    reference, model = (Clips((0.1, "norm"), make_optimizer=OPTIMIZERS["sgd"]) for _ in "12")
    start, plugin = parameters_of(model), make_plugin()
    fit(reference, None, loader(6))
    fit(model, plugin, loader(6))
    assert moved_alike(model, reference, start) < 4 * tolerance(plugin)


@clipping
def test_clipped_gradient_with_inf_skips_the_step(clipping: Any) -> None:
    class Overflows(ClippedByHand):
        def on_after_backward(self) -> None:
            if len(self.losses) == 2:
                self.network[3].bias.grad.fill_(torch.inf)

    model = Overflows(clipping)
    trainer = fit(model, BalancedAMP(), loader(3))
    assert trainer.global_step == 2
    assert torch.equal(model.weights[0], model.weights[1])
    assert not torch.equal(model.weights[1], model.weights[2])


# --- accumulation --------------------------------------------------------------------------------


@plugins
def test_accumulated_batches_equal_fp32(make_plugin: Callable[[], Plugin]) -> None:
    reference, model = Regression(), Regression()
    start, plugin = parameters_of(model), make_plugin()
    for each, precision in ((reference, None), (model, plugin)):
        trainer = fit(each, precision, loader(7), accumulate_grad_batches=3)
        assert trainer.global_step == 3
    assert moved_alike(model, reference, start) < tolerance(plugin)
    assert model.gradient_norms == pytest.approx(reference.gradient_norms, rel=tolerance(plugin))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@plugins
def test_training_step_that_returns_none_changes_nothing(
    make_plugin: Callable[[], Plugin],
) -> None:
    class Sometimes(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            return None if batch_idx in (1, 4) else super().training_step(batch, batch_idx)

    plugin = make_plugin()
    for accumulated in (1, 2):  # with 2, batch 1 ends the accumulation of batch 0
        reference, model = Sometimes(), Sometimes()
        start = parameters_of(model)
        fit(reference, None, loader(6), accumulate_grad_batches=accumulated)
        fit(model, plugin, loader(6), accumulate_grad_batches=accumulated)
        assert moved_alike(model, reference, start) < tolerance(plugin)
        assert len(model.gradient_norms) == len(reference.gradient_norms)  # hooks run as in fp32
        assert accumulated == 2 or torch.equal(model.weights[1], model.weights[0])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@plugins
def test_weight_held_twice_by_its_group_equals_fp32(make_plugin: Callable[[], Plugin]) -> None:
    class HeldTwice(Regression):
        def configure_optimizers(self) -> Optimizer:
            return SGD([*self.parameters(), self.network[0].weight], lr=0.1)

    reference, model = HeldTwice(), HeldTwice()
    start, plugin = parameters_of(model), make_plugin()
    fit(reference, None, loader(4))
    fit(model, plugin, loader(4))
    assert moved_alike(model, reference, start) < tolerance(plugin)


# --- several optimizers --------------------------------------------------------------------------


class TwoOptimizers(Regression):
    """Steps the layers of one network with two optimizers, in one of several orders.

    Args:
        order: "together": both backwards, then both steps. "toggled": one after the other, with
            the other's parameters frozen. "waiting": one steps at every batch, the other at every
            third batch. "shared": both hold all parameters and alternate.
    """

    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.order = order

    def configure_optimizers(self) -> list[Optimizer]:
        if self.order == "shared":
            return [SGD(self.parameters(), lr=0.1) for _ in range(2)]
        first, second = self.network[0], self.network[1:]
        return [SGD(first.parameters(), lr=0.1), SGD(second.parameters(), lr=0.1)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        getattr(self, self.order)(batch, batch_idx, *self.optimizers())

    def together(self, batch: list[Tensor], _: int, first: Any, second: Any) -> None:
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()

    def toggled(self, batch: list[Tensor], _: int, *optimizers: Any) -> None:
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def waiting(self, batch: list[Tensor], batch_idx: int, first: Any, second: Any) -> None:
        self.manual_backward(self.loss(batch) / 3)
        first.step()
        first.zero_grad()
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()

    def shared(self, batch: list[Tensor], batch_idx: int, first: Any, second: Any) -> None:
        if batch_idx > 0:
            optimizer = (first, second)[batch_idx % 2]
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["together", "toggled", "waiting", "shared"])
@pytest.mark.parametrize("plugin_type", [BalancedAMP, PureFP16])
def test_two_optimizers_equal_fp32_while_the_loss_scale_grows(plugin_type: Any, order: str) -> None:
    reference, model = TwoOptimizers(order), TwoOptimizers(order)
    start, plugin = parameters_of(model), growing(plugin_type)
    fit(reference, None, loader(7))
    trainer = fit(model, plugin, loader(7))
    assert plugin.scaler.scale >= 2.0**10
    assert plugin.scaler.skipped_steps == 0
    assert trainer.global_step == {"waiting": 9, "shared": 6}.get(order, 14)
    assert moved_alike(model, reference, start) < 2**-7


def test_two_optimizers_differ_from_fp32_with_the_scaler_of_torch() -> None:
    reference, model = TwoOptimizers("together"), TwoOptimizers("together")
    start = parameters_of(model)
    fit(reference, None, loader(7))
    fit(model, growing_stock(), loader(7))
    assert moved_alike(model, reference, start) > 0.3


@plugins
def test_parameter_gradients_equal_fp32_before_the_step(
    make_plugin: Callable[[], Plugin],
) -> None:
    """The `grad_norm` of Lightning's documentation returned 1008 times the norm."""
    seen: list[dict[str, float]] = []

    class RecordsGradientNorms(Regression):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            assert {p.grad.dtype for p in self.parameters()} == {torch.float32}
            seen.append({name: norm.item() for name, norm in grad_norm(self, 2).items()})

    plugin = make_plugin()
    fit(RecordsGradientNorms(), None, loader(1))
    fit(RecordsGradientNorms(), plugin, loader(1))
    assert seen[1] == pytest.approx(seen[0], rel=tolerance(plugin), abs=1e-3)
