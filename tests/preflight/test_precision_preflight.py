"""The preflight names planted weaknesses, proves the cure, and leaves the run as it was."""

import subprocess
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
    InfCLStrategy,
    InstabilityReport,
    LossScaleConfig,
    PrecisionPreflight,
)
from tests.preflight.models import WEAK, LayerScale, Sentences, Words, plugin, trainer
from tests.processes import run_ranks
from tests.quiet import QUIET, parameters_of

ROOT = Path(__file__).resolve().parents[2]


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
    assert result.fp32_modules == ("blocks.1.weak",)
    assert result.mended is not None
    assert result.mended < 0.05
    assert result.modules[0].path == "blocks.1.weak"


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


def test_settings_are_the_cure(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model": {
            "class_path": "tests.preflight.models.Words",
            "init_args": {"weak": "cancellation"},
        },
        "data": {"class_path": "tests.preflight.models.Sentences"},
        "trainer": {"plugins": [{"class_path": "BalancedAMP"}], "max_steps": 2, "logger": False},
    }
    path = tmp_path / "run.yaml"

    def run(command: str) -> subprocess.CompletedProcess[str]:
        path.write_text(yaml.safe_dump(config))
        arguments = [sys.executable, "-m", "lightning_mp", command, "--config", str(path)]
        return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False)

    weak = run("preflight")
    assert weak.returncode == 1, weak.stderr
    assert "`blocks.1.weak` in fp32" in weak.stdout
    assert not (tmp_path / "checkpoints").exists()
    settings = yaml.safe_load(weak.stdout.partition("Paste into the configuration:")[2])
    config["trainer"].update(settings["trainer"])
    cured = run("preflight")
    assert cured.returncode == 0, cured.stdout + cured.stderr
    config["trainer"].update(enable_checkpointing=False, enable_progress_bar=False)
    assert run("fit").returncode == 0


class Notes(pl.Callback):
    """Remembers batches, losses and what was logged."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, batch: Any, *__: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((float(outputs["loss"]), batch[0].tolist(), logged))


@pytest.mark.parametrize("name", NAMES)
def test_run_goes_on_as_without_it(name: str) -> None:
    ends = []
    for callback in ([], [PrecisionPreflight(steps=2)]):
        model, notes = made("cancellation"), Notes()
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


class Broken(Words):
    """Fails where no context of the plugin is."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            raise KeyError("scores")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "words"),
    [(Manual, "takes its steps itself"), (Broken, "could not run the step: KeyError: 'scores'")],
)
def test_what_cannot_be_looked_at_trains_on(model: type[Words], words: str) -> None:
    callback, fitted = PrecisionPreflight(steps=1), model()
    before = parameters_of(fitted)
    with pytest.warns(UserWarning, match=words):
        trainer("BalancedAMP bf16", callback).fit(fitted, Sentences())
    assert callback.result is None
    assert words in str(callback.failure)
    assert not torch.equal(parameters_of(fitted), before)


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
    assert "</strong> as it is, <strong>0." in page
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
    assert callback.result.fp32_modules == ()
    assert callback.result.mended is not None
    assert callback.result.mended < 0.05 < callback.result.ratio
    settings = yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["init_args"]
    scale = settings["loss_scale"]["init_scale"]
    assert settings == {"half": "fp16", "loss_scale": {"init_scale": scale}}
    assert scale > 4.0
    assert "at an initial loss scale of" in callback.text
    cured = look_at_scale(scale).result
    assert cured is not None
    assert cured.is_clean


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
    assert result.fp32_modules == (() if weak is None else ("blocks.1.weak",))


def test_fp32_is_left_out() -> None:
    callback = PrecisionPreflight()
    with pytest.warns(UserWarning, match="computes nothing in half"):
        pl.Trainer(**{**QUIET, "max_steps": 1, "callbacks": callback}).fit(made(), Sentences())


def test_weights_that_stand_still_are_told() -> None:
    model = made()
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-6)  # type: ignore[method-assign]
    callback = PrecisionPreflight(steps=1)
    pl.seed_everything(0, verbose=False)
    kwargs = {**QUIET, "max_steps": 1, "callbacks": callback}
    pl.Trainer(**kwargs, precision="bf16-true").fit(model, Sentences())
    assert callback.result is not None
    # Of weights up to 2^-2.5, those above 2^-11 or so have a unit that is twice as large.
    assert callback.result.stagnant > 0.9
    assert "of the weights stand still" in callback.text
    assert yaml.safe_load(callback.settings)["trainer"]["plugins"][0]["class_path"] == "BalancedAMP"


def test_compiled_and_checkpointed_modules_are_looked_at() -> None:
    model = made("cancellation")
    model.blocks[0].compile(backend="eager")
    first = model.blocks[2].forward
    model.blocks[2].forward = lambda x: torch.utils.checkpoint.checkpoint(  # type: ignore[method-assign]
        first, x, use_reentrant=False
    )
    result = look(model, "BalancedAMP fp16").result
    assert result is not None
    assert result.fp32_modules == ("blocks.1.weak",)


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
    assert callback.result.fp32_modules == ("text.1",)
