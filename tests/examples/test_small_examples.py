"""The small examples reach the results that they print."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import balanced_amp, data, gradient_cache, inf_cl, locate_nan, pure_fp16, spike_guard
from lightning_mp import LightningMPCLI
from tests.precision.models import one_thread

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
FILES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the repository is not the working directory


def test_readme_of_examples_names_them_all() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    for name in FILES:
        assert f"`{name}.py`" in text, name


def test_data_are_letters_and_text() -> None:
    images, labels = data.letters(data.FONTS[:2], shifts=1)
    assert images.shape == (52, 1, 16, 16)
    assert labels.tolist() == [*range(26), *range(26)]
    assert float(images.amax()) == 1  # every image has ink
    assert float(images.flatten(1).amax(1).min()) > 0.5
    windows = data.text_windows(3, length=9)
    assert windows.shape == (3, 9)
    assert int(windows.max()) < 128


def test_gradient_cache_holds_a_micro_batch_and_has_the_gradients_of_all() -> None:
    difference, share = gradient_cache.main()
    assert difference < 1e-5
    assert share == 32 / 234


TRAINING = [
    # Chance is 1 of 26 letters for the first two, and log(128) nats for the third.
    pytest.param(balanced_amp.main, 0.5, 1.0, id="balanced_amp"),
    pytest.param(inf_cl.main, 0.5, 1.0, id="inf_cl"),
    pytest.param(pure_fp16.main, 1.0, 2.5, id="pure_fp16"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("main", "least", "most"), TRAINING)
def test_example_learns(main: object, least: float, most: float) -> None:
    with one_thread():
        assert least <= main() <= most  # type: ignore[operator]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")
def test_spike_guard_saves_the_run() -> None:
    with one_thread():
        losses = spike_guard.main()
    assert losses["skip"] < 0.5 * losses["warn"]


@pytest.mark.slow
def test_planted_nan_is_located() -> None:
    with one_thread():
        assert locate_nan.main() == "network.3"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of jsonargparse and Lightning
def test_text_to_text_finds_names_of_characters_it_never_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-mp"])
    config = str(ROOT / "examples" / "text_to_text.yaml")
    args = ["fit", "--config", config, "--model.width=24", "--data.batch_size=256"]
    args += ["--trainer.max_epochs=12", "--trainer.check_val_every_n_epoch=12"]
    with one_thread():
        cli = LightningMPCLI(args=[*args, "--trainer.enable_progress_bar=false"])
    chance = 1 / len(cli.datamodule.unseen)
    assert chance < 0.01
    assert cli.trainer.callback_metrics["recall@1"] > 5 * chance
    assert cli.trainer.strategy._cache.micro_batch_sizes["tower"] <= 256


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="would train on every GPU")
def test_sharded_trains_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "examples.sharded"]
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = done.stdout.strip().splitlines()[-1]
    assert line.endswith("on 2 ranks; a uniform guess among 26 has 3.26")
    assert float(line.split()[0]) < 1.6  # half of the loss of a uniform guess
