"""User code that works with a plain LightningModule works under BalancedAMP as in fp32."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mp.precision.balanced_amp import BalancedAMP
from tests.averages import weight_averaging
from tests.precision.models import Regression, fit, loader, make_trainer, parameters_of, perceptron
from tests.precision.working_models import bytes_held

PLUGINS: dict[str, Callable[[], BalancedAMP]] = {
    "fp16": lambda: BalancedAMP(loss_scale=2.0**10),
    "bf16": lambda: BalancedAMP(half="bf16"),
}
plugins = pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)
# Relative error of weights: each step adds gradients with a few roundings to half precision.
ERROR = {"fp16": 2**-7, "bf16": 2**-4}


def errors(
    make: Callable[[], Regression], plugin: BalancedAMP, of: Callable[[Any], Tensor], **options: Any
) -> float:
    """Return the distance to fp32 of a quantity of the model, relative to its change in fp32."""
    start, ends = of(make()), []
    for each in (None, plugin):
        model = make()
        fit(model, each, loader(8), **options)
        ends.append(of(model))
    return ((ends[1] - ends[0]).norm() / (ends[0] - start).norm()).item()


@pytest.mark.slow
@plugins
def test_clipping_and_freezing_by_hand_equal_fp32(make_plugin: Any) -> None:
    class ByHand(Regression):
        def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
            self.norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
            assert self.norm < 100

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            for p in self.network[3].parameters():  # DINO freezes its last layer in this way
                p.grad = None

    plugin = make_plugin()
    assert errors(ByHand, plugin, parameters_of) < 2 * ERROR[plugin.half]
    model = ByHand()
    start = model.network[3].weight.clone()
    fit(model, make_plugin(), loader(2))
    assert torch.equal(model.network[3].weight, start)


@pytest.mark.slow
@plugins
def test_average_that_is_swapped_in_for_validation_keeps_its_bits(make_plugin: Any) -> None:
    """Lightning's callback writes the average into the weights, which half weights would round."""
    averages = weight_averaging()
    plugin, ends = make_plugin(), []
    start = parameters_of(Regression())
    for each in (None, plugin):
        model = Regression()
        callback = averages.EMAWeightAveraging(decay=0.9)
        trainer = make_trainer(each, max_epochs=3, callbacks=[callback])
        trainer.fit(model, loader(4), loader(1, seed=9))
        ends.append(torch.cat([p.double().flatten() for p in callback._average_model.parameters()]))
    error = (ends[1] - ends[0]).norm() / (ends[0] - start).norm()
    assert error < ERROR[plugin.half]


class Taught(Regression):
    """Has an EMA teacher, as in BYOL and MoCo."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=lambda _: SGD(self.network.parameters(), lr=0.1))
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(batch[0]).float()
        return super().loss(batch) + (self.network(batch[0]).float() - aim).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for teacher, p in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
            teacher.data = teacher.data * 0.999 + p.data * 0.001


@plugins
def test_ema_teacher_with_decay_0_999_follows_as_in_fp32(make_plugin: Any) -> None:
    plugin = make_plugin()
    assert errors(Taught, plugin, lambda m: parameters_of(m.teacher)) < 2 * ERROR[plugin.half]


class Decays(pl.Callback):
    """Reduces every weight by 2e-4 of its value per step, less than half a ULP of bf16."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for p in pl_module.parameters():
            p.data.mul_(1 - 2e-4)


@plugins
def test_weight_decay_by_a_callback_takes_effect(make_plugin: Any) -> None:
    plugin = make_plugin()

    def make() -> Regression:
        return Regression(make_optimizer=lambda p: SGD(p, lr=1e-7))

    error = errors(make, plugin, parameters_of, callbacks=[Decays()])
    assert error < 2**-10  # the weights are not products of half precision


class Attacked(Regression):
    """Moves its weights against the gradient for a second backward, as FGM and AWP do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.changes: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        own = list(self.network.parameters())
        kept, norm = [p.data.clone() for p in own], nn.utils.get_total_norm([p.grad for p in own])
        for p in own:
            p.data.add_(0.3 * p.grad / norm)  # not counted as a write
        attacked = self.loss(batch)
        self.manual_backward(attacked)
        for p, weight in zip(own, kept, strict=True):
            p.data = weight
        self.changes.append((attacked - loss).item())
        optimizer.step()


class Clipped(Attacked):
    """Clips its weights after the step, as a WGAN, and computes with them."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        for p in self.network.parameters():
            p.data.clamp_(-0.1, 0.1)
        self.changes.append(self.loss(batch).item())


@plugins
@pytest.mark.parametrize("kind", [Attacked, Clipped])
def test_writes_after_a_backward_take_effect_in_the_same_step(kind: Any, make_plugin: Any) -> None:
    plugin = make_plugin()
    error = errors(kind, plugin, lambda model: torch.tensor(model.changes or [0.0] * 8))
    assert error < ERROR[plugin.half]


class Lookahead(Optimizer):
    """Averages with the weights of two inner steps before (arXiv:1907.08610)."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 0.01})
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.data.copy_(slow)
        return result


@pytest.mark.slow
@plugins
def test_inner_optimizer_keeps_its_state(make_plugin: Any) -> None:
    plugin = make_plugin()

    def make() -> Regression:
        return Regression(make_optimizer=lambda p: Lookahead(Adam(list(p), lr=0.01, eps=1e-3)))

    assert errors(make, plugin, parameters_of) < 4 * ERROR[plugin.half]
    model = make()
    trainer = fit(model, make_plugin(), loader(5))
    states = trainer.optimizers[0].inner.state
    assert set(states) == set(model.parameters())
    assert {int(state["step"]) for state in states.values()} == {5}


class ScheduleFree(Optimizer):
    """Schedule-free SGD: gradients between the stepped and averaged weights (arXiv:2405.15682)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            z = state.setdefault("z", p.detach().clone())
            x = state.setdefault("x", p.detach().clone())
            k = state["k"] = state.get("k", 0) + 1
            z.add_(p.grad, alpha=-self.defaults["lr"])
            x.lerp_(z, 1 / k)
            p.copy_(0.9 * x + 0.1 * z)
        return result


@plugins
def test_optimizer_that_writes_weights_from_its_state_trains_as_in_fp32(
    make_plugin: Any,
) -> None:
    plugin = make_plugin()
    error = errors(lambda: Regression(make_optimizer=ScheduleFree), plugin, parameters_of)
    assert error < ERROR[plugin.half]


@pytest.mark.slow
@pytest.mark.parametrize("half", ["bf16", pytest.param("fp16", marks=pytest.mark.sweep)])
def test_gradients_of_500_batches_accumulate_in_fp32(half: str) -> None:
    """A bf16 sum stagnates when it is 256 times the next term."""
    count, plugin = 512, PLUGINS[half]()
    norms = []
    for each in (None, plugin):
        model = Regression()
        fit(model, each, loader(count, 1), accumulate_grad_batches=count)
        norms.append(model.gradient_norms[0])
    assert norms[1] == pytest.approx(norms[0], rel=ERROR[plugin.half] / 8)


class _Own(nn.Linear):
    """A layer of a class of one's own."""


@plugins
def test_backward_hooks_of_layers_see_parameters(make_plugin: Any) -> None:
    """Libraries for gradients per sample store them as attributes of the weight."""
    seen: list[Any] = []
    layer = _Own(8, 16)
    layer.register_full_backward_hook(lambda module, *_: seen.append(module.weight))
    network = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(16, 1))
    fit(Regression(lambda: network), make_plugin(), loader(2))
    assert len(seen) == 2
    assert all(weight is layer.weight for weight in seen)


@plugins
def test_logit_scale_is_not_rounded(make_plugin: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.logit_scale = perceptron(), nn.Parameter(torch.tensor(4.605170))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.logit_scale.exp()
            return self.network(x) * self.seen

    model = Regression(Scaled, lambda p: SGD(p, lr=0.0))
    fit(model, make_plugin(), loader(1))
    assert model.network.seen.item() == pytest.approx(100, rel=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@plugins
def test_bytes_per_parameter_equal_the_docstring(make_plugin: Any, kind: str) -> None:
    """Counted right after a step, for a layer so large that all else is negligible."""
    layers = {"sgd": lambda p: SGD(p, lr=0.1), "adam": lambda p: AdamW(p, lr=1e-3)}
    counted: list[float] = []

    class Counts(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            plugin, optimizer = self.trainer.precision_plugin, self.optimizers().optimizer
            own = list(self.parameters())
            states = [v for s in optimizer.state.values() for v in s.values() if v.numel() > 1]
            tensors = [*own, *(p.grad for p in own if p.grad is not None), *states]
            total = sum(t.nbytes for t in tensors) + bytes_held(plugin._working)
            counted.append(total / sum(p.numel() for p in own))

    fit(Counts(lambda: nn.Linear(8, 1, bias=False), layers[kind]), make_plugin(), loader(1))
    assert counted == [4 + 2 + 4 + (8 if kind == "adam" else 0)]
    counted.clear()

    def frozen() -> nn.Module:
        network = nn.Sequential(nn.Linear(8, 256, bias=False), nn.Linear(256, 1, bias=False))
        network[0].requires_grad_(False)
        return network

    fit(Counts(frozen, layers[kind]), make_plugin(), loader(1))
    trained = 10 + (8 if kind == "adam" else 0)
    assert counted == [pytest.approx((6 * 8 * 256 + trained * 256) / (9 * 256))]


@pytest.mark.slow
def test_zero_gradients_do_not_grow_the_loss_scale() -> None:
    """In 100 steps with zero gradients, a scale that grows every 5 steps would rise by 2^20."""

    class ZeroGradientsAtFirst(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (batch_idx >= 60)

    from lightning_mp.precision.loss_scale_config import LossScaleConfig

    plugin = BalancedAMP(loss_scale=LossScaleConfig(init_scale=256.0, growth_interval=5))
    fit(ZeroGradientsAtFirst(), plugin, loader(60, 4))
    assert plugin.scaler.get_scale() == 256.0
    assert plugin.scaler.skipped_steps == 0
    fit(ZeroGradientsAtFirst(), plugin, loader(66, 4))
    assert plugin.scaler.get_scale() > 256.0


def test_half_matrix_products_accumulate_in_fp32_in_training() -> None:
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    seen: list[Any] = []

    class Looks(Regression):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(
                (
                    matmul.allow_fp16_reduced_precision_reduction,
                    matmul.allow_bf16_reduced_precision_reduction,
                )
            )

    plugin = BalancedAMP()
    fit(Looks(), plugin, loader(1))
    assert seen == [(False, False)]
    assert before == (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    assert "products are accumulated in fp32" in plugin.policy.describe()
