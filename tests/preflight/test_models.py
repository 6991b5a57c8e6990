"""Models that the preflight supports, and models that train without a comparison."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_mp import InfCLStrategy, PrecisionPreflight, PureFP16
from tests.preflight.models import WEAK, Sentences, Words, plugin, trainer
from tests.preflight.runs import checkpointed, make_words, run_preflight
from tests.quiet import QUIET, parameters_of


class Manual(Words):
    """Uses manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


class Infinite(Words):
    """The loss is inf in every dtype."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float("inf")


class Broken(Words):
    """Raises outside the autocast of the plugin, so the comparison in fp32 fails."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            raise KeyError("scores")
        return super().training_step(batch, batch_idx)


class Lost(Words):
    def on_train_start(self) -> None:
        next(self.parameters()).data.fill_(torch.nan)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Lost, "Weights are NaN or inf before this step"),
        (Infinite, "The loss is inf in fp32"),
        (Manual, "does not support manual optimization"),
        (Broken, "could not run the step: KeyError: 'scores'"),
    ],
)
def test_unsupported_model_warns_and_training_continues(model: type[Words], message: str) -> None:
    callback, fitted = PrecisionPreflight(steps=1), model()
    before = parameters_of(fitted)
    with pytest.warns(UserWarning, match=message):
        trainer("BalancedAMP bf16", callback).fit(fitted, Sentences())
    assert callback.result is None
    assert message in str(callback.failure)
    assert not torch.equal(parameters_of(fitted), before)


class WithDropout(torch.nn.Module):
    """Attention and a function with a dropout probability of 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(x, x, x)
        return torch.nn.functional.alpha_dropout(x, 0.5, self.training) ** 2


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_dropout_is_disabled_in_composite_functions_and_checkpoints(
    use_reentrant: bool | None,
) -> None:
    model = make_words()
    for block in model.blocks:
        block.norm = torch.nn.Sequential(block.norm, WithDropout())
    if use_reentrant is not None:
        checkpointed(model, use_reentrant)
    result = run_preflight(model, "BalancedAMP fp16").result
    assert result is not None
    # Dropout in one of the two runs would cause a relative error of 1.
    assert max(each.own for each in result.modules) < 0.01
    assert result.is_clean


class LowRank(torch.nn.Module):
    """LoRA: a frozen layer plus a trainable product of two low-rank factors."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("weak", [None, "hand-written norm"])
def test_lora_layers_are_compared(weak: str | None) -> None:
    model = make_words(weak)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    result = run_preflight(model, "BalancedAMP fp16").result
    assert result is not None
    assert result.remedy.fp32_modules == (() if weak is None else ("blocks.1.weak",))


def test_fp32_run_warns_that_there_is_nothing_to_compare() -> None:
    callback = PrecisionPreflight()
    with pytest.warns(UserWarning, match="does not compute in half precision"):
        pl.Trainer(**{**QUIET, "max_steps": 1, "callbacks": callback}).fit(
            make_words(), Sentences()
        )


def test_compiled_module_is_compared_in_eager_mode() -> None:
    model = make_words("cancellation")
    model.blocks[0].compile(backend="eager")
    callback = run_preflight(model, "BalancedAMP fp16")
    assert callback.result is not None
    assert callback.result.remedy.fp32_modules == ("blocks.1.weak",)
    assert "Compiled modules were compared in eager mode." in callback.text


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_weak_module_beside_torchscript_is_named() -> None:
    model = make_words("cancellation")
    model.head = torch.jit.script(model.head)
    result = run_preflight(model, "BalancedAMP fp16").result
    assert result is not None
    assert result.remedy.fp32_modules == ("blocks.1.weak",)
    assert "head" not in [error.path for error in result.modules]


@pytest.mark.parametrize("name", ["BalancedAMP fp16", "PureFP16 fp16"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_weak_module_in_a_checkpointed_block_is_named(use_reentrant: bool, name: str) -> None:
    plain = run_preflight(make_words("cancellation"), name).result
    result = run_preflight(checkpointed(make_words("cancellation"), use_reentrant), name).result
    assert plain is not None
    assert result is not None
    assert result.remedy.fp32_modules == ("blocks.1.weak",)
    # Inputs and cotangents equal those of the run without checkpointing.
    assert {m.path: (m.output, m.gradient) for m in result.modules if "." in m.path[8:]} == {
        m.path: (m.output, m.gradient) for m in plain.modules if "." in m.path[8:]
    }


def test_casts_at_borders_of_modules_are_left_out_in_fp32() -> None:
    class Sequential(torch.nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x.flatten(0, 1)).view_as(x))[0]

    model = make_words("cancellation")
    model.blocks.append(Sequential(torch.nn.Linear(32, 32), torch.nn.LSTM(32, 32)))
    callback = PrecisionPreflight(steps=1, stops=True)
    kept = PureFP16(fp32_modules=["Cancellation", "Linear"])  # the LSTM casts its inputs to half
    pl.Trainer(**QUIET, max_steps=1, callbacks=callback, plugins=kept).fit(model, Sentences())
    assert callback.result is not None
    assert callback.result.is_clean


def test_tensors_of_a_batch_stay_on_their_devices() -> None:
    class KeepsLengths(Sentences):
        """Leaves a tensor on another device, as `pack_padded_sequence` requires."""

        def transfer_batch_to_device(self, batch: Any, device: Any, _: int) -> Any:
            return [*batch, torch.full((len(batch[0]),), 12, device="meta")]

    class Checks(Words):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert batch[2].is_meta
            return super().training_step(batch, batch_idx)

    callback = PrecisionPreflight(steps=1, stops=True)
    trainer("BalancedAMP fp16", callback).fit(Checks(), KeepsLengths())
    assert callback.result is not None


def test_towers_of_a_gradient_cache_are_compared() -> None:
    from tests.strategies.models import TinyCLIP, loader

    class Weak(TinyCLIP):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.text = torch.nn.Sequential(self.text, WEAK["cancellation"]())

    callback = PrecisionPreflight(steps=1)
    pl.seed_everything(0, verbose=False)
    kwargs = {**QUIET, "max_steps": 1, "callbacks": callback}
    strategy = InfCLStrategy(micro_batch_size=4, process_group_backend="gloo")
    run = pl.Trainer(**kwargs, strategy=strategy, plugins=plugin("BalancedAMP fp16"))
    run.fit(Weak(), loader(24, 12))
    assert callback.result is not None
    assert callback.result.remedy.fp32_modules == ("text.1",)
