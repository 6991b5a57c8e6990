"""What README.md shows is run as it stands there: nothing is added to a block, nothing left out."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_mp.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# The reader saves the first as `clip.py`; the others import it.
MODULE, *OTHERS = [code for language, code in BLOCKS if language == "python"]
CONFIGS = [code for language, code in BLOCKS if language == "yaml"]
COMMANDS = [code for language, code in BLOCKS if not language]
pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice about data loaders and loops, and what it says of itself.
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Precision .* is not supported by the model summary",
    "ignore::DeprecationWarning",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the reader's, with `clip.py`; the working directory."""
    (tmp_path / "clip.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clip", raising=False)
    monkeypatch.setattr(sys, "argv", ["lightning-mp", "fit", "--config", "config.yaml"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # several GPUs would start this test on each
    return tmp_path


def run_script(code: str) -> None:
    Path("script.py").write_text(code)
    runpy.run_path("script.py", run_name="__main__")


def fit_config(code: str) -> None:
    Path("config.yaml").write_text(code)
    main()


RUNS = [(run_script, MODULE, 1), *((run_script, code, 2) for code in OTHERS)]
RUNS += [(fit_config, code, 1) for code in CONFIGS]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "code", "trainings"), RUNS)
def test_block_trains_as_it_stands(
    run: Callable[[str], None], code: str, trainings: int, folder: Path
) -> None:
    run(code)
    checkpoints = [torch.load(path, weights_only=False) for path in folder.rglob("*.ckpt")]
    # Two batches in each of two epochs.
    assert [checkpoint["global_step"] for checkpoint in checkpoints] == [4] * trainings


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert len(BLOCKS) == len(COMMANDS) + len(CONFIGS) + len(OTHERS) + 1
    assert len(OTHERS) == len(CONFIGS) == len(COMMANDS) == 1


def test_commands_are_targets_of_the_makefile() -> None:
    (commands,) = COMMANDS
    targets = re.findall(r"^make (\w+)", commands, re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
