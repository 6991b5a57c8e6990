"""The preflight names planted weaknesses, proves the cure, and leaves the run as it was."""

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor

from lightning_mp import (
    BalancedAMP,
    InfCLStrategy,
    InstabilityReport,
    LightningMPCLI,
    LossScaleConfig,
    PrecisionPreflight,
)
from lightning_mp.cli import main
from tests.preflight.models import WEAK, LayerScale, Sentences, Shifts, Words, plugin, trainer
from tests.processes import run_ranks
from tests.quiet import QUIET, parameters_of


def look(model: pl.LightningModule, name: str, steps: int = 2, **kwargs: Any) -> PrecisionPreflight:
    callback = PrecisionPreflight(steps=steps, stops=True)
    pl.seed_everything(0, verbose=False)
    trainer(name, callback, **kwargs).fit(model, Sentences())
    return callback


def made(weak: str | None = None, **kwargs: Any) -> Words:
    torch.manual_seed(1)
    return Words(weak, **kwargs)


NAMES = ["BalancedAMP fp16", "16-mixed", "PureFP16 fp16"]


@pytest.mark.parametrize("name", [*NAMES, "BalancedAMP bf16"])
def test_healthy_model_is_clean(name: str) -> None:
    callback = look(made(), name)
    assert callback.result is not None
    assert callback.result.is_clean
    assert callback.settings == ""
    assert "is safe for this model" in callback.text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weak", ["cancellation", "hand-written norm", "overflow"])
def test_planted_weakness_is_named_and_cured(weak: str, name: str) -> None:
    result = look(made(weak), name).result
    assert result is not None
    assert result.ratio > 0.05
    assert result.remedy.fp32_modules == ("blocks.1.weak",)
    assert result.mended is not None
    assert result.mended < 0.05
    assert result.modules[0].path == "blocks.1.weak"


def with_settings(callback: PrecisionPreflight, model: pl.LightningModule) -> PrecisionPreflight:
    """Return the preflight of a model with printed settings, read as by `fit --config`."""
    settings = yaml.safe_load(callback.settings)["trainer"]
    args: Any = {"model": "tests.preflight.models.Words", "trainer": {**QUIET, **settings}}
    with warnings.catch_warnings():  # of LightningCLI, about pytest's own arguments
        warnings.simplefilter("ignore")
        cli = LightningMPCLI(
            args=args,
            run=False,
            save_config_callback=None,
            parser_kwargs={"exit_on_error": False},
        )
    cured = PrecisionPreflight(steps=2, stops=True)
    pl.seed_everything(0, verbose=False)
    plugins = cli.trainer.precision_plugin
    run = pl.Trainer(**{**QUIET, "max_steps": 4, "callbacks": cured}, plugins=plugins)  # type: ignore[arg-type]
    run.fit(model, Sentences())
    return cured


class LossInHalf(Words):
    """Squares differences of 300 in fp16."""

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
def test_op_of_the_step_itself_is_cured_by_fp32_ops(name: str) -> None:
    torch.manual_seed(1)
    callback = look(LossInHalf(), name)
    result = callback.result
    assert result is not None
    assert not result.is_clean
    (op,) = result.remedy.fp32_ops
    assert result.remedy.fp32_modules == result.remedy.inf_clamp == ()
    assert f"With `fp32_ops: [{op}]` the largest error is" in callback.text
    assert f"`{op}` rounds in " in callback.text
    assert "`training_step`" in callback.text
    torch.manual_seed(1)
    assert with_settings(callback, LossInHalf()).result.is_clean  # type: ignore[union-attr]


def test_op_that_half_ops_moves_leaves_them() -> None:
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
    BalancedAMP(**settings)  # which refuses an op in both lists


class Massive(torch.nn.Module):
    """Writes 1e5 into one channel of the first token."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.zeros(x.shape[1:], device=x.device)
        place[0, 0] = 1e5
        return x + place.to(x.dtype)


def massive() -> Words:
    model = made()
    model.running = torch.nn.LayerNorm(model.embed.embedding_dim)
    model.blocks[1].drop = torch.nn.Sequential(Massive())
    return model


@pytest.mark.parametrize("name", ["BalancedAMP fp16", "16-mixed"])
def test_massive_activation_is_cured_by_a_clamp(name: str) -> None:
    callback = look(massive(), name)
    result = callback.result
    assert result is not None
    assert result.ratio == float("inf")
    assert result.remedy.inf_clamp
    assert result.remedy.fp32_modules == result.remedy.fp32_ops == ()
    assert with_settings(callback, massive()).result.is_clean  # type: ignore[union-attr]


def test_rounding_in_every_block_of_bf16_is_cured_by_fp16() -> None:
    def many() -> Words:
        model = made()
        for block in model.blocks:
            block.weak = Shifts()
        return model

    callback = look(many(), "PureFP16 bf16")
    assert callback.result is not None
    assert callback.result.remedy.half == torch.float16
    assert "`BalancedAMP(half='fp16')`" in callback.text
    assert with_settings(callback, many()).result.is_clean  # type: ignore[union-attr]


def test_errors_of_half_are_those_of_the_formats() -> None:
    """A unit in the last place is 2^-10 of fp16, and 2^-7 of bf16."""
    fp16, bf16 = (look(made(), f"BalancedAMP {half}").result for half in ("fp16", "bf16"))
    assert fp16 is not None
    assert bf16 is not None
    by_path = {each.path: each for each in bf16.modules}
    for each in fp16.modules:
        if each.kind == "Linear":
            assert 2.0**-14 < each.output < 2.0**-10
            assert 4 < by_path[each.path].output / each.output < 16
            assert each.handed >= each.output / 2


@pytest.mark.filterwarnings("ignore")
def test_settings_are_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {
        "model": {
            "class_path": "tests.preflight.models.Words",
            "init_args": {"weak": "cancellation"},
        },
        "data": {"class_path": "tests.preflight.models.Sentences"},
        "trainer": {"plugins": [{"class_path": "BalancedAMP"}], "max_steps": 2, "logger": False},
    }
    path = tmp_path / "run.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-mp"])

    def run(command: str) -> str:
        path.write_text(yaml.safe_dump(config))
        main([command, "--config", str(path)])
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="1"):
        run("preflight")
    said = capsys.readouterr().out
    assert "With `fp32_modules: [blocks.1.weak]` the largest error is" in said
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]
    config["trainer"].update(yaml.safe_load(said.partition("configuration:")[2])["trainer"])
    assert "is safe for this model" in run("preflight")
    config["trainer"].update(enable_checkpointing=False, enable_progress_bar=False)
    run("fit")


class Notes(pl.Callback):
    """Remembers batches, losses and what was logged."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, batch: Any, *__: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((float(outputs["loss"]), batch[0].tolist(), logged))


def checkpointed(model: Words, use_reentrant: bool) -> Words:
    for block in model.blocks:
        block.forward = partial(  # type: ignore[method-assign]
            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=use_reentrant
        )
    return model


@pytest.mark.parametrize(
    ("name", "is_checkpointed"), [*((name, False) for name in NAMES), ("BalancedAMP fp16", True)]
)
def test_run_goes_on_as_without_it(name: str, is_checkpointed: bool) -> None:
    ends = []
    for callback in ([], [PrecisionPreflight(steps=2)]):
        model, notes = made("cancellation"), Notes()
        if is_checkpointed:
            checkpointed(model, use_reentrant=True)
        pl.seed_everything(0, verbose=False)
        run = trainer(name, [*callback, notes], max_steps=5)
        run.fit(model, Sentences())
        buffers = [b.double().flatten() for b in model.buffers()]
        state = [
            x.double().flatten()
            for each in run.optimizers[0].state.values()
            for x in each.values()
            if isinstance(x, Tensor)
        ]
        ends.append((torch.cat([parameters_of(model).double(), *buffers, *state]), notes.seen))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


class Manual(Words):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


class Infinite(Words):
    """Has a loss of inf in every dtype."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float("inf")


class Broken(Words):
    """Fails where no context of the plugin is."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            raise KeyError("scores")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Infinite, "The loss is inf in fp32"),
        (Manual, "does not support manual optimization"),
        (Broken, "could not run the step: KeyError: 'scores'"),
    ],
)
def test_what_cannot_be_looked_at_trains_on(model: type[Words], words: str) -> None:
    callback, fitted = PrecisionPreflight(steps=1), model()
    before = parameters_of(fitted)
    with pytest.warns(UserWarning, match=words):
        trainer("BalancedAMP bf16", callback).fit(fitted, Sentences())
    assert callback.result is None
    assert words in str(callback.failure)
    assert not torch.equal(parameters_of(fitted), before)


class Dropping(torch.nn.Module):
    """Attention and a function that drop half of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(x, x, x)
        return torch.nn.functional.alpha_dropout(x, 0.5, self.training) ** 2


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_dropout_is_left_out_in_composites_and_checkpoints(use_reentrant: bool | None) -> None:
    model = made()
    for block in model.blocks:
        block.norm = torch.nn.Sequential(block.norm, Dropping())
    result = look(model if use_reentrant is None else checkpointed(model, use_reentrant),
                  "BalancedAMP fp16").result  # fmt: skip
    assert result is not None
    # A mask of 0.5 in one of both runs would be an error of 1.
    assert max(each.own for each in result.modules) < 0.01
    assert result.is_clean


def test_page_of_the_run_has_the_verdict(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    trainer("BalancedAMP fp16", [PrecisionPreflight(steps=1), report]).fit(made(), Sentences())
    page = (tmp_path / "instability.html").read_text()
    assert "BalancedAMP is safe for this model: errors of fp16" in page


def test_page_shows_modules_and_settings_and_the_report_links_to_it(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    callback = PrecisionPreflight(steps=2)
    trainer("BalancedAMP fp16", [callback, report]).fit(made("cancellation"), Sentences())
    assert callback.path == tmp_path / "preflight.html"
    page = callback.path.read_text()
    assert "<pre>trainer:\n  plugins:" in page
    assert '<text class="name mends"' in page
    assert "</strong> now and <strong>0." in page
    assert page.count("<tr>") == 1 + len(callback.result.modules)  # type: ignore[union-attr]
    assert 'href="./preflight.html"' in (tmp_path / "instability.html").read_text()


def test_page_escapes_names(tmp_path: Path) -> None:
    model = made()
    model.blocks[1].add_module("<script>", model.blocks[1].weak)
    callback = PrecisionPreflight(steps=1, dirpath=str(tmp_path), stops=True)
    trainer("BalancedAMP fp16", callback).fit(model, Sentences())
    assert "<script>" not in (tmp_path / "preflight.html").read_text()


def test_page_is_not_written_without_a_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    callback = look(made(), "BalancedAMP fp16")
    assert callback.path is None
    assert [*tmp_path.iterdir()] == []


def scaled() -> Words:
    model = made()
    model.running = torch.nn.Identity()
    for block in model.blocks:
        block.weak = LayerScale()
    return model


def look_at_scale(scale: float) -> PrecisionPreflight:
    callback = PrecisionPreflight(steps=2, stops=True)
    pl.seed_everything(0, verbose=False)
    kwargs = {**QUIET, "max_steps": 4, "callbacks": callback}
    plugins = BalancedAMP(loss_scale=LossScaleConfig(init_scale=scale))
    pl.Trainer(**kwargs, plugins=plugins).fit(scaled(), Sentences())
    return callback


def test_gradients_below_the_range_are_cured_by_the_loss_scale() -> None:
    callback = look_at_scale(4.0)
    assert callback.result is not None
    assert callback.result.remedy.fp32_modules == ()
    assert callback.result.mended is not None
    assert callback.result.mended < 0.05 < callback.result.ratio
    settings = yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["init_args"]
    scale = settings["loss_scale"]["init_scale"]
    assert settings == {"half": "fp16", "loss_scale": {"init_scale": scale}}
    assert scale > 4.0
    assert "With an initial loss scale of" in callback.text
    cured = with_settings(callback, scaled()).result
    assert cured is not None
    assert cured.is_clean
    (before,), (after,) = (
        [m for m in result.modules if m.path == "blocks.0.up"]
        for result in (callback.result, cured)
    )
    # Below half the smallest number of fp16; with the settings, between it and 2^-14.
    assert (before.underflow, before.subnormal) == (1, 0)
    assert after.underflow < 0.1
    assert after.subnormal > 0.5


def test_settings_keep_the_other_arguments_of_the_plugin() -> None:
    settings = []
    for weights in ("half", "full"):
        scale = LossScaleConfig(growth_interval=7)
        plugin = BalancedAMP(weights=weights, loss_scale=scale, fp32_modules=("norm", "head"))  # type: ignore[arg-type]
        callback = PrecisionPreflight(steps=2, stops=True)
        pl.seed_everything(0, verbose=False)
        run = pl.Trainer(**{**QUIET, "max_steps": 4, "callbacks": callback}, plugins=plugin)
        run.fit(made("cancellation"), Sentences())
        settings.append(yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["init_args"])
    expected = {
        "half": "fp16",
        "loss_scale": {"growth_interval": 7},
        "fp32_modules": ["norm", "head", "blocks.1.weak"],
    }
    assert settings == [expected, {**expected, "weights": "full"}]


class LowRank(torch.nn.Module):
    """A frozen layer in fp16, and two factors of low rank beside it: LoRA."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("weak", [None, "hand-written norm"])
def test_factors_of_low_rank_are_looked_at(weak: str | None) -> None:
    model = made(weak)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    result = look(model, "BalancedAMP fp16").result
    assert result is not None
    assert result.remedy.fp32_modules == (() if weak is None else ("blocks.1.weak",))


def test_fp32_is_left_out() -> None:
    callback = PrecisionPreflight()
    with pytest.warns(UserWarning, match="does not compute in half precision"):
        pl.Trainer(**{**QUIET, "max_steps": 1, "callbacks": callback}).fit(made(), Sentences())


def look_at_true_half(model: pl.LightningModule, optimizers: Any) -> PrecisionPreflight:
    model.configure_optimizers = lambda: optimizers  # type: ignore[method-assign]
    callback = PrecisionPreflight(steps=1)
    pl.seed_everything(0, verbose=False)
    kwargs = {**QUIET, "max_steps": 1, "callbacks": callback}
    pl.Trainer(**kwargs, precision="bf16-true").fit(model, Sentences())
    return callback


def test_weights_that_stand_still_are_told() -> None:
    model = made()
    callback = look_at_true_half(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    assert callback.result is not None
    # Of weights up to 2^-2.5, those above 2^-11 or so have a unit that is twice as large.
    assert callback.result.stagnant > 0.9
    assert "of the weights are stagnant" in callback.text
    assert yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["class_path"] == "BalancedAMP"


def test_stagnation_is_judged_at_the_learning_rate_after_warm_up() -> None:
    model = made()
    # Half a unit of bf16 is 2^-9 of a weight of 1, the largest, so this rate changes every weight.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-6 * (step + 1))
    result = look_at_true_half(model, ([optimizer], [schedule])).result
    assert optimizer.param_groups[0]["lr"] < 1e-6
    assert result is not None
    assert result.stagnant < 0.2


def test_zeros_are_not_stagnant() -> None:
    model = made()
    for each in model.parameters():
        each.data.zero_()
    result = look_at_true_half(model, torch.optim.AdamW(model.parameters(), lr=1e-6)).result
    assert result is not None
    assert result.stagnant == 0


def test_compiled_module_is_compared_in_eager_mode() -> None:
    model = made("cancellation")
    model.blocks[0].compile(backend="eager")
    callback = look(model, "BalancedAMP fp16")
    assert callback.result is not None
    assert callback.result.remedy.fp32_modules == ("blocks.1.weak",)
    assert "Compiled modules were compared in eager mode." in callback.text


@pytest.mark.parametrize("name", ["BalancedAMP fp16", "PureFP16 fp16"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_weakness_in_a_checkpoint_is_named_and_cured(use_reentrant: bool, name: str) -> None:
    plain = look(made("cancellation"), name).result
    result = look(checkpointed(made("cancellation"), use_reentrant), name).result
    assert plain is not None
    assert result is not None
    assert result.remedy.fp32_modules == ("blocks.1.weak",)
    # The inputs and cotangents are those of the run without checkpoints.
    assert {m.path: (m.output, m.gradient) for m in result.modules if "." in m.path[8:]} == {
        m.path: (m.output, m.gradient) for m in plain.modules if "." in m.path[8:]
    }


def _on_ranks(rank: int) -> tuple[str, Tensor]:
    callback = PrecisionPreflight(steps=2)
    pl.seed_everything(0, verbose=False)
    model = made("cancellation")
    run = trainer("BalancedAMP fp16", callback, devices=2, strategy="ddp")
    run.fit(model, Sentences())
    return callback.settings, parameters_of(model)


@pytest.mark.distributed
def test_ranks_agree_on_the_cure() -> None:
    (first, weights), (second, others) = run_ranks(_on_ranks, 2)
    assert first == second
    assert "blocks.1.weak" in first
    assert torch.equal(weights, others)


def test_towers_of_a_gradient_cache_are_looked_at() -> None:
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
