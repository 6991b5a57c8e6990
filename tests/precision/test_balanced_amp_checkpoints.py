"""Checkpoints of BalancedAMP have fp32 weights, resume exactly and fit other precisions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, make_trainer, parameters_of, perceptron

SETTINGS: dict[str, dict[str, Any]] = {
    "fp16 O2": {},
    "fp16 O1": {"weights": "full"},
    "bf16 O2": {"half": "bf16"},
    "bf16 O1": {"half": "bf16", "weights": "full"},
}
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def make_model() -> Regression:
    return Regression(make_optimizer=lambda p: AdamW(p, lr=0.01), interval="step")


def make_plugin(setting: dict[str, Any], **scale: Any) -> BalancedAMP:
    if setting.get("half") == "bf16":
        return BalancedAMP(**setting)
    config = LossScaleConfig(init_scale=2.0**8, growth_interval=2, **scale)
    return BalancedAMP(**setting, loss_scale=config)


def save_and_load(trainer: Any, folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "run.ckpt"
    trainer.save_checkpoint(path)
    return path, torch.load(path, weights_only=False)


@settings
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    whole, plugin = make_model(), make_plugin(setting)
    trainer = fit(whole, plugin, loader(3), max_epochs=2)
    half = make_model()
    saved_by = fit(half, make_plugin(setting), loader(3), max_epochs=1)
    path, checkpoint = save_and_load(saved_by, tmp_path)
    resumed, resumed_plugin = make_model(), make_plugin(setting)
    resumed_trainer = fit(resumed, resumed_plugin, loader(3), max_epochs=2, ckpt_path=path)
    assert len(resumed.losses) == 3
    assert whole.losses == half.losses + resumed.losses
    assert torch.equal(parameters_of(resumed), parameters_of(whole))
    assert resumed_plugin.state_dict() == plugin.state_dict()
    assert bool(plugin.state_dict()) == (plugin.half == "fp16")
    assert resumed_trainer.global_step == trainer.global_step == 6
    one, other = trainer.optimizers[0], resumed_trainer.optimizers[0]
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert one.state[p][name].dtype == torch.float32
            assert torch.equal(one.state[p][name], other.state[q][name])
    assert {t.dtype for t in checkpoint["state_dict"].values()} == {torch.float32}


class _Renormalizing(nn.Module):
    """Adds embeddings of at most unit length, so that the forward writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.head = nn.Embedding(4, 8, max_norm=1.0), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x + self.codes(torch.arange(len(x)) % 4))
        return result


def test_resumed_run_knows_the_modules_that_write_to_their_weights(tmp_path: Path) -> None:
    """The first write of a forward is rounded to half, once in a run."""
    path: Path | None = None
    ends = []
    for epochs in (2, 1, 2):
        model = Regression(_Renormalizing)
        trainer = fit(model, BalancedAMP(half="bf16"), loader(3), max_epochs=epochs, ckpt_path=path)
        ends.append(parameters_of(model))
        path = save_and_load(trainer, tmp_path)[0] if epochs == 1 else None
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_run_in_fp16_resumes_a_run_without_a_loss_scale(half: Any, tmp_path: Path) -> None:
    first = fit(Regression(_Renormalizing), BalancedAMP(half="bf16"), loader(2))
    stochastic = PureFP16(half="bf16", write_back="stochastic")
    second = fit(Regression(), stochastic, loader(2))
    for trainer, kind, network in ((first, BalancedAMP, _Renormalizing), (second, PureFP16, None)):
        assert trainer.precision_plugin.state_dict()  # without the state of a scaler
        path, _ = save_and_load(trainer, tmp_path)
        model = Regression(network or perceptron)
        resumed = fit(model, kind(half=half), loader(2), max_epochs=2, ckpt_path=path)
        assert resumed.global_step == 4


def test_state_dict_in_training_equals_that_of_a_plain_module(tmp_path: Path) -> None:
    """Its tensors alias the weights, so a write reaches the model; tied weights are shared."""

    class Looks(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            super().on_train_batch_end()
            state = self.state_dict()
            own = dict(self.named_parameters())
            assert all(state[name].data_ptr() == p.data_ptr() for name, p in own.items())
            assert {value.dtype for value in state.values()} == {torch.float32}
            self.trainer.save_checkpoint(tmp_path / "run.ckpt")
            state["network.3.bias"].fill_(5.0)

        def on_train_batch_start(self, *_: Any) -> None:
            if self.losses:
                assert self.network[3].bias.item() == 5.0

    def tied() -> nn.Module:
        network = perceptron()
        network.shared = network[0].weight
        return network

    model = Looks(tied)
    fit(model, BalancedAMP(), loader(3))
    stored = torch.load(tmp_path / "run.ckpt", weights_only=False)["state_dict"]
    shared, weight = stored["network.shared"], stored["network.0.weight"]
    assert shared.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    plain = Regression(tied, seed=1)
    plain.load_state_dict(stored)
    assert not torch.equal(weight, weight.half().float())  # more bits than the working copies


@pytest.mark.slow
@pytest.mark.parametrize("source", ["fp32", "16-mixed"])
@pytest.mark.parametrize("setting", [{}, {"half": "bf16"}], ids=["fp16", "bf16"])
def test_checkpoints_are_exchangeable_with_fp32_and_16_mixed(
    source: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    def other() -> MixedPrecision | None:
        if source == "fp32":
            return None
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**9))

    reference = make_model()
    fit(reference, None, loader(3), max_epochs=3)
    start = parameters_of(make_model())
    first = make_model()
    trainer = fit(first, other(), loader(3))
    path, _ = save_and_load(trainer, tmp_path)

    second, plugin = make_model(), make_plugin(setting)
    trainer = make_trainer(plugin, max_epochs=2)
    began = _record_start(second, plugin)
    trainer.fit(second, loader(3), ckpt_path=path)
    assert torch.equal(began[0], parameters_of(first).float().double())
    if plugin.scaler is not None:  # 2^8 is the initial scale
        assert began[1] == (2.0**8 if source == "fp32" else 2.0**9)
    assert {int(s["step"]) for s in trainer.optimizers[0].state.values()} == {6}

    path, _ = save_and_load(trainer, tmp_path)
    third = make_model()
    trainer = fit(third, other(), loader(3), max_epochs=3, ckpt_path=path)
    assert trainer.global_step == 9
    error = (parameters_of(third) - parameters_of(reference)).norm()
    moved = (parameters_of(reference) - start).norm()
    assert error < 0.15 * moved  # Adam's first steps amplify rounding: lr * sign(gradient)


def _record_start(model: Regression, plugin: BalancedAMP) -> list[Any]:
    """Return a list that receives the weights and the loss scale when training starts."""
    began: list[Any] = []

    def record(*_: Any) -> None:
        state = model.state_dict()
        began.append(torch.cat([state[n].double().flatten() for n, _ in model.named_parameters()]))
        began.append(plugin.scaler.scale if plugin.scaler else None)

    model.on_train_start = record
    return began


@pytest.mark.parametrize("plugin_type", [BalancedAMP, PureFP16])
def test_optimizer_states_are_loaded_without_rounding(plugin_type: Any, tmp_path: Path) -> None:
    small = loader(2)

    class Small(Regression):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * 1e-5  # second moments underflow in fp16

    def make() -> Regression:
        return Small(make_optimizer=lambda p: Adam(p, lr=1e-3))

    path, saved = save_and_load(fit(make(), plugin_type(), small), tmp_path)
    model = make()
    trainer = fit(model, plugin_type(), small, max_epochs=1, ckpt_path=path)  # all epochs are done
    assert model.losses == []
    loaded = trainer.optimizers[0].state_dict()["state"]
    for index, state in saved["optimizer_states"][0]["state"].items():
        assert 0 < state["exp_avg_sq"].max() < 2**-25
        assert torch.equal(loaded[index]["exp_avg_sq"], state["exp_avg_sq"])
