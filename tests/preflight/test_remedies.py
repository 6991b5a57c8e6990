"""The preflight recommends a remedy for each kind of weakness, and the remedy works."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor

from lightning_mp import (
    BalancedAMP,
    LossScaleConfig,
    PrecisionPreflight,
)
from lightning_mp.cli import main
from tests.preflight.models import Cancellation, LayerScale, Sentences, Shifts, Words
from tests.preflight.runs import NAMES, make_words, rerun_with_settings, run_preflight
from tests.quiet import QUIET


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weak", ["cancellation", "hand-written norm", "overflow"])
def test_weak_module_is_named_and_fp32_modules_remedies_it(weak: str, name: str) -> None:
    result = run_preflight(make_words(weak), name).result
    assert result is not None
    assert result.ratio > 0.05
    assert result.remedy.fp32_modules == ("blocks.1.weak",)
    assert result.mended is not None
    assert result.mended < 0.05
    assert result.modules[0].path == "blocks.1.weak"


def make_patched() -> Words:
    """Set `forward` on an instance, as patches of a library do."""
    model = make_words()
    model.blocks[1].weak.forward = lambda x: (3 * x + 1000) - 1000
    return model


@pytest.mark.parametrize("name", ["BalancedAMP fp16", "PureFP16 fp16"])
def test_forward_that_is_set_on_an_instance_runs_in_fp32(name: str) -> None:
    callback = run_preflight(make_patched(), name)
    assert callback.result is not None
    assert callback.result.remedy.fp32_modules == ("blocks.1.weak",)
    assert rerun_with_settings(callback, make_patched()).result.is_clean  # type: ignore[union-attr]


class SquaredError(Words):
    """The loss squares differences of 300, which overflow in fp16."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.running = torch.nn.Identity()
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        scores = x @ self.head.weight.T
        target = 300.0 * torch.nn.functional.one_hot(batch[1], 40)
        difference = scores - target.to(scores.dtype)
        return (difference * difference).mean()


@pytest.mark.parametrize("name", ["BalancedAMP fp16", "16-mixed"])
def test_operation_of_the_training_step_is_remedied_by_fp32_ops(name: str) -> None:
    torch.manual_seed(1)
    callback = run_preflight(SquaredError(), name)
    result = callback.result
    assert result is not None
    assert not result.is_clean
    (op,) = result.remedy.fp32_ops
    assert result.remedy.fp32_modules == result.remedy.inf_clamp == ()
    assert f"With `fp32_ops: [{op}]` the largest error is" in callback.text
    assert f"`{op}` rounds in " in callback.text
    assert "`training_step`" in callback.text
    torch.manual_seed(1)
    assert rerun_with_settings(callback, SquaredError()).result.is_clean  # type: ignore[union-attr]


def test_remedy_moves_an_operation_from_half_ops_to_fp32_ops() -> None:
    half_ops = BalancedAMP(half_ops=["cross_entropy", "softmax"])
    callback = PrecisionPreflight(steps=1, stops=True)

    class Step(Words):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x = self.embed(batch[0])
            weights = (1e4 + 4 * self.head(x).float()).softmax(-1)
            return -(weights.flatten(0, 1).log() * 1.0).mean()

    torch.manual_seed(1)
    model = Step()
    run = pl.Trainer(**{**QUIET, "max_steps": 1, "callbacks": callback}, plugins=half_ops)
    run.fit(model, Sentences())
    assert callback.result is not None
    assert callback.result.remedy.fp32_ops == ("softmax",)
    settings = yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["init_args"]
    assert settings["fp32_ops"] == ["softmax"]
    assert settings["half_ops"] == ["cross_entropy"]
    BalancedAMP(**settings)  # raises if an operation is in both lists


class Massive(torch.nn.Module):
    """Adds 1e5 to one channel of the first token."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.zeros(x.shape[1:], device=x.device)
        place[0, 0] = 1e5
        return x + place.to(x.dtype)


def make_massive() -> Words:
    model = make_words()
    model.running = torch.nn.LayerNorm(model.embed.embedding_dim)
    model.blocks[1].drop = torch.nn.Sequential(Massive())
    return model


@pytest.mark.parametrize("name", ["BalancedAMP fp16", "16-mixed"])
def test_massive_activation_is_remedied_by_inf_clamp(name: str) -> None:
    callback = run_preflight(make_massive(), name)
    result = callback.result
    assert result is not None
    assert result.ratio == float("inf")
    assert result.remedy.inf_clamp
    assert result.remedy.fp32_modules == result.remedy.fp32_ops == ()
    assert rerun_with_settings(callback, make_massive()).result.is_clean  # type: ignore[union-attr]


def make_shifted() -> Words:
    model = make_words()
    for block in model.blocks:
        block.weak = Shifts()
    return model


def test_bf16_rounding_in_every_block_is_remedied_by_fp16() -> None:
    callback = run_preflight(make_shifted(), "PureFP16 bf16")
    assert callback.result is not None
    assert callback.result.remedy.half == torch.float16
    assert "`BalancedAMP(half='fp16')`" in callback.text
    assert rerun_with_settings(callback, make_shifted()).result.is_clean  # type: ignore[union-attr]


def test_remedy_that_failed_at_an_earlier_step_is_not_recommended() -> None:
    class OverflowsOnce(Words):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            large = (self.embed(batch[0]) * 7e4).float().mean()  # inf in fp16
            return super().training_step(batch, batch_idx) + (0.0 if batch_idx else 0 * large)

    torch.manual_seed(1)
    model = OverflowsOnce()
    for block in model.blocks:
        block.weak = Shifts()
    result = run_preflight(model, "PureFP16 bf16").result
    assert result is not None
    assert result.remedy.half is None


def test_weak_module_in_true_half_precision_is_remedied_by_fp32_modules_of_balanced_amp() -> None:
    callback = run_preflight(make_words("cancellation"), "bf16-true")
    assert callback.result is not None
    assert callback.result.remedy.half == torch.bfloat16
    assert callback.result.remedy.fp32_modules == ("blocks.1.weak",)
    assert "`BalancedAMP(half='bf16')` and `fp32_modules: [blocks.1.weak]`" in callback.text
    assert rerun_with_settings(callback, make_words("cancellation")).result.is_clean  # type: ignore[union-attr]


class ShiftedNorm(Words):
    """The step rounds unless a norm returns fp32, which norms of `fp32_modules` do not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = (self.running(self.embed(batch[0]).flatten(0, 1)) + 1000) - 1000
        return torch.nn.functional.cross_entropy(self.head(x), batch[1].flatten())


def test_norm_that_is_in_fp32_already_is_no_remedy() -> None:
    torch.manual_seed(1)
    callback = run_preflight(ShiftedNorm(), "BalancedAMP fp16")
    assert callback.result is not None
    assert callback.result.is_mended
    assert callback.result.remedy.fp32_modules == ()
    torch.manual_seed(1)
    assert rerun_with_settings(callback, ShiftedNorm()).result.is_clean  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore")
def test_command_prints_settings_that_remedy_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {
        "model": {
            "class_path": "tests.preflight.models.Words",
            "init_args": {"weak": "cancellation"},
        },
        "data": {"class_path": "tests.preflight.models.Sentences"},
        "trainer": {
            "plugins": [{"class_path": "BalancedAMP"}],
            "callbacks": [{"class_path": "ModelCheckpoint"}, {"class_path": "TQDMProgressBar"}],
            "max_steps": 2,
            "logger": False,
        },
    }
    path = tmp_path / "run.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-mp"])

    def run(command: str, *more: str) -> str:
        path.write_text(yaml.safe_dump(config))
        main([command, "--config", str(path), *more])
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="1"):
        run("preflight")
    printed = capsys.readouterr().out
    assert "With `fp32_modules: [blocks.1.weak]` the largest error is" in printed
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]
    pasted = tmp_path / "settings.yaml"
    pasted.write_text(printed.partition("configuration:")[2])
    assert "is safe for this model" in run("preflight", "--config", str(pasted))
    config["trainer"].update(yaml.safe_load(pasted.read_text())["trainer"])
    assert "is safe for this model" in run("preflight")
    with pytest.raises(SystemExit, match="the page could not be written to"):
        run("preflight", "--dirpath", str(path / "pages"))  # `path` is a file
    config["trainer"].update(enable_checkpointing=False, enable_progress_bar=False, callbacks=[])
    run("fit")


def make_layer_scaled() -> Words:
    model = make_words()
    model.running = torch.nn.Identity()
    for block in model.blocks:
        block.weak = LayerScale()
    return model


def run_with_loss_scale(scale: float) -> PrecisionPreflight:
    callback = PrecisionPreflight(steps=2, stops=True)
    pl.seed_everything(0, verbose=False)
    kwargs = {**QUIET, "max_steps": 4, "callbacks": callback}
    plugins = BalancedAMP(loss_scale=LossScaleConfig(init_scale=scale))
    pl.Trainer(**kwargs, plugins=plugins).fit(make_layer_scaled(), Sentences())
    return callback


def test_gradient_underflow_is_remedied_by_the_loss_scale() -> None:
    callback = run_with_loss_scale(4.0)
    assert callback.result is not None
    assert callback.result.remedy.fp32_modules == ()
    assert callback.result.mended is not None
    assert callback.result.mended < 0.05 < callback.result.ratio
    settings = yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["init_args"]
    scale = settings["loss_scale"]["init_scale"]
    assert settings == {"half": "fp16", "loss_scale": {"init_scale": scale}}
    assert scale > 4.0
    assert "With an initial loss scale of" in callback.text
    cured = rerun_with_settings(callback, make_layer_scaled()).result
    assert cured is not None
    assert cured.is_clean
    (before,), (after,) = (
        [m for m in result.modules if m.path == "blocks.0.up"]
        for result in (callback.result, cured)
    )
    # At first, gradients are below half the smallest fp16 number; with the settings, subnormal.
    assert (before.underflow, before.subnormal) == (1, 0)
    assert after.underflow < 0.1
    assert after.subnormal > 0.5


class Autocast(Cancellation):
    """Computes in the dtype of autocast, as kernels do that `fp32_ops` cannot name."""

    def forward(self, x: Tensor) -> Tensor:
        is_on, half = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with torch._C.DisableTorchFunction():
            return super().forward(x.to(half) if is_on else x)


def test_settings_with_the_other_dtype_keep_other_arguments_of_the_plugin() -> None:
    def make() -> Words:
        model = make_words()
        for block in model.blocks:
            block.weak = torch.nn.Sequential(*(Autocast(30.0) for _ in range(5)))
        return model

    kept = {"fp32_modules": ["norm", "head"], "fp32_ops": ["softplus"]}
    callback = PrecisionPreflight(steps=2, stops=True)
    pl.seed_everything(0, verbose=False)
    plugin = BalancedAMP(half="bf16", **kept)  # type: ignore[arg-type]
    run = pl.Trainer(**{**QUIET, "max_steps": 4, "callbacks": callback}, plugins=plugin)
    run.fit(make(), Sentences())
    settings = yaml.safe_load(callback.settings)["trainer"]["plugins"][0]
    assert settings == {"class_path": "BalancedAMP", "init_args": {"half": "fp16", **kept}}
    assert rerun_with_settings(callback, make()).result.is_clean  # type: ignore[union-attr]


def test_settings_keep_other_arguments_of_the_plugin() -> None:
    settings = []
    for weights in ("half", "full"):
        scale = LossScaleConfig(growth_interval=7)
        plugin = BalancedAMP(weights=weights, loss_scale=scale, fp32_modules=("norm", "head"))  # type: ignore[arg-type]
        callback = PrecisionPreflight(steps=2, stops=True)
        pl.seed_everything(0, verbose=False)
        run = pl.Trainer(**{**QUIET, "max_steps": 4, "callbacks": callback}, plugins=plugin)
        run.fit(make_words("cancellation"), Sentences())
        settings.append(yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["init_args"])
    expected = {
        "half": "fp16",
        "loss_scale": {"growth_interval": 7},
        "fp32_modules": ["norm", "head", "blocks.1.weak"],
    }
    assert settings == [expected, {**expected, "weights": "full"}]
