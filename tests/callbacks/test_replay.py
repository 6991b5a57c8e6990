"""`replay` repeats a step exactly and restores all state."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks._locate.replay import Record, replay
from lightning_mp.callbacks._step.training_state import loss_scale_of
from lightning_mp.numerics.replay_state import RngState
from tests.callbacks.non_finite_models import WIDTH, Model, Perceptron, data, fit, mixed


def body() -> nn.Module:
    return nn.Sequential(Perceptron(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))


class Replays(Model):
    """Replays every step before its optimizer step; records the result and the state after it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(body, **kwargs)
        self.metric = MeanMetric()
        self.traces: list[Any] = []
        self.left: list[tuple[Any, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.metric(batch["x"].mean() + torch.rand(()) + random.random() + np.random.rand())
        self.log("metric", self.metric, on_step=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.record = Record(batch, batch_idx, RngState(self.device))
        self.scale = loss_scale_of(self.trainer)
        if isinstance(self.scale, Tensor):
            self.scale = self.scale.item()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if len(self.traces) == self.runs[-1]:
            torch.rand(3), random.random(), np.random.rand()  # drawn after the forward
            before = self.state()
            self.traces.append(None)
            self.traces[-1] = replay(self.trainer, self.record, self.scale, 1)
            self.left.append((before, self.state()))

    def state(self) -> dict[str, Any]:
        gradients = {f"gradient of {n}": p.grad for n, p in self.named_parameters()}
        tensors = {**gradients, **dict(self.named_buffers()), **dict(self.named_parameters())}
        stepped = [p.grad for g in self.trainer.optimizers[0].param_groups for p in g["params"]]
        results = self.trainer.fit_loop.epoch_loop._results
        return {
            "ids": [id(each) for each in (*gradients.values(), *stepped)],
            "tensors": {n: None if t is None else t.clone() for n, t in tensors.items()},
            "rng": (torch.get_rng_state(), random.getstate()[1], np.random.get_state()[1]),
            "metric": (self.metric._update_count, float(self.metric.mean_value)),
            "results": (id(results), {k: value_of(r) for k, r in results.items()}),
            "fx": (self._current_fx_name, self.trainer._logger_connector._current_fx),
            "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules()),
        }


def value_of(result: Any) -> float:
    return float(result.value.compute() if result.is_tensor is False else result.value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


PLUGINS = {
    "32-true": lambda: None,
    "balanced": BalancedAMP,
    "pure": PureFP16,
    "16-mixed": mixed,
}


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_replay_repeats_a_step_and_restores_all_state(plugin: Any, automatic: bool) -> None:
    model = Replays(automatic=automatic)
    fit(model, data(3), plugin())
    assert model.runs == [0, 0, 1, 1, 2, 2]
    for index, (trace, (before, after)) in enumerate(zip(model.traces, model.left, strict=True)):
        assert torch.equal(model.losses[2 * index], model.losses[2 * index + 1])
        for key in before:
            assert same(before[key], after[key]), key
        own = before["tensors"]
        gradients = {s.path: s for s in trace.groups["gradients"]}
        assert gradients.keys() == {n for n, _ in model.named_parameters()}
        for name, seen in gradients.items():
            real = own[f"gradient of {name}"].abs().amax().item()
            scale = seen.amax / real  # some gradients are unscaled already
            assert min(abs(scale - 1), abs(scale / (model.scale or 1) - 1)) < 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.parametrize("automatic", [True, False])
def test_training_after_a_replay_is_bitwise_equal(plugin: Any, automatic: bool) -> None:
    class Plain(Replays):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            torch.rand(3), random.random(), np.random.rand()

    trained = []
    for kind in (Plain, Replays):
        model = kind(automatic=automatic)
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        trainer = fit(model, data(4), plugin())
        trained.append((torch.stack(model.weights), dict(model.named_buffers()), trainer))
    (weights, buffers, trainer), (again, buffers_again, other) = trained
    assert not torch.equal(weights[0], weights[-1])
    assert torch.equal(weights, again)
    assert same(buffers, buffers_again)
    assert same(dict(trainer.callback_metrics), dict(other.callback_metrics))
    assert trainer.global_step == other.global_step == 4


@pytest.mark.slow
def test_replay_runs_at_the_given_loss_scale() -> None:
    class Scales(Replays):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for scale in (1.0, 64.0):
                self.traces.append(replay(self.trainer, self.record, scale, 1))

    model = Scales()
    fit(model, data(1), BalancedAMP())
    one, more = ({s.path: s.amax for s in t.groups["gradients"]} for t in model.traces)
    for name, amax in one.items():
        assert more[name] == pytest.approx(64 * amax, rel=1e-2, abs=64 * 2**-24), name


def test_replay_in_manual_optimization_ends_before_the_current_step() -> None:
    reached: list[str] = []

    class Twice(Replays):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            for part in ("first", "second"):
                optimizer.zero_grad()
                self.toggle_optimizer(optimizer)
                self.manual_backward(self(batch["x"]).mean())
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                reached.append(part)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                schedule.step()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if reached == ["first"]:
                replay(self.trainer, self.record, None, 1)
                reached.append("end")

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    model = Twice(automatic=False)
    trainer = fit(model, data(1))
    assert reached == ["first", "first", "end", "second"]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-3 / 4
    assert trainer.global_step == 2
    assert all(p.requires_grad for p in model.parameters())


def test_replay_does_not_run_optimizers_in_gradient_hooks() -> None:
    def step(parameter: Tensor) -> None:
        parameter.data.add_(1.0)

    class InHooks(Replays):
        def on_train_start(self) -> None:
            for p in self.body.parameters():
                p.register_post_accumulate_grad_hook(step)

    model = InHooks()
    fit(model, data(1))
    before, after = model.left[0]
    assert same(before["tensors"], after["tensors"])
    assert model.runs == [0, 0]


@pytest.mark.slow
def test_replay_does_not_count_clamped_values_again() -> None:
    class Clamps(Replays):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.body[0].overflow()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            counts = self.trainer.precision_plugin.inf_clamp.counted
            before = counts()
            replay(self.trainer, self.record, self.scale, 1)
            assert counts() == before
            assert sum(before.values()) > 0
            self.traces.append(None)

    model = Clamps()
    fit(model, data(1), BalancedAMP(inf_clamp=["body.0.drop"]))
    assert len(model.traces) == 1
