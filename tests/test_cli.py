"""`lightning-mp` reads YAML, finds plugins by short name and by class path, and trains."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_mp
import lightning_mp.callbacks
from lightning_mp.cli import main
from tests.quiet import QUIET
from tests.strategies.models import TinyCLIP, loader


class TinyCLIPWithData(TinyCLIP):
    """Has its own data, so that a config needs no data module."""

    steps_trained: list[int] = []

    def train_dataloader(self) -> Any:
        return loader(16, 8)

    test_dataloader = train_dataloader

    def on_train_end(self) -> None:
        self.steps_trained.append(self.global_step)


def _config(path: Path, strategy: dict[str, Any] | str, **trainer: Any) -> str:
    config = {
        "seed_everything": 1,
        "model": {"class_path": f"{__name__}.TinyCLIPWithData"},
        "trainer": {
            **QUIET,
            "max_steps": 2,
            "strategy": strategy,
            **trainer,
        },
    }
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


ARGUMENTS = {"towers": ["visual", "text"], "micro_batch_size": 3, "offload": "host"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("inf_cl", marks=pytest.mark.sweep),
        pytest.param(
            {"class_path": "lightning_mp.strategies.InfCLStrategy", "init_args": ARGUMENTS},
            marks=pytest.mark.sweep,
        ),
        {"class_path": "InfCLStrategy", "init_args": ARGUMENTS},
    ],
    ids=["registered", "class path", "short name"],
)
@pytest.mark.filterwarnings("ignore")
def test_cli_fit_and_test_with_inf_cl(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    TinyCLIPWithData.steps_trained.clear()
    main(["fit", "--config", _config(tmp_path, strategy)])
    assert TinyCLIPWithData.steps_trained == [2]
    main(["test", "--config", _config(tmp_path, strategy)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"half": "bf16", "fp32_modules": ["norm", "head"], "fp32_ops": ["gelu"]},
        {"loss_scale": 1024, "weights": "full", "adam_epsilon": 1e-7},
        {"loss_scale": {"init_scale": 1024, "hysteresis": 2}, "reduce_dtype": "half"},
    ],
    ids=["bf16", "static", "config"],
)
@pytest.mark.filterwarnings("ignore")
def test_cli_fit_with_a_precision_plugin(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    TinyCLIPWithData.steps_trained.clear()
    plugin = {"class_path": "BalancedAMP", "init_args": arguments}
    main(["fit", "--config", _config(tmp_path, "inf_cl", plugins=[plugin])])
    assert TinyCLIPWithData.steps_trained == [2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cli_imports_classes_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # undoes what `main` adds
    (tmp_path / "my_models.py").write_text(
        "from tests.test_cli import TinyCLIPWithData\nclass Mine(TinyCLIPWithData):\n    pass\n"
    )
    config = Path(_config(tmp_path, "inf_cl"))
    config.write_text(config.read_text().replace(f"{__name__}.TinyCLIPWithData", "my_models.Mine"))
    TinyCLIPWithData.steps_trained.clear()
    main(["fit", "--config", str(config)])
    assert TinyCLIPWithData.steps_trained == [2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cli_bad_argument_exits_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = {"class_path": "InfCLStrategy", "init_args": {**ARGUMENTS, "offload": "disk"}}
    with pytest.raises(SystemExit):
        main(["fit", "--config", _config(tmp_path, strategy)])
    assert "offload" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cli_error_for_plugin_as_precision_names_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = f"{__name__}.TinyCLIPWithData"
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.precision", "BalancedAMP", "--model", model])
    assert "Pass `--trainer.plugins BalancedAMP`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cli_help_shows_the_arguments_of_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.strategy.help", "InfCLStrategy"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Rows per micro-batch. " in printed
    assert "default: 256" in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cli_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert lightning_mp.__version__ in capsys.readouterr().out


CALLBACKS = {
    "LossScaleMonitor": {"min_scale": 2.0},
    "GradientUnderflowMonitor": {"every_n_steps": 5},
    "ActivationRangeMonitor": {"modules": ["Linear"], "backward": True},
    "AdamStateMonitor": {"max_update_rms": 3.0},
    "SpikeGuard": {"action": "warn", "window_steps": 64, "judge_after_steps": 32},
    "NonFiniteLocator": {"action": "warn"},
    "ParameterMonitor": {"patience": 20},
    "RepresentationMonitor": {"modules": ["Linear"]},
    "PrecisionPreflight": {"steps": 2},
    "TensorCollector": {"include": ["*"], "collect": ["gradients", "outputs"]},
    "InstabilityReport": {"every_n_seconds": 1.0, "alert": "http://127.0.0.1:1/", "max_tensors": 7},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cli_fits_with_all_callbacks_and_rebuilds_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    callbacks = [
        {"class_path": name, "init_args": arguments} for name, arguments in CALLBACKS.items()
    ]
    # All exported names are callbacks, except these.
    others = {"Alarm", "InstabilityError", "InstabilityMonitor", "InstabilityWarning"}
    assert set(CALLBACKS) == set(lightning_mp.callbacks.__all__) - others
    plugin = {"class_path": "BalancedAMP"}
    run = tmp_path / "run"
    config = _config(
        tmp_path, "inf_cl", plugins=[plugin], callbacks=callbacks, default_root_dir=str(run)
    )
    main(["fit", "--config", config])
    written = (run / "instability.html").read_text()
    (run / "instability.html").unlink()
    capsys.readouterr()
    main(["report", str(run)])
    assert capsys.readouterr().out == f"Report: {run / 'instability.html'}\n"
    assert (run / "instability.html").read_text() == written
    names = [name for name in CALLBACKS if name != "InstabilityReport"]
    assert all(name in written for name in names)


def test_cli_report_error_names_the_callback_that_writes_the_data(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no report data.*InstabilityReport"):
        main(["report", str(tmp_path)])


def test_cli_report_help_names_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    printed = capsys.readouterr().out
    assert "lightning-mp report" in printed
    assert "run_dir" in printed
