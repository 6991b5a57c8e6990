"""In YAML and on the command line, public classes are found by their names."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import Precision
from torch import optim

import lightning_mp
from lightning_mp import LightningMPCLI
from tests.cli.models import TRAINER, Model

pytestmark = pytest.mark.filterwarnings("ignore")


def _cli(folder: Path, *args: str, **trainer: Any) -> Any:
    """Return a user's CLI after it has made model and Trainer."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {**TRAINER, **trainer}}))
    return LightningMPCLI(Model, run=False, args=["--config", str(config), *args])


@pytest.mark.slow
def test_class_names_without_a_module_are_accepted_in_yaml(tmp_path: Path) -> None:
    cli = _cli(
        tmp_path,
        plugins=[{"class_path": "BalancedAMP", "init_args": {"half": "bf16"}}],
        strategy={"class_path": "InfCLStrategy", "init_args": {"micro_batch_size": 3}},
        callbacks=[
            {"class_path": "SpikeGuard", "init_args": {"action": "stop"}},
            {"class_path": "InstabilityReport"},
        ],
    )
    assert cli.trainer.precision_plugin.half == "bf16"
    assert cli.trainer.strategy.micro_batch_size == 3
    guard, report = cli.trainer.callbacks[:2]
    assert (guard.action, type(report)) == ("stop", lightning_mp.InstabilityReport)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in lightning_mp.__all__ if n.endswith("Monitor")])
def test_monitors_are_known_by_name(name: str, tmp_path: Path) -> None:
    if name == "InstabilityMonitor":  # the base class
        return
    cli = _cli(tmp_path, f"--trainer.callbacks={name}", "--trainer.callbacks.repeat_after_steps=7")
    (monitor,) = [c for c in cli.trainer.callbacks if type(c).__name__ == name]
    assert monitor.repeat_after_steps == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["InfCLStrategy", "inf_cl", "InfCLModelParallelStrategy", "inf_cl_fsdp2"]
)
def test_strategy_name_without_arguments_is_accepted(name: str, tmp_path: Path) -> None:
    for cli in (_cli(tmp_path, "--trainer.strategy", name), _cli(tmp_path, strategy=name)):
        assert cli.trainer.strategy.micro_batch_size == 256


def test_strategies_take_arguments_of_the_sharded_kind_and_auto(tmp_path: Path) -> None:
    cli = _cli(
        tmp_path,
        "--trainer.strategy=InfCLModelParallelStrategy",
        "--trainer.strategy.micro_batch_size=auto",
        "--trainer.strategy.save_distributed_checkpoint=false",
        "--trainer.strategy.towers=[layer]",
    )
    assert cli.trainer.strategy.micro_batch_size == "auto"
    assert cli.trainer.strategy._save_distributed_checkpoint is False


def test_strategy_takes_the_arguments_of_ddp(tmp_path: Path) -> None:
    cli = _cli(
        tmp_path,
        "--trainer.strategy=InfCLStrategy",
        "--trainer.strategy.find_unused_parameters=true",
        "--trainer.strategy.towers=[layer]",
    )
    assert cli.trainer.strategy.towers == ("layer",)
    assert cli.trainer.strategy._ddp_kwargs["find_unused_parameters"] is True


def test_plugin_takes_a_number_from_the_command_line(tmp_path: Path) -> None:
    cli = _cli(tmp_path, "--trainer.plugins=BalancedAMP", "--trainer.plugins.loss_scale=1024")
    config = cli.trainer.precision_plugin.scaler.config
    assert (config.init_scale, config.dynamic) == (1024, False)


@pytest.mark.slow
def test_optimizer_loss_and_metric_are_known_by_name(tmp_path: Path) -> None:
    cli = _cli(
        tmp_path,
        "--optimizer=SafeAdamW",
        "--optimizer.lr=0.003",
        "--optimizer.clip_update_rms=1.0",
        "--model.loss=ContrastiveLoss",
        "--model.loss.backend=torch",
        "--model.metric=ContrastiveRecall",
        "--model.metric.top_k=[2]",
    )
    optimizer = cli.model.configure_optimizers()
    assert isinstance(optimizer, lightning_mp.SafeAdamW)
    assert isinstance(optimizer, optim.Optimizer)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["clip_update_rms"]) == (0.003, 1.0)
    assert cli.model.loss.backend == "torch"
    assert cli.model.metric.top_k == (2,)


PLUGINS = ["BalancedAMP", "FSDPBalancedAMP", "ModelParallelBalancedAMP", "PureFP16"]


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize(
    ("loss_scale", "scale", "dynamic"),
    [
        ("1024", 1024, False),
        ("0.5", 0.5, False),
        ('"dynamic"', 1024, True),
        ("dynamic", 1024, True),
        ("{init_scale: 32, hysteresis: 2}", 32, True),
        ("null", 1024, True),
    ],
)
def test_loss_scale_of_a_plugin_is_read_from_yaml(
    name: str, loss_scale: str, scale: float, dynamic: bool
) -> None:
    assert getattr(lightning_mp, name)  # imported, so that the parser finds it by name
    parser = ArgumentParser()
    parser.add_subclass_arguments(Precision, "plugin")
    text = f"plugin: {{class_path: {name}, init_args: {{loss_scale: {loss_scale}}}}}"
    plugin = parser.instantiate_classes(parser.parse_string(text)).plugin
    # With fp16 weight gradients, a dynamic scale starts at 2^10; see `LossScaleConfig.parse`.
    assert (plugin.scaler.config.init_scale, plugin.scaler.config.dynamic) == (scale, dynamic)


@pytest.mark.slow
def test_saved_config_is_read_again(tmp_path: Path) -> None:
    first = _cli(tmp_path, "--trainer.plugins=PureFP16", "--trainer.callbacks=SpikeGuard")
    saved = first.parser.dump(first.config)
    (tmp_path / "saved.yaml").write_text(saved)
    again = LightningMPCLI(Model, run=False, args=["--config", str(tmp_path / "saved.yaml")])
    assert isinstance(again.trainer.precision_plugin, lightning_mp.PureFP16)
    assert any(isinstance(c, lightning_mp.SpikeGuard) for c in again.trainer.callbacks)
    assert again.parser.dump(again.config) == saved
