"""Checkpoints of PureFP16 have fp32 weights, resume exactly and fit other precisions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import AdamW

from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, make_trainer, parameters_of

WAYS = "kahan", "stochastic", "nearest"
ways = pytest.mark.parametrize("way", WAYS)
halves = pytest.mark.parametrize("half", ["fp16", "bf16"])


def wide() -> nn.Module:
    # Among 70,000 weights, some residuals are half a ULP of their weight, a tie in rounding.
    return nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 1))


def make_plugin(half: str, way: str) -> PureFP16:
    if half == "bf16":
        return PureFP16(half="bf16", write_back=way)
    config = LossScaleConfig(init_scale=2.0**8, growth_interval=2)
    return PureFP16(write_back=way, loss_scale=config)


def make_model(kind: Any = AdamW, **options: Any) -> Regression:
    return Regression(make_optimizer=lambda p: kind(p, lr=0.01), interval="step", **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AdamW, SafeAdamW])
@ways
@halves
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(
    half: str, way: str, kind: Any, tmp_path: Path
) -> None:
    bad = [1] if half == "fp16" else []  # one step is skipped in every epoch
    whole, first, second = (make_model(kind, network=wide, bad_batches=bad) for _ in range(3))
    plugin, resumed = make_plugin(half, way), make_plugin(half, way)
    trainer = fit(whole, plugin, loader(3), max_epochs=2)
    path = tmp_path / "run.ckpt"
    fit(first, make_plugin(half, way), loader(3)).save_checkpoint(path)
    other = fit(second, resumed, loader(3), max_epochs=2, ckpt_path=path)
    assert len(second.losses) == 3
    assert whole.losses == first.losses + second.losses
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert resumed.state_dict() == plugin.state_dict()
    steps = 6 - 2 * len(bad)
    assert other.global_step == trainer.global_step == steps
    counts = way == "stochastic" and kind is AdamW  # SafeAdamW has its own counter
    assert plugin.state_dict().get("writes", 0) == (steps if counts else 0)
    one, two = trainer.optimizers[0], other.optimizers[0]
    assert (
        one.param_groups[0]["lr"] == two.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**steps)
    )
    for p, q in zip(whole.parameters(), second.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert one.state[p][name].dtype == torch.float32
            assert torch.equal(one.state[p][name], two.state[q][name])


class _Saves(Regression):
    """Saves a checkpoint in training, and records the half weights at this point."""

    path: Path

    def on_train_start(self) -> None:
        self.at_start = parameters_of(self)

    def on_train_epoch_end(self) -> None:
        self.dtypes = {p.dtype for p in self.parameters()}
        self.at_end = parameters_of(self)
        self.trainer.save_checkpoint(self.path)


@pytest.mark.slow
@ways
@halves
def test_checkpoint_contains_fp32_weights_for_a_plain_model(
    half: str, way: str, tmp_path: Path
) -> None:
    model, again = _Saves(wide), _Saves(wide, seed=1)
    model.path = again.path = tmp_path / "run.ckpt"
    fit(model, make_plugin(half, way), loader(3))
    assert model.dtypes == {torch.float16 if half == "fp16" else torch.bfloat16}
    state = torch.load(model.path)["state_dict"]
    assert {value.dtype for value in state.values()} == {torch.float32}
    plain = Regression(wide, seed=2)
    plain.load_state_dict(state)
    assert torch.equal(parameters_of(plain), parameters_of(model))  # the weights after teardown
    assert torch.equal(parameters_of(plain), model.at_end) == (way != "kahan")
    # After resuming, the half weights are equal.
    fit(again, make_plugin(half, way), loader(4), ckpt_path=model.path, max_epochs=2)
    assert torch.equal(again.at_start, model.at_end)


def other_plugin(source: str) -> Any:
    if source == "16-mixed":
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**9))
    return {"fp32": None, "BalancedAMP": BalancedAMP(loss_scale=2.0**9)}[source]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["fp32", "16-mixed", "BalancedAMP"])
@halves
def test_checkpoints_are_exchangeable_with_other_precisions(
    source: str, half: str, tmp_path: Path
) -> None:
    path, reference, first, third = tmp_path / "run.ckpt", *(make_model() for _ in range(3))
    start = parameters_of(reference)
    fit(reference, None, loader(3), max_epochs=3)
    fit(first, other_plugin(source), loader(3)).save_checkpoint(path)

    began: list[torch.Tensor] = []
    second, plugin = make_model(), make_plugin(half, "kahan")
    scales: list[float] = []

    def record() -> None:
        began.append(torch.cat([*map(flat, second.state_dict().values())]))
        if plugin.scaler is not None:
            scales.append(plugin.scaler.scale)

    second.on_train_start = record
    trainer = make_trainer(plugin, max_epochs=2)
    trainer.fit(second, loader(3), ckpt_path=path)
    expected = torch.cat([*map(flat, first.state_dict().values())])
    bits = {"fp16": 22, "bf16": 16}[half]
    torch.testing.assert_close(began[0], expected, rtol=2.0**-bits, atol=2.0**-35)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {6}
    if half == "fp16":
        assert scales == [2.0**8 if source == "fp32" else 2.0**9]

    trainer.save_checkpoint(path)
    trainer = fit(third, other_plugin(source), loader(3), max_epochs=3, ckpt_path=path)
    assert trainer.global_step == 9
    error = (parameters_of(third) - parameters_of(reference)).norm()
    moved = (parameters_of(reference) - start).norm()
    assert error < 0.15 * moved  # Adam's first steps amplify rounding: lr * sign(gradient)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().flatten()
