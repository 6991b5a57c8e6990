"""Steps that a callback requests to skip, and direct calls of `optimizer.step`."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import LBFGS, SGD, AdamW

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16
from tests.precision.models import Regression, fit, loader

LOW = LossScaleConfig(init_scale=256.0)
PLUGINS = {
    "fp16 O2": lambda: BalancedAMP(loss_scale=LOW),
    "fp16 O1": lambda: BalancedAMP(weights="full", loss_scale=LOW),
    "bf16 O2": lambda: BalancedAMP(half="bf16"),
    "bf16 O1": lambda: BalancedAMP(half="bf16", weights="full"),
    "PureFP16": lambda: PureFP16(loss_scale=LOW),
}
plugins = pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)


class Skip(Callback):
    """Requests to skip one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls = 0

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        trainer.precision_plugin.request_skip(torch.tensor(self.calls == self.step))
        self.calls += 1


@plugins
def test_requested_skip_changes_no_weight_state_count_or_schedule(make_plugin: Any) -> None:
    skipping = Regression(make_optimizer=lambda p: AdamW(p, lr=0.01), interval="step")
    plugin = make_plugin()
    before = plugin.scaler and plugin.scaler.scale
    trainer = fit(skipping, plugin, loader(5), callbacks=[Skip(2)])
    assert torch.equal(skipping.weights[2], skipping.weights[1])
    assert not torch.equal(skipping.weights[3], skipping.weights[2])
    assert trainer.global_step == 4
    optimizer = trainer.optimizers[0]
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**4)
    if plugin.scaler is not None:
        assert plugin.scaler.skipped_steps == 0
        assert plugin.scaler.scale == before


def test_request_before_an_error_does_not_skip_a_step_of_the_next_fit() -> None:
    class Fail(Skip):
        def on_before_optimizer_step(self, *args: Any) -> None:
            super().on_before_optimizer_step(*args)
            raise RuntimeError("after the request")

    plugin = BalancedAMP(half="bf16")
    with pytest.raises(RuntimeError, match="after the request"):
        fit(Regression(), plugin, loader(1), callbacks=[Fail(0)])
    assert fit(Regression(), plugin, loader(2)).global_step == 2


def test_requested_skip_of_an_overflow_counts_as_overflow() -> None:
    model = Regression(bad_batches=[2])
    plugin = BalancedAMP(loss_scale=LossScaleConfig(init_scale=256.0))
    trainer = fit(model, plugin, loader(5), callbacks=[Skip(2)])
    assert (plugin.scaler.skipped_steps, plugin.scaler.scale) == (1, 128.0)
    assert trainer.global_step == 4


def test_request_after_the_first_evaluation_of_a_step_of_lbfgs_is_ignored() -> None:
    """LBFGS has changed weights by then, and cannot continue after an error in its step."""
    weights = []
    for callbacks in ([], [Skip(2)]):
        model = Regression(make_optimizer=lambda p: LBFGS(p, lr=0.1, max_iter=4))
        trainer = fit(model, BalancedAMP(half="bf16"), loader(3), callbacks=callbacks)
        assert trainer.global_step == 3
        weights.append(model.weights[-1])
    assert torch.equal(*weights)


class _StepsByHand(Regression):
    """Calls `step` of the optimizer directly, without Lightning and the plugin."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=lambda p: SGD(p, 0.1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("name", ["fp16 O2", "fp16 O1", "PureFP16"])
def test_direct_step_on_scaled_gradients_raises(name: str) -> None:
    model = _StepsByHand()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was not called through"):
        fit(model, PLUGINS[name](), loader(2))
    after = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    torch.testing.assert_close(after, weights, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_next_forward_uses_the_weights_of_a_direct_step_without_a_loss_scale(fused: bool) -> None:
    """A GAN has two forwards in one training step, with an optimizer step in between."""

    class Twice(_StepsByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.zero_grad()
            self.after = self.loss(batch)

    models = []
    for plugin in (None, BalancedAMP(half="bf16")):
        model = Twice()
        model.make_optimizer = lambda p: SGD(p, 0.1, fused=fused)
        fit(model, plugin, loader(2))
        models.append(model.after.item())
    assert models[1] == pytest.approx(models[0], rel=2**-6)


def test_optimizer_steps_directly_after_training() -> None:
    model = Regression()
    trainer = fit(model, BalancedAMP(), loader(2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    trainer.optimizers[0].step()
